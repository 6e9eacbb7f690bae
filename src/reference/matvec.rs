//! `y[r] = sum_c w[r, c] * x[c]`, for every codec and both arithmetics.
//!
//! Source: `cmf.md` §5, `runtime.md` §3a.
//!
//! | codec | f32 activations | int8 activations |
//! |---|---|---|
//! | f32, f16, bf16 | `sum w * x` | the same: exact matrices are not concerned |
//! | q8_2f | `s[r] * sum q * (f[c] * x[c])` | `a = x * f`; `s[r] * sum_g d_g * sum q * code` |
//! | q4tp | `sum (nib - 8) * scale * x` | `a = x`; `sum_g d_g * scale(r, g) * sum (nib - 8) * code` |
//!
//! Inner int8 sums are exact in i32; the rows are independent and run in parallel.

use rayon::prelude::*;

use super::dequantize::{dequantize_row, ladder, nibble, rung};
use super::dot;
use super::half::f16_at;
use super::quantize_activations::{ActivationCodes, quantize_activations};
use crate::knobs::Activations;
use crate::model::tensors::{Codec, Matrix};

/// Multiply-adds below which splitting the rows over threads costs more than it gives.
const PARALLEL_MIN: usize = 1 << 15;

/// One product; `x` `[cols]`, `y` `[rows]`.
///
/// # Panics
///
/// If the lengths do not fit the matrix.
pub fn matvec(w: &Matrix, x: &[f32], act: Activations, y: &mut [f32]) {
    assert_eq!((x.len(), y.len()), (w.cols(), w.rows()), "{w:?}");
    match (w.codec(), act) {
        (Codec::F32 | Codec::F16 | Codec::Bf16, _) | (Codec::Q4tp, Activations::F32) => {
            each_row(w, y, |r, buffer| {
                dequantize_row(w, r, buffer);
                dot(buffer, x) as f32
            });
        }
        (Codec::Q8_2f, Activations::F32) => {
            let (planes, a) = (w.q8_2f(), times_field(w, x));
            each_row(w, y, |r, _| {
                let mut sum = 0.0f64;
                for (q, a) in planes.codes[r * w.cols()..].iter().zip(&a) {
                    sum += f64::from(*q) * f64::from(*a);
                }
                (f64::from(f16_at(planes.row_scales, r)) * sum) as f32
            });
        }
        (Codec::Q8_2f, Activations::Int8) => {
            let (planes, a) = (w.q8_2f(), quantize_activations(&times_field(w, x)));
            each_row(w, y, |r, _| {
                let mut sum = 0.0f64;
                for (group, q) in planes.codes[r * w.cols()..][..w.cols()].chunks(Codec::GROUP).enumerate() {
                    let inner: i32 = q.iter().zip(codes(&a, group)).map(|(q, a)| i32::from(*q) * i32::from(*a)).sum();
                    sum += f64::from(a.scales[group]) * f64::from(inner);
                }
                (f64::from(f16_at(planes.row_scales, r)) * sum) as f32
            });
        }
        (Codec::Q4tp, Activations::Int8) => {
            let (planes, a) = (w.q4tp(), quantize_activations(x));
            each_row(w, y, |r, _| {
                let ladder = ladder(&planes, r);
                let mut sum = 0.0f64;
                for group in 0..planes.groups {
                    let codes = codes(&a, group).iter().enumerate();
                    let inner: i32 = codes.map(|(c, a)| nibble(&planes, r, group, c) * i32::from(*a)).sum();
                    let scale = a.scales[group] * ladder[rung(&planes, r, group)];
                    sum += f64::from(scale) * f64::from(inner);
                }
                sum as f32
            });
        }
    }
}

/// [`matvec`] of every row of `x` `[n, cols]`; `[n, rows]`.
///
/// # Panics
///
/// If `x` is no whole number of rows.
#[must_use]
pub fn matmul(w: &Matrix, x: &[f32], act: Activations) -> Vec<f32> {
    assert!(x.len().is_multiple_of(w.cols()), "{w:?} of {} floats", x.len());
    let mut y = vec![0.0; x.len() / w.cols() * w.rows()];
    for (x, y) in x.chunks_exact(w.cols()).zip(y.chunks_exact_mut(w.rows())) {
        matvec(w, x, act, y);
    }
    y
}

