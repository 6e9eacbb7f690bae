//! Load, prefill and decode of a model on the wgpu device, without actors: what the kernels alone do.
//!
//! `device_bench MODEL.cmf [adapter=NAME] [act=int8|f32] [prompts=512,4096] [tokens=256] [steps=16] [pass=512]
//! [drafts=DEPTH]`
//!
//! Prints one JSON object. For files whose answer is known to be the previous id plus one it counts wrong ids.
#![allow(clippy::print_stdout, reason = "a program")]

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use riparian::device::wgpu::{DraftSetup, Gpu, Setup, find};
use riparian::device::{
    Device, Item, Landing, Landings as _, Pass, Point, Queue as _, Read, Record, Run, Staging, Stamp, Wait, Work,
};
use riparian::ids::{FlightId, Position, SessionId, SlotIx, TokenId, Turn};
use riparian::knobs::{Activations, DeviceChoice};
use riparian::model::state::BlockState;
use riparian::model::{Model, OpenOptions, open};
use riparian::reference::embed::embed;
use serde_json::json;

const SLOT: SlotIx = SlotIx(0);

struct Bench {
    gpu: Gpu,
    turn: u32,
    flights: u64,
    batch: u32,
    offered: u32,
    kept: u32,
}

impl Bench {
    fn start(&mut self) -> Result<()> {
        self.turn += 1;
        self.batch = 0;
        let (turn, eos) = (Turn(self.turn), Arc::new([]));
        self.gpu.queue().append(vec![Item::Start { slot: SLOT, turn, session: SessionId(1), eos, seed: None }])?;
        Ok(())
    }

    /// Queues a flight of `batches` batches; it lands in the staging buffer that is returned.
    fn fly(&mut self, batches: u32, work: Work) -> Result<Staging> {
        self.flights += 1;
        let staging = Staging((self.flights % 4) as u16);
        let stamp = Stamp { flight: FlightId(self.flights), slot: SLOT, turn: Turn(self.turn) };
        let (from, to) = (Point::start_of(self.batch), Point::start_of(self.batch + batches));
        self.batch += batches;
        let run = Run { stamp, from, to, work, limit: Position(u32::MAX), peeks: vec![] };
        self.gpu.queue().append(vec![Item::Run(run), Item::Land { stamp, staging }])?;
        Ok(staging)
    }

    fn land(&mut self, staging: Staging) -> Result<Record> {
        let deadline = Instant::now() + Duration::from_secs(120);
        match self.gpu.landings().wait(Wait::Land(staging), Some(deadline))? {
            Landing::Record(record) => Ok(*record),
            other => bail!("landed {other:?}"),
        }
    }

    /// Prefills `rows` in passes, two in flight; the first id.
    fn prefill(&mut self, rows: &[f32], pass_rows: usize) -> Result<Vec<TokenId>> {
        let hidden = self.gpu.facts().hidden;
        let passes: Vec<&[f32]> = rows.chunks(pass_rows * hidden).collect();
        let (mut waiting, mut ids) = (Vec::new(), Vec::new());
        for (i, pass) in passes.iter().enumerate() {
            let pass = Pass { rows: pass.to_vec(), accept: i + 1 == passes.len() };
            waiting.push(self.fly(1, Work::Prefill(Arc::new(pass)))?);
            if waiting.len() > 1 {
                let staging = waiting.remove(0);
                self.land(staging)?;
            }
        }
        for staging in waiting {
            let flight = self.flights;
            let record = self.land(staging)?;
            if record.out.flight == FlightId(flight) {
                ids = record.out.ids;
            }
        }
        Ok(ids)
    }

    /// Decodes `tokens` ids in flights of `steps`, two in flight.
    fn decode(&mut self, tokens: usize, steps: u32, work: &Work) -> Result<Vec<TokenId>> {
        let (mut waiting, mut ids) = (std::collections::VecDeque::new(), Vec::new());
        while ids.len() < tokens {
            waiting.push_back(self.fly(steps, work.clone())?);
            if waiting.len() == 2 {
                let staging = waiting.pop_front().context("two")?;
                self.take(staging, &mut ids)?;
            }
        }
        while let Some(staging) = waiting.pop_front() {
            self.take(staging, &mut ids)?;
        }
        Ok(ids)
    }

    fn take(&mut self, staging: Staging, ids: &mut Vec<TokenId>) -> Result<()> {
        let out = self.land(staging)?.out;
        ids.extend(out.ids);
        for round in out.rounds {
            self.offered += round.offered;
            self.kept += round.kept;
        }
        Ok(())
    }

