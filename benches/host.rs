//! GB/s of weight bytes for each kernel, beside what the machine can read, in the same run.
//!
//! `cargo bench --bench host` times every kernel with all physical cores over
//! a working set that no cache holds, then prints a table of rates as shares
//! of the read bandwidth: each kernel's rounds alternate with rounds of plain
//! reading, so that what else the machine does falls on both. `cargo bench
//! --bench host -- --quick "q4tp/Int8/rows"` shows the cases that the filter
//! names; `taskset -c 0` before it shows one core.

#![allow(clippy::print_stdout, reason = "a benchmark prints its table")]

use std::cell::Cell;
use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

use criterion::{Criterion, Throughput};
use riparian::host::{Isa, Pool, matmul, physical_cores};
use riparian::knobs::Activations;
use riparian::model::tensors::{Codec, Matrix};

/// More than any cache here holds.
const WORKING_SET: usize = 320 << 20;
/// `in_proj` of the 30B model.
const SHAPE: [usize; 2] = [10304, 2688];

/// Where payloads begin.
const PAGE: usize = 4096;

/// Matrices of one codec that are used in turn.
struct Turns {
    matrices: Vec<Matrix>,
    next: Cell<usize>,
}

impl Turns {
    fn new(codec: Codec, shape: [usize; 2]) -> Self {
        let bytes = codec.payload_len(shape[0], shape[1]).expect("a shape the codec can hold");
        let matrices = (0..WORKING_SET.div_ceil(bytes)).map(|seed| matrix(codec, shape, bytes, seed as u64)).collect();
        Self { matrices, next: Cell::new(0) }
    }

    fn next(&self) -> &Matrix {
        let at = self.next.get();
        self.next.set((at + 1) % self.matrices.len());
        &self.matrices[at]
    }

    fn bytes(&self) -> usize {
        self.matrices[0].payload().len()
    }
}

/// Random codes with scales of moderate size.
fn matrix(codec: Codec, [rows, cols]: [usize; 2], bytes: usize, seed: u64) -> Matrix {
    let mut state = seed;
    let mut payload: Vec<u8> = (0..bytes.div_ceil(8))
        .flat_map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state ^ (state >> 29)).to_le_bytes()
        })
        .collect();
    payload.truncate(bytes);
    let half = |x: f32| half::f16::from_f32(x).to_le_bytes();
    match codec {
        Codec::Q8_2f => payload[rows * cols..].chunks_exact_mut(2).for_each(|h| h.copy_from_slice(&half(0.01))),
        Codec::Q4tp => {
            let at = rows * cols / 2;
            let ladders = &mut payload[at..at + 4 * rows];
            ladders.chunks_exact_mut(4).for_each(|l| l.copy_from_slice(&[half(-6.0), half(0.1)].concat()));
        }
        Codec::F32 => payload.chunks_exact_mut(4).for_each(|x| x.copy_from_slice(&0.01f32.to_le_bytes())),
        Codec::F16 | Codec::Bf16 => payload.chunks_exact_mut(2).for_each(|x| x.copy_from_slice(&[1, 0x2c])),
    }
    // On a page of its own, as a file's payloads lie.
    let mut source = vec![0; bytes + PAGE];
    let at = source.as_ptr().align_offset(PAGE);
    source[at..at + bytes].copy_from_slice(&payload);
    Matrix::new("bench", codec, [rows, cols], Arc::new(source), at)
}

/// Reads all bytes with all threads, the cheapest way there is.
fn read(pool: &Pool, bytes: &[u8]) {
    pool.each(bytes.chunks(256 << 10).collect(), |chunk: &[u8]| {
        let mut sums = [0u64; 16];
        for words in chunk.as_chunks::<128>().0 {
            for (sum, word) in sums.iter_mut().zip(words.as_chunks::<8>().0) {
                *sum ^= u64::from_ne_bytes(*word);
            }
        }
        black_box(sums);
    });
}

struct Case {
    name: String,
    n: usize,
    act: Activations,
    turns: usize,
}

