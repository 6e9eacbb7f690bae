//! `riparian tune`: measures this machine on a model's own weights and writes what it would set.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use clap::Args;
use riparian::host::{Decoder, ExpertRows, Pool, physical_cores};
use riparian::ids::{ExpertIx, LayerIx, TokenId};
use riparian::knobs::{Activations, Knobs};
use riparian::model::Model;
use riparian::runtime::{Options, Runtime};
use serde_json::{Value, json};

use super::stream::Interrupt;
use super::terminal::Terminal;
use super::{Global, INTERRUPTED, Outcome, SUCCESS, access, load, record};

const EXAMPLES: &str = "\
Examples:
  riparian tune model.cmf                              measures and tells
  riparian tune model.cmf --out here.profile           and writes a profile
  riparian transcribe model.cmf talk.wav --profile here.profile

Measured are the time in which the host completes missing experts (for each number of threads and both arithmetics), and
decode with and without drafts on the device that decodes. A profile is lines of NAME=VALUE; the environment and flags
override it, and riparian doctor --profile FILE shows what came of it. Measure on an idle machine.";

/// How long one candidate is measured.
const EACH: Duration = Duration::from_millis(400);
/// Positions of the prompt, and ids decoded behind it.
const PROMPT: u32 = 32;
const DECODED: usize = 64;
/// A larger number of threads has to be better by this factor: threads are taken from others.
const WORTH: f64 = 1.03;
/// Another arithmetic than the default has to be better by this factor.
const WORTH_OTHER_ACT: f64 = 1.25;

#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Tune {
    /// The model to be run here
    #[arg(value_name = "MODEL.cmf")]
    model: PathBuf,
    /// Write the proposals as a profile
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Write a JSON line about what was measured
    #[arg(long)]
    json: bool,
}

/// One way for the host to complete experts.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Completion {
    threads: usize,
    act: Activations,
    /// For one row's experts of a layer.
    layer_us: f64,
    /// Of experts' weights.
    gb_per_s: f64,
}

impl Tune {
    pub(crate) fn run(self, global: &Global, terminal: &mut Terminal) -> Outcome {
        let knobs = global.knobs()?;
        let opened = riparian::model::open(&self.model, &riparian::model::OpenOptions { access: access(&knobs) });
        let model = opened.map_err(anyhow::Error::from)?;
        let completions = completions(&model)?;
        let best = choose(&completions);
        let mut proposed: Vec<(&str, String)> = Vec::new();
        if let Some(best) = best {
            proposed.push(("CMF_NEMO_THREADS", best.threads.to_string()));
            proposed.push(("CMF_NEMO_ACT", name(best.act).to_owned()));
        }
        super::block_on(async {
            let mut interrupt = Interrupt::listen();
            let mut drafts = Vec::new();
            for on in [true, false].into_iter().filter(|on| !on || model.geometry.draft) {
                let mut knobs: Knobs = knobs.clone();
                for (name, value) in
                    proposed.iter().map(|(n, v)| (*n, v.as_str())).chain([("CMF_NEMO_MTP", if on { "1" } else { "0" })])
                {
                    knobs.set(name, value, riparian::knobs::Origin::Code)?;
                }
                let Some(runtime) = interrupt.or(load(&self.model, knobs, terminal)).await else {
                    return Ok(INTERRUPTED);
                };
                let runtime = runtime?;
                let Some(rate) = interrupt.or(rate(&runtime)).await else { return Ok(INTERRUPTED) };
                drafts.push((on, rate.map_err(anyhow::Error::from)?, runtime.device().to_owned()));
                runtime.shutdown().await;
            }
            if let [(_, with, _), (_, without, _)] = &drafts[..] {
                proposed.push(("CMF_NEMO_MTP", if with >= without { "1" } else { "0" }.to_owned()));
            }
            let text = if self.json {
                let completion = |c: &Completion| {
                    json!({
                        "threads": c.threads, "act": name(c.act), "layer_us": c.layer_us, "gb_per_s": c.gb_per_s,
                    })
                };
                let draft = |(on, rate, device): &(bool, f64, String)| {
                    json!({
                        "drafts": on, "decode_tok_s": rate, "device": device,
                    })
                };
                let knobs: serde_json::Map<String, Value> =
                    proposed.iter().map(|(name, value)| ((*name).to_owned(), value.clone().into())).collect();
                let line = json!({
                    "cmd": "tune", "completions": completions.iter().map(completion).collect::<Vec<_>>(),
                    "decode": drafts.iter().map(draft).collect::<Vec<_>>(), "proposed": knobs,
                });
                format!("{line}\n")
            } else {
                page(&completions, &drafts, &proposed)
            };
            terminal.put(&text).map_err(anyhow::Error::from)?;
            if let Some(out) = &self.out {
                let lines: String = proposed.iter().map(|(name, value)| format!("{name}={value}\n")).collect();
                std::fs::write(out, lines).with_context(|| format!("cannot write {}", out.display()))?;
            }
            Ok(SUCCESS)
        })?
    }
}

fn name(act: Activations) -> &'static str {
    match act {
        Activations::F32 => "f32",
        Activations::Int8 => "int8",
    }
}

