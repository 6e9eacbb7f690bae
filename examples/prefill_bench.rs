//! Times the kernels of a pass at the 30B model's shapes and checks those of the matrix units against their plain twins.
//!
//! `prefill_bench [rows] [position]`; shaders are read from `RIPARIAN_SHADERS` or this source tree.
#![allow(clippy::print_stdout)]

#[path = "../tests/prefill/gpu.rs"]
mod gpu;

use gpu::{Buffer, Gpu, Pipeline, Random, source};
use std::time::Instant;

const NONE: u32 = u32::MAX;

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
    /// Microseconds of one dispatch; adds `count` of them to the pass.
    fn time(
        &mut self,
        what: &str,
        pipeline: &Pipeline,
        buffers: &[&Buffer],
        grid: [u32; 3],
        flop: f64,
        count: usize,
    ) -> f64 {
        let group = self.gpu.bind(pipeline, buffers);
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
        println!("{what:60} {best:9.1} us  {:7.2} TFLOP/s", flop / best / 1e6);
        self.total_us += best * count as f64;
        best
    }

    fn matmat(
        &self,
        coop: bool,
        codec: &str,
        tiles: &str,
        int8: bool,
        cols: usize,
        edit: &dyn Fn(String) -> String,
    ) -> Pipeline {
        let mut pieces = if coop { vec!["coop_head"] } else { vec!["team_none"] };
        pieces.extend(["guard", "guard_read", "own_miss", "none", "matmat", tiles]);
        let (columns, kernel) = match (coop, int8) {
            (true, _) => (format!("half_{codec}"), "prefill_matmat_coop"),
            (false, true) => (format!("columns_{codec}"), "prefill_matmat_int8"),
            (false, false) => (format!("columns_{codec}"), "prefill_matmat_f32"),
        };
        pieces.extend([columns.as_str(), kernel]);
        let side = if codec == "q4" { 2 + (cols / 32).div_ceil(6) } else { 1 };
        self.gpu.pipeline_of(
            kernel,
            &edit(source(&pieces)),
            &[("COLS", cols as f64), ("SIDE_WORDS", side as f64)],
            true,
        )
    }

    fn encode(&self, form: &str, cols: usize, top_k: usize) -> Pipeline {
        let mut pieces = vec![
            "team_none",
            "guard",
            "guard_read",
            "own_miss",
            "none",
            "encode_rows_params",
            "wide_reduce",
            "rows_of_norm",
            "group32",
        ];
        pieces.extend([form, "prefill_encode"]);
        self.gpu.pipeline(&pieces, &[("WG", 128.0), ("COLS", cols as f64), ("TOP_K", top_k as f64), ("INT8", 1.0)])
    }
}

