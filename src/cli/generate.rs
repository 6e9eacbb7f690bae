//! `riparian generate`: tokens from a prompt, from token ids or from raw embedding rows.

use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail, ensure};
use clap::{ArgGroup, Args};
use riparian::ids::TokenId;
use riparian::runtime::{Options, Runtime, Session};
use safetensors::{Dtype, SafeTensors};
use serde_json::{Map, Value};

use super::record::Recorder;
use super::stream::{Interrupt, follow};
use super::terminal::Terminal;
use super::transcribe::Format;
use super::{Global, INTERRUPTED, Outcome, SUCCESS, load};

const EXAMPLES: &str = "\
Examples:
  riparian generate model.cmf --prompt \"Why is the sky blue?\"     the model's chat template applies
  riparian generate model.cmf --prompt \"Once upon\" --raw           the text as it stands
  echo \"Why?\" | riparian generate model.cmf --prompt -             from stdin
  riparian generate model.cmf --ids 1,42,7 --max-new-tokens 16
  riparian generate model.cmf --rows rows.safetensors:embeds       [n, hidden] in f32, f16 or bf16";

#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
#[command(group(ArgGroup::new("input").required(true).args(["prompt", "ids", "rows"])))]
pub(crate) struct Generate {
    /// The model
    #[arg(value_name = "MODEL.cmf")]
    model: PathBuf,
    /// What to say to the model; - reads it from stdin
    #[arg(long, value_name = "TEXT")]
    prompt: Option<String>,
    /// Take the prompt as it stands, without the chat template
    #[arg(long, requires = "prompt")]
    raw: bool,
    /// Token ids, separated by commas
    #[arg(long, value_name = "ID,...", value_delimiter = ',')]
    ids: Option<Vec<u32>>,
    /// Embedding rows from a safetensors file; the tensor may be left out when there is but one
    #[arg(long, value_name = "FILE[:TENSOR]")]
    rows: Option<String>,
    /// Tokens to make at most
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    max_new_tokens: Option<u32>,
    /// Go on after an end id
    #[arg(long)]
    ignore_eos: bool,
    /// How the result is written
    #[arg(long, value_enum, default_value = "text")]
    format: Format,
    /// Write which experts each position was routed to (docs/partial-banks.md)
    #[arg(long, value_name = "FILE")]
    record_routes: Option<PathBuf>,
    /// Tell on stderr how long it took and what happened
    #[arg(long)]
    stats: bool,
}

impl Generate {
    pub(crate) fn run(self, global: &Global, terminal: &mut Terminal) -> Outcome {
        let knobs = global.knobs()?;
        let heeded = knobs.clone();
        super::block_on(async {
            let mut interrupt = Interrupt::listen();
            let Some(runtime) = interrupt.or(load(&self.model, knobs, terminal)).await else { return Ok(INTERRUPTED) };
            let runtime = runtime?;
            let options = Options {
                max_new_tokens: self.max_new_tokens.map(|n| n as usize),
                eos: self.ignore_eos.then(Vec::new),
                draft_depth: None,
                keep_rows: self.record_routes.is_some(),
            };
            let begun = async {
                let mut session = runtime.session(options).await.map_err(anyhow::Error::from)?;
                self.feed(&runtime, &mut session).await?;
                anyhow::Ok(session)
            };
            let Some(session) = interrupt.or(begun).await else { return Ok(INTERRUPTED) };
            let mut tokens = session?.decode();
            let aloud = self.format == Format::Text;
            let ended = follow(&mut tokens, terminal, &mut interrupt, aloud).await.map_err(anyhow::Error::from)?;
            let line = if aloud {
                String::new()
            } else {
                Value::Object(self.line(&ended.record(runtime.device()))).to_string()
            };
            terminal.line(line).map_err(anyhow::Error::from)?;
            if self.stats {
                terminal.note(ended.summary(runtime.device()));
            }
            if let Some(path) = &self.record_routes {
                let mut recorder = Recorder::create(path, runtime.model(), &heeded)?;
                recorder.record(tokens.prompt_rows(), tokens.ids())?;
                recorder.finish()?;
            }
            super::end(runtime, &heeded, terminal).await;
            match ended.error {
                Some(error) => Err(error.into()),
                None if interrupt.fired() => Ok(INTERRUPTED),
                None => Ok(SUCCESS),
            }
        })?
    }

    /// The JSON line: what a session has, less what only recordings have.
    fn line(&self, record: &Map<String, Value>) -> Map<String, Value> {
        let audio = ["audio_s", "encode_s"];
        let rest = record.iter().filter(|(name, _)| !audio.contains(&name.as_str()));
        rest.map(|(name, value)| (name.clone(), value.clone())).collect()
    }

