//! The kernels of a prefill pass.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

use riparian::device::kernels::{
    Format, Kernel, PREFILL_ATTENTION, PREFILL_CONV, PREFILL_ENCODE, PREFILL_LAST, PREFILL_MATMAT_F32,
    PREFILL_MATMAT_INT8, PREFILL_RING, PREFILL_ROUTE, PREFILL_SORT, PREFILL_SSD_OUT, PREFILL_SSD_PASS,
    PREFILL_SSD_STATES, PREFILL_SSD_STEPS, PREFILL_SUM,
};
use riparian::device::pass::{self, PassChoice, Source};
use riparian::device::wgpu::pipelines::Pipeline;
use riparian::knobs::Activations;
use riparian::model::geometry::{AttentionGeometry, MambaGeometry, MoeGeometry};
use riparian::model::tensors::{Codec, Matrix};
use riparian::model::weights::{MambaWeights, MlpWeights};
use riparian::reference;

use crate::gpu::{Buffer, Gpu, Random, Tolerance, UNWRITTEN, close};
use crate::weights::{Arena, Laid, lay, padded, random};

pub(crate) const NONE: u32 = u32::MAX;
const SUM_ORDER: Tolerance = Tolerance { nmse: 1e-12, max_abs: 2e-6, why: "f32 sums in another order" };
const CODE_FLIPS: Tolerance =
    Tolerance { nmse: 2e-6, max_abs: 5e-3, why: "a code may move by one where the norm or the division rounds" };

/// One at a time: the driver's threads are all there is.
pub(crate) fn gpu() -> MutexGuard<'static, Gpu> {
    static GPU: OnceLock<Mutex<Gpu>> = OnceLock::new();
    let gpu = GPU.get_or_init(|| Mutex::new(Gpu::open())).lock();
    gpu.unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Flight and control words of a live slot.
struct Slot {
    flight: Buffer,
    control: Buffer,
}

fn slot(gpu: &Gpu, rows: usize, position: usize) -> Slot {
    let flight = [7, rows as u32, 11, 0, u32::MAX, 0, rows as u32, 0];
    let mut control = [0u32; 32];
    control[0] = 7;
    control[6] = position as u32;
    Slot { flight: gpu.buffer(&flight), control: gpu.buffer(&control) }
}

/// The same with another turn: nothing may run.
fn stale(gpu: &Gpu, slot: &Slot) -> Slot {
    let mut control = gpu.read(&slot.control);
    control[0] = 8;
    Slot { flight: slot.flight.clone(), control: gpu.buffer(&control) }
}

fn words(values: &[u32]) -> Vec<u32> {
    let mut out = values.to_vec();
    out.resize(values.len().div_ceil(4) * 4, 0);
    out
}

// ------------------------------------------------------------------ encode

#[derive(Clone, Copy, PartialEq, Debug)]
enum Form {
    F32,
    Int8,
    /// Halves for the matrix units, in either arithmetic.
    Half {
        int8: bool,
    },
}

impl Form {
    fn pass(self) -> pass::Form {
        match self {
            Form::F32 => pass::Form::F32,
            Form::Int8 => pass::Form::Int8,
            Form::Half { .. } => pass::Form::Half,
        }
    }

    fn of(codec: Codec, act: Activations) -> Self {
        if codec.is_quantized() && act == Activations::Int8 { Form::Int8 } else { Form::F32 }
    }

    fn act_words(self, cols: usize) -> usize {
        match self {
            Form::F32 => cols,
            Form::Int8 => cols / 4,
            Form::Half { .. } => cols / 2,
        }
    }
}

/// What a kernel's variant is chosen by where nothing concerns it.
const PLAIN: PassChoice =
    PassChoice { format: Format::F32, form: pass::Form::F32, experts: false, source: Source::Rows };

