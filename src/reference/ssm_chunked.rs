//! Many positions of the state space recurrence, in chunks.
//!
//! With `l_t = sum_{r <= t} dt_r A` inside a chunk, `A = -exp(A_log)`:
//!
//! ```text
//! o_t   = e^{l_t} s_in C_t + sum_{r <= t} e^{l_t - l_r} (C_t . B_r) dt_r x_r + D x_t
//! s_out = e^{l_last} s_in + sum_r e^{l_last - l_r} dt_r x_r (outer) B_r
//! ```
//!
//! `l_t - l_r` is summed over the segment, never taken as a difference. The
//! result does not depend on the chunk length or on how the rows are split over
//! calls, but for f32 rounding. Source: `model.md` §1.4, prefill.

use super::dot;
use super::ssm_step::{Xbc, step_size};
use crate::model::geometry::MambaGeometry;
use crate::model::weights::MambaWeights;

/// Advances the state by `T` positions, `chunk` at a time.
///
/// Shapes: `xbc` `[T, channels]`; `d` `[T, heads]`; `state` `[heads, P, N]`; `out` `[T, heads, P]`.
///
/// # Panics
///
/// If a length does not fit the geometry, or `chunk` is 0.
pub fn ssm_chunked(
    geometry: &MambaGeometry,
    weights: &MambaWeights,
    chunk: usize,
    xbc: &[f32],
    d: &[f32],
    state: &mut [f32],
    out: &mut [f32],
) {
    let (heads, channels, inner) = (geometry.heads, geometry.conv_channels(), geometry.inner());
    let positions = d.len() / heads;
    assert_eq!((xbc.len(), d.len()), (positions * channels, positions * heads));
    assert_eq!((state.len(), out.len()), (geometry.ssm_state_len(), positions * inner));
    assert!(chunk > 0, "a chunk has at least one position");
    let rows: Vec<Xbc<'_>> = xbc.chunks_exact(channels).map(|row| Xbc::split(geometry, row)).collect();
    for start in (0..positions).step_by(chunk) {
        let end = positions.min(start + chunk);
        for h in 0..heads {
            one_chunk(
                geometry,
                weights,
                h,
                &rows[start..end],
                &d[start * heads..end * heads],
                state,
                &mut out[start * inner..],
            );
        }
    }
}

