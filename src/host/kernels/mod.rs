//! Products of activation rows with stored matrices.
//!
//! A matrix is cut into tiles of rows, about as many bytes each; a parallel
//! region works off the tiles of any number of matrices. Inside a tile a few
//! weight rows stay in the nearest cache while all activation rows pass, so
//! that memory is read once whatever their number. Each output is computed from
//! its weight row and its activation row alone, in one order: it does not
//! depend on how many rows there are, nor on threads or tiles.

#![allow(
    clippy::needless_range_loop,
    clippy::too_many_arguments,
    clippy::type_complexity,
    reason = "lanes are indexed side by side; kernels take planes and shapes as they are"
)]

mod body;
mod input;
mod portable;
mod set;
#[cfg(target_arch = "x86_64")]
pub(super) mod simd_avx2;
#[cfg(target_arch = "x86_64")]
pub(super) mod simd_avx512;

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

pub(crate) use input::Input;
pub(crate) use set::Set;

use self::input::{GROUP, LANES};
use self::set::{BLOCK, CHUNK, CODES_MAX, Line};
use super::isa::Isa;
use super::math;
use super::pool::Pool;
use crate::knobs::Activations;
use crate::model::tensors::{Codec, Matrix};

/// Fewest weight bytes worth handing to another thread.
const TILE_MIN_BYTES: usize = 32 << 10;
/// Most weight bytes of a tile, some fifteen microseconds: the last threads of a region hold up the others no longer.
const TILE_MAX_BYTES: usize = 128 << 10;
/// Tiles for each thread, so that the last ones end together.
const TILES_PER_THREAD: usize = 12;

/// Regions of products run with each instruction set.
static RUNS: [AtomicU64; Isa::ALL.len()] = [const { AtomicU64::new(0) }; Isa::ALL.len()];

/// How many regions of products this process has run with an instruction set: tests prove by it that a set was used.
#[must_use]
pub fn regions_run(isa: Isa) -> u64 {
    RUNS[isa as usize].load(Ordering::Relaxed)
}

/// A product of a parallel region.
pub(crate) struct Job<'a> {
    /// Weights.
    pub(crate) matrix: &'a Matrix,
    /// Rows prepared for them.
    pub(crate) input: &'a Input,
    /// `[n, matrix.rows()]`
    pub(crate) out: &'a mut [f32],
}

/// `out[i] = matrix · x[i]` for rows `x [n, cols]`, `out [n, rows]`.
///
/// # Panics
///
/// If the lengths do not fit the matrix.
pub fn matmul(pool: &Pool, matrix: &Matrix, x: &[f32], act: Activations, out: &mut [f32]) {
    let input = prepare(pool, matrix, act, x);
    run(pool, vec![Job { matrix, input: &input, out }]);
}

/// One row of a matrix as floats, `out [cols]`: an embedding look-up.
///
/// # Panics
///
/// If there is no such row or `out` has another length.
pub fn row(matrix: &Matrix, r: usize, out: &mut [f32]) {
    let cols = matrix.cols();
    assert!(r < matrix.rows(), "row {r} of {matrix:?}");
    assert_eq!(out.len(), cols, "columns of {matrix:?}");
    match matrix.codec() {
        Codec::Q8_2f => {
            let planes = matrix.q8_2f();
            let scale = math::half_at(&planes.row_scales[2 * r..]);
            for (c, out) in out.iter_mut().enumerate() {
                let field = math::half_at(&planes.col_fields[2 * c..]);
                *out = f32::from(planes.codes[r * cols + c]) * scale * field;
            }
        }
        Codec::Q4tp => {
            let planes = matrix.q4tp();
            let mut scales = vec![0.0; planes.groups.next_multiple_of(LANES)];
            scale_rows(&portable::SET, matrix, r..r + 1, &mut scales);
            let row = &planes.nibbles[r * cols / 2..(r + 1) * cols / 2];
            for (k, byte) in row.iter().enumerate() {
                let scale = scales[2 * k / GROUP];
                out[2 * k] = (i32::from(byte & 15) - 8) as f32 * scale;
                out[2 * k + 1] = (i32::from(byte >> 4) - 8) as f32 * scale;
            }
        }
        Codec::F32 => {
            let row = &matrix.payload()[4 * r * cols..];
            out.iter_mut().zip(row.as_chunks().0).for_each(|(out, w)| *out = f32::from_le_bytes(*w));
        }
        Codec::F16 | Codec::Bf16 => {
            let row = &matrix.payload()[2 * r * cols..];
            for (out, w) in out.iter_mut().zip(row.as_chunks().0) {
                let bits = u16::from_le_bytes(*w);
                let brain = matrix.codec() == Codec::Bf16;
                *out = if brain { f32::from_bits(u32::from(bits) << 16) } else { math::half(bits) };
            }
        }
    }
}

