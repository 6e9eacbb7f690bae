//! Perception on the host: the front end alone, and recordings end to end on one thread and on all.
//!
//! Uses the trained tiny model and its 40 recordings, where they stand beside the clone:
//! `cargo bench --bench perception`.

use std::hint::black_box;
use std::path::Path;
use std::sync::Arc;

use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use riparian::audio::config::AudioConfig;
use riparian::audio::logmel::LogMel;
use riparian::audio::perception::{Perception, Step};
use riparian::audio::read::read_file;
use riparian::model::container::Container;
use riparian::model::mmap::Access;

fn log_mel(c: &mut Criterion) {
    let samples: Vec<f32> = (0..16_000 * 40).map(|i| (i as f32 * 0.01).sin() * (i as f32 * 0.37).sin()).collect();
    let mel = LogMel::new();
    let mut group = c.benchmark_group("log_mel");
    group.throughput(Throughput::Elements(samples.len() as u64));
    group.bench_function("40 s", |b| b.iter(|| mel.features(black_box(&samples)).unwrap()));
    group.finish();
}

fn encode(perception: &Arc<Perception>, samples: &[f32], keep: bool) -> usize {
    let mut encoding = perception.encode(samples, keep).unwrap();
    let mut rows = 0;
    while let Step::Rows(chunk) = encoding.step(&|| false) {
        rows += chunk.range.len();
    }
    rows
}

fn recordings(c: &mut Criterion) {
    let tiny = Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/tiny-transcribe");
    if !tiny.is_dir() {
        return;
    }
    let container = Container::open(&tiny.join("peer/tiny-q4tp.cmf"), Access::default()).unwrap();
    let config = AudioConfig::from_json(&container.header()["provenance"]["nemotron_transcribe"]).unwrap();
    let perception = Arc::new(Perception::load(&container, config).unwrap());
    let files = ["golden", "wavs"].into_iter().flat_map(|folder| std::fs::read_dir(tiny.join(folder)).unwrap());
    let files: Vec<_> =
        files.map(|f| f.unwrap().path()).filter(|p| p.extension().is_some_and(|e| e == "wav")).collect();
    let recordings: Vec<Vec<f32>> = files.iter().map(|f| read_file(f).unwrap().samples).collect();
    let samples = recordings.iter().map(Vec::len).sum::<usize>();

    let mut group = c.benchmark_group("tiny, 40 recordings");
    group.sample_size(10).throughput(Throughput::Elements(samples as u64));
    group.bench_function("read", |b| {
        b.iter(|| files.iter().map(|f| read_file(f).unwrap().samples.len()).sum::<usize>())
    });
    let all = || recordings.iter().map(|samples| encode(&perception, samples, false)).sum::<usize>();
    let one = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
    group.bench_function("encode, one thread", |b| b.iter(|| one.install(all)));
    group.bench_function("encode, all threads", |b| b.iter(all));
    // One long recording: three chunks with contexts, the diarization's memories full.
    let long: Vec<f32> = recordings.concat().into_iter().cycle().take(16_000 * 120).collect();
    group.throughput(Throughput::Elements(long.len() as u64));
    group.bench_function("encode 120 s, all threads", |b| {
        b.iter_batched(|| (), |()| encode(&perception, &long, true), BatchSize::PerIteration);
    });
    group.finish();
}

criterion_group!(benches, log_mel, recordings);
criterion_main!(benches);
