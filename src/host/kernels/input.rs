//! Activation rows in the form a matrix's kernel reads (`runtime.md` §3a).
//!
//! A q8_2f matrix wants its column field folded in, a q4tp matrix wants even
//! columns before odd ones, as its nibbles lie. In int8 mode
//! each group of 32 columns becomes codes and a step. All rows are padded with
//! zeros, so that kernels need no tails on this side.

use crate::host::math;
use crate::knobs::Activations;
use crate::model::tensors::{Codec, Matrix};

use super::Set;

/// Columns that share a step.
pub(crate) const GROUP: usize = Codec::GROUP;
/// Groups whose products are summed side by side, one a lane.
pub(crate) const LANES: usize = 16;
/// Makes an int8 weight unsigned.
pub(crate) const Q8_OFFSET: i32 = 128;
/// Columns a float kernel sums side by side.
pub(crate) const WIDE: usize = 64;

/// Prepared rows.
#[derive(Clone, Debug)]
pub(crate) enum Input {
    /// For int8 products.
    Codes(Codes),
    /// For float products.
    Floats(Floats),
}

/// int8 rows.
#[derive(Clone, Debug)]
pub(crate) struct Codes {
    /// Rows.
    pub(crate) n: usize,
    /// Groups of a row, a multiple of [`LANES`].
    pub(crate) lanes: usize,
    /// `[n, lanes, 32]`; for q4tp the even columns of four groups, then their odd ones
    pub(crate) codes: Vec<i8>,
    /// `[n, lanes]`: value of one code; 0 for padding.
    pub(crate) steps: Vec<f32>,
    /// `[n, lanes]`: sum of a group's codes times what kernels add to a weight to make it
    /// unsigned: [`Q8_OFFSET`], or the 8 that stands for zero in q4tp.
    pub(crate) offsets: Vec<i32>,
}

/// Float rows.
#[derive(Clone, Debug)]
pub(crate) struct Floats {
    /// Rows.
    pub(crate) n: usize,
    /// Columns of a row, a multiple of [`WIDE`].
    pub(crate) stride: usize,
    /// `[n, stride]`
    pub(crate) x: Vec<f32>,
}

/// One row being prepared.
pub(crate) enum Row<'a> {
    /// For int8 products.
    Codes {
        /// `[cols]`
        x: &'a [f32],
        /// `[lanes]`
        codes: &'a mut [[i8; GROUP]],
        /// `[lanes]`
        steps: &'a mut [f32],
        /// `[lanes]`
        offsets: &'a mut [i32],
    },
    /// For float products.
    Floats {
        /// `[cols]`
        x: &'a [f32],
        /// `[stride]`
        to: &'a mut [f32],
    },
}

impl Codes {
    fn zeros(n: usize, cols: usize) -> Self {
        let lanes = cols.div_ceil(GROUP).next_multiple_of(LANES);
        Self { n, lanes, codes: vec![0; n * lanes * GROUP], steps: vec![0.0; n * lanes], offsets: vec![0; n * lanes] }
    }

    /// One row: codes `[lanes, 32]`, steps and offsets `[lanes]`.
    #[inline(always)]
    pub(crate) fn row(&self, i: usize) -> (&[[i8; GROUP]], &[f32], &[i32]) {
        let lanes = i * self.lanes..(i + 1) * self.lanes;
        (&self.codes.as_chunks().0[lanes.clone()], &self.steps[lanes.clone()], &self.offsets[lanes])
    }
}

impl Floats {
    /// One row.
    #[inline(always)]
    pub(crate) fn row(&self, i: usize) -> &[f32] {
        &self.x[i * self.stride..(i + 1) * self.stride]
    }
}

