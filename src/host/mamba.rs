//! Mamba-2 blocks (`model.md` §1.4).
//!
//! The scan runs head by head over all rows, in parallel over heads: a stripe
//! of the state stays in registers while a stretch of rows passes. Every row
//! goes through the same operations as in a step, so a prompt gives the same
//! bits however it is cut. (The scan is about 1 % of a prefill's time, the
//! projections are the rest: a chunked matrix form would win nothing.)

use super::kernels::{Job, prepare, run};
use super::{math, norm};
use crate::host::Pool;
use crate::knobs::Activations;
use crate::model::geometry::MambaGeometry;
use crate::model::state::MambaState;
use crate::model::weights::MambaWeights;

/// Rows whose B and C stay in the nearest cache while a head's state passes.
const STRETCH: usize = 16;
/// Lanes of a sum over the state.
const LANES: usize = 16;

/// Mixer output `[n, hidden]` for normed rows `[n, hidden]`; `state` moves on by
/// `n` rows, and `snapshots` gets it as it is after each row.
pub(crate) fn mix(
    pool: &Pool,
    geometry: &MambaGeometry,
    eps: f32,
    weights: &MambaWeights,
    act: Activations,
    normed: &[f32],
    state: &mut MambaState,
    snapshots: Option<&mut Vec<MambaState>>,
) -> Vec<f32> {
    let (inner, channels, width) = (geometry.inner(), geometry.conv_channels(), geometry.in_proj_rows());
    let n = normed.len() / weights.in_proj.cols();
    let mut projected = vec![0.0; n * width];
    let input = prepare(pool, &weights.in_proj, act, normed);
    run(pool, vec![Job { matrix: &weights.in_proj, input: &input, out: &mut projected }]);

    let mut after = snapshots.is_some().then(|| {
        vec![MambaState { conv: vec![0.0; geometry.conv_state_len()], ssm: vec![0.0; geometry.ssm_state_len()] }; n]
    });
    let convolved = convolve(pool, geometry, weights, &projected, &mut state.conv, after.as_deref_mut());
    let mut o = scan(pool, geometry, weights, &projected, &convolved, &mut state.ssm, after.as_deref_mut());
    if let (Some(snapshots), Some(after)) = (snapshots, after) {
        snapshots.extend(after);
    }
    let rows = o.chunks_exact_mut(inner).zip(projected.chunks_exact(width)).collect();
    pool.each(rows, |(o, projected): (&mut [f32], &[f32])| {
        norm::gated_groups(o, &projected[..inner], &weights.norm, geometry.groups, eps);
    });
    debug_assert_eq!(convolved.len(), n * channels);

    let mut out = vec![0.0; n * weights.out_proj.rows()];
    let input = prepare(pool, &weights.out_proj, act, &o);
    run(pool, vec![Job { matrix: &weights.out_proj, input: &input, out: &mut out }]);
    out
}

/// `silu(conv(u))`, `[n, channels]`; `state [channels, K - 1]` is left with the last inputs.
fn convolve(
    pool: &Pool,
    geometry: &MambaGeometry,
    weights: &MambaWeights,
    projected: &[f32],
    state: &mut [f32],
    after: Option<&mut [MambaState]>,
) -> Vec<f32> {
    let (channels, taps, width) = (geometry.conv_channels(), geometry.d_conv, geometry.in_proj_rows());
    let n = projected.len() / width;
    let past = taps - 1;
    // Inputs channel-last: the K - 1 of the state, then the n new ones.
    let mut inputs = vec![0.0; (past + n) * channels];
    for (c, kept) in state.chunks_exact(past.max(1)).enumerate() {
        for (i, u) in kept.iter().enumerate().take(past) {
            inputs[i * channels + c] = *u;
        }
    }
    for (t, row) in projected.chunks_exact(width).enumerate() {
        let u = &row[geometry.inner()..geometry.inner() + channels];
        inputs[(past + t) * channels..(past + t + 1) * channels].copy_from_slice(u);
    }
    // Taps channel-last too, so that the loop over channels is one of vectors.
    let mut kernel = vec![0.0; taps * channels];
    for (c, w) in weights.conv.chunks_exact(taps).enumerate() {
        for (i, w) in w.iter().enumerate() {
            kernel[i * channels + c] = *w;
        }
    }
    let mut out = vec![0.0; n * channels];
    let rows = out.chunks_exact_mut(channels).enumerate().collect();
    pool.each(rows, |(t, out): (usize, &mut [f32])| {
        out.copy_from_slice(&weights.conv_bias);
        for i in 0..taps {
            let u = &inputs[(t + i) * channels..(t + i + 1) * channels];
            let w = &kernel[i * channels..(i + 1) * channels];
            for ((out, u), w) in out.iter_mut().zip(u).zip(w) {
                *out += u * w;
            }
        }
        out.iter_mut().for_each(|x| *x = math::silu(*x));
    });
    let keep = |state: &mut [f32], rows: usize| {
        for (c, kept) in state.chunks_exact_mut(past.max(1)).enumerate() {
            for (i, u) in kept.iter_mut().enumerate().take(past) {
                *u = inputs[(rows + i) * channels + c];
            }
        }
    };
    for (t, after) in after.into_iter().flatten().enumerate() {
        keep(&mut after.conv, t + 1);
    }
    keep(state, n);
    out
}

