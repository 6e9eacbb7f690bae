//! `c[j] = silu(bias[j] + sum_{i < K} w[j, i] * u_{t-K+1+i}[j])`
//!
//! One position of the depthwise causal convolution; tap `K - 1` multiplies
//! the current position. Then the ring takes `u_t` in and lets the oldest go.
//! Source: `model.md` §1.4, step 2.

use super::silu;

/// Advances the ring by one position.
///
/// Shapes: `u`, `bias`, `out` `[channels]`; `weight` `[channels, K]`; `state` `[channels, K - 1]`, oldest first.
///
/// # Panics
///
/// If the lengths do not fit each other.
pub fn conv_step(u: &[f32], weight: &[f32], bias: &[f32], state: &mut [f32], out: &mut [f32]) {
    let channels = u.len();
    let taps = weight.len() / channels;
    assert_eq!(weight.len(), channels * taps);
    assert_eq!((bias.len(), out.len(), state.len()), (channels, channels, channels * (taps - 1)));
    for j in 0..channels {
        let weight = &weight[j * taps..][..taps];
        let ring = &mut state[j * (taps - 1)..][..taps - 1];
        let mut sum = f64::from(bias[j]);
        for (weight, past) in weight.iter().zip(ring.iter()) {
            sum += f64::from(*weight) * f64::from(*past);
        }
        sum += f64::from(weight[taps - 1]) * f64::from(u[j]);
        out[j] = silu(sum as f32);
        if taps > 1 {
            ring.rotate_left(1);
            ring[taps - 2] = u[j];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_tap_meets_the_current_position() {
        // one channel, K = 4; an impulse comes out tap by tap, the last tap first
        let weight = [1.0, 2.0, 3.0, 4.0];
        let (mut state, mut out) = ([0.0; 3], [0.0]);
        let mut got = Vec::new();
        for u in [1.0, 0.0, 0.0, 0.0, 0.0] {
            conv_step(&[u], &weight, &[0.5], &mut state, &mut out);
            got.push(out[0]);
        }
        assert_eq!(got, [4.5, 3.5, 2.5, 1.5, 0.5].map(silu));
    }

    #[test]
    fn the_ring_is_oldest_first_in_each_channel() {
        let (mut state, mut out) = ([0.0; 6], [0.0; 2]);
        for t in 1..=5 {
            conv_step(&[t as f32, -(t as f32)], &[0.0; 8], &[0.0; 2], &mut state, &mut out);
        }
        assert_eq!(state, [3.0, 4.0, 5.0, -3.0, -4.0, -5.0]);
    }

    #[test]
    fn a_single_tap_has_no_ring() {
        let mut out = [0.0; 2];
        conv_step(&[2.0, 3.0], &[1.0, 2.0], &[0.0, 1.0], &mut [], &mut out);
        assert_eq!(out, [silu(2.0), silu(7.0)]);
    }
}
