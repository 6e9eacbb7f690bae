//! One row of a matrix as f32, for every codec.
//!
//! Source: `cmf.md` §5.
//!
//! | codec | value of `w[r, c]` |
//! |---|---|
//! | f32, f16, bf16 | as stored |
//! | q8_2f | `q[r, c] * s[r] * f[c]`, in this order |
//! | q4tp | `(nibble - 8) * scale(r, c / 32)` |

use super::half::{bf16_to_f32, f16_at, f16_to_f32};
use crate::model::tensors::{Codec, Matrix, Q4Planes};

/// Writes row `row` of `matrix` to `out`, `[cols]`.
///
/// # Panics
///
/// If `row` or the length of `out` does not fit the matrix.
pub fn dequantize_row(matrix: &Matrix, row: usize, out: &mut [f32]) {
    let cols = matrix.cols();
    assert!(row < matrix.rows() && out.len() == cols, "row {row} of {matrix:?} into {} floats", out.len());
    match matrix.codec() {
        Codec::F32 => {
            let bytes = &matrix.payload()[4 * row * cols..][..4 * cols];
            for (out, b) in out.iter_mut().zip(bytes.chunks_exact(4)) {
                *out = f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
            }
        }
        Codec::F16 => {
            let bytes = &matrix.payload()[2 * row * cols..][..2 * cols];
            for (out, b) in out.iter_mut().zip(bytes.chunks_exact(2)) {
                *out = f16_to_f32(u16::from_le_bytes([b[0], b[1]]));
            }
        }
        Codec::Bf16 => {
            let bytes = &matrix.payload()[2 * row * cols..][..2 * cols];
            for (out, b) in out.iter_mut().zip(bytes.chunks_exact(2)) {
                *out = bf16_to_f32(u16::from_le_bytes([b[0], b[1]]));
            }
        }
        Codec::Q8_2f => {
            let planes = matrix.q8_2f();
            let scale = f16_at(planes.row_scales, row);
            for (c, out) in out.iter_mut().enumerate() {
                *out = f32::from(planes.codes[row * cols + c]) * scale * f16_at(planes.col_fields, c);
            }
        }
        Codec::Q4tp => {
            let planes = matrix.q4tp();
            let ladder = ladder(&planes, row);
            for (group, out) in out.chunks_exact_mut(Codec::GROUP).enumerate() {
                let scale = ladder[rung(&planes, row, group)];
                for (c, out) in out.iter_mut().enumerate() {
                    *out = nibble(&planes, row, group, c) as f32 * scale;
                }
            }
        }
    }
}

/// The 32 scales of one row: `exp2(lo) * exp2(step)^code`.
///
/// Evaluated by repeated multiplication, as the format's reference dequantiser
/// does. Kernels may call `exp2(lo + code * step)` instead: the two differ by
/// at most 5e-6 of the scale (`runtime.md` §3a).
#[must_use]
pub fn ladder(planes: &Q4Planes<'_>, row: usize) -> [f32; 32] {
    let lo = f16_at(planes.ladders, 2 * row);
    let step = f16_at(planes.ladders, 2 * row + 1);
    let factor = step.exp2();
    let mut scales = [lo.exp2(); 32];
    for code in 1..32 {
        scales[code] = scales[code - 1] * factor;
    }
    scales
}

/// The 5-bit rung of a group: bit `5 * group` of the row's slice, least significant bit first.
#[must_use]
pub fn rung(planes: &Q4Planes<'_>, row: usize, group: usize) -> usize {
    let bytes = Codec::code_bytes(planes.groups);
    let slice = &planes.rungs[row * bytes..][..bytes];
    let mut code = 0;
    for bit in 0..5 {
        let at = 5 * group + bit;
        code |= usize::from(slice[at / 8] >> (at % 8) & 1) << bit;
    }
    code
}

/// Element `c` (of 32) of a group, `-8..=7`.
#[must_use]
pub fn nibble(planes: &Q4Planes<'_>, row: usize, group: usize, c: usize) -> i32 {
    let byte = planes.nibbles[(row * planes.groups + group) * 16 + c / 2];
    i32::from(byte >> (4 * (c % 2)) & 0xf) - 8
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reference::half::f16_to_f32;

    /// The worked example of `cmf.md` §8: row 0 of `ramp` in q4tp, its second group all zero on rung 0.
    #[test]
    fn q4tp_worked_example() {
        let mut payload = vec![0x11; 16];
        payload.extend([0x88; 16]);
        payload.extend([0xb5, 0xc3, 0x0e, 0x16]);
        payload.extend([0x1d, 0x00]);
        let matrix = Matrix::from_payload("ramp", Codec::Q4tp, [1, 64], payload);
        let mut row = [1.0; 64];
        dequantize_row(&matrix, 0, &mut row);
        assert!((row[0] + 0.498_859_2).abs() < 1e-6, "{}", row[0]);
        assert!(row[..32].iter().all(|w| *w == row[0]));
        assert_eq!(row[32..], [0.0; 32]);
    }

    #[test]
    fn rungs_cross_byte_borders() {
        // nine groups: 45 bits in six bytes a row; codes 31, 0, 31, 0 … and, in the second row, counting up
        let codes = [[31, 0, 31, 0, 31, 0, 31, 0, 31], [1, 2, 3, 4, 5, 6, 7, 8, 9]];
        let mut rungs = Vec::new();
        for row in codes {
            let bits = row.iter().enumerate().fold(0u64, |bits, (g, code)| bits | code << (5 * g));
            rungs.extend(&bits.to_le_bytes()[..6]);
        }
        let planes = Q4Planes { nibbles: &[], ladders: &[], rungs: &rungs, groups: 9 };
        for (row, codes) in codes.iter().enumerate() {
            for (group, code) in codes.iter().enumerate() {
                assert_eq!(rung(&planes, row, group) as u64, *code, "row {row} group {group}");
            }
        }
    }

    /// The two evaluations that `runtime.md` §3a allows, over ladders that reach from 2^-14 upwards.
    #[test]
    fn ladders_agree_within_the_allowed_difference() {
        let mut largest = 0.0f64;
        for lo in [0xcb00u16, 0xc3b5, 0x8001, 0x0000, 0x3c00, 0x4500] {
            for step in [0x0001u16, 0x03ff, 0x160e, 0x288f, 0x3266, 0x3800] {
                let bytes = [lo.to_le_bytes(), step.to_le_bytes()].concat();
                let planes = Q4Planes { nibbles: &[], ladders: &bytes, rungs: &[], groups: 0 };
                let (lo, step) = (f64::from(f16_to_f32(lo)), f64::from(f16_to_f32(step)));
                for (code, scale) in ladder(&planes, 0).iter().enumerate() {
                    let exact = (lo + code as f64 * step).exp2();
                    largest = largest.max((f64::from(*scale) / exact - 1.0).abs());
                }
            }
        }
        assert!(largest < 5e-6, "{largest}");
    }

    #[test]
    fn q8_2f_with_unaligned_planes() {
        // 3 x 1: the half planes start at an odd byte
        let mut payload = vec![127u8, 0x80, 1];
        for half in [0x3c00u16, 0x0001, 0x4000, 0x3800] {
            payload.extend(half.to_le_bytes());
        }
        let matrix = Matrix::from_payload("odd", Codec::Q8_2f, [3, 1], payload);
        let rows: Vec<f32> = (0..3)
            .map(|r| {
                let mut out = [0.0];
                dequantize_row(&matrix, r, &mut out);
                out[0]
            })
            .collect();
        assert_eq!(rows, [63.5, -128.0 * 2f32.powi(-24) * 0.5, 1.0]);
    }
}
