//! `riparian bench`: prefill and decode through the real runtime, against known answers where the file has them.

mod arrivals;
mod compare;
mod memory;
mod table;

use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::Context as _;
use clap::Args;
use riparian::host::{Isa, default_threads};
use riparian::ids::TokenId;
use riparian::knobs::{Activations, Knobs};
use riparian::model::synth::has_known_answer;
use riparian::runtime::{Options, Runtime, Stats};
use serde_json::{Map, Value, json};

use super::record::Recorder;
use super::stream::{Interrupt, seconds};
use super::terminal::Terminal;
use super::{Failure, Global, INTERRUPTED, Outcome, SUCCESS, load, progress};
use arrivals::{Arrivals, Spread};
use memory::Watch;

const EXAMPLES: &str = "\
Examples:
  riparian synth nano.cmf --geometry nano-30b --mtp && riparian bench nano.cmf --prompt-len 512,4096
  riparian bench nano.cmf --expert-gb all,12,8,4 --drafts on,off     every combination, the model loaded for each
  riparian bench nano.cmf --device vulkan:0,cpu --json > now.jsonl
  riparian bench nano.cmf --compare before.jsonl                     what has changed since

Each run feeds the embeddings of consecutive tokens and decodes greedily past every end id. Prefill is timed over all
positions but the last, decode from the first ids that arrive to the last. In a file of riparian synth the token after t
is t + 1: right counts the ids that are. --json writes a line a measurement, in the shape of cortiq-bench decode.";

#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Bench {
    /// The model
    #[arg(value_name = "MODEL.cmf")]
    model: PathBuf,
    /// Positions of the prompt, separated by commas
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "512",
        value_parser = clap::value_parser!(u32).range(2..))]
    prompt_len: Vec<u32>,
    /// Tokens to decode
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..))]
    tokens: u32,
    /// With drafts, without, or with so many a round, any of them: on, off, 1, 2, 3, 4
    #[arg(long, value_name = "ON,OFF,N", value_delimiter = ',', value_parser = drafts)]
    drafts: Vec<Drafting>,
    /// Runs before those that are counted
    #[arg(long, value_name = "N", default_value_t = 1)]
    warmup: u32,
    /// Runs that are counted
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    repeats: u32,
    /// The prompt's first token
    #[arg(long, value_name = "ID", default_value_t = 1000)]
    start: u32,
    /// Write a JSON line a measurement
    #[arg(long)]
    json: bool,
    /// Lines of an earlier run (ours or the peer's) to compare with
    #[arg(long, value_name = "FILE")]
    compare: Option<PathBuf>,
    /// Write which experts each position of the last runs was routed to (docs/partial-banks.md)
    #[arg(long, value_name = "FILE")]
    record_routes: Option<PathBuf>,
}

/// How drafts are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Drafting {
    /// None are.
    Off,
    /// As deep as pays.
    On,
    /// So many a round.
    Depth(u8),
}

fn drafts(text: &str) -> Result<Drafting, String> {
    match text {
        "on" => Ok(Drafting::On),
        "off" | "0" => Ok(Drafting::Off),
        "1" | "2" | "3" | "4" => Ok(Drafting::Depth(text.parse().unwrap_or(1))),
        _ => Err("accepted are on and off, and 1 to 4 drafts a round".into()),
    }
}

/// What a model is loaded with.
#[derive(Clone, Debug)]
struct Setting {
    knobs: Knobs,
    drafts: bool,
}

/// One session.
struct Run {
    arrivals: Arrivals,
    ids: Vec<TokenId>,
    rows: Vec<f32>,
    stats: Stats,
}

impl Bench {
    pub(crate) fn run(self, global: &Global, terminal: &mut Terminal) -> Outcome {
        let settings = self.settings(global)?;
        let before = self.compare.as_deref().map(compare::read).transpose()?;
        super::block_on(async {
            let mut interrupt = Interrupt::listen();
            let mut lines = Vec::new();
            let mut recorder = None;
            for setting in settings {
                let watch = Watch::start(&self.model);
                let began = Instant::now();
                let loaded = interrupt.or(load(&self.model, setting.knobs.clone(), terminal)).await;
                let Some(runtime) = loaded else { return Ok(INTERRUPTED) };
                let (runtime, load_s) = (runtime?, began.elapsed().as_secs_f64());
                if let (Some(path), None) = (&self.record_routes, &recorder) {
                    recorder = Some(Recorder::create(path, runtime.model(), &setting.knobs)?);
                }
                for &prompt_len in &self.prompt_len {
                    let measured = self.measure(&runtime, prompt_len, terminal);
                    let Some(runs) = interrupt.or(measured).await else { return Ok(INTERRUPTED) };
                    let runs = runs?;
                    if let (Some(recorder), Some(last)) = (&mut recorder, runs.last()) {
                        recorder.record(&last.rows, &last.ids)?;
                    }
                    let mut line = self.line(&runtime, &setting, prompt_len, &runs);
                    line.insert("load_s".into(), seconds(load_s));
                    if setting.knobs.ts {
                        line.insert("class_times".into(), class_times(&runtime));
                    }
                    watch.record(&mut line);
                    if self.json {
                        terminal.line(Value::Object(line.clone())).map_err(anyhow::Error::from)?;
                    }
                    lines.push(line);
                }
                super::end(runtime, &setting.knobs, terminal).await;
            }
            if let Some(recorder) = recorder {
                recorder.finish()?;
            }
            self.tell(&lines, before.as_deref(), terminal)?;
            Ok(SUCCESS)
        })?
    }

