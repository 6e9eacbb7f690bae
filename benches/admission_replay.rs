//! Routing traces replayed against admission policies and budgets: hit rate, uploads, predicted speed.
//!
//! ```sh
//! cargo bench --bench admission_replay                                   # the two traces kept in benches/traces
//! cargo bench --bench admission_replay -- routes.bin --gb 4,8,12 --places 16,64
//! cargo bench --bench admission_replay -- --flight 1,16 --admit 1,4 --layers 23
//! ```
//!
//! Traces are written by `--record-routes` of `transcribe`, `generate` and `bench`. Budgets are places a layer
//! (`--places`; an eighth, a quarter, a half and three quarters of the experts by default) or gigabytes of all layers
//! (`--gb`). `--flight` gives the positions of a flight, `--admit` the positions that pay for an upload.
//!
//! Speeds are predictions by the constants of `StepCosts`, measured on one H200 with the 30B model (52 blocks, 23 layers
//! of experts). They tell policies apart, not machines. For a trace of fewer layers they are those of a model that has no
//! more; `--layers N` takes the trace for a part of N layers of the same kind: the layers' time and counts are scaled up,
//! and uploads, which all layers share, are paid for accordingly more slowly.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a program for people")]

use std::fs::File;
use std::io::BufReader;
use std::path::PathBuf;
use std::process::ExitCode;

use riparian::policy::admission::{AdmissionOptions, Policy};
use riparian::policy::replay::{ReplayOptions, Replayed, StepCosts, replay, residents};
use riparian::policy::routes::Routes;

/// What to replay.
#[derive(Default)]
struct Wanted {
    traces: Vec<PathBuf>,
    gb: Vec<f64>,
    places: Vec<usize>,
    flights: Vec<usize>,
    admits: Vec<u32>,
    layers: Option<usize>,
}

fn main() -> ExitCode {
    match wanted(std::env::args().skip(1)).and_then(|wanted| run(&wanted)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("error: {why}");
            ExitCode::from(2)
        }
    }
}

fn wanted(mut args: impl Iterator<Item = String>) -> Result<Wanted, String> {
    fn list<T: std::str::FromStr>(flag: &str, value: Option<String>) -> Result<Vec<T>, String> {
        let value = value.ok_or_else(|| format!("{flag} takes a list of numbers"))?;
        value.split(',').map(|one| one.parse().map_err(|_| format!("{flag}: {one:?} is no number"))).collect()
    }
    let mut wanted = Wanted::default();
    while let Some(arg) = args.next() {
        match arg.as_str() {
            // Cargo says so to every bench.
            "--bench" => {}
            "--gb" => wanted.gb = list("--gb", args.next())?,
            "--places" => wanted.places = list("--places", args.next())?,
            "--flight" => wanted.flights = list("--flight", args.next())?,
            "--admit" => wanted.admits = list("--admit", args.next())?,
            "--layers" => wanted.layers = list("--layers", args.next())?.first().copied(),
            flag if flag.starts_with("--") => {
                return Err(format!("unknown option {flag}; accepted are --gb, --places, --flight, --admit, --layers"));
            }
            path => wanted.traces.push(path.into()),
        }
    }
    if wanted.traces.is_empty() {
        let kept = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("benches/traces");
        wanted.traces = ["synthetic.routes", "tiny-transcribe.routes"].map(|name| kept.join(name)).into();
    }
    if wanted.flights.is_empty() {
        wanted.flights = vec![ReplayOptions::default().flight];
    }
    if wanted.admits.is_empty() {
        wanted.admits = vec![AdmissionOptions::default().positions_per_upload];
    }
    Ok(wanted)
}

fn run(wanted: &Wanted) -> Result<(), String> {
    for path in &wanted.traces {
        let named = |error: &dyn std::fmt::Display| format!("{}: {error}", path.display());
        let file = File::open(path).map_err(|error| named(&error))?;
        let routes = Routes::read(&mut BufReader::new(file)).map_err(|error| named(&error))?;
        let (of, (prompt, decoded)) = (&routes.of, routes.positions());
        println!(
            "{}: {} layers, {} experts, top {}, {:.3} MB an expert, {} texts, {prompt} positions of prompts, {decoded} \
             decoded",
            path.display(),
            of.layers,
            of.experts,
            of.top_k,
            of.expert_bytes as f64 / 1e6,
            routes.texts.len(),
        );
        println!(
            "{:>6} {:>6} {:>6} {:>5} {:20} {:>7} {:>9} {:>9} {:>9} {:>9} {:>8}",
            "places",
            "GB",
            "flight",
            "admit",
            "policy",
            "hits %",
            "miss/tok",
            "stop/tok",
            "up/tok",
            "prefill m",
            "tok/s"
        );
        let scale = wanted.layers.map_or(1.0, |layers| layers as f64 / of.layers as f64);
        for places in budgets(wanted, &routes) {
            for &flight in &wanted.flights {
                for (policy, name) in POLICIES {
                    // Without moves there is nothing that admission could be paid for.
                    let admits = if policy.is_some() { &wanted.admits[..] } else { &wanted.admits[..1] };
                    for &admit in admits {
                        let admission = policy.map(|policy| AdmissionOptions {
                            policy,
                            positions_per_upload: (f64::from(admit) * scale).round() as u32,
                            ..AdmissionOptions::default()
                        });
                        let options = ReplayOptions { admission, flight, ..ReplayOptions::default() };
                        let seen = replay(&routes, &residents(of, places), &options, &StepCosts::default());
                        row(&routes, [places, flight, admit as usize], name, &seen, scale);
                    }
                }
            }
        }
        println!();
    }
    Ok(())
}

/// Every policy there is, and none.
const POLICIES: [(Option<Policy>, &str); 3] =
    [(None, "fixed"), (Some(Policy::Baseline), "baseline"), (Some(Policy::RecencyFrequency), "recency-frequency")];

/// Places a layer of every budget, at least `top_k`.
fn budgets(wanted: &Wanted, routes: &Routes) -> Vec<usize> {
    let of = &routes.of;
    let layers = wanted.layers.unwrap_or(of.layers);
    let of_gb = |gb: &f64| (gb * 1e9 / (layers as f64 * of.expert_bytes.max(1) as f64)) as usize;
    let mut places: Vec<usize> = wanted.gb.iter().map(of_gb).chain(wanted.places.iter().copied()).collect();
    if places.is_empty() {
        places = [8, 4, 2].map(|part| of.experts / part).into();
        places.push(of.experts * 3 / 4);
    }
    places.iter_mut().for_each(|places| *places = (*places).clamp(of.top_k, of.experts));
    places.dedup();
    places
}

fn row(routes: &Routes, [places, flight, admit]: [usize; 3], name: &str, seen: &Replayed, scale: f64) {
    let of = &routes.of;
    let head = StepCosts::default().head_us * seen.positions as f64;
    let time_us = head + (seen.time_us - head) * scale;
    println!(
        "{places:>6} {:>6.2} {flight:>6} {admit:>5} {name:20} {:>7.2} {:>9.3} {:>9.3} {:>9.3} {:>9} {:>8.1}",
        places as f64 * of.layers as f64 * scale * of.expert_bytes as f64 / 1e9,
        100.0 * seen.hit_rate(),
        seen.per_token(seen.misses) * scale,
        seen.per_token(seen.stops) * scale,
        seen.per_token(seen.uploads) * scale,
        seen.prefill_misses,
        seen.positions as f64 * 1e6 / time_us,
    );
}
