//! `riparian tune`: measures this machine on a model's own weights and writes what it would set.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use clap::Args;
use indicatif::ProgressBar;
use riparian::host::{Decoder, ExpertRows, Pool, physical_cores};
use riparian::ids::{ExpertIx, LayerIx, TokenId};
use riparian::knobs::{Activations, DeviceChoice, Knobs, Origin};
use riparian::model::Model;
use riparian::runtime::{Options, Runtime};
use serde_json::{Value, json};

use super::stream::Interrupt;
use super::terminal::Terminal;
use super::{Global, INTERRUPTED, Outcome, SUCCESS, access, load, progress, record};

const EXAMPLES: &str = "\
Examples:
  riparian tune model.cmf                              measures and tells
  riparian tune model.cmf --out here.profile           and writes a profile
  riparian transcribe model.cmf talk.wav --profile here.profile

Measured are the time in which the host completes missing experts (for each number of threads and both arithmetics); of
the adapter that would decode, its bus, its memory and what a dispatch and a readback cost; and decode with the budgets
that fit it, with fewer threads where the host has part in it, without drafts and with 1 to 4 a round, the model's own. A
profile is lines of NAME=VALUE; the environment and flags override it, and riparian doctor --profile FILE shows what came
of it. Measure on an idle machine.";

/// How long one candidate is measured.
const EACH: Duration = Duration::from_millis(400);
/// Positions of the prompt, and ids decoded behind it, before what is counted and then.
const PROMPT: u32 = 32;
const WARM: usize = 16;
const DECODED: usize = 64;
/// Runs of a choice: as many as take this time, but not more than that; the fastest counts.
const LONG_ENOUGH: Duration = Duration::from_millis(800);
const RUNS_MAX: usize = 12;
/// Deepest draft that is tried.
const DEPTHS: usize = 4;
/// Budgets to try where all experts do not fit, as shares of them.
const SHARES: [f64; 3] = [0.75, 0.5, 0.25];
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

/// What an adapter is like.
#[derive(Clone, Debug)]
struct Adapter {
    name: String,
    upload_gb_s: f64,
    memory_gb_s: f64,
    dispatch_us: f64,
    readback_us: f64,
}

/// Decode with one choice.
#[derive(Clone, Debug)]
struct Decoded {
    /// GB for routed experts; `None` is all of them.
    expert_gb: Option<f64>,
    /// Drafts a round; 0 is plain decode.
    depth: usize,
    /// Host threads; `None` is the program's own choice.
    threads: Option<usize>,
    /// `None` where it does not fit.
    tok_s: Option<f64>,
    /// Where it ran, or why it did not.
    note: String,
}

/// A knob's value, and what it gives.
#[derive(Clone, Debug, PartialEq)]
struct Proposal {
    name: &'static str,
    value: String,
    gives: String,
}

