//! Times the kernels of a pass at the 30B model's shapes and checks those of the matrix units against the int8 tiles.
//!
//! `RIPARIAN_TEST_ADAPTER=NAME prefill_bench [rows] [position]`
#![allow(clippy::print_stdout, reason = "a program")]

#[path = "../tests/kernels/gpu.rs"]
mod gpu;

use std::sync::Arc;
use std::time::Instant;

use gpu::{Buffer, Gpu, Random};
use riparian::device::kernels::{
    Format, Kernel, PREFILL_ATTENTION, PREFILL_CONV, PREFILL_ENCODE, PREFILL_MATMAT_COOP, PREFILL_MATMAT_F32,
    PREFILL_MATMAT_INT8, PREFILL_ROUTE, PREFILL_SORT, PREFILL_SSD_OUT, PREFILL_SSD_PASS, PREFILL_SSD_STATES,
    PREFILL_SSD_STEPS, PREFILL_SUM,
};
use riparian::device::pass::{Form, PassChoice, Source, TILE_ROWS};
use riparian::device::wgpu::pipelines::Pipeline;

const NONE: u32 = u32::MAX;
const PLAIN: PassChoice = PassChoice { format: Format::F32, form: Form::F32, experts: false, source: Source::Rows };

struct Bench {
    gpu: Gpu,
    flight: Buffer,
    control: Buffer,
    rows: usize,
    position: usize,
    total_us: f64,
}

fn random_words(n: usize, seed: u64) -> Vec<u32> {
    let mut rng = Random::new(seed);
    (0..n).map(|_| rng.bits()).collect()
}

fn random_floats(n: usize, seed: u64) -> Vec<f32> {
    let mut rng = Random::new(seed);
    (0..n).map(|_| rng.unit() + rng.unit() - 1.0).collect()
}

impl Bench {
    /// Times one dispatch, with the slot's words in front of `buffers`; adds `count` of them to the pass.
    fn time(&mut self, what: &str, pipeline: &Pipeline, buffers: &[&Buffer], grid: [u32; 3], flop: f64, count: usize) {
        let all: Vec<&Buffer> = [&self.flight, &self.control].into_iter().chain(buffers.iter().copied()).collect();
        let group = self.gpu.bind(pipeline, &all);
        // an idle card clocks down, and takes its time to come up again: the best of many batches
        let begun = Instant::now();
        let (mut times, mut best) = (2, f64::INFINITY);
        while begun.elapsed().as_millis() < 500 {
            let start = Instant::now();
            self.gpu.repeat(pipeline, &group, grid, times);
            self.gpu.wait();
            let us = start.elapsed().as_secs_f64() * 1e6;
            best = best.min(us / f64::from(times));
            if us < 10_000.0 {
                times *= 2;
            }
        }
        println!("{what:50} {best:9.1} us  {:7.2} TFLOP/s", flop / best / 1e6);
        self.total_us += best * count as f64;
    }

    fn matmat(&self, form: Form, format: Format, experts: bool, cols: usize) -> Arc<Pipeline> {
        let kernel = match form {
            Form::F32 => &PREFILL_MATMAT_F32,
            Form::Int8 => &PREFILL_MATMAT_INT8,
            Form::Half => &PREFILL_MATMAT_COOP,
        };
        let numbers = [("COLS", cols), ("SIDE_WORDS", format.side_words(cols))];
        self.gpu.pass(kernel, PassChoice { format, form, experts, source: Source::Rows }, &numbers)
    }

    fn encode(&self, form: Form, cols: usize, top_k: usize) -> Arc<Pipeline> {
        let numbers = [("WG", 128), ("COLS", cols), ("TOP_K", top_k), ("INT8", 1)];
        self.gpu.pass(&PREFILL_ENCODE, PassChoice { form, ..PLAIN }, &numbers)
    }
}

/// Words of `places` random matrices, and where in a place codes and side words begin, and its vec4s.
fn matrix(format: Format, rows: usize, cols: usize, places: usize, seed: u64) -> (Vec<u32>, [u32; 3]) {
    let code_words = if format == Format::Q8 { rows * cols / 4 } else { rows * cols / 8 };
    let side_words = format.side_words(cols);
    let place = (code_words + rows * side_words).next_multiple_of(4);
    let mut all = random_words(place * places, seed);
    let size = 1.0 / (cols as f32).sqrt();
    for p in 0..places {
        for r in 0..rows {
            let at = p * place + code_words + r * side_words;
            if format == Format::Q8 {
                all[at] = (size / 73.0).to_bits();
            } else {
                all[at] = ((size / 4.6).log2() - 1.0).to_bits();
                all[at + 1] = 0.06f32.to_bits();
            }
        }
    }
    (all, [0, code_words as u32, place as u32 / 4])
}