    /// Microseconds by class, over a few repeats.
    fn profile(&mut self, what: &str, depth: usize) -> (f64, serde_json::Map<String, serde_json::Value>) {
        const REPEATS: u32 = 8;
        let (mut total, mut sums) = (0.0, Vec::<(String, u32, f64)>::new());
        for _ in 0..REPEATS {
            let queue = self.gpu.queue();
            let seen = match what {
                "step" => queue.profile(SLOT),
                "draft" => queue.profile_draft(SLOT, depth.saturating_sub(1)),
                _ => queue.profile_verify(SLOT, depth + 1),
            };
            for (class, n, took) in seen.unwrap_or_default() {
                let us = took.as_secs_f64() * 1e6 / f64::from(REPEATS);
                match sums.iter_mut().find(|(name, _, _)| name == class.name()) {
                    Some((_, _, sum)) => *sum += us,
                    None => sums.push((class.name().to_owned(), n, us)),
                }
                total += us;
            }
        }
        let classes = (sums.into_iter())
            .map(|(name, n, us)| (name, json!({ "dispatches": n, "us": (us * 10.0).round() / 10.0 })))
            .collect();
        (total, classes)
    }
}

/// Memory of this process that is its own: bytes of `RssAnon`.
fn anonymous_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find(|line| line.starts_with("RssAnon:")).unwrap_or_default();
    line.split_whitespace().nth(1).and_then(|kb| kb.parse::<u64>().ok()).unwrap_or(0) * 1024
}

