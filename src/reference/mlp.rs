//! `down relu2(up x)`, `relu2(x) = max(x, 0)^2`
//!
//! A routed expert, the shared expert, or a dense block: no gate, two
//! matrices. Source: `model.md` §1.5, §1.6.

use super::matvec::matvec;
use crate::knobs::Activations;
use crate::model::weights::MlpWeights;

/// One row; `x` and `out` `[in]`.
///
/// # Panics
///
/// If the lengths do not fit the matrices.
pub fn mlp(weights: &MlpWeights, x: &[f32], act: Activations, out: &mut [f32]) {
    let mut inner = vec![0.0; weights.up.rows()];
    matvec(&weights.up, x, act, &mut inner);
    for inner in &mut inner {
        let positive = inner.max(0.0);
        *inner = positive * positive;
    }
    matvec(&weights.down, &inner, act, out);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::tensors::{Codec, Matrix};

    #[test]
    fn negatives_are_cut_and_the_rest_squared() {
        let matrix = |shape: [usize; 2], values: &[f32]| {
            Matrix::from_payload("m", Codec::F32, shape, values.iter().flat_map(|v| v.to_le_bytes()).collect())
        };
        let weights = MlpWeights { up: matrix([2, 1], &[3.0, -3.0]), down: matrix([1, 2], &[1.0, 10.0]) };
        let mut out = [0.0];
        mlp(&weights, &[1.0], Activations::F32, &mut out);
        assert_eq!(out, [9.0]);
        mlp(&weights, &[-2.0], Activations::F32, &mut out);
        assert_eq!(out, [360.0]);
    }
}
