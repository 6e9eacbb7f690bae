//! Opening a file, and decoding through the whole runtime on the host.
//!
//! `cargo bench --bench runtime` opens the bundled model and a synthetic one (header, directory, tensors, experts;
//! no payload is read) and prefills and decodes with both: actors, device thread, token stream. `RIPARIAN_BENCH_MODEL` names
//! another file than the synthetic one, `RIPARIAN_BENCH_DEVICE` another device than the host.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use criterion::{Criterion, Throughput};
use riparian::ids::TokenId;
use riparian::knobs::{Knobs, Origin};
use riparian::model::container::Container;
use riparian::model::geometry::Geometry;
use riparian::model::mmap::Access;
use riparian::model::synth::{SynthOptions, preset, synth};
use riparian::model::tensors::Codec;
use riparian::model::{OpenOptions, open};
use riparian::runtime::{Options, Runtime};

/// Ids decoded a round, behind a prompt of so many.
const IDS: usize = 64;
const PROMPT: u32 = 32;

fn open_files(criterion: &mut Criterion, files: &[(&str, &Path)]) {
    let mut group = criterion.benchmark_group("open");
    for (name, path) in files {
        let tensors = Container::open(path, Access::Mapped).expect("a model").tensors().len();
        group.throughput(Throughput::Elements(tensors as u64));
        group.bench_function(format!("container, {name}, {tensors} tensors"), |bencher| {
            bencher.iter(|| Container::open(path, Access::Mapped).expect("a model"));
        });
        group.bench_function(format!("model, {name}, {tensors} tensors"), |bencher| {
            bencher.iter(|| open(path, &OpenOptions::default()).expect("a model"));
        });
    }
    group.finish();
}

/// Time from the first id to the last, without the prompt's.
async fn decode(runtime: &Runtime) -> Duration {
    let options = Options { max_new_tokens: Some(IDS), eos: Some(Vec::new()), ..Options::default() };
    let mut session = runtime.session(options).await.expect("a session");
    session.feed_ids(&(0..PROMPT).map(TokenId).collect::<Vec<_>>()).await.expect("a prompt");
    session.decode().finish().await.expect("ids").stats.decode
}

/// Time of a prompt of 256 positions, to its first id.
async fn prefill(runtime: &Runtime) -> Duration {
    let options = Options { max_new_tokens: Some(1), eos: Some(Vec::new()), ..Options::default() };
    let mut session = runtime.session(options).await.expect("a session");
    let began = Instant::now();
    session.feed_ids(&(0..256).map(TokenId).collect::<Vec<_>>()).await.expect("a prompt");
    session.decode().finish().await.expect("an id");
    began.elapsed()
}

fn run(criterion: &mut Criterion, name: &str, path: &Path, expert_gb: f64) {
    let device = std::env::var("RIPARIAN_BENCH_DEVICE").unwrap_or_else(|_| "cpu".into());
    let tokio = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("an executor");
    let mut group = criterion.benchmark_group("runtime");
    group.sample_size(10).measurement_time(Duration::from_secs(8));
    for (bank, share) in [("all experts", None), ("half the experts", Some(0.5))] {
        let mut knobs = Knobs::default();
        let mut set = |name: &str, value: &str| knobs.set(name, value, Origin::Code).expect("a knob");
        set("CMF_NEMO_DEVICE", &device);
        set("CMF_NEMO_MTP", "0");
        if let Some(share) = share {
            set("CMF_NEMO_EXPERT_GB", &format!("{}", share * expert_gb));
        }
        let runtime = tokio.block_on(Runtime::builder(path).knobs(knobs).build()).expect("a runtime");
        let where_ = format!("{name}, {}, {bank}", runtime.device());
        group.throughput(Throughput::Elements(IDS as u64 - 1));
        group.bench_function(format!("decode, {where_}"), |bencher| {
            bencher.iter_custom(|rounds| (0..rounds).map(|_| tokio.block_on(decode(&runtime))).sum());
        });
        group.throughput(Throughput::Elements(256));
        group.bench_function(format!("prefill, {where_}"), |bencher| {
            bencher.iter_custom(|rounds| (0..rounds).map(|_| tokio.block_on(prefill(&runtime))).sum());
        });
        tokio.block_on(runtime.shutdown());
    }
    group.finish();
}

fn main() {
    let dir = tempfile::tempdir().expect("a folder");
    let expert_gb = |path: &Path| {
        let model = open(path, &OpenOptions::default()).expect("a model");
        let summary = riparian::model::Summary::of(&model.container).expect("a decoder");
        summary.expert_bytes() as f64 / 1e9
    };
    let path = match std::env::var_os("RIPARIAN_BENCH_MODEL") {
        Some(path) => PathBuf::from(path),
        None => {
            let path = dir.path().join("mini.cmf");
            let geometry = Geometry { draft: false, ..preset("mini").expect("a preset") };
            let (name, experts) = ("mini".into(), Codec::Q4tp);
            let options = SynthOptions { name, geometry, experts, seed: 1, zipf: 0.8, accept: 0.0, hot: true };
            synth(&path, &options, &|_, _| {}).expect("a model");
            path
        }
    };
    let tiny = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/tiny-transcribe.cmf");
    let mut criterion = Criterion::default().configure_from_args();
    let name = path.file_stem().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
    let files: [(&str, &Path); 2] = [("tiny-transcribe", &tiny), (&name, &path)];
    open_files(&mut criterion, &files);
    for (name, path) in files {
        run(&mut criterion, name, path, expert_gb(path));
    }
    criterion.final_summary();
}