/// Every number of threads worth trying, in both arithmetics.
fn completions(model: &Arc<Model>) -> anyhow::Result<Vec<Completion>> {
    let of = match record::routes_from(model) {
        Ok(of) => of,
        // A model without experts never misses one.
        Err(_) => return Ok(Vec::new()),
    };
    let all = physical_cores();
    let mut threads: Vec<usize> =
        [1, 2, all / 4, all / 2, all * 3 / 4, all].into_iter().filter(|n| (1..=all).contains(n)).collect();
    threads.sort_unstable();
    threads.dedup();
    let mut measured = Vec::new();
    for act in [Activations::Int8, Activations::F32] {
        for &threads in &threads {
            let decoder = Decoder::new(Arc::clone(model), act, Pool::new(threads));
            let normed: Vec<f32> = (0..model.geometry.hidden).map(|i| ((i * 37 % 101) as f32 - 50.0) / 30.0).collect();
            let mut turn = 0usize;
            // Another layer and other experts each time, so that weights come from memory as in a real miss.
            let mut once = || {
                let layer = LayerIx::from(turn % of.layers);
                let mut wanted: Vec<ExpertIx> =
                    (0..of.top_k).map(|k| ExpertIx::from((turn * of.top_k + k) % of.experts)).collect();
                wanted.sort_unstable();
                let wanted: Vec<ExpertRows> =
                    wanted.into_iter().map(|expert| ExpertRows { expert, rows: vec![0] }).collect();
                turn += 1;
                std::hint::black_box(decoder.experts(layer, &normed, &wanted));
            };
            // The first round reads the file.
            for _ in 0..of.layers {
                once();
            }
            let began = Instant::now();
            let mut rounds = Vec::new();
            while began.elapsed() < EACH || rounds.len() < 8 {
                let round = Instant::now();
                once();
                rounds.push(round.elapsed().as_secs_f64() * 1e6);
            }
            rounds.sort_by(f64::total_cmp);
            let layer_us = rounds[rounds.len() / 2];
            let gb_per_s = of.expert_bytes as f64 * of.top_k as f64 / layer_us / 1e3;
            measured.push(Completion { threads, act, layer_us, gb_per_s });
        }
    }
    Ok(measured)
}

/// The fastest, but for threads that add next to nothing and for an arithmetic that gains little: another one may choose
/// other ids.
fn choose(completions: &[Completion]) -> Option<Completion> {
    completions.iter().copied().reduce(|best, next| {
        let worth = if next.act == best.act { WORTH } else { WORTH_OTHER_ACT };
        if next.layer_us * worth < best.layer_us { next } else { best }
    })
}

/// Ids a second behind a short prompt; the first run warms up.
async fn rate(runtime: &Runtime) -> Result<f64, riparian::Error> {
    let vocab = runtime.model().geometry.vocab as u32;
    let prompt: Vec<TokenId> = (0..PROMPT).map(|i| TokenId(i % vocab)).collect();
    let mut rate = 0.0;
    for _ in 0..2 {
        let options = Options { max_new_tokens: Some(DECODED), eos: Some(Vec::new()), ..Options::default() };
        let mut session = runtime.session(options).await?;
        session.feed_ids(&prompt).await?;
        let finished = session.decode().finish().await?;
        rate = finished.ids.len() as f64 / (finished.stats.prefill + finished.stats.decode).as_secs_f64();
    }
    Ok(rate)
}

fn page(completions: &[Completion], drafts: &[(bool, f64, String)], proposed: &[(&str, String)]) -> String {
    let mut text = String::from("Missing experts completed by the host, one position's of a layer\n");
    for c in completions {
        let _ = writeln!(
            text,
            "  {:>3} threads, {:4}  {:>9.1} us  {:>6.2} GB/s",
            c.threads,
            name(c.act),
            c.layer_us,
            c.gb_per_s
        );
    }
    text += "Decode\n";
    for (on, rate, device) in drafts {
        let _ = writeln!(
            text,
            "  {:14} {rate:>9.1} tokens/s on {device}",
            if *on { "with drafts" } else { "without drafts" }
        );
    }
    text += "Proposed\n";
    for (name, value) in proposed {
        let _ = writeln!(text, "  {name}={value}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_threads_have_to_be_worth_it() {
        let of = |threads, layer_us| Completion { threads, act: Activations::Int8, layer_us, gb_per_s: 1.0 };
        assert_eq!(choose(&[]), None);
        assert_eq!(choose(&[of(1, 100.0), of(2, 50.0), of(4, 49.5)]).unwrap().threads, 2);
        assert_eq!(choose(&[of(1, 100.0), of(2, 120.0), of(4, 60.0)]).unwrap().threads, 4);
        let floats = |layer_us| Completion { act: Activations::F32, ..of(1, layer_us) };
        assert_eq!(choose(&[of(1, 100.0), floats(90.0)]).unwrap().act, Activations::Int8);
        assert_eq!(choose(&[of(1, 100.0), floats(70.0)]).unwrap().act, Activations::F32);
    }
}
