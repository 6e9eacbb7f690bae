//! Linear layers and layer norms over f32 rows.

use std::ops::Range;

use rayon::prelude::*;

use super::gemm::{Factor, Spread, View, product};
use super::weights::{PerceptionError, Scope, rows_to_f32};
use crate::model::tensors::Matrix;

/// Weights converted at once: bounds the scratch (8 MiB) while a product stays long enough to be fast.
const PANEL_FLOATS: usize = 2 << 20;

/// Values below which spreading element-wise work costs more than it saves.
const SPREAD_FLOATS: usize = 1 << 17;

/// Where a layer's weights are.
enum Weight {
    /// `[cols, rows]` as f32: so turned, the product reads it as it lies, and needs no copy in its own order each time.
    Floats(Vec<f32>),
    /// In the file, converted a panel of rows at a time.
    Mapped(Matrix),
}

/// `y = x W^T + b`.
pub(crate) struct Linear {
    weight: Weight,
    bias: Option<Vec<f32>>,
    rows: usize,
    cols: usize,
}

/// Reusable memory for panels of converted weights.
#[derive(Default)]
pub(crate) struct Panel(Vec<f32>);

impl Linear {
    /// `name.weight [rows, cols]` and, where `biased`, `name.bias [rows]`.
    pub(crate) fn load(
        scope: &Scope<'_>,
        name: &str,
        shape: [Option<usize>; 2],
        biased: bool,
    ) -> Result<Self, PerceptionError> {
        let matrix = scope.matrix(&format!("{name}.weight"), shape)?;
        let bias = biased.then(|| scope.vector(&format!("{name}.bias"), Some(matrix.rows()))).transpose()?;
        Ok(Self { rows: matrix.rows(), cols: matrix.cols(), weight: Weight::Mapped(matrix), bias })
    }

    /// A layer made of values: `weight [rows, cols]`, `bias [rows]`.
    pub(crate) fn from_floats(weight: Vec<f32>, bias: Vec<f32>) -> Self {
        let rows = bias.len();
        let cols = weight.len() / rows;
        assert_eq!(weight.len(), rows * cols, "a bias for each row");
        Self { weight: Weight::Floats(turned(&weight, cols)), bias: Some(bias), rows, cols }
    }

    pub(crate) fn with_bias(mut self, bias: Vec<f32>) -> Self {
        assert_eq!(bias.len(), self.rows, "a bias for each row");
        self.bias = Some(bias);
        self
    }

    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    pub(crate) fn cols(&self) -> usize {
        self.cols
    }

    /// Floats that [`Linear::keep_floats`] would add to memory.
    pub(crate) fn mapped_floats(&self) -> usize {
        match self.weight {
            Weight::Floats(_) => 0,
            Weight::Mapped(_) => self.rows * self.cols,
        }
    }

    /// Converts the weights once and for all.
    pub(crate) fn keep_floats(&mut self) {
        if let Weight::Mapped(matrix) = &self.weight {
            let mut floats = vec![0.0; self.rows * self.cols];
            convert(matrix, 0, &mut floats);
            self.weight = Weight::Floats(turned(&floats, self.cols));
        }
    }

    /// `out = x W^T + b`, or `out += x W^T + b` where `add`. `x [n, cols]`, `out [n, rows]`.
    pub(crate) fn apply(&self, x: View<'_>, add: bool, out: &mut [f32], panel: &mut Panel) {
        assert_eq!(out.len(), x.rows * self.rows, "a row of output for each row of input");
        if let Some(bias) = &self.bias {
            each_row(out, self.rows, |row| {
                if add {
                    row.iter_mut().zip(bias).for_each(|(o, b)| *o += b);
                } else {
                    row.copy_from_slice(bias);
                }
            });
        }
        let keep = add || self.bias.is_some();
        self.panels(panel, |range, factor| {
            if x.rows > 0 {
                product(x, factor, 1.0, keep, &mut out[range.start..], self.rows, Spread::Pool);
            }
        });
    }

