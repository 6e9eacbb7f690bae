//! `riparian transcribe`: recordings in, their transcripts out while they are being made.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use clap::{Args, ValueEnum};
use riparian::audio::read::read_file;
use riparian::runtime::{Error, Options, Runtime, Transcription, TranscriptionOptions};
use riparian::text::transcript::{Transcript, Word};
use serde_json::{Value, json};

use super::record::Recorder;
use super::stream::{Ended, Interrupt, follow, seconds};
use super::terminal::Terminal;
use super::{FAILURE, Failure, Global, INTERRUPTED, Outcome, SUCCESS, bundled, load, progress};

const EXAMPLES: &str = "\
Examples:
  riparian transcribe                              the bundled model and a bundled recording
  riparian transcribe model.cmf talk.wav           the text, as it is made
  riparian transcribe model.cmf *.flac             several: each line begins with the file's name
  riparian transcribe model.cmf talk.mp3 --timestamps
  riparian transcribe model.cmf talk.wav --format json | jq .text";

/// Where the bundled model lies under assets/.
const BUNDLED_MODEL: &str = "tiny-transcribe.cmf";
/// Where the bundled recordings lie under assets/.
const BUNDLED_RECORDINGS: &str = "demo";

/// How results are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// The text as it is made
    Text,
    /// A JSON line a recording
    Json,
}

#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Transcribe {
    /// The model; the bundled tiny one if neither model nor recording is named
    #[arg(value_name = "MODEL.cmf")]
    model: Option<PathBuf>,
    /// Recordings of any common format, rate and channel count
    #[arg(value_name = "RECORDING")]
    recordings: Vec<PathBuf>,
    /// The instruction to the model, instead of its default one
    #[arg(long, value_name = "TEXT")]
    prompt: Option<String>,
    /// How results are written
    #[arg(long, value_enum, default_value = "text")]
    format: Format,
    /// Tokens to make at most
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    max_new_tokens: Option<u32>,
    /// Add the times of the words
    #[arg(long)]
    timestamps: bool,
    /// Write which experts each position was routed to (docs/partial-banks.md)
    #[arg(long, value_name = "FILE")]
    record_routes: Option<PathBuf>,
    /// Tell on stderr how long it took and what happened
    #[arg(long)]
    stats: bool,
}

impl Transcribe {
    pub(crate) fn run(self, global: &Global, terminal: &mut Terminal) -> Outcome {
        let knobs = global.knobs()?;
        let (model, recordings) = self.inputs()?;
        let heeded = knobs.clone();
        super::block_on(async {
            let mut interrupt = Interrupt::listen();
            let Some(runtime) = interrupt.or(load(&model, knobs, terminal)).await else { return Ok(INTERRUPTED) };
            let runtime = runtime?;
            let mut recorder = match &self.record_routes {
                Some(path) => Some(Recorder::create(path, runtime.model(), &heeded)?),
                None => None,
            };
            let several = recordings.len() > 1;
            let mut code = SUCCESS;
            for recording in &recordings {
                match self.one(&runtime, recording, several, terminal, &mut interrupt, recorder.as_mut()).await {
                    Ok(ended) => {
                        if ended.is_some_and(|ended| ended.error.is_some()) {
                            code = FAILURE;
                        }
                    }
                    Err(failure) if super::is_broken_pipe(&failure.error) => return Err(failure),
                    Err(failure) => {
                        // The others still get their turn; the exit code tells.
                        code = FAILURE;
                        if self.format == Format::Json {
                            let line = json!({
                                "file": recording.to_string_lossy(), "error": format!("{:#}", failure.error),
                            });
                            terminal.line(line).map_err(anyhow::Error::from)?;
                        }
                        terminal.error(&failure.error);
                    }
                }
                if interrupt.fired() {
                    code = INTERRUPTED;
                    break;
                }
            }
            if let Some(recorder) = recorder {
                recorder.finish()?;
            }
            super::end(runtime, &heeded, terminal).await;
            Ok(code)
        })?
    }

    /// The named model and recordings, or the bundled ones where nothing is named.
    fn inputs(&self) -> Result<(PathBuf, Vec<PathBuf>), Failure> {
        match &self.model {
            None => {
                let folder = bundled(BUNDLED_RECORDINGS)?;
                let listed = folder.read_dir().and_then(|entries| entries.map(|e| Ok(e?.path())).collect());
                let mut found: Vec<PathBuf> = listed.with_context(|| format!("cannot list {}", folder.display()))?;
                found.retain(|path| path.extension().is_some_and(|extension| extension == "wav"));
                found.sort();
                let first =
                    found.into_iter().next().with_context(|| format!("no recording in {}", folder.display()))?;
                Ok((bundled(BUNDLED_MODEL)?, vec![first]))
            }
            Some(_) if self.recordings.is_empty() => Err(Failure::usage(
                "no recording is named: riparian transcribe takes MODEL.cmf RECORDING..., or nothing at all for the \
                 bundled ones",
            )),
            Some(model) => Ok((model.clone(), self.recordings.clone())),
        }
    }