    /// Every combination of devices, budgets and drafts.
    fn settings(&self, global: &Global) -> Result<Vec<Setting>, Failure> {
        let each = |given: &Option<String>| match given {
            None => vec![None],
            Some(list) => list.split(',').map(|one| Some(one.trim().to_owned())).collect(),
        };
        let drafts = match &self.drafts[..] {
            [] if global.no_drafts => vec![Drafting::Off],
            [] => vec![Drafting::On],
            given => given.to_vec(),
        };
        let mut settings = Vec::new();
        for device in each(&global.device) {
            for budget in each(&global.expert_gb) {
                for &drafts in &drafts {
                    let budget = budget.clone().filter(|budget| budget != "all");
                    let (device, no_drafts) = (device.clone(), drafts == Drafting::Off);
                    let draft_depth = match drafts {
                        Drafting::Depth(depth) => Some(depth.to_string()),
                        _ => global.draft_depth.clone(),
                    };
                    let knobs =
                        Global { device, expert_gb: budget, no_drafts, draft_depth, ..global.clone() }.knobs()?;
                    settings.push(Setting { drafts: knobs.mtp, knobs });
                }
            }
        }
        Ok(settings)
    }

    /// All runs of one prompt length, the uncounted ones first.
    async fn measure(&self, runtime: &Runtime, prompt_len: u32, terminal: &Terminal) -> anyhow::Result<Vec<Run>> {
        let vocab = u32::try_from(runtime.model().geometry.vocab).context("vocabulary")?;
        let prompt: Vec<TokenId> = (0..prompt_len).map(|i| TokenId((self.start % vocab + i) % vocab)).collect();
        let bar = progress::count(terminal, "bench", u64::from(self.warmup + self.repeats));
        let mut runs = Vec::new();
        for _ in 0..self.warmup + self.repeats {
            runs.push(self.once(runtime, &prompt).await?);
            bar.inc(1);
        }
        bar.finish_and_clear();
        Ok(runs)
    }

    async fn once(&self, runtime: &Runtime, prompt: &[TokenId]) -> Result<Run, riparian::Error> {
        let options = Options {
            max_new_tokens: Some(self.tokens as usize),
            eos: Some(Vec::new()),
            draft_depth: None,
            keep_rows: self.record_routes.is_some(),
        };
        let mut session = runtime.session(options).await?;
        let began = Instant::now();
        session.feed_ids(prompt).await?;
        let mut tokens = session.decode();
        let mut times = Vec::with_capacity(self.tokens as usize);
        while let Some(token) = tokens.next().await {
            token?;
            times.push(began.elapsed().as_secs_f64());
        }
        let arrivals = Arrivals::new(times);
        Ok(Run { arrivals, ids: tokens.ids().to_vec(), rows: tokens.prompt_rows().to_vec(), stats: tokens.stats() })
    }

