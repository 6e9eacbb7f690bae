//! Activation rows in the form a matrix's kernel reads (`runtime.md` §3a).
//!
//! A q8_2f matrix wants its column field folded in, a q4tp matrix wants even
//! columns before odd ones, as its nibbles lie. In int8 mode
//! each group of 32 columns becomes codes and a step; sixteen groups make a
//! [`Stretch`], inside which each instruction set lays the codes as its
//! kernels meet them. All rows are padded with zeros, so that kernels need no
//! tails on this side.

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
    /// Stretches of a row.
    pub(crate) width: usize,
    /// `[n, width]`
    pub(crate) stretches: Vec<Stretch>,
}

/// Sixteen groups of an int8 row, in whatever order the set's kernels want.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
pub(crate) struct Stretch {
    /// 16 groups of 32; the set's `quantize` says in which order.
    pub(crate) codes: [i8; GROUP * LANES],
    /// Value of one code; 0 for padding.
    pub(crate) steps: [f32; LANES],
    /// Minus the sum of a group's codes times what kernels add to a weight to make it unsigned: [`Q8_OFFSET`], or the 8
    /// that stands for zero in q4tp.
    pub(crate) offsets: [i32; LANES],
}

impl Stretch {
    const ZERO: Self = Self { codes: [0; GROUP * LANES], steps: [0.0; LANES], offsets: [0; LANES] };
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
        /// `[width]`
        to: &'a mut [Stretch],
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
        let width = cols.div_ceil(GROUP * LANES);
        Self { n, width, stretches: vec![Stretch::ZERO; n * width] }
    }

    /// One row, `[width]`.
    #[inline(always)]
    pub(crate) fn row(&self, i: usize) -> &[Stretch] {
        &self.stretches[i * self.width..(i + 1) * self.width]
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
            let width = codes.width;
            let items = x.chunks_exact(cols).zip(codes.stretches.chunks_exact_mut(width));
            each(items.map(|(x, to)| Row::Codes { x, to }).collect(), &|row| {
                if let Row::Codes { x, to } = row {
                    let mut folded = vec![0.0; width * GROUP * LANES];
                    folded[..cols].copy_from_slice(x);
                    (set.quantize)(&mut folded, fields, split.then_some(cols / GROUP), to);
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
            Self::Codes(rows) => {
                let stretches = take(&rows.stretches, rows.width, picks);
                Self::Codes(Codes { n: picks.len(), width: rows.width, stretches })
            }
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
fn split_group<T: Copy + Default>(group: &[T; GROUP]) -> [T; GROUP] {
    let mut split = [T::default(); GROUP];
    for k in 0..GROUP / 2 {
        split[k] = group[2 * k];
        split[GROUP / 2 + k] = group[2 * k + 1];
    }
    split
}

/// Codes of one row: `d = max|a| / 127`, `q = round(a / d)` to even; a zero or subnormal `d` gives zeros.
///
/// `x` is padded to whole stretches and is left multiplied by `fields`. An infinity
/// or NaN in a group makes its step one too, so that it reaches the output. Groups lie in order;
/// for q4tp (`split`, a row's groups) a group's even columns come before its odd ones.
#[inline(always)]
pub(super) fn quantize_body(x: &mut [f32], fields: Option<&[u8]>, split: Option<usize>, to: &mut [Stretch]) {
    if let Some(fields) = fields {
        fold(x, fields);
    }
    for (x, to) in x.as_chunks::<{ GROUP * LANES }>().0.iter().zip(to) {
        let groups = x.as_chunks::<GROUP>().0.iter().zip(to.codes.as_chunks_mut::<GROUP>().0);
        for (((x, codes), step), offset) in groups.zip(&mut to.steps).zip(&mut to.offsets) {
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
            *codes = if split.is_some() { split_group(&q) } else { q };
            *offset = total.iter().sum::<i32>() * if split.is_some() { -8 } else { -Q8_OFFSET };
        }
    }
}