    fn options(&self) -> TranscriptionOptions {
        TranscriptionOptions {
            session: Options {
                max_new_tokens: self.max_new_tokens.map(|n| n as usize),
                keep_rows: self.record_routes.is_some(),
                ..Options::default()
            },
            prompt: self.prompt.clone(),
            words: self.timestamps,
        }
    }

    /// One recording from file to stdout; `None` when Ctrl-C came before its first token.
    async fn one(
        &self,
        runtime: &Runtime,
        path: &Path,
        several: bool,
        terminal: &Terminal,
        interrupt: &mut Interrupt,
        recorder: Option<&mut Recorder>,
    ) -> Result<Option<Ended>, Failure> {
        let in_file = |error: Error| Failure::from(error).about(path);
        let recording = read_file(path).map_err(anyhow::Error::from)?;
        if recording.damaged {
            terminal.note(format!("{} is damaged: this is what could be read", path.display()));
        }
        let bar = progress::seconds(terminal, "encode");
        let observed = |seen: Duration, all: Duration| {
            bar.set_length(all.as_secs());
            bar.set_position(seen.as_secs());
        };
        let begun = interrupt.or(runtime.transcribe_observed(recording.samples, self.options(), observed)).await;
        bar.finish_and_clear();
        let Some(begun) = begun else { return Ok(None) };
        let mut transcription: Transcription = begun.map_err(in_file)?;
        let aloud = self.format == Format::Text;
        if aloud && several {
            put(terminal, &format!("{}: ", path.display()))?;
        }
        let ended = follow(transcription.tokens(), terminal, interrupt, aloud).await.map_err(anyhow::Error::from)?;
        if aloud {
            put(terminal, "\n")?;
        }
        let whole = ended.error.is_none() && !interrupt.fired();
        let timed = if self.timestamps && whole {
            Some(transcription.timed_transcript().await.map_err(in_file)?)
        } else {
            None
        };
        let words = timed.iter().flat_map(words);
        if aloud {
            put(terminal, &words.map(line_of).collect::<String>())?;
        } else {
            let mut line = serde_json::Map::new();
            line.insert("file".into(), path.to_string_lossy().into());
            line.append(&mut ended.record(runtime.device()));
            if self.timestamps {
                line.insert("words".into(), words.map(record_of).collect());
            }
            put(terminal, &format!("{}\n", Value::Object(line)))?;
        }
        if self.stats {
            terminal.note(ended.summary(runtime.device()));
        }
        if let Some(recorder) = recorder {
            let tokens = transcription.tokens();
            recorder.record(tokens.prompt_rows(), tokens.ids())?;
        }
        if let Some(error) = &ended.error {
            terminal.error(&Failure::from(error.clone()).about(path).error);
        }
        Ok(Some(ended))
    }
}

fn put(terminal: &Terminal, text: &str) -> Result<(), Failure> {
    terminal.put(text).map_err(|error: io::Error| anyhow::Error::from(error).into())
}

/// Each word with its speaker.
fn words(transcript: &Transcript) -> impl Iterator<Item = (Option<u32>, &Word)> {
    transcript.turns.iter().flat_map(|turn| turn.words.iter().map(|word| (turn.speaker, word)))
}

/// Start, end and word; a word that could not be placed has no times.
fn line_of((speaker, word): (Option<u32>, &Word)) -> String {
    let time = |time: Option<f64>| time.map_or_else(|| "-".into(), |time| format!("{time:.3}"));
    let speaker = speaker.map_or_else(String::new, |speaker| format!("  speaker {speaker}"));
    format!("{:>11} {:>9}  {}{speaker}\n", time(word.start), time(word.end), word.word)
}

fn record_of((speaker, word): (Option<u32>, &Word)) -> Value {
    let time = |time: Option<f64>| time.map_or(Value::Null, seconds);
    let mut record = json!({ "word": word.word, "start_s": time(word.start), "end_s": time(word.end) });
    if let Some(speaker) = speaker {
        record["speaker"] = speaker.into();
    }
    record
}