impl Tune {
    pub(crate) fn run(self, global: &Global, terminal: &mut Terminal) -> Outcome {
        let knobs = global.knobs()?;
        let opened = riparian::model::open(&self.model, &riparian::model::OpenOptions { access: access(&knobs) });
        let model = opened.map_err(anyhow::Error::from)?;
        let bar = progress::count(terminal, "tune", 1);
        let completions = completions(&model, &bar)?;
        let best = choose(&completions);
        let mut proposed: Vec<Proposal> = Vec::new();
        let propose = |proposed: &mut Vec<Proposal>, name, value, gives| proposed.push(Proposal { name, value, gives });
        if let Some(best) = best {
            let same = |act| completions.iter().find(|c| c.threads == best.threads && c.act == act);
            let other = [Activations::Int8, Activations::F32].into_iter().filter(|act| *act != best.act).find_map(same);
            let other = other.map_or_else(String::new, |c| format!(", {:.1} us with {}", c.layer_us, name(c.act)));
            let gives = format!("{:.1} us for a layer's missing experts{other}", best.layer_us);
            propose(&mut proposed, "CMF_NEMO_ACT", name(best.act).to_owned(), gives);
        }
        let adapter = adapter(&knobs);
        let found = adapter.as_ref().and_then(|adapter| adapter.as_ref().ok());
        super::block_on(async {
            let mut interrupt = Interrupt::listen();
            let mut decoded: Vec<Decoded> = Vec::new();
            // Without drafts, or each depth of them.
            let try_one = async |expert_gb: Option<f64>, drafts: bool, threads: Option<usize>| {
                let mut knobs: Knobs = knobs.clone();
                knobs.set("CMF_NEMO_MTP", if drafts { "1" } else { "0" }, Origin::Code)?;
                if let Some(best) = best {
                    knobs.set("CMF_NEMO_ACT", name(best.act), Origin::Code)?;
                }
                if let Some(threads) = threads {
                    knobs.set("CMF_NEMO_THREADS", &threads.to_string(), Origin::Code)?;
                }
                if let Some(gb) = expert_gb {
                    knobs.set("CMF_NEMO_EXPERT_GB", &gb.to_string(), Origin::Code)?;
                }
                let one =
                    |depth: usize, tok_s: Option<f64>, note: String| Decoded { expert_gb, depth, threads, tok_s, note };
                let depths = if drafts { 1..=DEPTHS } else { 0..=0 };
                bar.inc_length(depths.clone().count() as u64);
                let built = load(&self.model, knobs, terminal).await;
                let runtime = match built {
                    Ok(runtime) => runtime,
                    Err(failure) => {
                        bar.inc(depths.clone().count() as u64);
                        return anyhow::Ok(vec![one(*depths.start(), None, format!("{:#}", failure.error))]);
                    }
                };
                let mut tried = Vec::new();
                let deepest = runtime.facts().verify_rows.saturating_sub(1);
                for depth in depths.filter(|depth| *depth <= deepest) {
                    let rate = rate(&runtime, depth).await?;
                    tried.push(one(depth, Some(rate), runtime.device().to_owned()));
                    bar.inc(1);
                }
                if tried.is_empty() {
                    tried.push(one(1, None, "no drafts are made with this budget".to_owned()));
                }
                runtime.shutdown().await;
                Ok(tried)
            };
            // Without an adapter the host decodes, which has all experts whatever the budget. Where one was asked for
            // with a budget, that is it; else the largest that fits and the next.
            let all_gb = expert_gb(&model);
            let budgets: Vec<Option<f64>> = match (found, knobs.expert_gb, all_gb) {
                (Some(_), None, Some(all)) => [None].into_iter().chain(SHARES.map(|share| Some(share * all))).collect(),
                (_, given, _) => vec![given],
            };
            let mut fit = 0;
            let threads = best.map(|best| best.threads);
            for budget in budgets {
                let Some(tried) = interrupt.or(try_one(budget, false, threads)).await else { return Ok(INTERRUPTED) };
                let tried = tried?;
                fit += usize::from(tried.iter().any(|d| d.tok_s.is_some()));
                decoded.extend(tried);
                if fit == 2 {
                    break;
                }
            }
            let fastest = decoded.iter().filter(|d| d.tok_s.is_some()).max_by(|a, b| rate_of(a).total_cmp(&rate_of(b)));
            let Some(fastest) = fastest.cloned() else {
                let why = decoded.first().map_or_else(String::new, |first| first.note.clone());
                return Err(anyhow::anyhow!("nothing decodes here: {why}").into());
            };
            // The completer's threads are not alone: where the host has part in decoding, fewer of them may leave more to
            // the others.
            let mut fastest = fastest;
            let all_on_adapter = found.is_some() && fastest.expert_gb.is_none();
            for fewer in fewer(threads.unwrap_or_else(physical_cores)).into_iter().filter(|_| !all_on_adapter) {
                let tried = try_one(fastest.expert_gb, false, Some(fewer));
                let Some(tried) = interrupt.or(tried).await else { return Ok(INTERRUPTED) };
                let tried = tried?;
                if let Some(better) = tried.iter().find(|d| rate_of(d) > rate_of(&fastest) * WORTH) {
                    fastest = better.clone();
                }
                decoded.extend(tried);
            }
            let plain = rate_of(&fastest);
            if let Some(threads) = fastest.threads {
                propose(&mut proposed, "CMF_NEMO_THREADS", threads.to_string(), format!("{plain:.1} tokens/s"));
            }
            let bounded = found.is_some() && knobs.expert_gb.is_none();
            if let Some(gb) = fastest.expert_gb.filter(|_| bounded) {
                propose(
                    &mut proposed,
                    "CMF_NEMO_EXPERT_GB",
                    format!("{gb:.3}"),
                    format!("{plain:.1} tokens/s: not all experts fit"),
                );
            }
            if model.geometry.draft {
                let Some(tried) = interrupt.or(try_one(fastest.expert_gb, true, fastest.threads)).await else {
                    return Ok(INTERRUPTED);
                };
                let tried = tried?;
                let best = drafting(&tried);
                let pays = best.is_some_and(|best| rate_of(best) > plain);
                let gives = match best {
                    Some(best) => {
                        format!("{plain:.1} tokens/s without, {:.1} with {} a round", rate_of(best), best.depth)
                    }
                    None => "none are made with this budget".to_owned(),
                };
                propose(&mut proposed, "CMF_NEMO_MTP", u8::from(pays).to_string(), gives.clone());
                if let Some(best) = best.filter(|_| pays) {
                    propose(&mut proposed, "CMF_NEMO_MTP_DEPTH", best.depth.to_string(), gives);
                }
                decoded.extend(tried);
            }
            bar.finish_and_clear();
            let text = if self.json {
                format!("{}\n", record_of(&completions, adapter.as_ref(), &decoded, &proposed))
            } else {
                let costs = miss_costs(best, found, &model);
                page(&completions, adapter.as_ref(), costs, &decoded, &proposed)
            };
            terminal.put(&text).map_err(anyhow::Error::from)?;
            if let Some(out) = &self.out {
                let lines: String =
                    proposed.iter().map(|p| format!("# {}\n{}={}\n", p.gives, p.name, p.value)).collect();
                std::fs::write(out, lines).with_context(|| format!("cannot write {}", out.display()))?;
            }
            Ok(SUCCESS)
        })?
    }
}