/// Codes, side words and where they lie, for `places` matrices.
fn matrix(codec: &str, rows: usize, cols: usize, places: usize, seed: u64) -> (Vec<u32>, [u32; 3]) {
    let code_words = if codec == "q8" { rows * cols / 4 } else { rows * cols / 8 };
    let side_words = if codec == "q8" { 1 } else { 2 + (cols / 32).div_ceil(6) };
    let place = (code_words + rows * side_words).div_ceil(4) * 4;
    let mut all = random_words(place * places, seed);
    let size = 1.0 / (cols as f32).sqrt();
    for p in 0..places {
        for r in 0..rows {
            let at = p * place + code_words + r * side_words;
            if codec == "q8" {
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
    println!("{}  coop {}  {rows} rows at {position}", gpu.name, gpu.coop);
    let flight = gpu.buffer(&[7, rows as u32, 11, 0, u32::MAX, 0, rows as u32, 0]);
    let mut control = [0u32; 32];
    control[0] = 7;
    control[6] = position as u32;
    let control = gpu.buffer(&control);
    let mut b = Bench { gpu, flight, control, rows, position, total_us: 0.0 };
    matrices(&mut b);
    mamba(&mut b);
    attention(&mut b);
    println!("pass of {rows}: {:.1} ms, {:.0} positions/s", b.total_us / 1e3, rows as f64 / b.total_us * 1e6);
}

fn matrices(b: &mut Bench) {
    let same = |s: String| s;
    let rows = b.rows;
    let experts = 128;
    let picks = rows * 6;
    // a router's picks: each row six different experts, popularity uneven
    let mut rng = Random::new(3);
    let mut routes = Vec::new();
    for _ in 0..rows {
        let mut chosen: Vec<u32> = Vec::new();
        while chosen.len() < 6 {
            let e = ((rng.unit() * rng.unit().max(0.3)) * 128.0) as u32 % 128;
            if !chosen.contains(&e) {
                chosen.push(e);
            }
        }
        chosen.sort_unstable();
        routes.extend(chosen.iter().flat_map(|e| [*e, *e, (2.5f32 / 6.0).to_bits(), 0]));
    }
    let routes = b.gpu.buffer(&routes);
    let (flight, control) = (b.flight.clone(), b.control.clone());
    for tile in [128usize, 64] {
        let tiles = picks / tile + experts;
        let order = 4 + 4 * tiles;
        let list = b.gpu.empty(order + 2 * picks);
        let sort = b.gpu.pipeline(
            &["team_none", "guard", "guard_write", "prefill_sort"],
            &[("WG", 256.0), ("TOP_K", 6.0), ("PLACES", 128.0), ("TILE_ROWS", tile as f64)],
        );
        let params = b.gpu.buffer(&[0, order as u32, 0, 0]);
        b.time(
            "sort",
            &sort,
            &[&flight, &control, &params, &routes, &list],
            [1, 1, 1],
            0.0,
            if tile == 128 { 23 } else { 0 },
        );
        println!("  {} tiles of {tile}", b.gpu.read(&list)[0]);
        let listed = list;
        // name, codec, rows, cols, grouped, times a pass
        let shapes: &[(&str, &str, usize, usize, bool, usize)] = &[
            ("in_proj", "q8", 10304, 2688, false, 23),
            ("out_proj", "q8", 2688, 4096, false, 23),
            ("qkv", "q8", 4608, 2688, false, 6),
            ("o_proj", "q8", 2688, 4096, false, 6),
            ("shared up", "q8", 3712, 2688, false, 23),
            ("shared down", "q8", 2688, 3712, false, 23),
            ("experts up", "q4", 1856, 2688, true, 23),
            ("experts down", "q4", 2688, 1856, true, 23),
        ];
        for (name, codec, out_rows, cols, grouped, count) in shapes {
            if tile == 64 && !matches!(*name, "in_proj" | "experts up" | "experts down") {
                continue;
            }
            let (out_rows, cols) = (*out_rows, *cols);
            let (words, [base, side, place]) = matrix(codec, out_rows, cols, if *grouped { experts } else { 1 }, 9);
            let w = b.gpu.buffer(&words);
            let n = if *grouped { picks } else { rows };
            let x = b.gpu.floats(&random_floats(n * cols, 5));
            let flop = 2.0 * n as f64 * out_rows as f64 * cols as f64;
            let eparams = b.gpu.buffer(&[
                NONE,
                NONE,
                place,
                cols as u32 / 4,
                0,
                cols as u32,
                0,
                NONE,
                if *grouped { 2 } else { 0 },
                order as u32,
                0,
                0,
            ]);
            let out = b.gpu.empty(n * out_rows);
            let params =
                b.gpu.buffer(&[out_rows as u32, base, side, place, out_rows as u32, 0, 0, 0, NONE, order as u32, 0, 0]);
            let pass = if *grouped { "pass_experts" } else { "pass_rows" };
            let mut results: Vec<(String, Vec<f32>)> = Vec::new();
            let encode = |b: &mut Bench, form: &str, count: usize| {
                let words = if form == "encode_half" { n * cols / 2 } else { n * cols / 4 };
                let (acts, scale) = (b.gpu.empty(words), b.gpu.empty(n * cols / 32));
                let pipeline = b.encode(form, cols, 6);
                let buffers = [&flight, &control, &eparams, &w, &x, &listed, &acts, &scale];
                b.time(
                    &format!("  {name} {form}"),
                    &pipeline,
                    &buffers,
                    [1, rows as u32, (n / rows) as u32],
                    0.0,
                    count,
                );
                (acts, scale)
            };
            if tile == 64 {
                let (acts, scale) = encode(b, "encode_int8", 0);
                let pipeline = b.matmat(false, codec, pass, true, cols, &same);
                let grid = [out_rows.div_ceil(64) as u32, if *grouped { tiles } else { rows.div_ceil(64) } as u32, 1];
                let buffers = [&flight, &control, &params, &w, &w, &acts, &scale, &listed, &out];
                b.time(&format!("{name} {codec} int8 plain"), &pipeline, &buffers, grid, flop, 0);
                continue;
            }
            if !b.gpu.coop {
                continue;
            }
            let (acts, scale) = encode(b, "encode_half", *count);
            let variants: &[(&str, &dyn Fn(String) -> String)] = &[("vec4 tiles", &same)];
            for (variant, edit) in variants {
                let pipeline = b.matmat(true, codec, pass, true, cols, *edit);
                let grid = [out_rows.div_ceil(128) as u32, if *grouped { tiles } else { rows.div_ceil(128) } as u32, 1];
                let buffers = [&flight, &control, &params, &w, &w, &acts, &scale, &listed, &out];
                let count = if *variant == "vec4 tiles" { *count } else { 0 };
                b.time(&format!("{name} {codec} coop {variant}"), &pipeline, &buffers, grid, flop, count);
                results.push((format!("{name} {variant}"), b.gpu.read_floats(&out)));
            }
            if !*grouped {
                let (acts, scale) = encode(b, "encode_int8", 0);
                let pipeline = b.matmat(false, codec, pass, true, cols, &same);
                let grid = [out_rows.div_ceil(64) as u32, rows.div_ceil(64) as u32, 1];
                let buffers = [&flight, &control, &params, &w, &w, &acts, &scale, &listed, &out];
                b.time(&format!("{name} {codec} int8 plain"), &pipeline, &buffers, grid, flop, 0);
                let want = b.gpu.read_floats(&out);
                for (what, got) in results {
                    compare(&what, &got, &want);
                }
            } else {
                // one expert at a time through the plain kernel would need its own lists: take the 128 tiles as they are
                let (acts, scale) = encode(b, "encode_int8", 0);
                let edit = |s: String| s;
                let pipeline = b.matmat(false, codec, pass, true, cols, &edit);
                // the plain kernel takes 64 rows of a tile: compare those
                let grid = [out_rows.div_ceil(64) as u32, tiles as u32, 1];
                let buffers = [&flight, &control, &params, &w, &w, &acts, &scale, &listed, &out];
                let blank = b.gpu.empty(n * out_rows);
                let buffers = {
                    let mut v = buffers;
                    v[8] = &blank;
                    v
                };
                b.gpu.run(&pipeline, &buffers, grid);
                let want = b.gpu.read(&blank);
                for (what, got) in results {
                    let (g, w): (Vec<f32>, Vec<f32>) = got
                        .iter()
                        .zip(&want)
                        .filter(|(_, w)| **w != gpu::UNWRITTEN)
                        .map(|(g, w)| (*g, f32::from_bits(*w)))
                        .unzip();
                    compare(&what, &g, &w);
                }
            }
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
    let verdict = if error / power < 1e-6 { "right" } else { "WRONG" };
    println!(
        "  {what}: {verdict}, nmse {:.2e}, largest {worst:.2e}, rms {:.2e}, {} values",
        error / power,
        (power / want.len() as f64).sqrt(),
        want.len()
    );
}

fn mamba(b: &mut Bench) {
    let (heads, p, n, groups, taps, slots, inner) = (64usize, 64usize, 128usize, 8usize, 4usize, 8usize, 4096usize);
    let channels = inner + 2 * groups * n;
    let stride = inner + channels + heads;
    let rows = b.rows;
    let numbers = [
        ("WG", 256.0),
        ("INNER", inner as f64),
        ("CHANNELS", channels as f64),
        ("TAPS", taps as f64),
        ("RING", slots as f64),
        ("PROJ", stride as f64),
        ("HEADS", heads as f64),
        ("P", p as f64),
        ("N", n as f64),
        ("GROUPS", groups as f64),
        ("DT_AT", (inner + channels) as f64),
    ];
    let (flight, control) = (b.flight.clone(), b.control.clone());
    let vectors = b.gpu.floats(&random_floats(channels * 8, 1));
    let proj = b.gpu.floats(&random_floats(rows * stride, 2));
    let ring = b.gpu.floats(&random_floats(slots * channels, 3));
    let (xbc, steps, o) = (b.gpu.empty(rows * channels), b.gpu.empty(rows * heads * 4), b.gpu.empty(rows * inner));
    let chunks = rows.div_ceil(64);
    let cells = inner * n;
    let (states, state) = (b.gpu.empty(chunks * cells), b.gpu.floats(&random_floats(cells, 4)));
    let kernel = |b: &Bench, name: &'static str| b.gpu.pipeline(&["team_none", "guard", "guard_read", name], &numbers);
    let p0 = b.gpu.buffer(&[0, 0, 0, 0]);
    let p1 = b.gpu.buffer(&[0, 64, 0, f32::INFINITY.to_bits()]);
    let k = kernel(b, "prefill_conv");
    b.time(
        "conv",
        &k,
        &[&flight, &control, &p0, &vectors, &proj, &ring, &xbc],
        [channels.div_ceil(256) as u32, rows as u32, 1],
        0.0,
        23,
    );
    let k = kernel(b, "prefill_ssd_steps");
    b.time("ssd steps", &k, &[&flight, &control, &p1, &vectors, &proj, &steps], [1, chunks as u32, 1], 0.0, 23);
    let k = kernel(b, "prefill_ssd_states");
    let flop = 2.0 * rows as f64 * cells as f64;
    b.time("ssd states", &k, &[&flight, &control, &xbc, &steps, &states], [2, chunks as u32, heads as u32], flop, 23);
    let k = kernel(b, "prefill_ssd_pass");
    b.time(
        "ssd pass",
        &k,
        &[&flight, &control, &p0, &steps, &states, &state],
        [cells.div_ceil(256) as u32, 1, 1],
        0.0,
        23,
    );
    let k = kernel(b, "prefill_ssd_out");
    let flop = 2.0 * rows as f64 * heads as f64 * (64 * n + 64 * p + p * n) as f64;
    b.time(
        "ssd out",
        &k,
        &[&flight, &control, &p0, &vectors, &xbc, &steps, &states, &o],
        [1, heads as u32, chunks as u32],
        flop,
        23,
    );
    let pieces = [
        "team_none",
        "guard",
        "guard_read",
        "own_miss",
        "none",
        "encode_gate_params",
        "wide_reduce",
        "rows_of_gate",
        "group32",
        "encode_half",
        "prefill_encode",
    ];
    let k = b.gpu.pipeline(&pieces, &[("WG", 128.0), ("COLS", 4096.0), ("GROUPS", 8.0), ("INT8", 1.0)]);
    let (acts, scale) = (b.gpu.empty(rows * inner / 2), b.gpu.empty(rows));
    let p2 = b.gpu.buffer(&[0, NONE, stride as u32, inner as u32, 1e-5f32.to_bits(), NONE, 0, 0]);
    b.time(
        "encode gate",
        &k,
        &[&flight, &control, &p2, &vectors, &o, &proj, &acts, &scale],
        [rows as u32, 1, 1],
        0.0,
        23,
    );
    // the router's product and its picks
    let pieces = [
        "team_none",
        "guard",
        "guard_read",
        "own_miss",
        "none",
        "matmat",
        "pass_rows",
        "columns_f32",
        "prefill_matmat_f32",
    ];
    let k = b.gpu.pipeline(&pieces, &[("COLS", 2688.0)]);
    let gate = b.gpu.floats(&random_floats(128 * 2688, 8));
    let x = b.gpu.floats(&random_floats(rows * 2688, 8));
    let logits = b.gpu.empty(rows * 128);
    let p3 = b.gpu.buffer(&[128, 0, 0, 0, 128, 0, 0, 0, NONE, 0, 0, 0]);
    let flop = 2.0 * rows as f64 * 128.0 * 2688.0;
    b.time(
        "router logits",
        &k,
        &[&flight, &control, &p3, &gate, &gate, &x, &scale, &scale, &logits],
        [2, rows.div_ceil(64) as u32, 1],
        flop,
        23,
    );
    let k = b.gpu.pipeline(
        &["team_none", "guard", "guard_read", "rows_1", "choose", "prefill_route"],
        &[
            ("WG", 128.0),
            ("EXPERTS", 128.0),
            ("TOP_K", 6.0),
            ("N_GROUP", 1.0),
            ("TOPK_GROUP", 1.0),
            ("SCORES", 128.0),
            ("PICKS", 6.0),
            ("GROUPS", 1.0),
            ("AT_CELLS", 6.0),
        ],
    );
    let map = b.gpu.buffer(&(0..128).collect::<Vec<u32>>());
    let p4 = b.gpu.buffer(&[0, 0, 0, 1, 2.5f32.to_bits(), 0, 0, 0]);
    let routes = b.gpu.empty(rows * 24);
    b.time("route", &k, &[&flight, &control, &p4, &vectors, &logits, &map, &routes], [1, rows as u32, 1], 0.0, 23);
    let k = b.gpu.pipeline(&["team_none", "guard", "guard_read", "prefill_sum"], &[("WG", 128.0), ("TOP_K", 6.0)]);
    let made = b.gpu.empty(rows * 6 * 2688);
    let p5 = b.gpu.buffer(&[2688, 2688, 0, 1]);
    b.time("sum", &k, &[&flight, &control, &p5, &routes, &made, &x, &proj], [21, rows as u32, 1], 0.0, 23);
}

fn attention(b: &mut Bench) {
    let rows = b.rows;
    let k = b.gpu.pipeline(
        &["guard", "guard_read", "prefill_attention"],
        &[("D", 128.0), ("HEADS", 32.0), ("KV_HEADS", 2.0), ("SPLITS", 1.0)],
    );
    let q = b.gpu.floats(&random_floats(rows * 4608, 1));
    let kv = b.gpu.floats(&random_floats((rows + b.position) * 512, 2));
    let out = b.gpu.empty(rows * 4096);
    let params = b.gpu.buffer(&[1152, 0, (1.0f32 / 128.0f32.sqrt()).to_bits(), 0]);
    let flop = 4.0 * rows as f64 * 4096.0 * (b.position as f64 + rows as f64 / 2.0);
    let (flight, control) = (b.flight.clone(), b.control.clone());
    b.time("attention", &k, &[&flight, &control, &params, &q, &kv, &out], [32, rows.div_ceil(64) as u32, 1], flop, 6);
}