    /// What was measured, in the shape of the peer's line.
    fn line(&self, runtime: &Runtime, setting: &Setting, prompt_len: u32, runs: &[Run]) -> Map<String, Value> {
        let model = runtime.model();
        let (warm, counted) = runs.split_at(self.warmup as usize);
        let rate = |pick: &dyn Fn(&Run) -> f64| Spread::of(counted.iter().map(pick).collect());
        let prefill = rate(&|run| run.arrivals.prefill_per_s(prompt_len as usize));
        let decode = rate(&|run| run.arrivals.decode_per_s());
        let last = counted.last().expect("one run or more");
        let drafts = last.stats.drafts;
        let partial =
            last.stats.bank.slots < model.geometry.decoder_layers() * model.geometry.moe.map_or(0, |m| m.experts);
        let expected = has_known_answer(model.container.header()).then(|| {
            let vocab = model.geometry.vocab as u64;
            let first = u64::from(self.start) % vocab + u64::from(prompt_len);
            let right = last.ids.iter().zip(first..).filter(|(id, want)| u64::from(id.0) == want % vocab).count();
            format!("{right}/{}", last.ids.len())
        });
        let used = setting.drafts && model.geometry.draft;
        let on_host = runtime.device_kind() == riparian::device::DeviceKind::Host;
        let line = json!({
            "cmd": "decode",
            "engine": concat!("riparian ", env!("CARGO_PKG_VERSION")),
            "commit": option_env!("RIPARIAN_COMMIT"),
            "file": self.model.file_name().map(|name| name.to_string_lossy()),
            "device": runtime.device(),
            "kernels": if on_host { Isa::best().to_string() } else { "wgsl".to_owned() },
            "act": match runtime.facts().activations {
                Activations::F32 => "f32",
                Activations::Int8 => "int8",
            },
            "cpu_threads": setting.knobs.threads.map_or_else(default_threads, |threads| threads as usize),
            "prompt_len": prompt_len,
            "tokens": last.ids.len(),
            "warmup": self.warmup,
            "repeats": self.repeats,
            "expert_gb": setting.knobs.expert_gb.map(|gb| gb.to_string()),
            "slots": last.stats.bank.slots,
            "partial": partial,
            "mtp_in_file": model.geometry.draft,
            "mtp_used": used && drafts.offered > 0,
            "draft_depth": setting.knobs.mtp_depth.filter(|_| used),
            "draft": (drafts.offered > 0).then(|| json!({
                "offered": drafts.offered, "kept": drafts.kept,
                "kept_percent": 100.0 * drafts.kept as f64 / drafts.offered as f64,
                "tokens_per_pass": last.ids.len() as f64 / (last.ids.len() as f64 - drafts.kept as f64).max(1.0),
            })),
            "prefill_per_s": prefill.median,
            "prefill_spread": [prefill.low, prefill.high],
            "decode_tok_s": decode.median,
            "decode_spread": [decode.low, decode.high],
            "misses": last.stats.bank.misses,
            "completed": last.stats.bank.completed,
            "admitted": last.stats.bank.admitted,
            "first_run": warm.first().map(|run| record(run, prompt_len)),
            "runs": counted.iter().map(|run| record(run, prompt_len)).collect::<Vec<_>>(),
            "expected_ids": expected,
            "first_ids": last.ids.iter().take(8).map(|id| id.0).collect::<Vec<_>>(),
            "recovered": counted.iter().any(|run| run.stats.recovered),
            "file_gb": std::fs::metadata(&self.model).map_or(0.0, |file| file.len() as f64 / 1e9),
            "tensors": model.container.tensors().len(),
        });
        let Value::Object(line) = line else { unreachable!("an object was written") };
        line
    }

    fn tell(&self, lines: &[Map<String, Value>], before: Option<&[Value]>, terminal: &Terminal) -> anyhow::Result<()> {
        if !self.json {
            terminal.put(&table::of(lines))?;
        }
        if let Some(before) = before {
            let told = compare::told(lines, before);
            // Beside JSON lines, people read stderr.
            if self.json { terminal.note(told) } else { terminal.line(told)? }
        }
        let wrong = |line: &&Map<String, Value>| {
            let expected = line["expected_ids"].as_str().and_then(|text| text.split_once('/'));
            expected.is_some_and(|(right, all)| right != all)
        };
        if lines.iter().any(|line| wrong(&line)) {
            terminal.note("ids differ from the known answer: something here decodes wrongly");
        }
        Ok(())
    }
}

/// One run of a line.
fn record(run: &Run, prompt_len: u32) -> Value {
    json!({
        "prefill_s": run.arrivals.prefill_s(), "decode_s": run.arrivals.decode_s(),
        "first_ids_s": run.arrivals.first_s(),
        "prefill_per_s": run.arrivals.prefill_per_s(prompt_len as usize),
        "decode_tok_s": run.arrivals.decode_per_s(),
        "misses": run.stats.bank.misses, "completed": run.stats.bank.completed,
        "admitted": run.stats.bank.admitted,
        "drafts_offered": run.stats.drafts.offered, "drafts_kept": run.stats.drafts.kept,
    })
}

/// Lines of an earlier run, by path, for messages.
fn named(path: &Path) -> String {
    path.display().to_string()
}

/// Device time by class since the start, as `CMF_NEMO_TS` measures it.
fn class_times(runtime: &Runtime) -> Value {
    let row = |time: &riparian::device::times::ClassTime| {
        json!({
            "in": time.kind.name(), "class": time.class.name(), "dispatches": time.dispatches,
            "ms": time.took.as_secs_f64() * 1e3,
        })
    };
    runtime.class_times().iter().map(row).collect()
}
