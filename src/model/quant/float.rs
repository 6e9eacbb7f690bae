//! f32, f16 and bf16: elements one after the other, little-endian.

use half::{bf16, f16};

use super::{EncodeError, Rows, check_finite};
use crate::model::tensors::Codec;

/// Bytes of an element.
///
/// # Panics
///
/// If the codec is a quantised one.
#[must_use]
pub const fn size(codec: Codec) -> usize {
    match codec {
        Codec::F32 => 4,
        Codec::F16 | Codec::Bf16 => 2,
        Codec::Q8_2f | Codec::Q4tp => panic!("a quantised codec has no element size"),
    }
}

/// All elements of a payload.
///
/// # Panics
///
/// If the codec is a quantised one.
#[must_use]
pub fn decode(codec: Codec, payload: &[u8]) -> Vec<f32> {
    let mut out = vec![0.0; payload.len() / size(codec)];
    decode_into(codec, payload, &mut out);
    out
}

/// As [`decode`], into `out`, whose length decides how many are read.
///
/// # Panics
///
/// If the payload holds fewer, or the codec is a quantised one.
pub fn decode_into(codec: Codec, payload: &[u8], out: &mut [f32]) {
    let payload = &payload[..size(codec) * out.len()];
    match codec {
        Codec::F32 => {
            out.iter_mut().zip(payload.as_chunks().0).for_each(|(out, bytes)| *out = f32::from_le_bytes(*bytes));
        }
        Codec::F16 => {
            let halves = payload.as_chunks().0;
            out.iter_mut().zip(halves).for_each(|(out, bytes)| *out = f16::from_le_bytes(*bytes).to_f32());
        }
        Codec::Bf16 => {
            let halves = payload.as_chunks().0;
            out.iter_mut()
                .zip(halves)
                .for_each(|(out, bytes)| *out = f32::from_bits(u32::from(u16::from_le_bytes(*bytes)) << 16));
        }
        Codec::Q8_2f | Codec::Q4tp => unreachable!("size() refused it"),
    }
}

/// The payload of `source`, rounded to nearest even where the codec is narrower.
///
/// # Errors
///
/// A value that is not finite, or becomes infinite as a half float.
pub fn encode(codec: Codec, source: &dyn Rows) -> Result<Vec<u8>, EncodeError> {
    let [rows, cols] = source.shape();
    let mut values = vec![0.0; cols];
    let mut payload = Vec::with_capacity(rows * cols * size(codec));
    for row in 0..rows {
        source.read(row, &mut values);
        check_finite(row, &values)?;
        for (col, &value) in values.iter().enumerate() {
            let narrow = match codec {
                Codec::F32 => {
                    payload.extend(value.to_le_bytes());
                    value
                }
                Codec::F16 => {
                    let half = f16::from_f32(value);
                    payload.extend(half.to_le_bytes());
                    half.to_f32()
                }
                Codec::Bf16 => {
                    let half = bf16::from_f32(value);
                    payload.extend(half.to_le_bytes());
                    half.to_f32()
                }
                Codec::Q8_2f | Codec::Q4tp => unreachable!("size() refused it"),
            };
            if !narrow.is_finite() {
                return Err(EncodeError::NotFinite { row, col, value });
            }
        }
    }
    Ok(payload)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::quant::Floats;

    #[test]
    fn every_half_survives_the_way_there_and_back() {
        for codec in [Codec::F16, Codec::Bf16] {
            let payload: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
            let values = decode(codec, &payload);
            for (bits, value) in values.iter().enumerate().filter(|(_, value)| value.is_finite()) {
                let again = encode(codec, &Floats::new(&[*value], 1)).unwrap();
                assert_eq!(again, (bits as u16).to_le_bytes(), "{codec} {bits:#06x}");
            }
        }
    }

    #[test]
    fn overflow_to_half_is_an_error() {
        let error = encode(Codec::F16, &Floats::new(&[1.0, 70_000.0], 2)).unwrap_err();
        assert_eq!(error, EncodeError::NotFinite { row: 0, col: 1, value: 70_000.0 });
    }
}
