//! The products as plain loops over fixed numbers of lanes.
//!
//! Inlined into functions compiled for one instruction set each, where the
//! compiler turns the lanes into vectors. Order of the sums, everywhere:
//!
//! * int8: group `g` of 32 columns gives `t = (d·scale) · sum` with an exact
//!   integer sum; lane `g mod 16` adds its `t` in order of `g`; the lanes are
//!   summed by [`math::tree`]. No fused multiply-add: all sets agree bit for bit.
//! * float: lane `c mod 64` adds its products in order of `c`; the four
//!   sixteens are added `(0 + 1) + (2 + 3)`, then [`math::tree`].

use crate::host::math;
use crate::model::tensors::Codec;

use super::input::{Codes, Floats, GROUP, LANES, WIDE};
use super::set::{CODES_MAX, Line};

/// What the logarithms of a ladder's sixteen parts are made of: `lo` and `step` times these. Lanes 0 to 7 are every
/// fourth rung, 8 to 11 the factors from it to the next three.
pub(super) const PARTS: [[f32; LANES]; 2] = [
    [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0],
    [0.0, 4.0, 8.0, 12.0, 16.0, 20.0, 24.0, 28.0, 0.0, 1.0, 2.0, 3.0, 0.0, 0.0, 0.0, 0.0],
];

/// The 32 rungs of a q4tp row, `2^(lo + code · step)`: every fourth one times `2^step`, `2^(2 · step)`, `2^(3 · step)`.
#[inline(always)]
pub(super) fn ladder(params: &[u8; 4]) -> [f32; 32] {
    let (lo, step) = (math::half_at(&params[..2]), math::half_at(&params[2..]));
    let mut parts = [0.0; LANES];
    for l in 0..LANES {
        parts[l] = math::exp2(lo * PARTS[0][l] + step * PARTS[1][l]);
    }
    let mut rungs = [0.0; 32];
    for code in 0..32 {
        rungs[code] = parts[code / 4] * parts[8 + code % 4];
    }
    rungs
}

/// Rung number of group `g`: 5 bits at bit `5·g` of the row's codes.
#[inline(always)]
fn rung(codes: &[u8], g: usize) -> usize {
    let (byte, shift) = (5 * g / 8, 5 * g % 8);
    let high = codes.get(byte + 1).copied().unwrap_or(0);
    (u16::from_le_bytes([codes[byte], high]) >> shift) as usize & 31
}

/// Scales of q4tp rows: `out [rows, lanes]`, zero beyond `groups`.
#[inline(always)]
pub(super) fn scales(ladders: &[u8], codes: &[u8], groups: usize, out: &mut [f32]) {
    let (width, lanes) = (Codec::code_bytes(groups), groups.next_multiple_of(LANES));
    for ((params, codes), out) in ladders.as_chunks().0.iter().zip(codes.chunks_exact(width)).zip(out.chunks_mut(lanes))
    {
        let rungs = ladder(params);
        for (g, out) in out[..groups].iter_mut().enumerate() {
            *out = rungs[rung(codes, g)];
        }
        out[groups..].fill(0.0);
    }
}

/// `sum w·q` of a group, exact.
#[inline(always)]
fn group_sum(w: &[i8; GROUP], q: &[i8; GROUP]) -> i32 {
    let mut sum = 0;
    for k in 0..GROUP {
        sum += i32::from(w[k]) * i32::from(q[k]);
    }
    sum
}

/// q8_2f, int8 activations, without the row scale.
#[inline(always)]
pub(super) fn q8_codes(w: &[i8], cols: usize, x: &Codes, first: usize, out: &mut [Line]) {
    for (r, w) in w.chunks_exact(cols).enumerate() {
        let (whole, tail) = w.as_chunks::<{ GROUP * LANES }>();
        let mut last = [0; GROUP * LANES];
        last[..tail.len()].copy_from_slice(tail);
        for (i, out) in out.iter_mut().enumerate() {
            let mut lanes = [0.0f32; LANES];
            for (w, x) in whole.iter().chain([&last]).zip(x.row(first + i)) {
                let mut sums = [0; LANES];
                let groups = w.as_chunks::<GROUP>().0.iter().zip(x.codes.as_chunks::<GROUP>().0);
                for ((w, q), sum) in groups.zip(&mut sums) {
                    *sum = group_sum(w, q);
                }
                for l in 0..LANES {
                    lanes[l] += x.steps[l] * sums[l] as f32;
                }
            }
            out[r] = math::tree(lanes);
        }
    }
}