/// Rows `x [n, cols]` prepared for products with `matrix`, in parallel when there are many.
pub(crate) fn prepare(pool: &Pool, matrix: &Matrix, act: Activations, x: &[f32]) -> Input {
    /// Rows of a task: some ten microseconds.
    const ROWS: usize = 8;
    Input::new(Set::of(pool.isa()), matrix, act, x, |mut rows, work| {
        let mut tasks = Vec::with_capacity(rows.len().div_ceil(ROWS));
        while !rows.is_empty() {
            tasks.push(rows.split_off(rows.len().saturating_sub(ROWS)));
        }
        pool.each(tasks, |rows: Vec<_>| rows.into_iter().for_each(work));
    })
}

/// As [`prepare`], on this thread alone.
pub(crate) fn prepare_here(set: &Set, matrix: &Matrix, act: Activations, x: &[f32]) -> Input {
    Input::new(set, matrix, act, x, |rows, work| rows.into_iter().for_each(work))
}

/// All products, in one parallel region.
pub(crate) fn run(pool: &Pool, jobs: Vec<Job<'_>>) {
    let bytes = jobs.iter().map(|job| job.matrix.payload().len()).sum();
    let mut tiles = Vec::new();
    for Job { matrix, input, out } in jobs {
        for (rows, out) in split_columns(out, input.n(), &cut(pool, matrix, bytes)) {
            tiles.push((matrix, input, rows, out));
        }
    }
    let set = Set::of(pool.isa());
    RUNS[pool.isa() as usize].fetch_add(1, Ordering::Relaxed);
    pool.each(tiles, |(matrix, input, rows, mut out)| {
        tile(set, matrix, rows, input, |r, i, y| out[i][r..r + y.len()].copy_from_slice(y));
    });
}

/// Ranges of a matrix's rows for a region that reads `bytes` in all.
pub(crate) fn cut(pool: &Pool, matrix: &Matrix, bytes: usize) -> Vec<Range<usize>> {
    let wanted = (bytes / (pool.threads() * TILES_PER_THREAD)).clamp(TILE_MIN_BYTES, TILE_MAX_BYTES);
    let row_bytes = (matrix.payload().len() / matrix.rows()).max(1);
    // Whole blocks, so that only a matrix's last tile has a short one.
    let step = (wanted / row_bytes).next_multiple_of(BLOCK).max(BLOCK);
    (0..matrix.rows()).step_by(step).map(|r| r..(r + step).min(matrix.rows())).collect()
}

/// Cuts `out [n, width]` at the given ranges of columns, which follow each other and cover it.
pub(crate) fn split_columns<'a>(
    out: &'a mut [f32],
    n: usize,
    ranges: &[Range<usize>],
) -> Vec<(Range<usize>, Vec<&'a mut [f32]>)> {
    let width = ranges.last().map_or(0, |range| range.end);
    assert_eq!(out.len(), n * width, "output of {n} rows");
    let mut parts: Vec<_> = ranges.iter().map(|range| (range.clone(), Vec::with_capacity(n))).collect();
    for mut row in out.chunks_exact_mut(width.max(1)) {
        for (range, part) in &mut parts {
            let (head, rest) = row.split_at_mut(range.len());
            part.push(head);
            row = rest;
        }
    }
    parts
}

