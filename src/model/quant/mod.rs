//! The codecs, one file each: what a payload's values are, and how values become a payload (`cmf.md` §5).
//!
//! Decoding here is plain and exact; the host's and the device's kernels read
//! payloads on their own and are tested against it. Encoding reads its source
//! row by row, so that nothing larger than a row need be held as floats.

pub mod float;
pub mod q4tp;
pub mod q8_2f;

use rayon::prelude::*;

use super::tensors::{Codec, Matrix};

/// A matrix to encode, read row by row and from several threads.
pub trait Rows: Sync {
    /// `[rows, cols]`, both above 0.
    fn shape(&self) -> [usize; 2];

    /// Writes row `row` to `out`, `[cols]`.
    fn read(&self, row: usize, out: &mut [f32]);
}

/// Floats in memory as [`Rows`].
#[derive(Clone, Copy, Debug)]
pub struct Floats<'a> {
    data: &'a [f32],
    cols: usize,
}

impl<'a> Floats<'a> {
    /// `data` is row-major, `[_, cols]`.
    ///
    /// # Panics
    ///
    /// If `data` is empty or no whole number of rows.
    #[must_use]
    pub fn new(data: &'a [f32], cols: usize) -> Self {
        assert!(cols > 0 && !data.is_empty() && data.len().is_multiple_of(cols), "whole rows");
        Self { data, cols }
    }
}

impl Rows for Floats<'_> {
    fn shape(&self) -> [usize; 2] {
        [self.data.len() / self.cols, self.cols]
    }

    fn read(&self, row: usize, out: &mut [f32]) {
        out.copy_from_slice(&self.data[row * self.cols..][..self.cols]);
    }
}

/// Why values have no payload.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum EncodeError {
    /// No codec here holds infinities.
    #[error("the value at row {row}, column {col} is {value}, which no codec can hold")]
    NotFinite {
        /// Its row.
        row: usize,
        /// Its column.
        col: usize,
        /// The value.
        value: f32,
    },
    /// The codec cannot hold the shape.
    #[error("{codec} cannot hold shape {shape:?}")]
    Shape {
        /// The codec.
        codec: Codec,
        /// `[rows, cols]`
        shape: [usize; 2],
    },
}

/// All values of a matrix, row-major.
#[must_use]
pub fn dequantize(matrix: &Matrix) -> Vec<f32> {
    let mut out = vec![0.0; matrix.rows() * matrix.cols()];
    out.par_chunks_exact_mut(matrix.cols()).enumerate().for_each(|(row, out)| dequantize_row(matrix, row, out));
    out
}

/// One row of a matrix.
///
/// # Panics
///
/// If there is no such row, or `out` is not `[cols]`.
pub fn dequantize_row(matrix: &Matrix, row: usize, out: &mut [f32]) {
    assert!(row < matrix.rows() && out.len() == matrix.cols(), "row {row} of {matrix:?} into {}", out.len());
    match matrix.codec() {
        codec @ (Codec::F32 | Codec::F16 | Codec::Bf16) => {
            let size = float::size(codec) * out.len();
            float::decode_into(codec, &matrix.payload()[row * size..][..size], out);
        }
        Codec::Q8_2f => q8_2f::decode_row(&matrix.q8_2f(), row, out),
        Codec::Q4tp => q4tp::decode_row(&matrix.q4tp(), row, out),
    }
}

/// The payload of `source` in `codec`.
///
/// # Errors
///
/// A value that is not finite, or a shape the codec cannot hold.
pub fn encode(codec: Codec, source: &dyn Rows) -> Result<Vec<u8>, EncodeError> {
    match codec {
        Codec::F32 | Codec::F16 | Codec::Bf16 => float::encode(codec, source),
        Codec::Q8_2f => q8_2f::encode(source),
        Codec::Q4tp => q4tp::encode(source),
    }
}

/// Refuses a row with a value that is not finite.
fn check_finite(row: usize, values: &[f32]) -> Result<(), EncodeError> {
    // One branch-free pass: the exponent bits say it.
    if values.iter().fold(true, |finite, value| finite & value.is_finite()) {
        return Ok(());
    }
    let col = values.iter().position(|value| !value.is_finite()).unwrap_or_default();
    Err(EncodeError::NotFinite { row, col, value: values[col] })
}

/// `value` rounded to the nearest integer, ties to even, for |value| < 2^22.
///
/// Adding 1.5 · 2^23 leaves no bit below one. Unlike `round_ties_even` it
/// needs no instruction beyond the oldest targets' and so stays vectorised.
fn round_even(value: f32) -> f32 {
    const SHIFT: f32 = 12_582_912.0;
    (value + SHIFT) - SHIFT
}

#[cfg(test)]
pub(super) mod sample {
    //! Matrices for the encoders' tests.

    /// A stream of numbers in (0, 1), the same on every run.
    pub(crate) struct Uniform(pub u64);

    impl Uniform {
        pub(crate) fn next(&mut self) -> f64 {
            self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
            let mut z = self.0;
            z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
            ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64 + 1e-17
        }

        pub(crate) fn gaussian(&mut self) -> f64 {
            (-2.0 * self.next().ln()).sqrt() * (std::f64::consts::TAU * self.next()).cos()
        }

        /// Student t with five degrees of freedom.
        pub(crate) fn student(&mut self) -> f64 {
            let chi: f64 = (0..5).map(|_| self.gaussian().powi(2)).sum();
            self.gaussian() / (chi / 5.0).sqrt()
        }
    }

    pub(crate) fn gaussian(rows: usize, cols: usize) -> Vec<f32> {
        let mut random = Uniform(1);
        (0..rows * cols).map(|_| (0.02 * random.gaussian()) as f32).collect()
    }

    pub(crate) fn student(rows: usize, cols: usize) -> Vec<f32> {
        let mut random = Uniform(2);
        (0..rows * cols).map(|_| (0.02 * random.student()) as f32).collect()
    }

    /// Gaussian with a factor a column, log-normal with sigma a half.
    pub(crate) fn uneven(rows: usize, cols: usize) -> Vec<f32> {
        let mut random = Uniform(3);
        let factors: Vec<f64> = (0..cols).map(|_| (0.5 * random.gaussian()).exp()).collect();
        (0..rows * cols).map(|i| (0.02 * random.gaussian() * factors[i % cols]) as f32).collect()
    }

    /// Relative root mean square error.
    pub(crate) fn error(want: &[f32], got: &[f32]) -> f64 {
        let square = |x: f64| x * x;
        let off: f64 = want.iter().zip(got).map(|(w, g)| square(f64::from(*w) - f64::from(*g))).sum();
        let all: f64 = want.iter().map(|w| square(f64::from(*w))).sum();
        (off / all).sqrt()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounding_by_shift_is_rounding_to_even() {
        for i in -4000..4000 {
            let value = i as f32 / 16.0;
            assert_eq!(round_even(value), value.round_ties_even(), "{value}");
        }
    }

    #[test]
    fn values_that_are_not_finite_are_refused_by_every_codec() {
        for codec in [Codec::F32, Codec::F16, Codec::Bf16, Codec::Q8_2f, Codec::Q4tp] {
            for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let mut data = vec![0.5; 3 * 64];
                data[64 + 7] = bad;
                let error = encode(codec, &Floats::new(&data, 64)).unwrap_err();
                assert!(matches!(error, EncodeError::NotFinite { row: 1, col: 7, .. }), "{codec} {error}");
            }
        }
    }
}
