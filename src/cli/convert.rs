//! `riparian convert`: a published checkpoint into a model file.

use std::path::PathBuf;

use clap::Args;
use riparian::model::convert::{ConvertOptions, Quant, convert};
use serde_json::json;

use super::terminal::Terminal;
use super::{Failure, Global, Outcome, SUCCESS, pool, progress};

const EXAMPLES: &str = "\
Examples:
  riparian convert checkpoint/ model.cmf                      as the source has it
  riparian convert checkpoint/ model.cmf --quant q8_2f        8 bits a weight
  riparian convert checkpoint/ model.cmf --quant q4tp         experts 4 bits, the rest 8
  riparian convert checkpoint/ model.cmf --quant q4tp --perception q8_2f

OUT.cmf appears when it is whole: a conversion that is broken off leaves the file that was there before.
Checkpoints are folders of safetensors with their config.json, in bf16, f16 or f32.";

#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Convert {
    /// The checkpoint's folder
    #[arg(value_name = "CHECKPOINT_DIR")]
    checkpoint: PathBuf,
    /// The model file to write
    #[arg(value_name = "OUT.cmf")]
    out: PathBuf,
    /// How the decoder's matrices are stored: exact, q8_2f or q4tp
    #[arg(long, value_name = "PROFILE", default_value = "exact", value_parser = quant)]
    quant: Quant,
    /// How the matrices of the audio encoder are stored: exact or q8_2f
    #[arg(long, value_name = "PROFILE", default_value = "exact", value_parser = perception)]
    perception: Quant,
    /// Write a JSON line about the result
    #[arg(long)]
    json: bool,
}

fn quant(text: &str) -> Result<Quant, String> {
    text.parse().map_err(|_| "accepted are exact, q8_2f and q4tp".into())
}

fn perception(text: &str) -> Result<Quant, String> {
    let quant = quant(text).ok().filter(|quant| *quant != Quant::Q4tp);
    quant.ok_or_else(|| "accepted are exact and q8_2f".into())
}

impl Convert {
    pub(crate) fn run(self, global: &Global, terminal: &mut Terminal) -> Outcome {
        let knobs = global.knobs()?;
        let bar = progress::bytes(terminal, "convert");
        let options = ConvertOptions { quant: self.quant, perception: self.perception, expert_hot: None };
        let converted = pool(&knobs)?.install(|| {
            convert(&self.checkpoint, &self.out, &options, |seen| {
                bar.set_length(seen.bytes_total);
                bar.set_position(seen.bytes);
            })
        });
        bar.finish_and_clear();
        let report = converted.map_err(anyhow::Error::from)?;
        report.notes.iter().for_each(|note| terminal.note(note));
        let listed = |names: &[String]| match names {
            [first, .., last] if names.len() > 3 => format!("{first} … {last} ({} in all)", names.len()),
            names => names.join(", "),
        };
        if !report.fallbacks.is_empty() {
            terminal
                .note(format!("stored as q8_2f, as q4tp takes 32 columns at a time: {}", listed(&report.fallbacks)));
        }
        if !report.unused.is_empty() {
            terminal.note(format!("left out, as nothing here uses them: {}", listed(&report.unused)));
        }
        let line = if self.json {
            let line = json!({
                "file": report.path.to_string_lossy(), "bytes": report.bytes, "tensors": report.tensors,
                "quant": self.quant.to_string(), "perception": self.perception.to_string(),
                "fallbacks": report.fallbacks, "unused": report.unused, "notes": report.notes,
            });
            line.to_string()
        } else {
            format!("{}: {} tensors, {} bytes", report.path.display(), report.tensors, report.bytes)
        };
        terminal.line(line).map_err(|error| Failure::from(anyhow::Error::from(error)))?;
        Ok(SUCCESS)
    }
}