impl Input {
    /// Rows `x [n, cols]` for products with `matrix`. `each` does its work on all items, in whatever way.
    pub(crate) fn new(
        set: &Set,
        matrix: &Matrix,
        act: Activations,
        x: &[f32],
        each: impl FnOnce(Vec<Row<'_>>, &(dyn Fn(Row<'_>) + Sync)),
    ) -> Self {
        let cols = matrix.cols();
        assert_eq!(x.len() % cols, 0, "rows of {cols} columns for {matrix:?}");
        let n = x.len() / cols;
        let fields = (matrix.codec() == Codec::Q8_2f).then(|| matrix.q8_2f().col_fields);
        let split = matrix.codec() == Codec::Q4tp;
        if matrix.codec().is_quantized() && act == Activations::Int8 {
            let mut codes = Codes::zeros(n, cols);
            let lanes = codes.lanes;
            let items = (x.chunks_exact(cols).zip(codes.codes.as_chunks_mut::<GROUP>().0.chunks_exact_mut(lanes)))
                .zip(codes.steps.chunks_exact_mut(lanes))
                .zip(codes.offsets.chunks_exact_mut(lanes))
                .map(|(((x, codes), steps), offsets)| Row::Codes { x, codes, steps, offsets })
                .collect();
            each(items, &|row| {
                if let Row::Codes { x, codes, steps, offsets } = row {
                    let mut folded = vec![0.0; lanes * GROUP];
                    folded[..cols].copy_from_slice(x);
                    (set.quantize)(&mut folded, fields, split, codes, steps, offsets);
                }
            });
            return Self::Codes(codes);
        }
        let stride = cols.next_multiple_of(WIDE);
        let mut rows = vec![0.0; n * stride];
        let items = rows.chunks_exact_mut(stride).zip(x.chunks_exact(cols));
        each(items.map(|(to, x)| Row::Floats { x, to }).collect(), &|row| {
            if let Row::Floats { x, to } = row {
                to[..cols].copy_from_slice(x);
                if let Some(fields) = fields {
                    fold(&mut to[..cols], fields);
                }
                if split {
                    to.as_chunks_mut::<GROUP>().0.iter_mut().for_each(|group| *group = split_group(group));
                }
            }
        });
        Self::Floats(Floats { n, stride, x: rows })
    }

    /// Rows prepared.
    pub(crate) fn n(&self) -> usize {
        match self {
            Self::Codes(rows) => rows.n,
            Self::Floats(rows) => rows.n,
        }
    }

    /// Some of the rows, in the order given.
    pub(crate) fn gather(&self, picks: &[u32]) -> Self {
        fn take<T: Copy>(from: &[T], width: usize, picks: &[u32]) -> Vec<T> {
            picks.iter().flat_map(|i| &from[*i as usize * width..(*i as usize + 1) * width]).copied().collect()
        }
        match self {
            Self::Codes(rows) => Self::Codes(Codes {
                n: picks.len(),
                lanes: rows.lanes,
                codes: take(&rows.codes, rows.lanes * GROUP, picks),
                steps: take(&rows.steps, rows.lanes, picks),
                offsets: take(&rows.offsets, rows.lanes, picks),
            }),
            Self::Floats(rows) => {
                Self::Floats(Floats { n: picks.len(), stride: rows.stride, x: take(&rows.x, rows.stride, picks) })
            }
        }
    }
}

/// Multiplies a row by a q8_2f matrix's column field.
#[inline(always)]
fn fold(x: &mut [f32], fields: &[u8]) {
    for (x, field) in x.iter_mut().zip(fields.as_chunks::<2>().0) {
        *x *= math::half(u16::from_le_bytes(*field));
    }
}

/// Even columns, then odd ones.
#[inline(always)]
fn split_group(group: &[f32; GROUP]) -> [f32; GROUP] {
    let mut split = [0.0; GROUP];
    for k in 0..GROUP / 2 {
        split[k] = group[2 * k];
        split[GROUP / 2 + k] = group[2 * k + 1];
    }
    split
}

/// Even columns of four groups, then their odd ones: how a 64-byte vector of q4tp nibbles meets them.
#[inline(always)]
fn split_four(groups: &[[i8; GROUP]; 4]) -> [[i8; GROUP]; 4] {
    let mut split = [0i8; 4 * GROUP];
    for (k, pair) in groups.as_flattened().as_chunks::<2>().0.iter().enumerate() {
        split[k] = pair[0];
        split[2 * GROUP + k] = pair[1];
    }
    bytemuck::cast(split)
}

/// Codes of one row: `d = max|a| / 127`, `q = round(a / d)` to even; a zero or subnormal `d` gives zeros.
///
/// `x` is padded to whole lanes and is left multiplied by `fields`. An infinity
/// or NaN in a group makes its step one too, so that it reaches the output.
#[inline(always)]
pub(super) fn quantize_body(
    x: &mut [f32],
    fields: Option<&[u8]>,
    split: bool,
    codes: &mut [[i8; GROUP]],
    steps: &mut [f32],
    offsets: &mut [i32],
) {
    if let Some(fields) = fields {
        fold(x, fields);
    }
    let groups = x.as_chunks::<GROUP>().0.iter().zip(codes.iter_mut());
    for (((x, codes), step), offset) in groups.zip(steps).zip(offsets) {
        // The magnitudes' bits order as the magnitudes do, with NaN above infinity.
        let mut largest = [0i32; LANES];
        for k in 0..LANES {
            let magnitude = |x: f32| (x.to_bits() & 0x7fff_ffff) as i32;
            largest[k] = magnitude(x[k]).max(magnitude(x[LANES + k]));
        }
        for width in [8, 4, 2, 1] {
            for k in 0..width {
                largest[k] = largest[k].max(largest[k + width]);
            }
        }
        let d = f32::from_bits(largest[0] as u32) / 127.0;
        let mut q = [0i8; GROUP];
        let zero = d < f32::MIN_POSITIVE;
        *step = if zero { 0.0 } else { d };
        let divisor = if zero { f32::INFINITY } else { d };
        let mut total = [0i32; LANES];
        for k in 0..GROUP {
            let a = (x[k] / divisor).clamp(-127.0, 127.0) + math::ROUND;
            let code = (a.to_bits() as i32).wrapping_sub(math::ROUND.to_bits() as i32) as i8;
            q[k] = code;
            total[k % LANES] += i32::from(code);
        }
        *codes = q;
        *offset = total.iter().sum::<i32>() * if split { 8 } else { Q8_OFFSET };
    }
    if split {
        codes.as_chunks_mut().0.iter_mut().for_each(|four| *four = split_four(four));
    }
}