fn encode_pipeline(gpu: &Gpu, form: Form, source: Source, numbers: &[(&'static str, usize)]) -> Arc<Pipeline> {
    let int8 = usize::from(form == Form::Half { int8: true });
    let numbers = [&[("WG", 64), ("INT8", int8)], numbers].concat();
    gpu.pass(&PREFILL_ENCODE, PassChoice { form: form.pass(), source, ..PLAIN }, &numbers)
}

struct EncodeRows {
    norm: u32,
    field: u32,
    place: u32,
    stride: usize,
    width: usize,
    listed: Option<u32>,
}

/// Encodes rows; returns codes and scales.
#[allow(clippy::too_many_arguments, reason = "the kernel's own")]
fn encode_rows(
    gpu: &Gpu,
    slot: &Slot,
    form: Form,
    arena: &Buffer,
    source: &Buffer,
    list: &Buffer,
    rows: usize,
    top_k: usize,
    e: &EncodeRows,
) -> (Buffer, Buffer) {
    let cols = padded(e.width);
    let pipeline = encode_pipeline(gpu, form, Source::Rows, &[("COLS", cols), ("TOP_K", top_k)]);
    let params = gpu.buffer(&words(&[
        e.norm,
        e.field,
        e.place,
        e.stride as u32 / 4,
        0,
        e.width as u32,
        1e-5f32.to_bits(),
        NONE,
        u32::from(e.listed.is_some()),
        e.listed.unwrap_or(0),
        0,
        0,
    ]));
    let acts = gpu.empty(rows * form.act_words(cols));
    let scales = gpu.empty(rows * cols / 32);
    gpu.run(
        &pipeline,
        &[&slot.flight, &slot.control, &params, arena, source, list, &acts, &scales],
        [1, rows as u32, 1],
    );
    (acts, scales)
}

fn decoded(gpu: &Gpu, form: Form, acts: &Buffer, scales: &Buffer) -> Vec<f32> {
    match form {
        Form::F32 => gpu.read_floats(acts),
        Form::Int8 => {
            let scales = gpu.read_floats(scales);
            let codes: Vec<u8> = bytemuck::cast_slice(&gpu.read(acts)).to_vec();
            codes.iter().enumerate().map(|(i, q)| f32::from(*q as i8) * scales[i / 32]).collect()
        }
        Form::Half { .. } => {
            let words = gpu.read(acts);
            let halves: Vec<half::f16> = words
                .iter()
                .flat_map(|w| [half::f16::from_bits(*w as u16), half::f16::from_bits((*w >> 16) as u16)])
                .collect();
            let scales: Vec<f32> = gpu.read(scales).into_iter().map(f32::from_bits).collect();
            let rows = scales.iter().take_while(|s| s.to_bits() != UNWRITTEN).count();
            let cols = halves.len() / rows;
            halves.iter().enumerate().map(|(i, h)| h.to_f32() * scales[i / cols]).collect()
        }
    }
}

fn normed(x: &[f32], norm: &[f32]) -> Vec<f32> {
    let mut out = vec![0.0; x.len()];
    reference::rms_norm::rms_norm(x, norm, 1e-5, &mut out);
    out
}

fn requantized(row: &[f32]) -> Vec<f32> {
    let coded = reference::quantize_activations::quantize_activations(row);
    coded.codes.iter().enumerate().map(|(i, q)| f32::from(*q) * coded.scales[i / 32]).collect()
}

#[test]
fn encode_norm_and_field() {
    let gpu = gpu();
    for (rows, width) in [(3, 40), (2, 256), (5, 2688)] {
        for (form, with_norm, with_field) in [
            (Form::F32, true, false),
            (Form::Int8, true, true),
            (Form::Int8, false, false),
            (Form::F32, false, true),
            (Form::Half { int8: false }, true, true),
            (Form::Half { int8: true }, true, true),
            (Form::Half { int8: true }, false, false),
        ] {
            let mut rng = Random::new(width as u64);
            let cols = padded(width);
            let mut x = rng.normals(rows * width);
            x[0] = 300.0;
            x[width..width + 32].fill(0.0);
            let (norm, field) = (rng.normals(width), rng.normals(width));
            let fill = |v: &[f32]| v.iter().copied().chain(std::iter::repeat(0.0)).take(cols).collect::<Vec<_>>();
            let mut arena = Arena::default();
            arena.put(&[0; 8]);
            let (norm_at, field_at) = (arena.floats(&fill(&norm)), arena.floats(&fill(&field)));
            // what lies past the width is no part of the row
            let source: Vec<f32> = x
                .chunks(width)
                .flat_map(|r| r.iter().copied().chain(std::iter::repeat(f32::NAN)).take(cols).collect::<Vec<_>>())
                .collect();
            let slot = slot(&gpu, rows, 0);
            let e = EncodeRows {
                norm: if with_norm { norm_at } else { NONE },
                field: if with_field { field_at } else { NONE },
                place: 0,
                stride: cols,
                width,
                listed: None,
            };
            let list = gpu.buffer(&[0; 4]);
            let (acts, scales) =
                encode_rows(&gpu, &slot, form, &gpu.buffer(&arena.0), &gpu.floats(&source), &list, rows, 1, &e);
            let got = decoded(&gpu, form, &acts, &scales);
            let want: Vec<f32> = (x.chunks(width))
                .flat_map(|row| {
                    let mut a = if with_norm { normed(row, &norm) } else { row.to_vec() };
                    if with_field {
                        a.iter_mut().zip(&field).for_each(|(a, f)| *a *= f);
                    }
                    a.resize(cols, 0.0);
                    if matches!(form, Form::Int8 | Form::Half { int8: true }) { requantized(&a) } else { a }
                })
                .collect();
            let tolerance = match form {
                Form::Int8 | Form::Half { int8: true } if with_norm || with_field => CODE_FLIPS,
                Form::Half { .. } => Tolerance { nmse: 1e-7, max_abs: 5e-4, why: "rounded to halves, 2^-11" },
                _ => SUM_ORDER,
            };
            close(&format!("encode {form:?} {rows}x{width}"), &got, &want, tolerance);
            // a flight of another turn writes nothing
            let (acts, _) = encode_rows(
                &gpu,
                &stale(&gpu, &slot),
                form,
                &gpu.buffer(&arena.0),
                &gpu.floats(&source),
                &list,
                rows,
                1,
                &e,
            );
            assert!(gpu.read(&acts).iter().all(|w| *w == UNWRITTEN));
        }
    }
}

#[test]
fn encode_gate() {
    let gpu = gpu();
    for (rows, width, groups) in [(2, 64, 4), (3, 48, 2), (2, 4096, 8)] {
        for form in [Form::F32, Form::Int8] {
            let mut rng = Random::new(width as u64 + 1);
            let cols = padded(width);
            let (o, norm) = (rng.normals(rows * width), rng.normals(width));
            let stride = width + 24;
            let z = rng.normals(rows * stride);
            let mut arena = Arena::default();
            let mut fill = norm.clone();
            fill.resize(cols, 0.0);
            let norm_at = arena.floats(&fill);
            let slot = slot(&gpu, rows, 0);
            let pipeline = encode_pipeline(&gpu, form, Source::Gate, &[("COLS", cols), ("GROUPS", groups)]);
            let params = gpu.buffer(&[norm_at, NONE, stride as u32, width as u32, 1e-5f32.to_bits(), NONE, 0, 0]);
            let (acts, scales) = (gpu.empty(rows * form.act_words(cols)), gpu.empty(rows * cols / 32));
            let (plain, gate) = (gpu.floats(&o), gpu.floats(&z));
            gpu.run(
                &pipeline,
                &[&slot.flight, &slot.control, &params, &gpu.buffer(&arena.0), &plain, &gate, &acts, &scales],
                [1, rows as u32, 1],
            );
            let want: Vec<f32> = (0..rows)
                .flat_map(|r| {
                    let mut out = vec![0.0; width];
                    reference::gated_group_norm::gated_group_norm(
                        &o[r * width..][..width],
                        &z[r * stride..][..width],
                        &norm,
                        groups,
                        1e-5,
                        &mut out,
                    );
                    out.resize(cols, 0.0);
                    if form == Form::Int8 { requantized(&out) } else { out }
                })
                .collect();
            let tolerance = if form == Form::Int8 { CODE_FLIPS } else { SUM_ORDER };
            close(&format!("gate {form:?} {rows}x{width}"), &decoded(&gpu, form, &acts, &scales), &want, tolerance);
        }
    }
}

#[test]
fn encode_fuse() {
    let gpu = gpu();
    let (rows, width) = (3, 64);
    let mut rng = Random::new(5);
    let (following, hidden) = (rng.normals(rows * width), rng.normals((rows + 1) * width));
    let (enorm, hnorm) = (rng.normals(width), rng.normals(width));
    for hidden_first in [0u32, 1] {
        let mut arena = Arena::default();
        let (e_at, h_at) = (arena.floats(&enorm), arena.floats(&hnorm));
        let slot = slot(&gpu, rows, 9);
        let pipeline = encode_pipeline(&gpu, Form::F32, Source::Fuse, &[("COLS", 2 * width)]);
        let params =
            gpu.buffer(&[e_at, h_at, NONE, width as u32 / 4, width as u32, 1e-5f32.to_bits(), hidden_first, NONE]);
        let (acts, scales) = (gpu.empty(rows * 2 * width), gpu.empty(rows * 2 * width / 32));
        gpu.run(
            &pipeline,
            &[
                &slot.flight,
                &slot.control,
                &params,
                &gpu.buffer(&arena.0),
                &gpu.floats(&following),
                &gpu.floats(&hidden),
                &acts,
                &scales,
            ],
            [1, rows as u32, 1],
        );
        let want: Vec<f32> = (0..rows)
            .flat_map(|r| {
                let e = normed(&following[r * width..][..width], &enorm);
                let h = normed(&hidden[r * width..][..width], &hnorm);
                if hidden_first == 1 { [h, e].concat() } else { [e, h].concat() }
            })
            .collect();
        close("fuse", &gpu.read_floats(&acts), &want, SUM_ORDER);
    }
}

// ------------------------------------------------------------------ matmat

fn matmat_pipeline(gpu: &Gpu, codec: Codec, form: Form, experts: bool, laid: &Laid) -> Arc<Pipeline> {
    let format = match codec {
        Codec::F32 | Codec::F16 => Format::F32,
        Codec::Bf16 => Format::Bf16,
        Codec::Q8_2f => Format::Q8,
        Codec::Q4tp => Format::Q4,
    };
    let kernel = if form == Form::Int8 { &PREFILL_MATMAT_INT8 } else { &PREFILL_MATMAT_F32 };
    let choice = PassChoice { format, experts, ..PLAIN };
    gpu.pass(kernel, choice, &[("COLS", laid.cols), ("SIDE_WORDS", laid.side_words)])
}

/// TO_* of `matmat.wgsl`
const TO_ROW: u32 = 0;
const TO_SUM: u32 = 1;
const TO_POSITION: u32 = 2;
const TO_BEFORE: u32 = 3;
const TO_PICK: u32 = 4;

#[test]
fn matmat() {
    let gpu = gpu();
    let cases = [
        (Codec::F32, 5, 7, 40),
        (Codec::F16, 2, 65, 32),
        (Codec::Bf16, 65, 70, 96),
        (Codec::Q8_2f, 70, 130, 96),
        (Codec::Q8_2f, 1, 3, 40),
        (Codec::Q8_2f, 9, 66, 2688),
        (Codec::Q4tp, 67, 66, 64),
        (Codec::Q4tp, 1, 1, 32),
        (Codec::Q4tp, 9, 66, 2688),
    ];
    for (codec, m, rows, cols) in cases {
        for act in [Activations::F32, Activations::Int8] {
            let form = Form::of(codec, act);
            let mut rng = Random::new((rows * cols) as u64);
            let w = random(codec, rows, cols, &mut rng);
            let laid = lay(&w);
            let mut arena = Arena::default();
            arena.put(&[3; 20]);
            let [base, side, field] = arena.matrix(&laid);
            let arena = gpu.buffer(&arena.0);
            let x = rng.normals(m * cols);
            let source: Vec<f32> = x
                .chunks(cols)
                .flat_map(|r| r.iter().copied().chain(std::iter::repeat(0.0)).take(laid.cols).collect::<Vec<_>>())
                .collect();
            let position = 5;
            let slot = slot(&gpu, m, position);
            let list = gpu.buffer(&[0; 4]);
            let e = EncodeRows { norm: NONE, field, place: 0, stride: laid.cols, width: cols, listed: None };
            let (acts, scales) = encode_rows(&gpu, &slot, form, &arena, &gpu.floats(&source), &list, m, 1, &e);
            let pipeline = matmat_pipeline(&gpu, codec, form, false, &laid);
            let want = reference::matvec::matmul(&w, &x, act);
            for (to, relu2, shift) in
                [(TO_ROW, 1, 0), (TO_SUM, 0, 0), (TO_POSITION, 0, position), (TO_BEFORE, 0, position - 1)]
            {
                let (stride, offset) = (rows + 3, 2);
                let before = if to == TO_SUM { 0.5f32.to_bits() } else { UNWRITTEN };
                let out = gpu.buffer(&vec![before; (m + shift) * stride]);
                let params =
                    gpu.buffer(&words(&[rows as u32, base, side, 0, stride as u32, offset, to, relu2, NONE, 0]));
                let grid = [rows.div_ceil(64) as u32, m.div_ceil(64) as u32, 1];
                gpu.run(
                    &pipeline,
                    &[&slot.flight, &slot.control, &params, &arena, &arena, &acts, &scales, &list, &out],
                    grid,
                );
                let all = gpu.read(&out);
                let mut got = Vec::new();
                for (i, word) in all.iter().enumerate() {
                    let (r, c) = (i / stride, i % stride);
                    if r >= shift && (offset as usize..offset as usize + rows).contains(&c) {
                        got.push(f32::from_bits(*word));
                    } else {
                        assert_eq!(*word, before, "touched what is not its own");
                    }
                }
                let want: Vec<f32> = want.iter().map(|y| if relu2 == 1 { y.max(0.0) * y.max(0.0) } else { *y } + if to == TO_SUM { 0.5 } else { 0.0 }).collect();
                let tolerance =
                    if form == Form::Int8 { CODE_FLIPS } else { Tolerance { nmse: 1e-11, max_abs: 1e-5, ..SUM_ORDER } };
                close(&format!("matmat {codec} {act:?} {m}x{rows}x{cols} to {to}"), &got, &want, tolerance);
            }
        }
    }
}

#[test]
fn keys_of_the_draft_layer_begin_at_position_zero() {
    let gpu = gpu();
    let mut rng = Random::new(1);
    let (m, rows, cols) = (3, 4, 32);
    let w = random(Codec::F32, rows, cols, &mut rng);
    let laid = lay(&w);
    let mut arena = Arena::default();
    let [base, side, _] = arena.matrix(&laid);
    let arena = gpu.buffer(&arena.0);
    let x = rng.normals(m * cols);
    let slot = slot(&gpu, m, 0);
    let (list, scales) = (gpu.buffer(&[0; 4]), gpu.buffer(&[0; 4]));
    let out = gpu.empty((m - 1) * rows);
    let params = gpu.buffer(&words(&[rows as u32, base, side, 0, rows as u32, 0, TO_BEFORE, 0, NONE, 0]));
    let pipeline = matmat_pipeline(&gpu, Codec::F32, Form::F32, false, &laid);
    gpu.run(
        &pipeline,
        &[&slot.flight, &slot.control, &params, &arena, &arena, &gpu.floats(&x), &scales, &list, &out],
        [1, 1, 1],
    );
    close(
        "rows before the first",
        &gpu.read_floats(&out),
        &reference::matvec::matmul(&w, &x[cols..], Activations::F32),
        SUM_ORDER,
    );
}

// ------------------------------------------------------------------ experts

struct Experts {
    geometry: MoeGeometry,
    codec: Codec,
    hidden: usize,
    rows: usize,
    /// place of each expert
    map: Vec<u32>,
    places: usize,
}

fn experts_case(gpu: &Gpu, case: &Experts, act: Activations) {
    let (g, hidden, rows) = (&case.geometry, case.hidden, case.rows);
    let mut rng = Random::new((hidden + rows) as u64);
    let experts: Vec<MlpWeights> = (0..g.experts)
        .map(|_| MlpWeights {
            up: random(case.codec, g.inter, hidden, &mut rng),
            down: random(case.codec, hidden, g.inter, &mut rng),
        })
        .collect();
    let (bias, normed) = (rng.normals(g.experts), rng.normals(rows * hidden));
    let gate: Vec<f32> = rng.normals(g.experts * hidden).iter().map(|v| v / (hidden as f32).sqrt()).collect();
    let routes: Vec<_> = normed.chunks(hidden).map(|row| reference::router::router(g, &gate, &bias, row)).collect();

    // the bank: every expert in its place
    let mut places: Vec<Option<Arena>> = (0..case.places).map(|_| None).collect();
    let mut at = [[0u32; 3]; 2];
    let mut place_words = 0;
    for (e, place) in case.map.iter().enumerate() {
        if *place != NONE {
            let mut arena = Arena::default();
            at = [arena.matrix(&lay(&experts[e].up)), arena.matrix(&lay(&experts[e].down))];
            place_words = arena.0.len();
            places[*place as usize] = Some(arena);
        }
    }
    let bank: Vec<u32> =
        places.into_iter().flat_map(|p| p.map_or_else(|| vec![UNWRITTEN; place_words], |a| a.0)).collect();
    let (bank, place) = (gpu.buffer(&bank), place_words as u32 / 4);

    let slot = slot(gpu, rows, 3);
    // router logits through the plain product
    let gate_matrix =
        Matrix::from_payload("gate", Codec::F32, [g.experts, hidden], bytemuck::cast_slice(&gate).to_vec());
    let laid = lay(&gate_matrix);
    let mut small = Arena::default();
    let [gate_base, gate_side, _] = small.matrix(&laid);
    let bias_at = 4 * small.floats(&bias);
    let small = gpu.buffer(&small.0);
    let dummy = gpu.buffer(&[0; 4]);
    let wide = padded(hidden);
    let rows_padded: Vec<f32> = normed
        .chunks(hidden)
        .flat_map(|r| r.iter().copied().chain(std::iter::repeat(0.0)).take(wide).collect::<Vec<_>>())
        .collect();
    let normed_buffer = gpu.floats(&rows_padded);
    let logits = gpu.empty(rows * g.experts);
    let params =
        gpu.buffer(&words(&[g.experts as u32, gate_base, gate_side, 0, g.experts as u32, 0, TO_ROW, 0, NONE, 0]));
    gpu.run(
        &matmat_pipeline(gpu, Codec::F32, Form::F32, false, &laid),
        &[&slot.flight, &slot.control, &params, &small, &small, &normed_buffer, &dummy, &dummy, &logits],
        [g.experts.div_ceil(64) as u32, rows.div_ceil(64) as u32, 1],
    );

    let k = g.top_k;
    let route = gpu.pass(
        &PREFILL_ROUTE,
        PLAIN,
        &[
            ("WG", 64),
            ("EXPERTS", g.experts),
            ("TOP_K", k),
            ("N_GROUP", g.n_group),
            ("TOPK_GROUP", g.topk_group),
            ("SCORES", g.experts),
            ("PICKS", k),
            ("GROUPS", g.n_group),
            ("AT_CELLS", k),
        ],
    );
    let map_at = 3;
    let map: Vec<u32> = [0; 3].into_iter().chain(case.map.iter().copied()).collect();
    let params = gpu.buffer(&words(&[0, bias_at, map_at, u32::from(g.norm_topk), g.scale.to_bits(), 0, 0, 0]));
    let routes_buffer = gpu.empty(rows * k * 4);
    gpu.run(
        &route,
        &[&slot.flight, &slot.control, &params, &small, &logits, &gpu.buffer(&map), &routes_buffer],
        [1, rows as u32, 1],
    );
    let got = gpu.read(&routes_buffer);
    let mut picks = vec![0usize; rows * k];
    for (r, want) in routes.iter().enumerate() {
        let mut order: Vec<usize> = (0..k).collect();
        order.sort_by_key(|i| want.picks[*i]);
        for (i, j) in order.into_iter().enumerate() {
            let entry = &got[4 * (r * k + i)..][..4];
            assert_eq!(entry[0], u32::from(want.picks[j].0), "row {r} pick {i}, gap {}", want.gap);
            assert_eq!(entry[1], case.map[entry[0] as usize]);
            assert!(
                (f32::from_bits(entry[2]) - want.weights[j]).abs() < 2e-6 * want.weights[j].abs(),
                "{} {}",
                f32::from_bits(entry[2]),
                want.weights[j]
            );
            picks[r * k + i] = want.picks[j].index();
        }
    }

    let layer = 2u32;
    let order_at = 4 + 4 * (rows * k / 64 + 1 + case.places);
    let list = gpu.empty(order_at + 2 * rows * k);
    let sort = gpu.pass(&PREFILL_SORT, PLAIN, &[("WG", 256), ("TOP_K", k), ("PLACES", case.places), ("TILE_ROWS", 64)]);
    let params = gpu.buffer(&[layer, order_at as u32, 0, 0]);
    gpu.run(&sort, &[&slot.flight, &slot.control, &params, &routes_buffer, &list], [1, 1, 1]);
    let listed = gpu.read(&list);
    let missing = picks.iter().filter(|e| case.map[**e] == NONE).count();
    assert_eq!((listed[1] as usize, listed[2] as usize), (rows * k - missing, missing));
    let mut seen = vec![false; rows * k];
    for tile in 0..listed[0] as usize {
        let at = 4 + 4 * tile;
        assert!(listed[at + 2] >= 1 && listed[at + 2] <= 64);
        for j in listed[at + 1]..listed[at + 1] + listed[at + 2] {
            let entry = &listed[order_at + 2 * j as usize..][..2];
            assert_eq!(entry[1], listed[at]);
            assert_eq!(case.map[picks[entry[0] as usize]], listed[at]);
            assert!(!std::mem::replace(&mut seen[entry[0] as usize], true));
        }
    }
    assert_eq!(seen.iter().filter(|s| **s).count(), rows * k - missing);
    // some of the places alone, as where experts stream through: the others' picks neither count nor halt
    if missing == 0 && case.places > 1 {
        let (first, some) = (case.places / 2, case.places - case.places / 2);
        let sort = gpu.pass(&PREFILL_SORT, PLAIN, &[("WG", 256), ("TOP_K", k), ("PLACES", some), ("TILE_ROWS", 64)]);
        let (params, list) =
            (gpu.buffer(&[layer, order_at as u32, first as u32, 1]), gpu.empty(order_at + 2 * rows * k));
        gpu.run(&sort, &[&slot.flight, &slot.control, &params, &routes_buffer, &list], [1, 1, 1]);
        let listed = gpu.read(&list);
        let wanted: Vec<usize> = (0..rows * k).filter(|i| case.map[picks[*i]] as usize >= first).collect();
        assert_eq!((listed[1] as usize, listed[2]), (wanted.len(), 0));
        let sorted = listed[order_at..][..2 * wanted.len()].chunks_exact(2);
        let mut seen: Vec<usize> = sorted
            .map(|entry| {
                assert_eq!(case.map[picks[entry[0] as usize]], entry[1] + first as u32);
                entry[0] as usize
            })
            .collect();
        seen.sort_unstable();
        assert_eq!(seen, wanted);
    }
    let control = gpu.read(&slot.control);
    if missing > 0 {
        assert_eq!(control[1..6], [1, 11, 0, 0, 2 * layer], "stopped at its own route");
    } else {
        assert_eq!(control[1], 0);
    }

    // up, down: also where the stop is the flight's own
    let form = Form::of(case.codec, act);
    let (up, down) = (lay(&experts[0].up), lay(&experts[0].down));
    let encode = |width: usize, field: u32, source: &Buffer, listed: bool| {
        let cols = padded(width);
        let pipeline = encode_pipeline(gpu, form, Source::Rows, &[("COLS", cols), ("TOP_K", k)]);
        // sorted rows read the row they were picked for; what up left is sorted already
        let top = if listed { 1 } else { 2 };
        let params =
            gpu.buffer(&words(&[NONE, field, place, cols as u32 / 4, 0, width as u32, 0, layer, top, order_at as u32]));
        let (acts, scales) = (gpu.empty(rows * k * form.act_words(cols)), gpu.empty(rows * k * cols / 32));
        gpu.run(
            &pipeline,
            &[&slot.flight, &slot.control, &params, &bank, source, &list, &acts, &scales],
            [1, rows as u32, k as u32],
        );
        (acts, scales)
    };
    let multiply =
        |m: &Matrix, laid: &Laid, at: [u32; 3], acts: &(Buffer, Buffer), stride: usize, to: u32, relu2: u32| {
            let pipeline = matmat_pipeline(gpu, case.codec, form, true, laid);
            let params = gpu.buffer(&words(&[
                m.rows() as u32,
                at[0],
                at[1],
                place,
                stride as u32,
                0,
                to,
                relu2,
                layer,
                order_at as u32,
            ]));
            let out = gpu.empty(rows * k * stride);
            let tiles = rows * k / 64 + 1 + case.places;
            gpu.run(
                &pipeline,
                &[&slot.flight, &slot.control, &params, &bank, &bank, &acts.0, &acts.1, &list, &out],
                [m.rows().div_ceil(64) as u32, tiles as u32, 1],
            );
            out
        };
    let acts = encode(hidden, at[0][2], &normed_buffer, true);
    let inner = multiply(&experts[0].up, &up, at[0], &acts, padded(g.inter), TO_ROW, 1);
    let acts = encode(g.inter, at[1][2], &inner, false);
    let made = multiply(&experts[0].down, &down, at[1], &acts, hidden, TO_PICK, 0);
    let mut all = gpu.read_floats(&made);
    let mut want = vec![0.0; rows * k * hidden];
    for (i, e) in picks.iter().enumerate() {
        let out = &mut want[i * hidden..][..hidden];
        reference::mlp::mlp(&experts[*e], &normed[i / k * hidden..][..hidden], act, out);
        if case.map[*e] == NONE {
            let made = &mut all[i * hidden..][..hidden];
            assert!(made.iter().all(|v| v.to_bits() == UNWRITTEN), "a missing pick was written");
            made.copy_from_slice(out);
        }
    }
    let tolerance = if form == Form::Int8 { CODE_FLIPS } else { Tolerance { nmse: 1e-11, max_abs: 1e-5, ..SUM_ORDER } };
    close(&format!("experts {} {act:?}", case.codec), &all, &want, tolerance);

    // the sum runs in the turn that the resume began
    let sum = gpu.pass(&PREFILL_SUM, PLAIN, &[("WG", 64), ("TOP_K", k)]);
    let mut words_of = control.clone();
    words_of[1] = 0;
    let resumed = gpu.buffer(&words_of);
    let (x, shared) = (rng.normals(rows * hidden), rng.normals(rows * hidden));
    let x_buffer = gpu.floats(&x);
    let params = gpu.buffer(&[hidden as u32, hidden as u32, 0, 1]);
    gpu.run(
        &sum,
        &[&slot.flight, &resumed, &params, &routes_buffer, &gpu.floats(&all), &gpu.floats(&shared), &x_buffer],
        [hidden.div_ceil(64) as u32, rows as u32, 1],
    );
    let mut want_x = x;
    for r in 0..rows {
        let weights: Vec<f32> = (0..k).map(|i| f32::from_bits(got[4 * (r * k + i) + 2])).collect();
        let outputs = &all[r * k * hidden..][..k * hidden];
        reference::moe_sum::moe_sum(
            &mut want_x[r * hidden..][..hidden],
            &weights,
            outputs,
            None,
            &shared[r * hidden..][..hidden],
            act,
        );
    }
    close("sum", &gpu.read_floats(&x_buffer), &want_x, SUM_ORDER);
}

#[test]
fn experts() {
    let gpu = gpu();
    let geometry = |experts, top_k, inter, n_group| MoeGeometry {
        experts,
        top_k,
        inter,
        shared_inter: 0,
        latent: None,
        n_group,
        topk_group: n_group.div_ceil(2),
        scale: 2.5,
        norm_topk: n_group == 1,
    };
    let full = |experts: u32| (0..experts).rev().collect::<Vec<u32>>();
    let mut half = full(8);
    half.iter_mut().for_each(|p| *p = if *p < 4 { *p } else { NONE });
    for act in [Activations::F32, Activations::Int8] {
        experts_case(
            &gpu,
            &Experts {
                geometry: geometry(8, 2, 64, 1),
                codec: Codec::Q4tp,
                hidden: 64,
                rows: 150,
                map: full(8),
                places: 8,
            },
            act,
        );
        experts_case(
            &gpu,
            &Experts {
                geometry: geometry(8, 3, 40, 2),
                codec: Codec::Q8_2f,
                hidden: 64,
                rows: 33,
                map: half.clone(),
                places: 5,
            },
            act,
        );
        experts_case(
            &gpu,
            &Experts {
                geometry: geometry(16, 6, 96, 1),
                codec: Codec::Q4tp,
                hidden: 96,
                rows: 1,
                map: full(16),
                places: 16,
            },
            act,
        );
    }
    experts_case(
        &gpu,
        &Experts { geometry: geometry(4, 2, 40, 1), codec: Codec::F32, hidden: 40, rows: 5, map: full(4), places: 4 },
        Activations::Int8,
    );
}

// ------------------------------------------------------------------ mamba

#[test]
fn convolution_and_scan() {
    let gpu = gpu();
    let limits = [0.0, f32::INFINITY];
    let cases = [
        (MambaGeometry { heads: 4, head_dim: 8, groups: 2, d_state: 16, d_conv: 4, dt_limit: limits }, 150, 5),
        (MambaGeometry { heads: 2, head_dim: 64, groups: 1, d_state: 128, d_conv: 4, dt_limit: limits }, 70, 0),
        (MambaGeometry { heads: 2, head_dim: 72, groups: 2, d_state: 68, d_conv: 3, dt_limit: [0.01, 0.5] }, 64, 2),
        (MambaGeometry { heads: 2, head_dim: 8, groups: 1, d_state: 8, d_conv: 4, dt_limit: limits }, 1, 1),
    ];
    for (g, rows, position) in cases {
        let mut rng = Random::new((rows + g.d_state) as u64);
        let (inner, channels, heads, taps) = (g.inner(), g.conv_channels(), g.heads, g.d_conv);
        let placeholder = || Matrix::from_payload("none", Codec::F32, [0, 0], Vec::new());
        let weights = MambaWeights {
            in_proj: placeholder(),
            out_proj: placeholder(),
            conv: rng.normals(channels * taps),
            conv_bias: rng.normals(channels),
            a_log: (0..heads).map(|_| 2.0 * rng.unit()).collect(),
            d_skip: rng.normals(heads),
            dt_bias: (0..heads).map(|_| rng.normal() - 2.0).collect(),
            norm: Vec::new(),
        };
        let stride = g.in_proj_rows() + 4;
        let proj = rng.normals(rows * stride);
        let conv_before =
            if position == 0 { vec![0.0; channels * (taps - 1)] } else { rng.normals(channels * (taps - 1)) };
        let ssm_before = rng.normals(g.ssm_state_len());

        // the twins
        let (mut ring, mut ssm) = (conv_before.clone(), ssm_before.clone());
        if position < taps - 1 {
            for c in 0..channels {
                ring[c * (taps - 1)..][..taps - 1 - position].fill(0.0);
            }
        }
        let ring_before = ring.clone();
        let (mut xbc, mut d) = (vec![0.0; rows * channels], Vec::new());
        for (r, out) in xbc.chunks_mut(channels).enumerate() {
            let u = &proj[r * stride + inner..][..channels];
            reference::conv_step::conv_step(u, &weights.conv, &weights.conv_bias, &mut ring, out);
            d.extend(&proj[r * stride + inner + channels..][..heads]);
        }
        let mut o = vec![0.0; rows * inner];
        reference::ssm_chunked::ssm_chunked(&g, &weights, 32, &xbc, &d, &mut ssm, &mut o);

        // the device: ring by position modulo 7, the state in snapshot 1
        let slots = 7;
        let mut device_ring = vec![0.25f32; slots * channels];
        for back in 1..taps {
            if position >= back {
                for c in 0..channels {
                    device_ring[(position - back) % slots * channels + c] =
                        ring_before[c * (taps - 1) + taps - 1 - back];
                }
            }
        }
        let mut arena = Arena::default();
        let at = [&weights.conv, &weights.conv_bias, &weights.a_log, &weights.d_skip, &weights.dt_bias]
            .map(|v| 4 * arena.floats(v));
        let arena = gpu.buffer(&arena.0);
        let slot = slot(&gpu, rows, position);
        let mut control = gpu.read(&slot.control);
        control[7] = 1;
        let control = gpu.buffer(&control);
        let numbers = [
            ("WG", 64),
            ("INNER", inner),
            ("CHANNELS", channels),
            ("TAPS", taps),
            ("RING", slots),
            ("PROJ", stride),
            ("HEADS", heads),
            ("P", g.head_dim),
            ("N", g.d_state),
            ("GROUPS", g.groups),
            ("DT_AT", (inner + channels)),
        ];
        let kernel = |kernel: &Kernel| gpu.pass(kernel, PLAIN, &numbers);
        let proj_buffer = gpu.floats(&proj);
        let ring_buffer = gpu.floats(&device_ring);
        let xbc_buffer = gpu.empty(rows * channels);
        let params = gpu.buffer(&[at[0], at[1], 0, 0]);
        let blocks = channels.div_ceil(64) as u32;
        gpu.run(
            &kernel(&PREFILL_CONV),
            &[&slot.flight, &control, &params, &arena, &proj_buffer, &ring_buffer, &xbc_buffer],
            [blocks, rows as u32, 1],
        );
        close("conv", &gpu.read_floats(&xbc_buffer), &xbc, SUM_ORDER);
        gpu.run(
            &kernel(&PREFILL_RING),
            &[&slot.flight, &control, &proj_buffer, &ring_buffer],
            [blocks, taps as u32 - 1, 1],
        );
        let got = gpu.read_floats(&ring_buffer);
        for back in 1..taps.min(rows + position + 1) {
            for c in 0..channels {
                assert_eq!(
                    got[(position + rows - back) % slots * channels + c],
                    ring[c * (taps - 1) + taps - 1 - back]
                );
            }
        }
        let steps = gpu.empty(rows * heads * 4);
        let params = gpu.buffer(&[at[2], at[4], g.dt_limit[0].to_bits(), g.dt_limit[1].to_bits()]);
        let chunks = rows.div_ceil(64);
        gpu.run(
            &kernel(&PREFILL_SSD_STEPS),
            &[&slot.flight, &control, &params, &arena, &proj_buffer, &steps],
            [heads.div_ceil(64) as u32, chunks as u32, 1],
        );
        let states = gpu.empty(chunks * g.ssm_state_len());
        let grid = [(g.head_dim.div_ceil(64) * g.d_state.div_ceil(64)) as u32, chunks as u32, heads as u32];
        // the same inputs as the twin's, so that only the scan is compared
        let xbc_buffer = gpu.floats(&xbc);
        gpu.run(&kernel(&PREFILL_SSD_STATES), &[&slot.flight, &control, &xbc_buffer, &steps, &states], grid);
        let mut snapshots = vec![7.0; 2 * g.ssm_state_len()];
        snapshots[g.ssm_state_len()..].copy_from_slice(&ssm_before);
        let state = gpu.floats(&snapshots);
        let params = gpu.buffer(&[g.ssm_state_len() as u32 / 4, 0, 0, 0]);
        gpu.run(
            &kernel(&PREFILL_SSD_PASS),
            &[&slot.flight, &control, &params, &steps, &states, &state],
            [(g.ssm_state_len() / 4).div_ceil(64) as u32, 1, 1],
        );
        let out = gpu.empty(rows * inner);
        let params = gpu.buffer(&[at[3], 0, 0, 0]);
        gpu.run(
            &kernel(&PREFILL_SSD_OUT),
            &[&slot.flight, &control, &params, &arena, &xbc_buffer, &steps, &states, &out],
            [g.head_dim.div_ceil(64) as u32, chunks as u32, heads as u32],
        );
        let tolerance =
            Tolerance { nmse: 1e-11, max_abs: 1e-5, why: "f32 sums in another order, exp of sums of up to 64 steps" };
        close(&format!("scan {g:?}"), &gpu.read_floats(&out), &o, tolerance);
        close("state", &gpu.read_floats(&state)[..ssm.len()], &ssm, tolerance);
    }
}

// ------------------------------------------------------------------ attention

#[test]
fn attention() {
    let gpu = gpu();
    let cases = [
        (AttentionGeometry { heads: 4, kv_heads: 2, head_dim: 8 }, 5, 0, 1),
        (AttentionGeometry { heads: 2, kv_heads: 1, head_dim: 128 }, 70, 33, 1),
        (AttentionGeometry { heads: 2, kv_heads: 1, head_dim: 72 }, 65, 200, 4),
        (AttentionGeometry { heads: 4, kv_heads: 4, head_dim: 20 }, 1, 64, 8),
    ];
    for (g, rows, position, splits) in cases {
        let mut rng = Random::new((rows + position) as u64);
        let (width, kv) = (g.q_width(), g.kv_width());
        let (stride, offset) = (width + 12, 4);
        let mut q = rng.normals(rows * stride);
        q.iter_mut().for_each(|v| *v *= 3.0);
        let length = position + rows;
        let kv_rows = rng.normals(length * 2 * kv);
        let slot = slot(&gpu, rows, position);
        let numbers = [("WG", 64), ("D", g.head_dim), ("HEADS", g.heads), ("KV_HEADS", g.kv_heads), ("SPLITS", splits)];
        let pipeline = gpu.pass(&PREFILL_ATTENTION, PLAIN, &numbers);
        let params = gpu.buffer(&[stride as u32 / 4, offset / 4, (1.0 / (g.head_dim as f32).sqrt()).to_bits(), 0]);
        let cells = if splits == 1 { g.head_dim } else { splits * (g.head_dim + 2) };
        let out = gpu.empty(rows * g.heads * cells);
        let grid = [g.heads as u32, rows.div_ceil(64) as u32, splits as u32];
        gpu.run(&pipeline, &[&slot.flight, &slot.control, &params, &gpu.floats(&q), &gpu.floats(&kv_rows), &out], grid);
        let mut got = gpu.read_floats(&out);
        if splits > 1 {
            let parts: Vec<reference::softmax_merge::Partial> = (got.chunks(g.head_dim + 2))
                .map(|p| reference::softmax_merge::Partial {
                    max: p[g.head_dim],
                    sum: p[g.head_dim + 1],
                    acc: p[..g.head_dim].to_vec(),
                })
                .collect();
            got = parts.chunks(splits).flat_map(reference::softmax_merge::softmax_merge).collect();
        }
        let (k, v): (Vec<f32>, Vec<f32>) = {
            let split = |at: usize| kv_rows.chunks(2 * kv).flat_map(|r| r[at * kv..][..kv].to_vec()).collect();
            (split(0), split(1))
        };
        let mut want = vec![0.0; rows * width];
        for r in 0..rows {
            let seen = (position + r + 1) * kv;
            reference::attention::attention(
                &g,
                &q[r * stride + offset as usize..][..width],
                &k[..seen],
                &v[..seen],
                &mut want[r * width..][..width],
            );
        }
        let tolerance =
            Tolerance { nmse: 1e-10, max_abs: 1e-5, why: "exp of scores of size 10, f32 sums in another order" };
        close(&format!("attention {g:?}"), &got, &want, tolerance);
    }
}

// ------------------------------------------------------------------ the last row

#[test]
fn the_last_row_goes_on_alone() {
    let gpu = gpu();
    let (rows, cols) = (5, 96);
    let wide = Random::new(3).normals(rows * cols);
    let slot = slot(&gpu, rows, 0);
    let pipeline = gpu.pass(&PREFILL_LAST, PLAIN, &[("WG", 64), ("COLS", cols)]);
    let (source, x) = (gpu.floats(&wide), gpu.empty(cols));
    gpu.run(&pipeline, &[&slot.flight, &stale(&gpu, &slot).control, &source, &x], [1, 1, 1]);
    assert!(gpu.read(&x).iter().all(|w| *w == UNWRITTEN));
    gpu.run(&pipeline, &[&slot.flight, &slot.control, &source, &x], [1, 1, 1]);
    assert_eq!(gpu.read_floats(&x), wide[(rows - 1) * cols..]);
}