fn main() {
    let args: Vec<usize> = std::env::args().skip(1).filter_map(|a| a.parse().ok()).collect();
    let rows = args.first().copied().unwrap_or(2048);
    let position = args.get(1).copied().unwrap_or(2048);
    let gpu = Gpu::open();
    let context = &gpu.context;
    println!("{}, matrix units {}, {rows} rows at {position}", context.info.name, context.cooperative);
    let flight = gpu.buffer(&[7, rows as u32, 11, 0, u32::MAX, 0, rows as u32, 0]);
    let mut control = [0u32; 32];
    control[0] = 7;
    control[6] = position as u32;
    let control = gpu.buffer(&control);
    let mut b = Bench { gpu, flight, control, rows, position, total_us: 0.0 };
    matrices(&mut b);
    mamba(&mut b);
    router(&mut b);
    attention(&mut b);
    println!("pass of {rows}: {:.1} ms, {:.0} positions/s", b.total_us / 1e3, rows as f64 / b.total_us * 1e6);
}

fn matrices(b: &mut Bench) {
    const EXPERTS: usize = 128;
    let rows = b.rows;
    let picks = rows * 6;
    // a router's picks: each row six different experts, popularity uneven
    let mut rng = Random::new(3);
    let mut routes = Vec::new();
    for _ in 0..rows {
        let mut chosen: Vec<u32> = Vec::new();
        while chosen.len() < 6 {
            let e = ((rng.unit() * rng.unit().max(0.3)) * EXPERTS as f32) as u32 % EXPERTS as u32;
            if !chosen.contains(&e) {
                chosen.push(e);
            }
        }
        chosen.sort_unstable();
        routes.extend(chosen.iter().flat_map(|e| [*e, *e, (2.5f32 / 6.0).to_bits(), 0]));
    }
    let routes = b.gpu.buffer(&routes);
    let order = 4 + 4 * (picks / TILE_ROWS as usize + EXPERTS);
    let list = b.gpu.empty(order + 2 * picks);
    let numbers = [("WG", 256), ("TOP_K", 6), ("PLACES", EXPERTS), ("TILE_ROWS", TILE_ROWS as usize)];
    let sort = b.gpu.pass(&PREFILL_SORT, PLAIN, &numbers);
    let params = b.gpu.buffer(&[0, order as u32, 0, 0]);
    b.time("sort", &sort, &[&params, &routes, &list], [1, 1, 1], 0.0, 23);
    println!("  {} tiles", b.gpu.read(&list)[0]);
    // name, format, rows, cols, by expert, times a pass
    let shapes = [
        ("in_proj", Format::Q8, 10304, 2688, false, 23),
        ("out_proj, o_proj", Format::Q8, 2688, 4096, false, 29),
        ("qkv", Format::Q8, 4608, 2688, false, 6),
        ("shared up", Format::Q8, 3712, 2688, false, 23),
        ("shared down", Format::Q8, 2688, 3712, false, 23),
        ("experts up", Format::Q4, 1856, 2688, true, 23),
        ("experts down", Format::Q4, 2688, 1856, true, 23),
    ];
    for (name, format, out_rows, cols, grouped, count) in shapes {
        let (words, [base, side, place]) = matrix(format, out_rows, cols, if grouped { EXPERTS } else { 1 }, 9);
        let w = b.gpu.buffer(&words);
        let n = if grouped { picks } else { rows };
        let x = b.gpu.floats(&random_floats(n * cols, 5));
        let flop = 2.0 * n as f64 * out_rows as f64 * cols as f64;
        let listed = if grouped { 2 } else { 0 };
        let encode = [NONE, NONE, place, cols as u32 / 4, 0, cols as u32, 0, NONE, listed, order as u32, 0, 0];
        let encode = b.gpu.buffer(&encode);
        let out_words = out_rows as u32;
        let params = [out_words, base, side, place, out_words, 0, 0, 0, NONE, order as u32, 0, 0];
        let params = b.gpu.buffer(&params);
        let mut results: Vec<(String, Vec<f32>)> = Vec::new();
        let cooperative = b.gpu.context.cooperative;
        for form in [Form::Half, Form::Int8].into_iter().filter(|form| *form == Form::Int8 || cooperative) {
            let counted = if form == Form::Half || !cooperative { count } else { 0 };
            let (acts, scale) = (b.gpu.empty(n * form.words(cols)), b.gpu.empty(n * cols / 32));
            let pipeline = b.encode(form, cols, 6);
            let grid = [1, rows as u32, (n / rows) as u32];
            let buffers = [&encode, &w, &x, &list, &acts, &scale];
            b.time(&format!("  {name} encode {form:?}"), &pipeline, &buffers, grid, 0.0, counted);
            let out = b.gpu.empty(n * out_rows);
            let pipeline = b.matmat(form, format, grouped, cols);
            let tile = TILE_ROWS as usize;
            let tiles = if grouped { picks / tile + EXPERTS } else { rows.div_ceil(tile) } as u32;
            let grid = [out_words.div_ceil(form.tile_cols()), tiles, 1];
            let buffers = [&params, &w, &w, &acts, &scale, &list, &out];
            b.time(&format!("{name} {format:?} {form:?}"), &pipeline, &buffers, grid, flop, counted);
            results.push((format!("{form:?}"), b.gpu.read_floats(&out)));
        }
        let (_, want) = results.pop().expect("the int8 tiles");
        for (what, got) in results {
            compare(&what, &got, &want);
        }
    }
}