/// `a[c] = x[c] * f[c]`
fn times_field(w: &Matrix, x: &[f32]) -> Vec<f32> {
    let planes = w.q8_2f();
    x.iter().enumerate().map(|(c, x)| x * f16_at(planes.col_fields, c)).collect()
}

/// The 32 codes of one group.
fn codes(a: &ActivationCodes, group: usize) -> &[i8] {
    &a.codes[group * Codec::GROUP..][..Codec::GROUP]
}

/// Fills `y[r]` with `row(r, buffer)`; the buffer of `[cols]` floats is the thread's own.
fn each_row(w: &Matrix, y: &mut [f32], row: impl Fn(usize, &mut [f32]) -> f32 + Sync) {
    let rows_min = (PARALLEL_MIN / w.cols().max(1)).max(1);
    y.par_iter_mut()
        .with_min_len(rows_min)
        .enumerate()
        .for_each_init(|| vec![0.0; w.cols()], |buffer, (r, y)| *y = row(r, buffer));
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn halves(values: &[u16]) -> Vec<u8> {
        values.iter().flat_map(|h| h.to_le_bytes()).collect()
    }

    /// A payload of any codec: codes from the bytes, halves that are finite and of moderate size.
    fn matrix(codec: Codec, rows: usize, cols: usize, bytes: &[u8], fields: &[u16]) -> Matrix {
        let byte = |i: usize| bytes[i % bytes.len()];
        let field = |i: usize| fields[i % fields.len()] & 0xbfff;
        let groups = cols / Codec::GROUP;
        let payload = match codec {
            Codec::F32 => (0..rows * cols).flat_map(|i| (f32::from(byte(i) as i8) / 7.0).to_le_bytes()).collect(),
            Codec::F16 => halves(&(0..rows * cols).map(field).collect::<Vec<_>>()),
            Codec::Bf16 => halves(&(0..rows * cols).map(|i| u16::from(byte(i)) | 0x3f00).collect::<Vec<_>>()),
            Codec::Q8_2f => {
                let mut out: Vec<u8> = (0..rows * cols).map(byte).collect();
                out.extend(halves(&(0..rows + cols).map(field).collect::<Vec<_>>()));
                out
            }
            Codec::Q4tp => {
                let mut out: Vec<u8> = (0..rows * groups * 16).map(byte).collect();
                for r in 0..rows {
                    // lo in -4..0, step in 0..0.25
                    out.extend(halves(&[0xc000 | field(r) & 0x3ff, field(r + 1) & 0x33ff]));
                }
                out.extend((0..rows * Codec::code_bytes(groups)).map(byte));
                out
            }
        };
        Matrix::from_payload("case", codec, [rows, cols], payload)
    }

    fn any_matrix() -> impl Strategy<Value = Matrix> {
        let codec = prop::sample::select(vec![Codec::F32, Codec::F16, Codec::Bf16, Codec::Q8_2f, Codec::Q4tp]);
        (
            codec,
            1usize..6,
            1usize..100,
            prop::collection::vec(any::<u8>(), 1..200),
            prop::collection::vec(any::<u16>(), 1..50),
        )
            .prop_map(|(codec, rows, cols, bytes, fields)| {
                let cols = if codec == Codec::Q4tp { cols.div_ceil(32) * 32 } else { cols };
                matrix(codec, rows, cols, &bytes, &fields)
            })
    }

    /// `sum |w| |x|` and `sum w x` of a row in f64: the scale of the rounding errors, and the value.
    fn exact(w: &Matrix, r: usize, x: &[f32]) -> (f64, f64) {
        let mut row = vec![0.0; w.cols()];
        dequantize_row(w, r, &mut row);
        let size = row.iter().zip(x).map(|(w, x)| f64::from(w.abs()) * f64::from(x.abs())).sum();
        (size, dot(&row, x))
    }

    proptest! {
        #[test]
        fn f32_activations_are_the_dot_with_the_dequantised_row(w in any_matrix(), seed in prop::collection::vec(-3f32..3.0, 1..40)) {
            let x: Vec<f32> = (0..w.cols()).map(|c| seed[c % seed.len()]).collect();
            let mut y = vec![0.0; w.rows()];
            matvec(&w, &x, Activations::F32, &mut y);
            for (r, y) in y.iter().enumerate() {
                let (size, value) = exact(&w, r, &x);
                // two roundings in the dequantised weight, one in f * x, one at the end
                prop_assert!((f64::from(*y) - value).abs() <= 2.5e-7 * size + 1e-37, "{w:?} row {r}: {y} {value}");
            }
        }

        #[test]
        fn int8_activations_are_the_dot_with_the_rounded_row(w in any_matrix(), seed in prop::collection::vec(-3f32..3.0, 1..40)) {
            let x: Vec<f32> = (0..w.cols()).map(|c| seed[c % seed.len()]).collect();
            let mut y = vec![0.0; w.rows()];
            matvec(&w, &x, Activations::Int8, &mut y);
            // what the codes stand for, and the weight they are multiplied with
            let a = if w.codec() == Codec::Q8_2f { times_field(&w, &x) } else { x.clone() };
            let rounded: Vec<f32> = if w.codec().is_quantized() {
                let coded = quantize_activations(&a);
                (0..a.len()).map(|c| f32::from(coded.codes[c]) * coded.scales[c / 32]).collect()
            } else {
                a
            };
            for (r, y) in y.iter().enumerate() {
                let mut row = vec![0.0; w.cols()];
                dequantize_row(&w, r, &mut row);
                if w.codec() == Codec::Q8_2f {
                    let planes = w.q8_2f();
                    for (c, row) in row.iter_mut().enumerate() {
                        *row = f32::from(planes.codes[r * w.cols() + c]) * f16_at(planes.row_scales, r);
                    }
                }
                let size: f64 = row.iter().zip(&rounded).map(|(w, a)| f64::from(w.abs()) * f64::from(a.abs())).sum();
                prop_assert!((f64::from(*y) - dot(&row, &rounded)).abs() <= 2.5e-7 * size + 1e-37, "{w:?} row {r}: {y}");
            }
        }
    }

    #[test]
    fn int8_by_hand_with_a_padded_group() {
        // 1 x 33, q8_2f: s = 1/2, f = 1 but for the last column, f = 2
        let mut payload = vec![2u8; 33];
        payload[32] = (-3i8) as u8;
        payload.extend(halves(&[0x3800]));
        payload.extend(halves(&[0x3c00; 32]));
        payload.extend(halves(&[0x4000]));
        let w = Matrix::from_payload("w", Codec::Q8_2f, [1, 33], payload);
        let mut x = [0.0; 33];
        x[0] = 127.0;
        x[1] = 1.4;
        x[32] = 10.0;
        let mut y = [0.0];
        matvec(&w, &x, Activations::Int8, &mut y);
        // group 0: d = 1, codes 127 and 1; group 1: a = 20, d = 20 / 127, code 127
        assert_eq!(y[0], 0.5 * (2.0 * 127.0 + 2.0 - 3.0 * 127.0 * (20.0 / 127.0)));
        matvec(&w, &x, Activations::F32, &mut y);
        assert!((y[0] - 0.5 * (2.0 * 127.0 + 2.0 * 1.4 - 3.0 * 20.0)).abs() < 1e-5);
    }

    #[test]
    fn many_rows_in_parallel_equal_one_by_one() {
        let bytes: Vec<u8> = (0..251u32).map(|i| (i * 97 % 256) as u8).collect();
        let w = matrix(Codec::Q4tp, 700, 64, &bytes, &[0x1234, 0x3456, 0x2fff]);
        let x: Vec<f32> = (0..128).map(|i| (i as f32 * 0.7).sin()).collect();
        for act in [Activations::F32, Activations::Int8] {
            let both = matmul(&w, &x, act);
            for (n, x) in x.chunks(64).enumerate() {
                let mut y = vec![0.0; 700];
                matvec(&w, x, act, &mut y);
                assert_eq!(both[700 * n..][..700], y);
            }
        }
    }
}
