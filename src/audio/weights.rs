//! Where perception gets its tensors from, and what can be wrong with them.

use crate::model::container::Container;
use crate::model::quant::float;
use crate::model::tensors::{Codec, Matrix};

/// Tensors by the names of `cmf.md` §7.
pub trait Tensors {
    /// A two-dimensional tensor of any codec.
    fn matrix(&self, name: &str) -> Option<Matrix>;

    /// The shape and the values of an exact tensor (f32, f16 or bf16) of any shape.
    fn floats(&self, name: &str) -> Option<(Vec<usize>, Vec<f32>)>;
}

/// Why a perception module cannot be built or run.
#[derive(Debug, thiserror::Error)]
pub enum PerceptionError {
    /// The file lacks a tensor the module needs.
    #[error("tensor {name} is missing")]
    Missing {
        /// Name in the file.
        name: String,
    },
    /// A tensor does not fit the others.
    #[error("tensor {name} has shape {seen:?}, wanted {wanted:?}")]
    Shape {
        /// Name in the file.
        name: String,
        /// Shape in the file.
        seen: Vec<usize>,
        /// Shape the rest of the module asks for.
        wanted: Vec<usize>,
    },
    /// A matrix is stored in a codec that perception does not read.
    #[error("tensor {name} is stored as {seen}, wanted f32, f16, bf16 or q8_2f")]
    Codec {
        /// Name in the file.
        name: String,
        /// Its codec.
        seen: Codec,
    },
    /// A setting is of the wrong kind or out of range.
    #[error("setting {key} is {seen}, wanted {wanted}")]
    Config {
        /// Path of the key.
        key: String,
        /// Its value.
        seen: String,
        /// What is accepted.
        wanted: &'static str,
    },
    /// The recording is shorter than one spectrogram frame.
    #[error("recording has {samples} samples, wanted at least {wanted}")]
    TooShort {
        /// Samples at 16 kHz.
        samples: usize,
        /// Samples of one frame.
        wanted: usize,
    },
    /// The file has no word timestamp head, or the recording was encoded without keeping its states.
    #[error("word times are not available: {why}")]
    NoWords {
        /// What is missing.
        why: &'static str,
    },
}

/// A named part of a [`Tensors`]: every look-up is by `prefix` and a local name.
#[derive(Clone)]
pub(crate) struct Scope<'a> {
    tensors: &'a dyn Tensors,
    prefix: String,
}

impl<'a> Scope<'a> {
    pub(crate) fn new(tensors: &'a dyn Tensors, prefix: &str) -> Self {
        Self { tensors, prefix: prefix.to_owned() }
    }

    /// The part below `name`.
    pub(crate) fn at(&self, name: &str) -> Self {
        Self { tensors: self.tensors, prefix: format!("{}{name}.", self.prefix) }
    }

    pub(crate) fn has_matrix(&self, name: &str) -> bool {
        self.tensors.matrix(&format!("{}{name}", self.prefix)).is_some()
    }

    pub(crate) fn has_floats(&self, name: &str) -> bool {
        self.tensors.floats(&format!("{}{name}", self.prefix)).is_some()
    }

    /// A matrix of `rows x cols`; `None` leaves a side to the file.
    pub(crate) fn matrix(&self, name: &str, [rows, cols]: [Option<usize>; 2]) -> Result<Matrix, PerceptionError> {
        let name = format!("{}{name}", self.prefix);
        let Some(matrix) = self.tensors.matrix(&name) else { return Err(PerceptionError::Missing { name }) };
        let wanted = vec![rows.unwrap_or(matrix.rows()), cols.unwrap_or(matrix.cols())];
        let seen = vec![matrix.rows(), matrix.cols()];
        if seen != wanted {
            return Err(PerceptionError::Shape { name, seen, wanted });
        }
        match matrix.codec() {
            Codec::F32 | Codec::F16 | Codec::Bf16 | Codec::Q8_2f => Ok(matrix),
            seen @ Codec::Q4tp => Err(PerceptionError::Codec { name, seen }),
        }
    }

    /// A vector of `len` values; `None` leaves the length to the file.
    pub(crate) fn vector(&self, name: &str, len: Option<usize>) -> Result<Vec<f32>, PerceptionError> {
        let name = format!("{}{name}", self.prefix);
        let Some((seen, values)) = self.tensors.floats(&name) else { return Err(PerceptionError::Missing { name }) };
        let wanted = vec![len.unwrap_or(values.len())];
        if seen != wanted {
            return Err(PerceptionError::Shape { name, seen, wanted });
        }
        Ok(values)
    }