/// The depth of drafts to go on with: the fastest, but a deeper one has to be worth it.
fn drafting(tried: &[Decoded]) -> Option<&Decoded> {
    let made = tried.iter().filter(|d| d.tok_s.is_some());
    made.reduce(|best, next| if rate_of(next) > rate_of(best) * WORTH { next } else { best })
}

/// Smaller numbers of threads worth a try.
fn fewer(threads: usize) -> Vec<usize> {
    let mut fewer: Vec<usize> = [threads / 2, threads - 1].into_iter().filter(|n| (1..threads).contains(n)).collect();
    fewer.dedup();
    fewer
}

fn rate_of(decoded: &Decoded) -> f64 {
    decoded.tok_s.unwrap_or(0.0)
}

/// GB of all routed experts of the decoder.
fn expert_gb(model: &Model) -> Option<f64> {
    let of = record::routes_from(model).ok()?;
    Some((of.layers * of.experts) as f64 * of.expert_bytes as f64 / 1e9)
}

/// The adapter that would decode, measured; `None` where the knobs ask for the host.
fn adapter(knobs: &Knobs) -> Option<Result<Adapter, String>> {
    if !knobs.frame || knobs.device == DeviceChoice::Cpu {
        return None;
    }
    #[cfg(feature = "gpu")]
    let measured = riparian::device::wgpu::measure::measure(&knobs.device)
        .map(|seen| Adapter {
            name: seen.name,
            upload_gb_s: seen.upload_gb_s,
            memory_gb_s: seen.memory_gb_s,
            dispatch_us: seen.dispatch_us,
            readback_us: seen.readback_us,
        })
        .map_err(|why| why.to_string());
    #[cfg(not(feature = "gpu"))]
    let measured = Err("built without the gpu feature".to_owned());
    Some(measured)
}

/// µs that a layer's missing experts of one position take, all `top_k` of them: completed by the host, and uploaded and
/// computed by the device.
fn miss_costs(best: Option<Completion>, adapter: Option<&Adapter>, model: &Model) -> Option<(f64, f64)> {
    let (best, adapter, of) = (best?, adapter?, record::routes_from(model).ok()?);
    let bytes = (of.top_k as u64 * of.expert_bytes) as f64;
    Some((best.layer_us + adapter.readback_us, bytes / adapter.upload_gb_s / 1e3 + adapter.readback_us))
}

fn record_of(
    completions: &[Completion],
    adapter: Option<&Result<Adapter, String>>,
    decoded: &[Decoded],
    proposed: &[Proposal],
) -> Value {
    let completion = |c: &Completion| json!({ "threads": c.threads, "act": name(c.act), "layer_us": c.layer_us, "gb_per_s": c.gb_per_s });
    let adapter = adapter.map(|adapter| match adapter {
        Ok(a) => json!({
            "name": a.name, "upload_gb_s": a.upload_gb_s, "memory_gb_s": a.memory_gb_s, "dispatch_us": a.dispatch_us,
            "readback_us": a.readback_us,
        }),
        Err(why) => json!({ "none": why }),
    });
    let one = |d: &Decoded| {
        let mut line = json!({ "expert_gb": d.expert_gb, "drafts": d.depth > 0, "draft_depth": d.depth, "threads": d.threads, "decode_tok_s": d.tok_s, "device": d.note });
        if d.tok_s.is_none() {
            line["error"] = line["device"].take();
        }
        line
    };
    let knobs: serde_json::Map<String, Value> =
        proposed.iter().map(|p| (p.name.to_owned(), p.value.clone().into())).collect();
    let gives: serde_json::Map<String, Value> =
        proposed.iter().map(|p| (p.name.to_owned(), p.gives.clone().into())).collect();
    json!({
        "cmd": "tune", "completions": completions.iter().map(completion).collect::<Vec<_>>(), "adapter": adapter,
        "decode": decoded.iter().map(one).collect::<Vec<_>>(), "proposed": knobs, "gives": gives,
    })
}

fn name(act: Activations) -> &'static str {
    match act {
        Activations::F32 => "f32",
        Activations::Int8 => "int8",
    }
}

