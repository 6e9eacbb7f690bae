//! `riparian calibrate`: observed popularity of experts, into a file beside the model.

use std::fs::File;
use std::io::BufReader;
use std::path::PathBuf;

use anyhow::{Context as _, ensure};
use clap::Args;
use riparian::audio::read::read_file;
use riparian::host::routes_of;
use riparian::ids::ExpertIx;
use riparian::model::popularity;
use riparian::policy::routes::{RoutedText, Routes, by_count};
use riparian::runtime::{Options, TranscriptionOptions};
use serde_json::json;

use super::stream::Interrupt;
use super::terminal::Terminal;
use super::{Failure, Global, INTERRUPTED, Outcome, SUCCESS, load, progress, record};

const EXAMPLES: &str = "\
Examples:
  riparian calibrate model.cmf talks/*.flac              recordings of the kind to be transcribed
  riparian calibrate model.cmf --routes routes.bin       what --record-routes wrote

The model itself is never touched: the result is MODEL.cmf.hot.json, which every command reads when it opens the model.
Deleting it undoes the calibration. With a partial bank the experts it names first are resident from the start.";

#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Calibrate {
    /// The model
    #[arg(value_name = "MODEL.cmf")]
    model: PathBuf,
    /// Recordings to transcribe and to count over
    #[arg(value_name = "RECORDING", required_unless_present = "routes")]
    recordings: Vec<PathBuf>,
    /// Routing traces of this model to count over
    #[arg(long, value_name = "FILE")]
    routes: Vec<PathBuf>,
    /// Write to this file instead, to be renamed to MODEL.cmf.hot.json later
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Write a JSON line about the result
    #[arg(long)]
    json: bool,
}

impl Calibrate {
    pub(crate) fn run(self, global: &Global, terminal: &mut Terminal) -> Outcome {
        let knobs = global.knobs()?;
        super::block_on(async {
            let mut interrupt = Interrupt::listen();
            let heeded = knobs.clone();
            let loaded = interrupt.or(load(&self.model, knobs, terminal)).await;
            let Some(runtime) = loaded else { return Ok(INTERRUPTED) };
            let runtime = runtime?;
            let model = runtime.model();
            let mut seen = Routes { of: record::routes_from(model)?, texts: Vec::new() };
            for path in &self.routes {
                let read = read_routes(path)?;
                let shape = |routes: &Routes| (routes.of.layers, routes.of.experts, routes.of.top_k);
                let (found, wanted) = (shape(&read), shape(&seen));
                ensure_same(found, wanted).with_context(|| format!("{} is of another model", path.display()))?;
                seen.texts.extend(read.texts);
            }
            let decoder = record::decoder(model, &heeded);
            let bar = progress::count(terminal, "calibrate", self.recordings.len() as u64);
            for path in &self.recordings {
                let recording = read_file(path).map_err(anyhow::Error::from)?;
                let session = Options { keep_rows: true, ..Options::default() };
                let options = TranscriptionOptions { session, ..TranscriptionOptions::default() };
                let made = async {
                    let mut made = runtime.transcribe(recording.samples, options).await?;
                    made.tokens().finish().await?;
                    Ok::<_, riparian::Error>(made)
                };
                let Some(made) = interrupt.or(made).await else { return Ok(INTERRUPTED) };
                let mut made = made.map_err(|error| Failure::from(error).about(path))?;
                let tokens = made.tokens();
                let rows = tokens.prompt_rows();
                let picks = routes_of(&decoder, rows, tokens.ids()).map_err(anyhow::Error::from)?;
                seen.texts.push(RoutedText { prompt: rows.len() / runtime.hidden(), picks });
                bar.inc(1);
            }
            bar.finish_and_clear();
            let positions = seen.positions();
            let positions = positions.0 + positions.1;
            ensure(positions > 0)?;
            let counts = seen.counts();
            let no_list = Vec::new();
            let hot: Vec<Vec<ExpertIx>> = (counts.iter().enumerate())
                .map(|(layer, counts)| by_count(counts, seen.of.hot.get(layer).unwrap_or(&no_list)))
                .collect();
            let out = self.out.clone().unwrap_or_else(|| popularity::side_file(&self.model));
            popularity::write(&out, &model.container, positions, &hot)
                .with_context(|| format!("cannot write {}", out.display()))?;
            let [eighth, quarter, half] = [8, 4, 2].map(|part| share_of_top(&counts, &hot, part));
            let line = if self.json {
                json!({
                    "cmd": "calibrate", "file": out.to_string_lossy(), "texts": seen.texts.len(),
                    "positions": positions, "layers": seen.of.layers, "experts": seen.of.experts,
                    "routed_share_of_top_eighth": eighth, "routed_share_of_top_quarter": quarter,
                    "routed_share_of_top_half": half,
                })
                .to_string()
            } else {
                format!(
                    "{}: {positions} positions of {} texts\n\
                     the most used eighth / quarter / half of the experts got {:.0} / {:.0} / {:.0} % of the routes",
                    out.display(),
                    seen.texts.len(),
                    100.0 * eighth,
                    100.0 * quarter,
                    100.0 * half
                )
            };
            terminal.line(line).map_err(anyhow::Error::from)?;
            super::end(runtime, &heeded, terminal).await;
            Ok(SUCCESS)
        })?
    }
}

fn ensure(counted: bool) -> anyhow::Result<()> {
    ensure!(counted, "there is nothing to count: no position was routed");
    Ok(())
}

fn ensure_same(found: (usize, usize, usize), wanted: (usize, usize, usize)) -> anyhow::Result<()> {
    ensure!(found == wanted, "layers, experts and picks are {found:?}, wanted {wanted:?}");
    Ok(())
}

/// A routing trace by its path.
pub(crate) fn read_routes(path: &std::path::Path) -> anyhow::Result<Routes> {
    let file = File::open(path).with_context(|| format!("cannot read {}", path.display()))?;
    Routes::read(&mut BufReader::new(file)).with_context(|| path.display().to_string())
}

/// The share of all routes that went to the first `1 / part` of each layer's list.
fn share_of_top(counts: &[Vec<u64>], hot: &[Vec<ExpertIx>], part: usize) -> f64 {
    let top = |(counts, hot): (&Vec<u64>, &Vec<ExpertIx>)| -> u64 {
        hot[..hot.len() / part].iter().map(|expert| counts[expert.index()]).sum()
    };
    let all: u64 = counts.iter().flatten().sum();
    counts.iter().zip(hot).map(top).sum::<u64>() as f64 / all.max(1) as f64
}