/// q4tp, int8 activations; `ladders [rows, 4]` and rung codes.
#[inline(always)]
pub(super) fn q4_codes(
    w: &[u8],
    groups: usize,
    ladders: &[u8],
    codes: &[u8],
    x: &Codes,
    first: usize,
    out: &mut [Line],
) {
    let codes = codes.chunks_exact(Codec::code_bytes(groups));
    for (r, ((w, ladder), codes)) in w.chunks_exact(groups * 16).zip(ladders.as_chunks().0).zip(codes).enumerate() {
        let rungs = self::ladder(ladder);
        let mut lanes = [[0.0f32; LANES]; CODES_MAX];
        for (stretch, w) in w.chunks(16 * LANES).enumerate() {
            let mut scales = [0.0; LANES];
            // Signed weights, a group's even columns before its odd ones.
            let mut signed = [[0i8; GROUP]; LANES];
            for (l, w) in w.as_chunks::<16>().0.iter().enumerate() {
                scales[l] = rungs[rung(codes, LANES * stretch + l)];
                for k in 0..16 {
                    signed[l][k] = (w[k] & 15) as i8 - 8;
                    signed[l][16 + k] = (w[k] >> 4) as i8 - 8;
                }
            }
            for (i, lanes) in lanes.iter_mut().enumerate().take(out.len()) {
                let x = &x.row(first + i)[stretch];
                let mut sums = [0; LANES];
                for ((w, q), sum) in signed.iter().zip(x.codes.as_chunks().0).zip(&mut sums) {
                    *sum = group_sum(w, q);
                }
                for l in 0..LANES {
                    lanes[l] += (x.steps[l] * scales[l]) * sums[l] as f32;
                }
            }
        }
        for (out, lanes) in out.iter_mut().zip(lanes) {
            out[r] = math::tree(lanes);
        }
    }
}

/// Float activations. `load(row, column, weights)` fills up to
/// 64 weights from `column` on (the rest is zero before and must stay so).
#[inline(always)]
pub(super) fn floats<const N: usize, const FMA: bool>(
    rows: usize,
    cols: usize,
    load: impl Fn(usize, usize, &mut [f32; WIDE]),
    x: &Floats,
    first: usize,
    out: &mut [Line],
) {
    for r in 0..rows {
        let mut lanes = [[0.0f32; WIDE]; N];
        for column in (0..cols).step_by(WIDE) {
            let mut w = [0.0f32; WIDE];
            load(r, column, &mut w);
            for i in 0..N {
                let x: &[f32; WIDE] = x.row(first + i)[column..].first_chunk().expect("padded rows");
                for l in 0..WIDE {
                    lanes[i][l] = if FMA { w[l].mul_add(x[l], lanes[i][l]) } else { lanes[i][l] + w[l] * x[l] };
                }
            }
        }
        for i in 0..N {
            let mut sum = [0.0; LANES];
            for l in 0..LANES {
                sum[l] = (lanes[i][l] + lanes[i][16 + l]) + (lanes[i][32 + l] + lanes[i][48 + l]);
            }
            out[i][r] = math::tree(sum);
        }
    }
}

/// Loads from rows of elements of `SIZE` bytes.
#[inline(always)]
pub(super) fn elements<const SIZE: usize>(
    w: &[u8],
    cols: usize,
    value: impl Fn([u8; SIZE]) -> f32,
) -> impl Fn(usize, usize, &mut [f32; WIDE]) {
    move |r, column, out| {
        let from = &w[(r * cols + column) * SIZE..(r * cols + cols) * SIZE];
        match from.first_chunk_of::<SIZE>() {
            Some(whole) => {
                for l in 0..WIDE {
                    out[l] = value(whole[l]);
                }
            }
            None => {
                for (out, from) in out.iter_mut().zip(from.as_chunks::<SIZE>().0) {
                    *out = value(*from);
                }
            }
        }
    }
}

/// The first 64 elements, where there are as many.
trait FirstWide {
    fn first_chunk_of<const SIZE: usize>(&self) -> Option<&[[u8; SIZE]; WIDE]>;
}

impl FirstWide for [u8] {
    #[inline(always)]
    fn first_chunk_of<const SIZE: usize>(&self) -> Option<&[[u8; SIZE]; WIDE]> {
        self.as_chunks::<SIZE>().0.first_chunk()
    }
}

/// Loads from q4tp rows: two groups, each its even columns and then its odd ones.
#[inline(always)]
pub(super) fn nibbles(w: &[u8], groups: usize, scales: &[f32]) -> impl Fn(usize, usize, &mut [f32; WIDE]) {
    let lanes = groups.next_multiple_of(LANES);
    move |r, column, out| {
        let first = column / GROUP;
        for (j, out) in out.as_chunks_mut::<GROUP>().0.iter_mut().enumerate().take(groups - first) {
            let g = first + j;
            let w = &w.as_chunks::<16>().0[r * groups + g];
            let scale = scales[r * lanes + g];
            for k in 0..16 {
                out[k] = (i32::from(w[k] & 15) - 8) as f32 * scale;
                out[16 + k] = (i32::from(w[k] >> 4) - 8) as f32 * scale;
            }
        }
    }
}

/// Dot products of float rows: `out [matrix rows, rows]`.
#[inline(always)]
pub(super) fn dots(matrix: &[f32], rows: &[f32], width: usize, out: &mut [f32]) {
    let n = rows.len() / width;
    for (line, out) in matrix.chunks_exact(width).zip(out.chunks_exact_mut(n)) {
        for (row, out) in rows.chunks_exact(width).zip(out) {
            *out = math::wide_dot(line, row);
        }
    }
}