/// Every number of threads worth trying, in both arithmetics.
fn completions(model: &Arc<Model>, bar: &ProgressBar) -> anyhow::Result<Vec<Completion>> {
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
    bar.inc_length(2 * threads.len() as u64);
    for act in [Activations::Int8, Activations::F32] {
        for &threads in &threads {
            bar.inc(1);
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

/// Ids a second behind a short prompt, with so many drafts a round.
async fn rate(runtime: &Runtime, depth: usize) -> Result<f64, riparian::Error> {
    let vocab = runtime.model().geometry.vocab as u32;
    let prompt: Vec<TokenId> = (0..PROMPT).map(|i| TokenId(i % vocab)).collect();
    let (mut rate, mut measured) = (0.0_f64, Duration::ZERO);
    for ids in std::iter::once(WARM).chain(std::iter::repeat_n(DECODED, RUNS_MAX)) {
        let options = Options {
            max_new_tokens: Some(ids),
            eos: Some(Vec::new()),
            draft_depth: Some(depth),
            ..Options::default()
        };
        let mut session = runtime.session(options).await?;
        session.feed_ids(&prompt).await?;
        let finished = session.decode().finish().await?;
        let decode = finished.stats.decode;
        if ids == DECODED {
            rate = rate.max((finished.ids.len() - 1) as f64 / decode.as_secs_f64());
            measured += decode;
            if measured > LONG_ENOUGH {
                break;
            }
        }
    }
    Ok(rate)
}

fn page(
    completions: &[Completion],
    adapter: Option<&Result<Adapter, String>>,
    costs: Option<(f64, f64)>,
    decoded: &[Decoded],
    proposed: &[Proposal],
) -> String {
    let mut text = String::from("Missing experts completed by the host, one position's of a layer\n");
    for c in completions {
        let (threads, act) = (c.threads, name(c.act));
        let _ = writeln!(text, "  {threads:>3} threads, {act:4}  {:>9.1} us  {:>6.2} GB/s", c.layer_us, c.gb_per_s);
    }
    match adapter {
        None => {}
        Some(Err(why)) => _ = writeln!(text, "Adapter\n  none: {why}"),
        Some(Ok(a)) => {
            let _ = writeln!(text, "Adapter {}", a.name);
            let _ = writeln!(text, "  bus, host to device  {:>9.1} GB/s", a.upload_gb_s);
            let _ = writeln!(text, "  memory, read         {:>9.1} GB/s", a.memory_gb_s);
            let _ = writeln!(text, "  dependent dispatch   {:>9.1} us", a.dispatch_us);
            let _ = writeln!(text, "  readback             {:>9.1} us", a.readback_us);
        }
    }
    if let Some((host, upload)) = costs {
        let _ = writeln!(text, "A layer that misses all its experts for a position would take");
        let _ = writeln!(text, "  {host:>9.1} us completed by the host, {upload:>9.1} us uploaded");
    }
    text += "Decode\n";
    for d in decoded {
        let experts = d.expert_gb.map_or_else(|| "all experts".to_owned(), |gb| format!("{gb:.3} GB of experts"));
        let drafts = if d.depth > 0 { format!("{} a round", d.depth) } else { "no drafts".to_owned() };
        let threads = d.threads.map_or_else(String::new, |threads| format!("{threads:>3} threads"));
        let _ = match d.tok_s {
            Some(rate) => writeln!(text, "  {experts:20} {drafts:9} {threads:11} {rate:>9.1} tokens/s on {}", d.note),
            None => writeln!(text, "  {experts:20} {drafts:9} {threads:11}         - {}", d.note),
        };
    }
    text += "Proposed\n";
    for p in proposed {
        let line = format!("{}={}", p.name, p.value);
        let _ = writeln!(text, "  {line:<26} {}", p.gives);
    }
    if decoded.iter().any(|d| d.expert_gb.is_none() && d.tok_s.is_some()) {
        text += "  no CMF_NEMO_EXPERT_GB         all experts fit\n";
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
        let drafts = |depth, tok_s| Decoded { expert_gb: None, depth, threads: None, tok_s, note: String::new() };
        let depth = |rates: [Option<f64>; 4]| {
            let tried: Vec<Decoded> = rates.into_iter().enumerate().map(|(i, rate)| drafts(i + 1, rate)).collect();
            drafting(&tried).map(|d| d.depth)
        };
        assert_eq!(depth([Some(10.0), Some(10.2), Some(9.0), None]), Some(1), "a second draft gains 2 % alone");
        assert_eq!(depth([Some(10.0), Some(12.0), Some(13.0), Some(8.0)]), Some(3));
        assert_eq!(depth([None; 4]), None);
        assert_eq!((fewer(1), fewer(2), fewer(16)), (vec![], vec![1], vec![8, 15]));
    }
}