/// One head of one chunk; `rows`, `d` and `out` start at the chunk.
fn one_chunk(
    geometry: &MambaGeometry,
    weights: &MambaWeights,
    h: usize,
    rows: &[Xbc<'_>],
    d: &[f32],
    state: &mut [f32],
    out: &mut [f32],
) {
    let (heads, p, n, inner) = (geometry.heads, geometry.head_dim, geometry.d_state, geometry.inner());
    let (len, g) = (rows.len(), h / (heads / geometry.groups));
    let state = &mut state[h * p * n..][..p * n];
    let group = |t: usize| (&rows[t].b[g * n..][..n], &rows[t].c[g * n..][..n]);

    let a = -weights.a_log[h].exp();
    let dt: Vec<f32> = (0..len).map(|t| step_size(geometry, weights, h, d[t * heads + h])).collect();
    // decay(r, t) = e^{l_t - l_r}: what is left at t of something that came in at r
    let decay = |r: usize, t: usize| (dt[r + 1..=t].iter().map(|dt| f64::from(dt * a)).sum::<f64>().exp()) as f32;
    let decay_in = |t: usize| (dt[..=t].iter().map(|dt| f64::from(dt * a)).sum::<f64>().exp()) as f32;

    for t in 0..len {
        let (_, c) = group(t);
        let from_state = decay_in(t);
        let pairs: Vec<f32> = (0..=t).map(|r| (f64::from(decay(r, t)) * dot(c, group(r).0)) as f32 * dt[r]).collect();
        for i in 0..p {
            let mut sum = f64::from(from_state) * dot(&state[i * n..][..n], c);
            for (r, pair) in pairs.iter().enumerate() {
                sum += f64::from(*pair) * f64::from(rows[r].x[h * p + i]);
            }
            sum += f64::from(weights.d_skip[h]) * f64::from(rows[t].x[h * p + i]);
            out[t * inner + h * p + i] = sum as f32;
        }
    }

    let last = len - 1;
    let (from_state, tails) = (decay_in(last), (0..len).map(|r| decay(r, last) * dt[r]).collect::<Vec<_>>());
    for i in 0..p {
        for k in 0..n {
            let mut sum = f64::from(from_state) * f64::from(state[i * n + k]);
            for (r, tail) in tails.iter().enumerate() {
                sum += f64::from(*tail) * f64::from(rows[r].x[h * p + i]) * f64::from(group(r).0[k]);
            }
            state[i * n + k] = sum as f32;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::tensors::{Codec, Matrix};
    use crate::reference::ssm_step::ssm_step;
    use proptest::prelude::*;

    fn weights(heads: usize, spread: f32) -> MambaWeights {
        let none = || Matrix::from_payload("unused", Codec::F32, [0, 1], Vec::new());
        MambaWeights {
            in_proj: none(),
            out_proj: none(),
            conv: Vec::new(),
            conv_bias: Vec::new(),
            a_log: (0..heads).map(|h| spread * (h as f32 - 1.0)).collect(),
            d_skip: (0..heads).map(|h| 1.0 - h as f32 * 0.3).collect(),
            dt_bias: (0..heads).map(|h| h as f32 - 2.0).collect(),
            norm: Vec::new(),
        }
    }

    fn wave(n: usize, phase: f32) -> Vec<f32> {
        (0..n).map(|i| (i as f32 * 0.37 + phase).sin() * 1.5).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn any_chunk_and_any_split_equal_the_steps(
            positions in 0usize..20, chunk in 1usize..24, split in 0usize..20, phase in 0f32..6.0, spread in 0f32..3.0,
            limited in any::<bool>(),
        ) {
            let dt_limit = if limited { [0.02, 0.2] } else { [0.0, f32::INFINITY] };
            let geometry = MambaGeometry { heads: 6, head_dim: 3, groups: 2, d_state: 5, d_conv: 4, dt_limit };
            let (heads, channels, inner) = (geometry.heads, geometry.conv_channels(), geometry.inner());
            let weights = weights(heads, spread);
            let (xbc, d) = (wave(positions * channels, phase), wave(positions * heads, phase + 1.0));
            let seed = wave(geometry.ssm_state_len(), phase + 2.0);

            let (mut stepped, mut want) = (seed.clone(), vec![0.0; positions * inner]);
            for t in 0..positions {
                let (xbc, d) = (&xbc[t * channels..][..channels], &d[t * heads..][..heads]);
                ssm_step(&geometry, &weights, xbc, d, &mut stepped, &mut want[t * inner..][..inner]);
            }

            let split = split.min(positions);
            let (mut state, mut got) = (seed, vec![0.0; positions * inner]);
            for part in [0..split, split..positions] {
                let (xbc, d) = (&xbc[part.start * channels..part.end * channels], &d[part.start * heads..part.end * heads]);
                let out = &mut got[part.start * inner..part.end * inner];
                ssm_chunked(&geometry, &weights, chunk, xbc, d, &mut state, out);
            }
            for (a, b) in want.iter().chain(&stepped).zip(got.iter().chain(&state)) {
                prop_assert!((a - b).abs() <= 2e-6 * (1.0 + a.abs()) * 4.0, "{a} {b}");
            }
        }
    }

    /// Over a long gap `e^{-l_r}` alone would overflow; the segment sum does not.
    #[test]
    fn strong_decay_stays_finite() {
        let geometry =
            MambaGeometry { heads: 1, head_dim: 1, groups: 1, d_state: 1, d_conv: 4, dt_limit: [0.0, f32::INFINITY] };
        let mut weights = weights(1, 0.0);
        weights.a_log[0] = 3.0;
        let (mut state, mut out) = ([1.0], [0.0; 64]);
        ssm_chunked(&geometry, &weights, 64, &[1.0; 3 * 64], &[20.0; 64], &mut state, &mut out);
        let (mut stepped, mut last) = ([1.0], [0.0]);
        for _ in 0..64 {
            ssm_step(&geometry, &weights, &[1.0; 3], &[20.0], &mut stepped, &mut last);
        }
        assert!((state[0] - stepped[0]).abs() < 1e-5 && (out[63] - last[0]).abs() < 1e-5, "{state:?} {stepped:?}");
    }
}