    /// A tensor of any shape, row-major; `None` leaves an axis to the file.
    pub(crate) fn floats(
        &self,
        name: &str,
        shape: &[Option<usize>],
    ) -> Result<(Vec<usize>, Vec<f32>), PerceptionError> {
        let name = format!("{}{name}", self.prefix);
        let Some((seen, values)) = self.tensors.floats(&name) else { return Err(PerceptionError::Missing { name }) };
        let fits = seen.len() == shape.len() && seen.iter().zip(shape).all(|(s, w)| w.is_none_or(|w| w == *s));
        if !fits {
            let wanted =
                shape.iter().enumerate().map(|(i, w)| w.unwrap_or(seen.get(i).copied().unwrap_or(0))).collect();
            return Err(PerceptionError::Shape { name, seen, wanted });
        }
        Ok((seen, values))
    }
}

impl Tensors for Container {
    fn matrix(&self, name: &str) -> Option<Matrix> {
        Container::matrix(self, name)
    }

    fn floats(&self, name: &str) -> Option<(Vec<usize>, Vec<f32>)> {
        let tensor = self.tensor(name).filter(|t| !t.codec().is_quantized())?;
        Some((tensor.shape().to_vec(), tensor.to_f32()))
    }
}

/// Rows `first..` of a matrix as f32, as many as `out` holds: `out [n, cols]`.
///
/// # Panics
///
/// If the rows are not there, or the codec is none that [`Scope::matrix`] lets through.
pub(crate) fn rows_to_f32(matrix: &Matrix, first: usize, out: &mut [f32]) {
    let cols = matrix.cols();
    match matrix.codec() {
        codec @ (Codec::F32 | Codec::F16 | Codec::Bf16) => {
            float::decode_into(codec, &matrix.payload()[first * cols * float::size(codec)..], out);
        }
        Codec::Q8_2f => {
            let planes = matrix.q8_2f();
            // The fields are decoded once for all rows, unlike in `quant::q8_2f::decode_row`.
            let fields = float::decode(Codec::F16, planes.col_fields);
            let scales = float::decode(Codec::F16, &planes.row_scales[2 * first..2 * (first + out.len() / cols)]);
            for ((row, codes), scale) in
                out.chunks_exact_mut(cols).zip(planes.codes[first * cols..].chunks(cols)).zip(scales)
            {
                for ((o, q), field) in row.iter_mut().zip(codes).zip(&fields) {
                    *o = f32::from(*q) * scale * field;
                }
            }
        }
        Codec::Q4tp => unreachable!("refused when the module was loaded"),
    }
}

#[cfg(test)]
mod tests {
    use half::f16;

    use super::*;

    #[test]
    fn every_codec_gives_its_rows() {
        let values = [1.0f32, -2.5, 0.0, 0.375, 4.0, -0.125];
        let f32s: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        let f16s: Vec<u8> = values.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes()).collect();
        let bf16s: Vec<u8> = values.iter().flat_map(|v| half::bf16::from_f32(*v).to_le_bytes()).collect();
        for (codec, payload) in [(Codec::F32, f32s), (Codec::F16, f16s), (Codec::Bf16, bf16s)] {
            let matrix = Matrix::from_payload("m", codec, [3, 2], payload);
            let mut out = [0.0; 4];
            rows_to_f32(&matrix, 1, &mut out);
            assert_eq!(out, values[2..], "{codec}");
        }
    }

    #[test]
    fn q8_2f_multiplies_code_scale_field() {
        let mut payload: Vec<u8> = [1i8, -2, 3, 127, -127, 0].iter().map(|q| *q as u8).collect();
        payload.extend([0.5f32, 2.0, 0.25].iter().flat_map(|s| f16::from_f32(*s).to_le_bytes()));
        payload.extend([4.0f32, 0.125].iter().flat_map(|s| f16::from_f32(*s).to_le_bytes()));
        let matrix = Matrix::from_payload("m", Codec::Q8_2f, [3, 2], payload);
        let mut out = [0.0; 6];
        rows_to_f32(&matrix, 0, &mut out);
        assert_eq!(out, [2.0, -0.125, 24.0, 31.75, -127.0, 0.0]);
        rows_to_f32(&matrix, 2, &mut out[..2]);
        assert_eq!(out[..2], [-127.0, 0.0]);
    }
}
