//! One position of the state space recurrence.
//!
//! ```text
//! dt_h = clamp(softplus(d_h + dt_bias_h), dt_limit)      a_h = exp(-dt_h * exp(A_log_h))
//! s_h <- a_h * s_h + dt_h * x_h (outer) B_g              g = h / (heads / groups)
//! o_h = s_h C_g + D_h * x_h                              the updated state is used
//! ```
//! Source: `model.md` §1.4, steps 3 to 6.

use super::{dot, softplus};
use crate::model::geometry::MambaGeometry;
use crate::model::weights::MambaWeights;

/// `[x | B | C]` of one position, split.
#[derive(Clone, Copy, Debug)]
pub struct Xbc<'a> {
    /// `[heads, P]`
    pub x: &'a [f32],
    /// `[groups, N]`
    pub b: &'a [f32],
    /// `[groups, N]`
    pub c: &'a [f32],
}

impl<'a> Xbc<'a> {
    /// Splits one row of the convolution's output, `[channels]`.
    ///
    /// # Panics
    ///
    /// If the row is shorter than the geometry's channels.
    #[must_use]
    pub fn split(geometry: &MambaGeometry, row: &'a [f32]) -> Self {
        let (x, rest) = row.split_at(geometry.inner());
        let (b, c) = rest.split_at(geometry.groups * geometry.d_state);
        Self { x, b, c }
    }
}

/// Step size of head `h` from its raw value `d`.
#[must_use]
pub fn step_size(geometry: &MambaGeometry, weights: &MambaWeights, h: usize, d: f32) -> f32 {
    let [low, high] = geometry.dt_limit;
    softplus(d + weights.dt_bias[h]).clamp(low, high)
}

/// Advances the state by one position.
///
/// Shapes: `xbc` `[channels]`, after the convolution; `d` `[heads]`, the raw step sizes; `state` `[heads, P, N]`;
/// `out` `[heads, P]`. Of the weights only `a_log`, `d_skip` and `dt_bias` are read.
///
/// # Panics
///
/// If a length does not fit the geometry.
pub fn ssm_step(
    geometry: &MambaGeometry,
    weights: &MambaWeights,
    xbc: &[f32],
    d: &[f32],
    state: &mut [f32],
    out: &mut [f32],
) {
    let (heads, p, n) = (geometry.heads, geometry.head_dim, geometry.d_state);
    assert_eq!((xbc.len(), d.len()), (geometry.conv_channels(), heads));
    assert_eq!((state.len(), out.len()), (geometry.ssm_state_len(), geometry.inner()));
    let xbc = Xbc::split(geometry, xbc);
    for (h, d) in d.iter().enumerate() {
        let g = h / (heads / geometry.groups);
        let (b, c) = (&xbc.b[g * n..][..n], &xbc.c[g * n..][..n]);
        let dt = step_size(geometry, weights, h, *d);
        let decay = (-dt * weights.a_log[h].exp()).exp();
        for i in h * p..(h + 1) * p {
            let x = xbc.x[i];
            let state = &mut state[i * n..][..n];
            for (s, b) in state.iter_mut().zip(b) {
                *s = decay * *s + dt * x * b;
            }
            out[i] = (dot(state, c) + f64::from(weights.d_skip[h]) * f64::from(x)) as f32;
        }
    }
}
