//! Random matrices, and their layout on the device.
#![allow(dead_code, unreachable_pub)]

use super::gpu::Random;
use riparian::model::tensors::{Codec, Matrix};
use riparian::reference::half::f16_at;

pub fn half(v: f32) -> [u8; 2] {
    half::f16::from_f32(v).to_le_bytes()
}

/// A random matrix whose rows have a norm near one.
pub fn random(codec: Codec, rows: usize, cols: usize, rng: &mut Random) -> Matrix {
    let size = 1.0 / (cols as f32).sqrt();
    let payload: Vec<u8> = match codec {
        Codec::F32 => (0..rows * cols).flat_map(|_| (rng.normal() * size).to_le_bytes()).collect(),
        Codec::F16 => (0..rows * cols).flat_map(|_| half(rng.normal() * size + 1e-3)).collect(),
        Codec::Bf16 => (0..rows * cols)
            .flat_map(|_| ((rng.normal() * size).to_bits() >> 16 & 0xffff).to_le_bytes()[..2].to_vec())
            .collect(),
        Codec::Q8_2f => {
            let mut out: Vec<u8> =
                (0..rows * cols).map(|_| ((rng.normal() * 40.0).clamp(-127.0, 127.0) as i8) as u8).collect();
            out.extend((0..rows).flat_map(|_| half(size * (0.5 + rng.unit()) / 40.0)));
            out.extend((0..cols).flat_map(|_| half(0.3 + 1.4 * rng.unit())));
            out
        }
        Codec::Q4tp => {
            let groups = cols / 32;
            let mut out: Vec<u8> = (0..rows * groups * 16).map(|_| rng.bits() as u8).collect();
            for _ in 0..rows {
                out.extend(half((size / 4.0).log2() - 2.0 * rng.unit()));
                out.extend(half(0.02 + 0.08 * rng.unit()));
            }
            out.extend((0..rows * Codec::code_bytes(groups)).map(|_| rng.bits() as u8));
            out
        }
    };
    Matrix::from_payload("random", codec, [rows, cols], payload)
}

/// What lies on the device: words of the matrix, side words, and the column field as f32.
pub struct Laid {
    pub codes: Vec<u32>,
    pub side: Vec<u32>,
    pub field: Option<Vec<f32>>,
    pub cols: usize,
    pub side_words: usize,
}

pub fn padded(cols: usize) -> usize {
    cols.div_ceil(32) * 32
}

pub fn lay(m: &Matrix) -> Laid {
    let (rows, cols, wide) = (m.rows(), m.cols(), padded(m.cols()));
    let (mut codes, mut side, mut field) = (Vec::new(), Vec::new(), None);
    match m.codec() {
        Codec::F32 | Codec::F16 => {
            for r in 0..rows {
                for c in 0..wide {
                    let v = if c >= cols {
                        0.0
                    } else if m.codec() == Codec::F32 {
                        f32::from_le_bytes(m.payload()[4 * (r * cols + c)..][..4].try_into().unwrap())
                    } else {
                        f16_at(m.payload(), r * cols + c)
                    };
                    codes.push(v.to_bits());
                }
            }
        }
        Codec::Bf16 => {
            for r in 0..rows {
                for c in (0..wide).step_by(2) {
                    let at = |c: usize| {
                        if c < cols {
                            u32::from(u16::from_le_bytes(m.payload()[2 * (r * cols + c)..][..2].try_into().unwrap()))
                        } else {
                            0
                        }
                    };
                    codes.push(at(c) | at(c + 1) << 16);
                }
            }
        }
        Codec::Q8_2f => {
            let planes = m.q8_2f();
            for r in 0..rows {
                for c in (0..wide).step_by(4) {
                    let at = |c: usize| if c < cols { u32::from(planes.codes[r * cols + c] as u8) } else { 0 };
                    codes.push(at(c) | at(c + 1) << 8 | at(c + 2) << 16 | at(c + 3) << 24);
                }
                side.push(f16_at(planes.row_scales, r).to_bits());
            }
            field = Some((0..wide).map(|c| if c < cols { f16_at(planes.col_fields, c) } else { 0.0 }).collect());
        }
        Codec::Q4tp => {
            let planes = m.q4tp();
            codes.extend(planes.nibbles.chunks_exact(4).map(|b| u32::from_le_bytes(b.try_into().unwrap())));
            for r in 0..rows {
                side.push(f16_at(planes.ladders, 2 * r).to_bits());
                side.push(f16_at(planes.ladders, 2 * r + 1).to_bits());
                let mut words = vec![0u32; planes.groups.div_ceil(6)];
                for g in 0..planes.groups {
                    words[g / 6] |= (riparian::reference::dequantize::rung(&planes, r, g) as u32) << (5 * (g % 6));
                }
                side.extend(words);
            }
        }
    }
    let side_words = side.len() / rows.max(1);
    Laid { codes, side, field, cols: wide, side_words }
}

/// Matrices and vectors one behind the other in one buffer, as a layer's weights or a bank's place lie.
#[derive(Default)]
pub struct Arena(pub Vec<u32>);

impl Arena {
    /// vec4 where the words begin.
    pub fn put(&mut self, words: &[u32]) -> u32 {
        let at = self.0.len() / 4;
        self.0.extend(words);
        self.0.resize(self.0.len().div_ceil(4) * 4, 0);
        at as u32
    }

    pub fn floats(&mut self, floats: &[f32]) -> u32 {
        self.put(bytemuck::cast_slice(floats))
    }

    /// base (vec4), side (word), field (vec4 or NONE)
    pub fn matrix(&mut self, laid: &Laid) -> [u32; 3] {
        let base = self.put(&laid.codes);
        let side = 4 * self.put(&laid.side);
        let field = laid.field.as_ref().map_or(u32::MAX, |f| self.floats(f));
        [base, side, field]
    }
}