fn compare(what: &str, got: &[f32], want: &[f32]) {
    let (mut error, mut power, mut worst) = (0.0f64, 0.0f64, 0.0f64);
    for (g, w) in got.iter().zip(want) {
        let d = f64::from(*g) - f64::from(*w);
        error += d * d;
        power += f64::from(*w) * f64::from(*w);
        worst = worst.max(d.abs());
    }
    let rms = (power / want.len() as f64).sqrt();
    let verdict = if error / power < 1e-6 { "right" } else { "WRONG" };
    println!("  {what}: {verdict}, nmse {:.2e}, largest {worst:.2e}, rms {rms:.2e}", error / power);
}

fn mamba(b: &mut Bench) {
    let (heads, p, n, groups, taps, slots, inner) = (64usize, 64usize, 128usize, 8usize, 4usize, 16usize, 4096usize);
    let channels = inner + 2 * groups * n;
    let stride = inner + channels + heads;
    let rows = b.rows;
    let numbers = [
        ("WG", 256),
        ("INNER", inner),
        ("CHANNELS", channels),
        ("TAPS", taps),
        ("RING", slots),
        ("PROJ", stride),
        ("HEADS", heads),
        ("P", p),
        ("N", n),
        ("GROUPS", groups),
        ("DT_AT", inner + channels),
    ];
    let vectors = b.gpu.floats(&random_floats(channels * 8, 1));
    let proj = b.gpu.floats(&random_floats(rows * stride, 2));
    let ring = b.gpu.floats(&random_floats(slots * channels, 3));
    let (xbc, steps, o) = (b.gpu.empty(rows * channels), b.gpu.empty(rows * heads * 4), b.gpu.empty(rows * inner));
    let chunks = rows.div_ceil(64) as u32;
    let cells = inner * n;
    let (states, state) = (b.gpu.empty(chunks as usize * cells), b.gpu.floats(&random_floats(cells, 4)));
    let kernel = |b: &Bench, kernel: &Kernel| b.gpu.pass(kernel, PLAIN, &numbers);
    let zeros = b.gpu.buffer(&[0; 4]);
    let grid = [channels.div_ceil(256) as u32, rows as u32, 1];
    let k = kernel(b, &PREFILL_CONV);
    b.time("conv", &k, &[&zeros, &vectors, &proj, &ring, &xbc], grid, 0.0, 23);
    let k = kernel(b, &PREFILL_SSD_STEPS);
    let params = b.gpu.buffer(&[0, 64, 0, f32::MAX.to_bits()]);
    b.time("ssd steps", &k, &[&params, &vectors, &proj, &steps], [1, chunks, 1], 0.0, 23);
    let k = kernel(b, &PREFILL_SSD_STATES);
    let flop = 2.0 * rows as f64 * cells as f64;
    b.time("ssd states", &k, &[&xbc, &steps, &states], [2, chunks, heads as u32], flop, 23);
    let k = kernel(b, &PREFILL_SSD_PASS);
    let grid = [(cells / 4).div_ceil(256) as u32, 1, 1];
    b.time("ssd pass", &k, &[&zeros, &steps, &states, &state], grid, 0.0, 23);
    let k = kernel(b, &PREFILL_SSD_OUT);
    let flop = 2.0 * rows as f64 * heads as f64 * (64 * n + 64 * p + p * n) as f64;
    let grid = [1, chunks, heads as u32];
    b.time("ssd out", &k, &[&zeros, &vectors, &xbc, &steps, &states, &o], grid, flop, 23);
    let gate = PassChoice { form: Form::Half, source: Source::Gate, ..PLAIN };
    let k = b.gpu.pass(&PREFILL_ENCODE, gate, &[("WG", 256), ("COLS", inner), ("GROUPS", groups), ("INT8", 1)]);
    let (acts, scale) = (b.gpu.empty(rows * inner / 2), b.gpu.empty(rows));
    let params = b.gpu.buffer(&[0, NONE, stride as u32, inner as u32, 1e-5f32.to_bits(), NONE, 0, 0]);
    b.time("encode gate", &k, &[&params, &vectors, &o, &proj, &acts, &scale], [1, rows as u32, 1], 0.0, 23);
}

