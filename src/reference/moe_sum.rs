//! `x + fc2(sum_i w_i * y_i) + shared`
//!
//! The end of an MoE block: picks in their order, then `fc2` if the experts
//! are latent, then the shared expert, then the residual. The order is fixed,
//! so that the result does not depend on where each `y_i` was computed. f32.
//! Source: `model.md` §1.5, steps 6 and 7; `runtime.md` §3a.

use super::matvec::matvec;
use crate::knobs::Activations;
use crate::model::tensors::Matrix;

/// Adds one row's MoE output to its residual.
///
/// Shapes: `row`, `shared` `[hidden]`; `weights` `[k]`; `outputs` `[k, width]`, the picked experts' outputs,
/// `width` being `latent` with `fc2` `[hidden, latent]` and `hidden` without.
///
/// # Panics
///
/// If the lengths do not fit each other.
pub fn moe_sum(
    row: &mut [f32],
    weights: &[f32],
    outputs: &[f32],
    fc2: Option<&Matrix>,
    shared: &[f32],
    act: Activations,
) {
    let width = fc2.map_or(row.len(), Matrix::cols);
    assert_eq!((outputs.len(), shared.len()), (weights.len() * width, row.len()));
    let mut sum = vec![0.0f32; width];
    for (weight, output) in weights.iter().zip(outputs.chunks_exact(width)) {
        for (sum, y) in sum.iter_mut().zip(output) {
            *sum += weight * y;
        }
    }
    if let Some(fc2) = fc2 {
        let mut wide = vec![0.0; row.len()];
        matvec(fc2, &sum, act, &mut wide);
        sum = wide;
    }
    for ((row, routed), shared) in row.iter_mut().zip(&sum).zip(shared) {
        *row += routed + shared;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::tensors::Codec;

    #[test]
    fn latent_sums_pass_through_fc2_and_the_shared_expert_does_not() {
        let fc2 = Matrix::from_payload(
            "fc2",
            Codec::F32,
            [2, 1],
            [10.0f32, 100.0].iter().flat_map(|v| v.to_le_bytes()).collect(),
        );
        let mut row = [1.0, 2.0];
        moe_sum(&mut row, &[2.0, 3.0], &[1.0, 1.0], Some(&fc2), &[0.5, 0.25], Activations::F32);
        assert_eq!(row, [51.5, 502.25]);
        let mut row = [1.0, 2.0];
        moe_sum(&mut row, &[2.0], &[1.0, -1.0], None, &[0.5, 0.25], Activations::F32);
        assert_eq!(row, [3.5, 0.25]);
    }
}
