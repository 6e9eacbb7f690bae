//! How matrices and vectors lie on the device, and the bytes that make them so.
//!
//! A buffer is seen as vec4s (codes, fields, norms) and as words (row scales,
//! ladders). Rows are padded to whole groups of 32 columns, with zeros. Codes
//! of a matrix whose rows need no padding are the file's own bytes.
//!
//! | format | codes, a row | side words, a row | field |
//! |---|---|---|---|
//! | q8_2f | int8 `[cols]` | f32 scale | f32 `[cols]` |
//! | q4tp | nibbles `[cols / 32, 16]` | f32 lo, f32 step, six 5-bit rungs a word | – |
//! | f32, f16 | f32 `[cols]` | – | – |
//! | bf16 | bf16 `[cols]` | – | – |

use std::borrow::Cow;

use half::f16;

use super::super::kernels::Format;
use super::super::params::NONE;
use crate::model::tensors::{Codec, Matrix};

/// Pieces begin at multiples of this.
const ALIGN: u64 = 64;

/// Columns with their padding.
#[must_use]
pub fn padded(cols: usize) -> usize {
    cols.next_multiple_of(32)
}

/// A matrix on the device, or a run of its rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Laid {
    /// How its codes lie.
    pub format: Format,
    /// Rows.
    pub rows: usize,
    /// Columns with padding.
    pub cols: usize,
    /// Codes, in vec4s.
    pub base: u32,
    /// Side words, in words.
    pub side: u32,
    /// Column field, in vec4s, or [`NONE`].
    pub field: u32,
}

/// The format that a codec is held in.
#[must_use]
pub fn format_of(codec: Codec) -> Format {
    match codec {
        Codec::Q8_2f => Format::Q8,
        Codec::Q4tp => Format::Q4,
        Codec::F32 | Codec::F16 => Format::F32,
        Codec::Bf16 => Format::Bf16,
    }
}

/// Hands out space of one buffer.
#[derive(Clone, Debug, Default)]
pub struct Space {
    /// Bytes handed out.
    pub bytes: u64,
}

impl Space {
    fn take(&mut self, bytes: u64) -> u64 {
        let at = self.bytes;
        self.bytes = (at + bytes).next_multiple_of(ALIGN);
        at
    }

    /// Space for a matrix of `rows` rows.
    pub fn matrix(&mut self, matrix: &Matrix, rows: usize) -> Laid {
        let format = format_of(matrix.codec());
        let cols = padded(matrix.cols());
        let codes = self.take((rows * cols / format.chunk() * 16) as u64);
        let side = self.take((rows * format.side_words(cols) * 4) as u64);
        let field = if format == Format::Q8 { (self.take(4 * cols as u64) / 16) as u32 } else { NONE };
        Laid { format, rows, cols, base: (codes / 16) as u32, side: (side / 4) as u32, field }
    }

    /// Space for `len` floats; in vec4s.
    pub fn floats(&mut self, len: usize) -> u32 {
        (self.take(4 * len as u64) / 16) as u32
    }
}

/// The codes of rows `first..first + rows`.
#[must_use]
pub fn codes(matrix: &Matrix, first: usize, rows: usize) -> Cow<'_, [u8]> {
    let (cols, wide) = (matrix.cols(), padded(matrix.cols()));
    let (bytes, row) = match matrix.codec() {
        Codec::Q8_2f => (matrix.payload(), cols),
        Codec::Q4tp => (matrix.payload(), cols / 2),
        Codec::Bf16 => (matrix.payload(), 2 * cols),
        Codec::F32 => (matrix.payload(), 4 * cols),
        Codec::F16 => {
            let mut out = Vec::with_capacity(4 * rows * wide);
            for halves in matrix.payload()[2 * first * cols..2 * (first + rows) * cols].chunks_exact(2 * cols) {
                out.extend(
                    halves.chunks_exact(2).flat_map(|h| f16::from_le_bytes([h[0], h[1]]).to_f32().to_le_bytes()),
                );
                out.resize(out.len() + 4 * (wide - cols), 0);
            }
            return Cow::Owned(out);
        }
    };
    let bytes = &bytes[first * row..(first + rows) * row];
    if cols == wide {
        return Cow::Borrowed(bytes);
    }
    let wide = row / cols * wide;
    let mut out = Vec::with_capacity(rows * wide);
    for bytes in bytes.chunks_exact(row) {
        out.extend_from_slice(bytes);
        out.resize(out.len() + wide - row, 0);
    }
    Cow::Owned(out)
}