fn main() {
    let mut criterion = Criterion::default().configure_from_args().sample_size(20);
    let pool = Pool::new(physical_cores());
    println!("{pool:?}; best instruction set {}", Isa::best());
    let sets: Vec<Turns> =
        [Codec::Q8_2f, Codec::Q4tp, Codec::Bf16].into_iter().map(|codec| Turns::new(codec, SHAPE)).collect();
    let mut cases = Vec::new();
    for (turns, set) in sets.iter().enumerate() {
        let codec = set.matrices[0].codec();
        for act in [Activations::Int8, Activations::F32] {
            if act == Activations::Int8 && !codec.is_quantized() {
                continue;
            }
            for n in [1, 2, 4, 8] {
                cases.push(Case { name: format!("{codec}/{act:?}/rows {n}"), n, act, turns });
            }
        }
    }
    let run = |case: &Case, pool: &Pool, out: &mut [f32], x: &[f32]| {
        matmul(pool, sets[case.turns].next(), &x[..case.n * SHAPE[1]], case.act, out);
    };
    let x: Vec<f32> = (0..8 * SHAPE[1]).map(|i| ((i * 7919) % 2003) as f32 / 1000.0 - 1.0).collect();
    let mut out = vec![0.0; 8 * SHAPE[0]];

    let mut group = criterion.benchmark_group("read");
    group.throughput(Throughput::Bytes(sets[0].bytes() as u64));
    group.bench_function("all cores", |b| b.iter(|| read(&pool, sets[0].next().payload())));
    group.finish();
    let mut group = criterion.benchmark_group("matvec");
    for case in &cases {
        group.throughput(Throughput::Bytes(sets[case.turns].bytes() as u64));
        group.bench_function(&case.name, |b| b.iter(|| run(case, &pool, &mut out[..case.n * SHAPE[0]], &x)));
    }
    group.finish();
    criterion.final_summary();

    // What a region costs beside its work: two items a thread that do nothing, in quick succession and from sleep.
    let nothing = |pool: &Pool| pool.each(vec![(); 2 * pool.threads()], |()| {});
    let quick = {
        let start = Instant::now();
        (0..10_000).for_each(|_| nothing(&pool));
        start.elapsed().as_secs_f64() * 1e6 / 1e4
    };
    let mut woken: Vec<f64> = (0..101)
        .map(|_| {
            std::thread::sleep(std::time::Duration::from_millis(2));
            let start = Instant::now();
            nothing(&pool);
            start.elapsed().as_secs_f64() * 1e6
        })
        .collect();
    woken.sort_by(f64::total_cmp);
    println!("\nan empty region: {quick:.2} µs in quick succession, {:.1} µs from sleep", woken[woken.len() / 2]);

    println!("\n{:28} {:>9} {:>9} {:>7}   (medians of 31 alternating rounds)", "", "GB/s", "read", "share");
    let timed = |f: &mut dyn FnMut()| {
        let start = Instant::now();
        f();
        start.elapsed().as_secs_f64()
    };
    // The benchmark's filter chooses lines of the table too.
    let filter = std::env::args().skip(1).find(|arg| !arg.starts_with('-'));
    let wanted = |line: &str| filter.as_ref().is_none_or(|filter| line.contains(filter.as_str()));
    for isa in Isa::present() {
        let pool = Pool::with_isa(physical_cores(), isa);
        for case in &cases {
            if !wanted(&format!("{isa} {}", case.name)) {
                continue;
            }
            let bytes = sets[case.turns].bytes() as f64 / 1e9;
            let mut rounds: Vec<(f64, f64)> = (0..31)
                .map(|_| {
                    let plain = timed(&mut || read(&pool, sets[case.turns].next().payload()));
                    let kernel = timed(&mut || run(case, &pool, &mut out[..case.n * SHAPE[0]], &x));
                    (bytes / kernel, bytes / plain)
                })
                .collect();
            let median = |rounds: &mut Vec<(f64, f64)>, by: fn(&(f64, f64)) -> f64| {
                rounds.sort_by(|a, b| by(a).total_cmp(&by(b)));
                by(&rounds[rounds.len() / 2])
            };
            let kernel = median(&mut rounds, |r| r.0);
            let plain = median(&mut rounds, |r| r.1);
            let share = median(&mut rounds, |r| r.0 / r.1);
            println!("{:28} {kernel:9.1} {plain:9.1} {:6.0}%", format!("{isa} {}", case.name), share * 100.0);
        }
    }
}