    /// Calls `f` with ranges of output rows and `x W^T + b` for them, `[n, range]`, in order.
    pub(crate) fn apply_panelwise(
        &self,
        x: View<'_>,
        panel: &mut Panel,
        out: &mut Vec<f32>,
        mut f: impl FnMut(Range<usize>, &[f32]),
    ) {
        self.panels(panel, |range, factor| {
            let width = range.len();
            out.clear();
            out.resize(x.rows * width, 0.0);
            if let Some(bias) = &self.bias {
                each_row(out, width, |row| row.copy_from_slice(&bias[range.clone()]));
            }
            product(x, factor, 1.0, true, out, width, Spread::Pool);
            f(range, out);
        });
    }

    fn panels(&self, panel: &mut Panel, mut f: impl FnMut(Range<usize>, Factor<'_>)) {
        match &self.weight {
            Weight::Floats(floats) => f(0..self.rows, Factor::Plain(View::dense(floats, self.rows))),
            Weight::Mapped(matrix) => {
                let step = (PANEL_FLOATS / self.cols.max(1)).clamp(1, self.rows.max(1));
                for first in (0..self.rows).step_by(step) {
                    let range = first..(first + step).min(self.rows);
                    panel.0.resize(range.len() * self.cols, 0.0);
                    convert(matrix, first, &mut panel.0);
                    f(range, Factor::Transposed(View::dense(&panel.0, self.cols)));
                }
            }
        }
    }
}

/// `w [rows, cols]` as `[cols, rows]`.
fn turned(w: &[f32], cols: usize) -> Vec<f32> {
    /// Columns of a stripe whose lines of memory stay in the nearest cache.
    const STRIPE: usize = 16;
    let rows = w.len() / cols.max(1);
    let mut turned = vec![0.0; w.len()];
    for first in (0..cols).step_by(STRIPE) {
        for (r, row) in w.chunks_exact(cols).enumerate() {
            for (c, value) in row.iter().enumerate().skip(first).take(STRIPE) {
                turned[c * rows + r] = *value;
            }
        }
    }
    turned
}

fn convert(matrix: &Matrix, first: usize, out: &mut [f32]) {
    let cols = matrix.cols();
    let rows = (SPREAD_FLOATS / cols.max(1)).max(1);
    if out.len() <= SPREAD_FLOATS {
        return rows_to_f32(matrix, first, out);
    }
    out.par_chunks_mut(rows * cols).enumerate().for_each(|(i, part)| rows_to_f32(matrix, first + i * rows, part));
}

/// Calls `f` with each row of `data [_, width]`, on the pool where that pays.
pub(crate) fn each_row(data: &mut [f32], width: usize, f: impl Fn(&mut [f32]) + Sync) {
    if data.len() <= SPREAD_FLOATS {
        data.chunks_exact_mut(width).for_each(f);
    } else {
        data.par_chunks_exact_mut(width).with_min_len((SPREAD_FLOATS / 4 / width).max(1)).for_each(&f);
    }
}

/// Layer norm with weight and bias; epsilon 1e-5 (`model.md` §4.2).
pub(crate) struct Norm {
    weight: Vec<f32>,
    bias: Vec<f32>,
}

impl Norm {
    pub(crate) fn load(scope: &Scope<'_>, name: &str, width: Option<usize>) -> Result<Self, PerceptionError> {
        let weight = scope.vector(&format!("{name}.weight"), width)?;
        let bias = scope.vector(&format!("{name}.bias"), Some(weight.len()))?;
        Ok(Self { weight, bias })
    }

    pub(crate) fn width(&self) -> usize {
        self.weight.len()
    }

    /// Normalises one row in place.
    pub(crate) fn row(&self, x: &mut [f32]) {
        let n = x.len() as f32;
        let mean = sum(x, |v| v) / n;
        let var = sum(x, |v| (v - mean) * (v - mean)) / n;
        let scale = 1.0 / (var + 1e-5).sqrt();
        for ((x, w), b) in x.iter_mut().zip(&self.weight).zip(&self.bias) {
            *x = (*x - mean) * scale * w + b;
        }
    }