/// Products with the weight rows of one tile: `give(row - rows.start, input row, values)` with the values of up to
/// [`BLOCK`] rows that follow each other, rows in order.
pub(crate) fn tile(
    set: &Set,
    matrix: &Matrix,
    rows: Range<usize>,
    input: &Input,
    mut give: impl FnMut(usize, usize, &[f32]),
) {
    let (cols, n) = (matrix.cols(), input.n());
    let step = if matches!(input, Input::Codes(_)) { CODES_MAX } else { CHUNK };
    let mut lines = [[0.0f32; BLOCK]; CODES_MAX];
    let mut scales = Vec::new();
    for start in rows.clone().step_by(BLOCK) {
        let block = start..(start + BLOCK).min(rows.end);
        let mut row_scales = None;
        match (matrix.codec(), input) {
            (Codec::Q8_2f, _) => {
                let halves = matrix.q8_2f().row_scales[2 * block.start..2 * block.end].as_chunks().0;
                let row_scales = row_scales.insert([0.0f32; BLOCK]);
                row_scales.iter_mut().zip(halves).for_each(|(s, h)| *s = math::half(u16::from_le_bytes(*h)));
            }
            (Codec::Q4tp, Input::Floats(_)) => {
                scales.resize(block.len() * (cols / GROUP).next_multiple_of(LANES), 0.0);
                scale_rows(set, matrix, block.clone(), &mut scales);
            }
            _ => {}
        }
        for first in (0..n).step_by(step) {
            let lines = &mut lines[..step.min(n - first)];
            few(set, matrix, block.clone(), &scales, input, first, lines);
            for (i, line) in lines.iter_mut().enumerate() {
                if let Some(row_scales) = &row_scales {
                    line.iter_mut().zip(row_scales).for_each(|(y, scale)| *y *= scale);
                }
                give(block.start - rows.start, first + i, &line[..block.len()]);
            }
        }
    }
}

/// Products of a block's rows with a few activation rows.
fn few(
    set: &Set,
    matrix: &Matrix,
    block: Range<usize>,
    scales: &[f32],
    input: &Input,
    first: usize,
    lines: &mut [Line],
) {
    let cols = matrix.cols();
    let elements = |size: usize| &matrix.payload()[block.start * cols * size..block.end * cols * size];
    match (matrix.codec(), input) {
        (Codec::Q8_2f, Input::Codes(x)) => {
            (set.q8_codes)(&matrix.q8_2f().codes[block.start * cols..block.end * cols], cols, x, first, lines);
        }
        (Codec::Q8_2f, Input::Floats(x)) => {
            (set.q8_floats)(&matrix.q8_2f().codes[block.start * cols..block.end * cols], cols, x, first, lines);
        }
        (Codec::Q4tp, Input::Codes(x)) => {
            let (planes, groups) = (matrix.q4tp(), cols / GROUP);
            let (w, width) = (&planes.nibbles[block.start * cols / 2..block.end * cols / 2], Codec::code_bytes(groups));
            let ladders = &planes.ladders[4 * block.start..4 * block.end];
            (set.q4_codes)(w, groups, ladders, &planes.rungs[width * block.start..width * block.end], x, first, lines);
        }
        (Codec::Q4tp, Input::Floats(x)) => {
            let w = &matrix.q4tp().nibbles[block.start * cols / 2..block.end * cols / 2];
            (set.q4_floats)(w, cols / GROUP, scales, x, first, lines);
        }
        (Codec::F32, Input::Floats(x)) => (set.f32)(elements(4), cols, x, first, lines),
        (Codec::F16, Input::Floats(x)) => (set.f16)(elements(2), cols, x, first, lines),
        (Codec::Bf16, Input::Floats(x)) => (set.bf16)(elements(2), cols, x, first, lines),
        (codec, Input::Codes(_)) => unreachable!("int8 rows for {codec}"),
    }
}

/// Scales of some q4tp rows: `out [rows, lanes]`.
fn scale_rows(set: &Set, matrix: &Matrix, rows: Range<usize>, out: &mut [f32]) {
    let planes = matrix.q4tp();
    let width = Codec::code_bytes(planes.groups);
    let ladders = &planes.ladders[4 * rows.start..4 * rows.end];
    (set.scales)(ladders, &planes.rungs[width * rows.start..width * rows.end], planes.groups, out);
}