/// The scan, `o [n, inner]`; `state [heads, P, N]` moves on.
fn scan(
    pool: &Pool,
    geometry: &MambaGeometry,
    weights: &MambaWeights,
    projected: &[f32],
    convolved: &[f32],
    state: &mut [f32],
    after: Option<&mut [MambaState]>,
) -> Vec<f32> {
    let (heads, p, d_state) = (geometry.heads, geometry.head_dim, geometry.d_state);
    let (inner, channels, width) = (geometry.inner(), geometry.conv_channels(), geometry.in_proj_rows());
    let n = projected.len() / width;
    struct Head<'a> {
        index: usize,
        state: &'a mut [f32],
        /// The head's part of each row's output.
        out: Vec<&'a mut [f32]>,
        /// The head's part of each snapshot.
        after: Vec<&'a mut [f32]>,
    }
    let mut o = vec![0.0; n * inner];
    let mut work: Vec<Head> = (state.chunks_exact_mut(p * d_state).enumerate())
        .map(|(index, state)| Head { index, state, out: Vec::with_capacity(n), after: Vec::new() })
        .collect();
    for row in o.chunks_exact_mut(inner) {
        work.iter_mut().zip(row.chunks_exact_mut(p)).for_each(|(head, out)| head.out.push(out));
    }
    for snapshot in after.into_iter().flatten() {
        let parts = snapshot.ssm.chunks_exact_mut(p * d_state);
        work.iter_mut().zip(parts).for_each(|(head, part)| head.after.push(part));
    }
    pool.each(work, |mut head| {
        let h = head.index;
        let group = h / (heads / geometry.groups);
        let a = -math::exp(weights.a_log[h]);
        let steps: Vec<(f32, f32)> = (projected.chunks_exact(width))
            .map(|row| {
                let raw = math::softplus(row[width - heads + h] + weights.dt_bias[h]);
                let dt = raw.clamp(geometry.dt_limit[0], geometry.dt_limit[1]);
                (dt, math::exp(dt * a))
            })
            .collect();
        for start in (0..n).step_by(STRETCH) {
            let stretch = start..(start + STRETCH).min(n);
            for (j, s) in head.state.chunks_exact_mut(d_state).enumerate() {
                for t in stretch.clone() {
                    let row = &convolved[t * channels..(t + 1) * channels];
                    let x = row[h * p + j];
                    let b = &row[inner + group * d_state..][..d_state];
                    let c = &row[inner + (geometry.groups + group) * d_state..][..d_state];
                    let (dt, decay) = steps[t];
                    head.out[t][j] = step(s, decay, dt * x, b, c) + weights.d_skip[h] * x;
                    if let Some(after) = head.after.get_mut(t) {
                        after[j * d_state..(j + 1) * d_state].copy_from_slice(s);
                    }
                }
            }
        }
    });
    o
}

/// `s = decay · s + x · b`, returns `s · c`, for one line of the state.
#[inline(always)]
fn step(s: &mut [f32], decay: f32, x: f32, b: &[f32], c: &[f32]) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let (s16, s_tail) = s.as_chunks_mut::<LANES>();
    let (b16, b_tail) = b.as_chunks::<LANES>();
    let (c16, c_tail) = c.as_chunks::<LANES>();
    for ((s, b), c) in s16.iter_mut().zip(b16).zip(c16) {
        for l in 0..LANES {
            s[l] = decay * s[l] + x * b[l];
            lanes[l] += s[l] * c[l];
        }
    }
    for (l, ((s, b), c)) in s_tail.iter_mut().zip(b_tail).zip(c_tail).enumerate() {
        *s = decay * *s + x * b;
        lanes[l] += *s * c;
    }
    math::tree(lanes)
}
