//! What spans and counters cost while nobody listens, and while a trace is written.
//!
//! `cargo bench --bench tracing` times one span and one counter event that nobody wants, then decodes on the host through
//! the whole runtime, in turn without a listener and with the layer that writes a trace, so that what else the machine does
//! falls on both. From the number of events that a trace has for a token follows what share of a token's time they
//! take while nobody listens: the figure that has to vanish.

#![allow(clippy::print_stdout, reason = "a benchmark prints its table")]

use std::hint::black_box;
use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use criterion::Criterion;
use riparian::ids::TokenId;
use riparian::knobs::{Knobs, Origin};
use riparian::model::geometry::Geometry;
use riparian::model::synth::{SynthOptions, preset, synth};
use riparian::model::tensors::Codec;
use riparian::runtime::{Options, Runtime};
use riparian::trace;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::reload;
use tracing_subscriber::{EnvFilter, Layer as _};

/// Ids of a round, and rounds of each kind.
const IDS: usize = 128;
const ROUNDS: usize = 15;
/// Spans and events timed together.
const TOGETHER: u32 = 1000;

/// Counts what is written and drops it: each event of a trace is a line.
#[derive(Clone, Default)]
struct Lines(Arc<AtomicU64>);

impl Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let lines = bytes.iter().filter(|byte| **byte == b'\n').count();
        self.0.fetch_add(lines as u64, Ordering::Relaxed);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn main() {
    let lines = Lines::default();
    let (layer, _guard) = trace::to_writer(Box::new(lines.clone()));
    let (filter, switch) = reload::Layer::new(EnvFilter::new("off"));
    let subscriber = tracing_subscriber::registry().with(layer.with_filter(filter));
    tracing::subscriber::set_global_default(subscriber).expect("the first one");
    let listen = |to: &str| switch.reload(EnvFilter::new(to)).expect("the subscriber lives");

    let mut criterion = Criterion::default().configure_from_args();
    let mut unheard_ns = 0.0;
    criterion.bench_function("a span and a counter that nobody wants", |bencher| {
        bencher.iter_custom(|rounds| {
            let began = Instant::now();
            for round in 0..rounds {
                for i in 0..TOGETHER {
                    let i = black_box(i);
                    let _span = tracing::debug_span!(target: "riparian::flight", "flight", flight = i, round).entered();
                    tracing::trace!(target: "riparian::counter", tokens = i, flights = round);
                }
            }
            let took = began.elapsed() / TOGETHER;
            unheard_ns = took.as_secs_f64() * 1e9 / rounds as f64;
            took
        });
    });
    if std::env::args().any(|argument| argument == "--test") {
        return;
    }

    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("bench.cmf");
    let geometry = Geometry { draft: false, ..preset("mini").expect("a preset") };
    let (name, experts) = ("mini".into(), Codec::Q4tp);
    let options = SynthOptions { name, geometry, experts, seed: 1, zipf: 0.8, accept: 0.0, hot: true };
    let report = synth(&path, &options, &|_, _| {}).expect("a model");
    let mut knobs = Knobs::default();
    for (name, value) in [
        ("CMF_NEMO_DEVICE", "cpu"),
        ("CMF_NEMO_THREADS", "1"),
        ("CMF_NEMO_EXPERT_GB", &format!("{}", report.expert_bytes as f64 / 2e9)),
    ] {
        knobs.set(name, value, Origin::Code).expect("a knob");
    }
    let tokio = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("an executor");
    tokio.block_on(async {
        let runtime = Runtime::builder(&path).knobs(knobs).build().await.expect("a runtime");
        let mut times: [Vec<f64>; 2] = Default::default();
        let mut events = 0.0;
        for round in 0..=ROUNDS {
            for (heard, times) in times.iter_mut().enumerate() {
                listen(if heard == 1 { "riparian=trace" } else { "off" });
                let before = lines.0.load(Ordering::Relaxed);
                let options = Options { max_new_tokens: Some(IDS), eos: Some(Vec::new()), ..Options::default() };
                let mut session = runtime.session(options).await.expect("a session");
                session.feed_ids(&(0..16).map(TokenId).collect::<Vec<_>>()).await.expect("a prompt");
                let stats = session.decode().finish().await.expect("ids").stats;
                // The first round warms up.
                if round > 0 {
                    times.push(stats.decode.as_secs_f64() / (IDS - 1) as f64 * 1e6);
                }
                if heard == 1 {
                    events = (lines.0.load(Ordering::Relaxed) - before) as f64 / IDS as f64;
                }
            }
        }
        runtime.shutdown().await;
        let [off, on] = times.map(|mut times| {
            times.sort_by(f64::total_cmp);
            (times[0], times[times.len() / 2])
        });
        println!("a span and a counter that nobody wants: {unheard_ns:.2} ns");
        println!("a token, host, one thread, half the experts resident (least, median of {ROUNDS}):");
        println!("  nobody listens  {:8.1} {:8.1} us", off.0, off.1);
        println!("  a trace         {:8.1} {:8.1} us, {events:.1} events", on.0, on.1);
        let share = events * unheard_ns / 1e3 / off.1;
        println!("  share of a token that {events:.1} unheard events take: {:.4} %", 100.0 * share);
    });
}