fn half_at(halves: &[u8], i: usize) -> f32 {
    f16::from_le_bytes([halves[2 * i], halves[2 * i + 1]]).to_f32()
}

/// The side words of rows `first..first + rows`, as bytes.
#[must_use]
pub fn side(matrix: &Matrix, first: usize, rows: usize) -> Vec<u8> {
    match matrix.codec() {
        Codec::Q8_2f => {
            let scales = matrix.q8_2f().row_scales;
            (first..first + rows).flat_map(|r| half_at(scales, r).to_le_bytes()).collect()
        }
        Codec::Q4tp => {
            let planes = matrix.q4tp();
            let words = planes.groups.div_ceil(6);
            let row_bytes = Codec::code_bytes(planes.groups);
            let mut out = Vec::with_capacity(rows * (8 + 4 * words));
            for r in first..first + rows {
                out.extend(half_at(planes.ladders, 2 * r).to_le_bytes());
                out.extend(half_at(planes.ladders, 2 * r + 1).to_le_bytes());
                let slice = &planes.rungs[r * row_bytes..][..row_bytes];
                for word in 0..words {
                    // six codes are 30 bits in a row
                    let mut window = [0; 8];
                    let from = &slice[30 * word / 8..];
                    let n = from.len().min(8);
                    window[..n].copy_from_slice(&from[..n]);
                    let bits = (u64::from_le_bytes(window) >> (30 * word % 8)) as u32 & 0x3fff_ffff;
                    out.extend(bits.to_le_bytes());
                }
            }
            out
        }
        Codec::F32 | Codec::F16 | Codec::Bf16 => Vec::new(),
    }
}

/// The column field with its padding, as bytes; empty where the codec has none.
#[must_use]
pub fn field(matrix: &Matrix) -> Vec<u8> {
    if matrix.codec() != Codec::Q8_2f {
        return Vec::new();
    }
    let fields = matrix.q8_2f().col_fields;
    let mut out: Vec<u8> = (0..matrix.cols()).flat_map(|c| half_at(fields, c).to_le_bytes()).collect();
    out.resize(4 * padded(matrix.cols()), 0);
    out
}

/// Rows of floats, each padded with zeros to whole groups of 32.
#[must_use]
pub fn rows_padded(floats: &[f32], cols: usize) -> Vec<u8> {
    let mut out = Vec::with_capacity(4 * floats.len() / cols * padded(cols));
    for row in floats.chunks_exact(cols) {
        out.extend_from_slice(bytemuck::cast_slice(row));
        out.resize(out.len() + 4 * (padded(cols) - cols), 0);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reference::dequantize::rung;

    #[test]
    fn rungs_are_six_to_a_word() {
        for groups in [1, 2, 5, 6, 7, 58, 84] {
            let cols = 32 * groups;
            let len = Codec::Q4tp.payload_len(3, cols).expect("a shape");
            let payload: Vec<u8> = (0..len).map(|i| (i * 37 + i / 7) as u8 & 0x3f).collect();
            let matrix = Matrix::from_payload("m", Codec::Q4tp, [3, cols], payload);
            let side = side(&matrix, 0, 3);
            let words: Vec<u32> =
                side.chunks_exact(4).map(|b| u32::from_le_bytes(b.try_into().expect("four"))).collect();
            let row = Format::Q4.side_words(cols);
            for r in 0..3 {
                for g in 0..groups {
                    let word = words[r * row + 2 + g / 6];
                    assert_eq!((word >> (5 * (g % 6)) & 31) as usize, rung(&matrix.q4tp(), r, g), "{groups} {r} {g}");
                }
            }
        }
    }

    #[test]
    fn odd_rows_are_padded() {
        let payload: Vec<u8> = (0..2 * 5 + 4 + 10).map(|i| i as u8).collect();
        let matrix = Matrix::from_payload("m", Codec::Q8_2f, [2, 5], payload);
        let codes = codes(&matrix, 0, 2);
        assert_eq!(codes.len(), 64);
        assert_eq!(&codes[32..38], [5, 6, 7, 8, 9, 0]);
        assert_eq!(field(&matrix).len(), 128);
    }
}