/// States after the same prompt, wide on matrix units, wide without them, and row by row: how far each is from the last,
/// relative to its largest value, block by block.
fn check(model: &Model, choice: &DeviceChoice, setup: &Setup, rows: usize) -> Result<()> {
    let hidden = model.geometry.hidden;
    let mut prompt = vec![0.0; rows * hidden];
    for (i, row) in prompt.chunks_exact_mut(hidden).enumerate() {
        embed(&model.decoder.embedding, TokenId((i * 7919 % model.geometry.vocab) as u32), row);
    }
    let mut states = Vec::new();
    for (wide, coop) in [(false, false), (true, false), (true, true)] {
        let context = find(choice)?.open(None, coop)?;
        let gpu = Gpu::open(context, &model.geometry, &model.decoder, setup, &mut |_, _| {})?;
        let mut bench = Bench { gpu, turn: 0, flights: 0, batch: 0, offered: 0, kept: 0 };
        bench.start()?;
        let ids = bench.prefill(&prompt, if wide { setup.pass_rows } else { 1 })?;
        let read = Item::Read { slot: SLOT, what: Read::State, staging: Staging(4) };
        bench.gpu.queue().append(vec![read])?;
        let Landing::State(seed) = bench.gpu.landings().wait(Wait::Read(Staging(4)), None)? else { bail!("no state") };
        println!("wide {wide}, matrix units {coop}: first id {ids:?}");
        states.push(seed.state);
    }
    let far = |a: &[f32], b: &[f32]| {
        let peak = b.iter().fold(0f32, |m, v| m.max(v.abs()));
        a.iter().zip(b).fold(0f32, |m, (a, b)| m.max((a - b).abs())) / peak.max(1e-30)
    };
    for (name, state) in [("wide", &states[1]), ("matrix units", &states[2])] {
        for (i, (a, b)) in state.blocks.iter().zip(&states[0].blocks).enumerate() {
            match (a, b) {
                (BlockState::Mamba(a), BlockState::Mamba(b)) => {
                    println!("{name} block {i}: conv {:.2e} ssm {:.2e}", far(&a.conv, &b.conv), far(&a.ssm, &b.ssm));
                }
                (BlockState::Attention(a), BlockState::Attention(b)) => {
                    println!("{name} block {i}: k {:.2e} v {:.2e}", far(&a.k, &b.k), far(&a.v, &b.v));
                }
                _ => {}
            }
        }
    }
    Ok(())
}

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let path = args.first().context("which model?")?;
    let options: HashMap<&str, &str> = args[1..].iter().filter_map(|a| a.split_once('=')).collect();
    let number = |name: &str, default: usize| options.get(name).map_or(Ok(default), |v| v.parse());
    let act = if options.get("act") == Some(&"f32") { Activations::F32 } else { Activations::Int8 };
    let (tokens, steps, pass) = (number("tokens", 256)?, number("steps", 16)? as u32, number("pass", 512)?);
    let prompts: Vec<usize> =
        options.get("prompts").unwrap_or(&"512,4096").split(',').map(str::parse).collect::<Result<_, _>>()?;

    let peak = Arc::new(AtomicU64::new(0));
    let done = Arc::new(AtomicBool::new(false));
    let watcher = std::thread::spawn({
        let (peak, done) = (peak.clone(), done.clone());
        move || {
            while !done.load(Ordering::Relaxed) {
                peak.fetch_max(anonymous_bytes(), Ordering::Relaxed);
                std::thread::sleep(Duration::from_millis(5));
            }
        }
    });

    let begun = Instant::now();
    let model = open(Path::new(path), &OpenOptions::default())?;
    let opened_s = begun.elapsed().as_secs_f64();
    let choice = options.get("adapter").map_or(DeviceChoice::Auto, |n| DeviceChoice::Adapter((*n).to_owned()));
    let context = find(&choice)?.open(None, options.get("coop") != Some(&"0"))?;
    let setup = Setup {
        activations: act,
        positions: prompts.iter().max().copied().unwrap_or(0) + 2 * tokens + 512,
        slots: 1,
        pass_rows: pass,
        window_bytes: 256_000_000,
        keep_logits: false,
        skip: options.get("skip").map_or(vec![], |names| {
            let all = riparian::knobs::DispatchClass::ALL;
            all.into_iter().filter(|class| names.split(',').any(|name| name == class.name())).collect()
        }),
        drafts: options.contains_key("drafts").then(DraftSetup::default),
    };
    let depth = number("drafts", 0)?;
    let work = if depth > 0 { Work::Rounds { depth } } else { Work::Steps };
    if let Some(rows) = options.get("check") {
        return check(&model, &choice, &setup, rows.parse()?);
    }
    let gpu = Gpu::open(context, &model.geometry, &model.decoder, &setup, &mut |_, _| {})?;
    let pass = pass.min(gpu.facts().prefill_rows);
    let load_s = begun.elapsed().as_secs_f64();
    let load_peak_bytes = peak.load(Ordering::Relaxed);
    let name = gpu.facts().name.clone();
    let dispatches = { gpu.facts().layers };
    let mut bench = Bench { gpu, turn: 0, flights: 0, batch: 0, offered: 0, kept: 0 };

    let mut runs = Vec::new();
    for prompt in prompts {
        let hidden = model.geometry.hidden;
        let mut rows = vec![0.0; prompt * hidden];
        let mut ids: Vec<TokenId> = (0..prompt).map(|i| TokenId((i * 7919 % model.geometry.vocab) as u32)).collect();
        for (id, row) in ids.iter().zip(rows.chunks_exact_mut(hidden)) {
            embed(&model.decoder.embedding, *id, row);
        }
        bench.start()?;
        // twice, so that a tail pass is warm too
        for _ in 0..2 {
            bench.prefill(&rows[..hidden * prompt.min(pass)], pass)?;
        }
        bench.start()?;
        let begun = Instant::now();
        let first = bench.prefill(&rows, pass)?;
        let prefill_s = begun.elapsed().as_secs_f64();
        ids.extend(&first);
        let mut all = first;
        all.extend(bench.decode(32, steps, &work)?);
        (bench.offered, bench.kept) = (0, 0);
        let begun = Instant::now();
        let more = bench.decode(tokens, steps, &work)?;
        let decode_s = begun.elapsed().as_secs_f64();
        let decoded = more.len();
        all.extend(more);
        let mut before = ids[prompt - 1].0;
        let mut wrong = 0;
        for id in &all {
            wrong += usize::from(id.0 != (before + 1) % model.geometry.vocab as u32);
            before = id.0;
        }
        let profiled = options.get("profile") != Some(&"0");
        let whats: &[&str] = if depth > 0 { &["draft", "verify"] } else { &["step"] };
        let profile: serde_json::Map<_, _> = (whats.iter().filter(|_| profiled))
            .map(|what| {
                let (us, classes) = bench.profile(what, depth);
                ((*what).to_owned(), json!({ "us_with_timestamps": us, "classes": classes }))
            })
            .collect();
        runs.push(json!({
            "prompt": prompt,
            "prefill_s": prefill_s,
            "prefill_positions_per_s": prompt as f64 / prefill_s,
            "tokens": decoded,
            "decode_tokens_per_s": decoded as f64 / decode_s,
            "ms_per_step": 1e3 * decode_s / decoded as f64,
            "wrong_ids": wrong,
            "ids": all.len(),
            "drafts": depth,
            "offered": bench.offered,
            "kept": bench.kept,
            "profile": profile,
        }));
    }
    done.store(true, Ordering::Relaxed);
    let _ = watcher.join();
    let report = json!({
        "adapter": name,
        "activations": format!("{act:?}"),
        "layers": dispatches,
        "open_s": opened_s,
        "load_s": load_s,
        "load_peak_anonymous_mb": load_peak_bytes / 1_000_000,
        "peak_anonymous_mb": peak.load(Ordering::Relaxed) / 1_000_000,
        "runs": runs,
    });
    println!("{}", serde_json::to_string_pretty(&report)?);
    Ok(())
}