    async fn feed(&self, runtime: &Runtime, session: &mut Session) -> anyhow::Result<()> {
        if let Some(prompt) = &self.prompt {
            let prompt = if prompt == "-" { stdin()? } else { prompt.clone() };
            let ids = if self.raw { runtime.encode(&prompt)? } else { runtime.chat(&prompt)? };
            session.feed_ids(&ids).await?;
        } else if let Some(ids) = &self.ids {
            let ids: Vec<TokenId> = ids.iter().copied().map(TokenId).collect();
            session.feed_ids(&ids).await?;
        } else if let Some(rows) = &self.rows {
            let rows = read_rows(rows, runtime.hidden())?;
            session.feed(rows).await?;
        }
        Ok(())
    }
}

fn stdin() -> anyhow::Result<String> {
    let mut text = String::new();
    io::stdin().read_to_string(&mut text).context("cannot read the prompt from stdin")?;
    Ok(text)
}

/// `FILE` or `FILE:TENSOR`; a colon may be part of a file's name.
fn split(given: &str) -> (PathBuf, Option<&str>) {
    match given.rsplit_once(':') {
        Some((file, tensor)) if !Path::new(given).exists() => (file.into(), Some(tensor)),
        _ => (given.into(), None),
    }
}

/// Rows `[n, hidden]` as floats.
fn read_rows(given: &str, hidden: usize) -> anyhow::Result<Vec<f32>> {
    let (path, wanted) = split(given);
    let bytes = std::fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let file =
        SafeTensors::deserialize(&bytes).with_context(|| format!("{} is no safetensors file", path.display()))?;
    let mut names = file.names();
    names.sort_unstable();
    let name = match (wanted, &names[..]) {
        (Some(name), _) if names.contains(&name) => name,
        (None, [only]) => only,
        (Some(name), _) => bail!("{} has no tensor {name:?}: it has {}", path.display(), names.join(", ")),
        (None, _) => bail!("{} has several tensors, name one as FILE:TENSOR: {}", path.display(), names.join(", ")),
    };
    let tensor = file.tensor(name)?;
    let shape = tensor.shape();
    ensure!(
        shape.len() == 2 && shape[1] == hidden && shape[0] > 0,
        "tensor {name:?} has shape {shape:?}, wanted are rows of [n, {hidden}]"
    );
    let data = tensor.data();
    Ok(match tensor.dtype() {
        Dtype::F32 => data.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
        Dtype::F16 => data.as_chunks().0.iter().map(|b| half::f16::from_le_bytes(*b).to_f32()).collect(),
        Dtype::BF16 => data.as_chunks().0.iter().map(|b| half::bf16::from_le_bytes(*b).to_f32()).collect(),
        other => bail!("tensor {name:?} is stored as {other:?}, accepted are F32, F16 and BF16"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use safetensors::tensor::TensorView;

    fn file(tensors: &[(&str, Dtype, &[usize], &[u8])]) -> tempfile::NamedTempFile {
        let views = tensors
            .iter()
            .map(|(name, dtype, shape, data)| (*name, TensorView::new(*dtype, shape.to_vec(), data).unwrap()));
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), safetensors::serialize(views, None).unwrap()).unwrap();
        file
    }

    #[test]
    fn rows_are_read_in_every_float_type() {
        let floats: Vec<u8> = [1.0_f32, -2.0].iter().flat_map(|v| v.to_le_bytes()).collect();
        let halves: Vec<u8> = [1.0, -2.0].iter().flat_map(|v| half::f16::from_f32(*v).to_le_bytes()).collect();
        let bfloats: Vec<u8> = [1.0, -2.0].iter().flat_map(|v| half::bf16::from_f32(*v).to_le_bytes()).collect();
        for (dtype, data) in [(Dtype::F32, &floats), (Dtype::F16, &halves), (Dtype::BF16, &bfloats)] {
            let file = file(&[("rows", dtype, &[1, 2], data)]);
            let name = file.path().to_str().unwrap();
            assert_eq!(read_rows(name, 2).unwrap(), [1.0, -2.0]);
            assert_eq!(read_rows(&format!("{name}:rows"), 2).unwrap(), [1.0, -2.0]);
        }
    }

    #[test]
    fn what_is_no_row_is_refused_with_its_shape() {
        let data = [0_u8; 24];
        let two = file(&[("a", Dtype::F32, &[2, 3], &data), ("b", Dtype::F32, &[6], &data)]);
        let name = two.path().to_str().unwrap();
        let refused = |given: &str, hidden| read_rows(given, hidden).unwrap_err().to_string();
        assert!(refused(name, 3).contains("name one as FILE:TENSOR: a, b"));
        assert!(refused(&format!("{name}:c"), 3).contains("no tensor \"c\": it has a, b"));
        assert!(refused(&format!("{name}:a"), 4).contains("[2, 3], wanted are rows of [n, 4]"));
        assert!(refused(&format!("{name}:b"), 6).contains("[6]"));
        assert!(refused("/nowhere.safetensors", 3).contains("cannot read"));
    }
}
