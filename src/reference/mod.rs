//! One CPU twin per kernel, and a plain decoder made of them.
//!
//! Every function here is written to be read beside its formula in `model.md`,
//! `cmf.md` or `runtime.md`: one row at a time, plain loops, no blocking, no
//! fused steps. The fast host code and the device kernels are tested against
//! these, and these against the recorded references of other implementations.
//!
//! Arithmetic: values are f32 wherever the formula says so (activations,
//! states, scales), element-wise steps round to f32, and a sum over an axis is
//! carried in f64 and rounded once. So a twin stands in the middle of all the
//! orders in which a kernel may add up the same f32 terms.
//!
//! Knows the model's types; never a device, an actor or the fast host code.

pub mod argmax;
pub mod attention;
pub mod block;
pub mod conv_step;
pub mod decoder;
pub mod dequantize;
pub mod draft;
pub mod embed;
pub mod fuse;
pub mod gated_group_norm;
pub mod half;
pub mod lanes;
pub mod layer_norm;
pub mod matvec;
pub mod mlp;
pub mod moe_sum;
pub mod quantize_activations;
pub mod rms_norm;
pub mod router;
pub mod softmax_merge;
pub mod ssm_chunked;
pub mod ssm_step;

pub use decoder::{Capture, Forward, Greedy, MoeCapture, PlainDecoder};
pub use draft::{Conventions, Round, Speculation};

/// `silu(x) = x * sigma(x)`
pub(crate) fn silu(x: f32) -> f32 {
    x * sigmoid(x)
}

/// `sigma(x) = 1 / (1 + e^-x)`
pub(crate) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

/// `ln(1 + e^x)`, rearranged so that a large `x` does not overflow.
pub(crate) fn softplus(x: f32) -> f32 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}

/// `sum a[i] * b[i]`, products and sum in f64.
pub(crate) fn dot(a: &[f32], b: &[f32]) -> f64 {
    debug_assert_eq!(a.len(), b.len());
    let mut sum = 0.0;
    for (a, b) in a.iter().zip(b) {
        sum += f64::from(*a) * f64::from(*b);
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn softplus_is_right_at_both_ends() {
        assert_eq!(softplus(200.0), 200.0);
        assert_eq!(softplus(-200.0), 0.0);
        assert_eq!(softplus(0.0), std::f32::consts::LN_2);
        // e^-20 survives where ln(1 + e^x) in f32 would give 0
        assert!((softplus(-20.0) / 2.061_153_6e-9 - 1.0).abs() < 1e-6);
    }
}