fn router(b: &mut Bench) {
    let rows = b.rows;
    let k = b.gpu.pass(&PREFILL_MATMAT_F32, PLAIN, &[("COLS", 2688)]);
    let gate = b.gpu.floats(&random_floats(128 * 2688, 8));
    let x = b.gpu.floats(&random_floats(rows * 2688, 8));
    let (logits, nothing) = (b.gpu.empty(rows * 128), b.gpu.buffer(&[0; 4]));
    let params = b.gpu.buffer(&[128, 0, 0, 0, 128, 0, 0, 0, NONE, 0, 0, 0]);
    let flop = 2.0 * rows as f64 * 128.0 * 2688.0;
    let buffers = [&params, &gate, &gate, &x, &nothing, &nothing, &logits];
    b.time("router logits", &k, &buffers, [2, rows.div_ceil(64) as u32, 1], flop, 23);
    let numbers = [
        ("WG", 128),
        ("EXPERTS", 128),
        ("TOP_K", 6),
        ("N_GROUP", 1),
        ("TOPK_GROUP", 1),
        ("SCORES", 128),
        ("PICKS", 6),
        ("GROUPS", 1),
        ("AT_CELLS", 6),
    ];
    let k = b.gpu.pass(&PREFILL_ROUTE, PLAIN, &numbers);
    let map = b.gpu.buffer(&(0..128).collect::<Vec<u32>>());
    let params = b.gpu.buffer(&[0, 0, 0, 1, 2.5f32.to_bits(), 0, 0, 0]);
    let routes = b.gpu.empty(rows * 24);
    b.time("route", &k, &[&params, &gate, &logits, &map, &routes], [1, rows as u32, 1], 0.0, 23);
    let k = b.gpu.pass(&PREFILL_SUM, PLAIN, &[("WG", 128), ("TOP_K", 6)]);
    let (made, shared) = (b.gpu.empty(rows * 6 * 2688), b.gpu.empty(rows * 2688));
    let params = b.gpu.buffer(&[2688, 2688, 0, 1]);
    b.time("sum", &k, &[&params, &routes, &made, &shared, &x], [21, rows as u32, 1], 0.0, 23);
}

fn attention(b: &mut Bench) {
    let rows = b.rows;
    let numbers = [("D", 128), ("HEADS", 32), ("KV_HEADS", 2), ("SPLITS", 1)];
    let k = b.gpu.pass(&PREFILL_ATTENTION, PLAIN, &numbers);
    let q = b.gpu.floats(&random_floats(rows * 4096, 1));
    let kv = b.gpu.floats(&random_floats((rows + b.position) * 512, 2));
    let out = b.gpu.empty(rows * 4096);
    let params = b.gpu.buffer(&[1024, 0, (1.0f32 / 128.0f32.sqrt()).to_bits(), 0]);
    let flop = 4.0 * rows as f64 * 4096.0 * (b.position as f64 + rows as f64 / 2.0);
    b.time("attention", &k, &[&params, &q, &kv, &out], [32, rows.div_ceil(64) as u32, 1], flop, 6);
}