    /// `out = norm(x)` for rows of this norm's width.
    pub(crate) fn rows(&self, x: &[f32], out: &mut Vec<f32>) {
        out.clear();
        out.extend_from_slice(x);
        self.rows_in_place(out);
    }

    /// Normalises each row of this norm's width in place.
    pub(crate) fn rows_in_place(&self, x: &mut [f32]) {
        each_row(x, self.width(), |row| self.row(row));
    }
}

/// Sum in eight lanes: vectorises, and rounds less than one running sum.
fn sum(x: &[f32], f: impl Fn(f32) -> f32) -> f32 {
    let mut lanes = [0.0f32; 8];
    let chunks = x.chunks_exact(8);
    let rest: f32 = chunks.remainder().iter().map(|v| f(*v)).sum();
    for chunk in chunks {
        for (lane, v) in lanes.iter_mut().zip(chunk) {
            *lane += f(*v);
        }
    }
    lanes.iter().sum::<f32>() + rest
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::tensors::Codec;

    fn linear(rows: usize, cols: usize, mapped: bool) -> Linear {
        let floats: Vec<f32> = (0..rows * cols).map(|i| ((i * 5) % 11) as f32 - 5.0).collect();
        let bias = (0..rows).map(|r| r as f32 * 0.5).collect();
        let bytes = floats.iter().flat_map(|v| v.to_le_bytes()).collect();
        let weight = if mapped {
            Weight::Mapped(Matrix::from_payload("w", Codec::F32, [rows, cols], bytes))
        } else {
            Weight::Floats(turned(&floats, cols))
        };
        Linear { weight, bias: Some(bias), rows, cols }
    }

    #[test]
    fn mapped_panels_equal_kept_floats() {
        // Wide enough for several panels, with a last one that is short.
        let cols = 3000;
        let rows = 2 * (PANEL_FLOATS / cols) + 5;
        let x: Vec<f32> = (0..2 * cols).map(|i| (i % 3) as f32 - 1.0).collect();
        let mut panel = Panel::default();
        let mut kept = linear(rows, cols, true);
        let mapped = linear(rows, cols, true);
        kept.keep_floats();
        assert_eq!((kept.mapped_floats(), mapped.mapped_floats()), (0, rows * cols));
        let (mut a, mut b) = (vec![1.0; 2 * rows], vec![1.0; 2 * rows]);
        for add in [false, true] {
            kept.apply(View::dense(&x, cols), add, &mut a, &mut panel);
            mapped.apply(View::dense(&x, cols), add, &mut b, &mut panel);
            assert_eq!(a, b);
        }
        let mut seen = 0;
        mapped.apply(View::dense(&x, cols), false, &mut a, &mut panel);
        mapped.apply_panelwise(View::dense(&x, cols), &mut panel, &mut Vec::new(), |range, out| {
            assert_eq!(range.start, seen);
            seen = range.end;
            for i in 0..2 {
                assert_eq!(out[i * range.len()..][..range.len()], a[i * rows..][range.clone()]);
            }
        });
        assert_eq!(seen, rows);
    }

    #[test]
    fn norm_has_zero_mean_and_unit_variance() {
        let norm = Norm { weight: vec![2.0; 11], bias: vec![-1.0; 11] };
        let mut x: Vec<f32> = (0..22).map(|i| (i * i % 13) as f32).collect();
        norm.rows_in_place(&mut x);
        for row in x.chunks_exact(11) {
            let mean = row.iter().sum::<f32>() / 11.0;
            let var = row.iter().map(|v| (v - mean) * (v - mean)).sum::<f32>() / 11.0;
            assert!((mean + 1.0).abs() < 1e-6 && (var - 4.0).abs() < 1e-4, "{mean} {var}");
        }
    }
}
