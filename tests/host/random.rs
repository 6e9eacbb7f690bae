//! Seeded matrices and rows.

use std::sync::Arc;

use riparian::model::tensors::{Bytes, Codec, Matrix};

/// SplitMix64.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// In `lo..hi`.
    pub(crate) fn between(&mut self, lo: f32, hi: f32) -> f32 {
        lo + (hi - lo) * (self.next() >> 40) as f32 / (1u64 << 24) as f32
    }

    pub(crate) fn rows(&mut self, len: usize, size: f32) -> Vec<f32> {
        (0..len).map(|_| self.between(-size, size)).collect()
    }

    fn half(&mut self, lo: f32, hi: f32) -> [u8; 2] {
        half::f16::from_f32(self.between(lo, hi)).to_le_bytes()
    }

    /// A payload `misaligned` bytes into its source. Codes and nibbles take every value, −128 too.
    pub(crate) fn matrix(&mut self, codec: Codec, [rows, cols]: [usize; 2], misaligned: usize) -> Matrix {
        let mut bytes = vec![0xee; misaligned];
        match codec {
            Codec::F32 => (0..rows * cols).for_each(|_| bytes.extend(self.between(-1.0, 1.0).to_le_bytes())),
            Codec::F16 => (0..rows * cols).for_each(|_| bytes.extend(self.half(-1.0, 1.0))),
            Codec::Bf16 => {
                (0..rows * cols)
                    .for_each(|_| bytes.extend(half::bf16::from_f32(self.between(-1.0, 1.0)).to_le_bytes()));
            }
            Codec::Q8_2f => {
                (0..rows * cols).for_each(|_| bytes.push(self.next() as u8));
                (0..rows + cols).for_each(|_| bytes.extend(self.half(0.001, 0.1)));
            }
            Codec::Q4tp => {
                let groups = cols / Codec::GROUP;
                (0..rows * groups * 16).for_each(|_| bytes.push(self.next() as u8));
                for _ in 0..rows {
                    bytes.extend(self.half(-14.0, -2.0));
                    bytes.extend(self.half(0.0, 0.4));
                }
                (0..rows * Codec::code_bytes(groups)).for_each(|_| bytes.push(self.next() as u8));
            }
        }
        let source: Arc<dyn Bytes> = Arc::new(bytes);
        Matrix::new("random", codec, [rows, cols], source, misaligned)
    }
}
