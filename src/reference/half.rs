//! Half floats, decoded by integer arithmetic, subnormals included.
//!
//! Source: IEEE 754 binary16; `cmf.md` §5. Shaders do the same, because a
//! device may flush subnormals when it converts halves itself.

/// The value of an IEEE binary16.
#[must_use]
pub const fn f16_to_f32(bits: u16) -> f32 {
    let sign = (bits as u32 & 0x8000) << 16;
    let exponent = (bits as u32 >> 10) & 0x1f;
    let fraction = bits as u32 & 0x3ff;
    match exponent {
        // fraction * 2^-24: exact, both factors are
        0 => {
            let magnitude = fraction as f32 * f32::from_bits((127 - 24) << 23);
            f32::from_bits(sign | magnitude.to_bits())
        }
        31 => f32::from_bits(sign | 0xff << 23 | fraction << 13),
        _ => f32::from_bits(sign | (exponent + 127 - 15) << 23 | fraction << 13),
    }
}

/// The value of a bfloat16: the upper half of an f32.
#[must_use]
pub const fn bf16_to_f32(bits: u16) -> f32 {
    f32::from_bits((bits as u32) << 16)
}

/// The `index`-th f16 of a little-endian plane that may be unaligned.
///
/// # Panics
///
/// If the plane is too short.
#[must_use]
pub fn f16_at(plane: &[u8], index: usize) -> f32 {
    f16_to_f32(u16::from_le_bytes([plane[2 * index], plane[2 * index + 1]]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_half_is_decoded_exactly() {
        for bits in 0..=u16::MAX {
            let (ours, theirs) = (f16_to_f32(bits), half::f16::from_bits(bits).to_f32());
            assert!(
                ours.to_bits() == theirs.to_bits() || ours.is_nan() && theirs.is_nan(),
                "{bits:#06x}: {ours} {theirs}"
            );
            let (ours, theirs) = (bf16_to_f32(bits), half::bf16::from_bits(bits).to_f32());
            assert!(
                ours.to_bits() == theirs.to_bits() || ours.is_nan() && theirs.is_nan(),
                "{bits:#06x}: {ours} {theirs}"
            );
        }
    }
}
