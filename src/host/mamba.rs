//! Mamba-2 blocks (`model.md` §1.4).
//!
//! The scan runs head by head over all rows, in parallel over heads: a stripe
//! of the state stays in registers while a stretch of rows passes. Every row
//! goes through the same operations as in a step, so a prompt gives the same
//! bits however it is cut. (The scan is about 1 % of a prefill's time, the
//! projections are the rest: a chunked matrix form would win nothing.)

use super::kernels::{Job, Set, prepare, run};
use super::math;
use crate::host::Pool;
use crate::knobs::Activations;
use crate::model::geometry::MambaGeometry;
use crate::model::state::MambaState;
use crate::model::weights::MambaWeights;

/// Rows whose B and C stay in the nearest cache while a head's state passes.
const STRETCH: usize = 16;
/// Rows from which on a call is a prompt's rather than a step's or a verify pass's.
const LONG: usize = 16;
/// Lanes of a sum over the state.
const LANES: usize = 16;

/// Mixer output `[n, hidden]` for normed rows `[n, hidden]`; `state` moves on by
/// `n` rows, and `snapshots` gets it as it is after each row.
#[expect(clippy::too_many_arguments, reason = "what a block is, what it reads and what it remembers")]
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
    let (inner, width) = (geometry.inner(), geometry.in_proj_rows());
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
    let set = Set::of(pool.isa());
    // Rows of a task.
    const ROWS: usize = 4;
    let rows = o.chunks_mut(ROWS * inner).zip(projected.chunks(ROWS * width)).collect();
    pool.each(rows, |(o, projected): (&mut [f32], &[f32])| {
        for (o, projected) in o.chunks_exact_mut(inner).zip(projected.chunks_exact(width)) {
            (set.gate)(o, &projected[..inner], &weights.norm, geometry.groups, eps);
        }
    });

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
    let mut out = vec![0.0; n * channels];
    let set = Set::of(pool.isa());
    let bias = &weights.conv_bias;
    if n < LONG {
        let mut after = after;
        for (t, (row, out)) in projected.chunks_exact(width).zip(out.chunks_exact_mut(channels)).enumerate() {
            let u = &row[geometry.inner()..][..channels];
            (set.convolve)(&mut Convolution { taps, bias, weights: &weights.conv, given: Given::Next(u, state), out });
            if let Some(after) = after.as_deref_mut() {
                after[t].conv.copy_from_slice(state);
            }
        }
        return out;
    }
    let past = taps - 1;
    // Inputs channel-last: the K - 1 of the state, then the n new ones; taps channel-last too.
    let mut inputs = vec![0.0; (past + n) * channels];
    for c in 0..channels {
        for i in 0..past {
            inputs[i * channels + c] = state[c * past + i];
        }
    }
    for (input, row) in inputs[past * channels..].chunks_exact_mut(channels).zip(projected.chunks_exact(width)) {
        input.copy_from_slice(&row[geometry.inner()..][..channels]);
    }
    let mut kernel = vec![0.0; taps * channels];
    for (c, w) in weights.conv.chunks_exact(taps).enumerate() {
        for (i, w) in w.iter().enumerate() {
            kernel[i * channels + c] = *w;
        }
    }
    // Rows of a task.
    const ROWS: usize = 8;
    let rows = out.chunks_mut(ROWS * channels).enumerate().collect();
    pool.each(rows, |(task, out): (usize, &mut [f32])| {
        for (t, out) in out.chunks_exact_mut(channels).enumerate() {
            let given = Given::All(&inputs[(task * ROWS + t) * channels..]);
            (set.convolve)(&mut Convolution { taps, bias, weights: &kernel, given, out });
        }
    });
    let keep = |state: &mut [f32], rows: usize| {
        for c in 0..channels {
            for i in 0..past {
                state[c * past + i] = inputs[(rows + i) * channels + c];
            }
        }
    };
    for (t, after) in after.into_iter().flatten().enumerate() {
        keep(&mut after.conv, t + 1);
    }
    keep(state, n);
    out
}

/// One row of a convolution.
pub(crate) struct Convolution<'a> {
    /// `K`
    taps: usize,
    /// `[channels]`
    bias: &'a [f32],
    /// `[channels, K]`, or `[K, channels]` where all inputs are given.
    weights: &'a [f32],
    given: Given<'a>,
    /// `[channels]`
    out: &'a mut [f32],
}

/// A row's inputs.
enum Given<'a> {
    /// The newest `[channels]` and the state `[channels, K - 1]`, which moves on.
    Next(&'a [f32], &'a mut [f32]),
    /// `[K, channels]`, the newest last.
    All(&'a [f32]),
}

/// `silu(bias + sum of weight · input)`, the oldest input first.
#[inline(always)]
pub(crate) fn convolve_body(row: &mut Convolution<'_>) {
    let Convolution { taps, bias, weights, given, out } = row;
    let (taps, out) = (*taps, &mut **out);
    match given {
        Given::All(inputs) => {
            out.copy_from_slice(bias);
            for (u, w) in inputs.chunks_exact(out.len()).zip(weights.chunks_exact(out.len())) {
                for ((out, u), w) in out.iter_mut().zip(u).zip(w) {
                    *out += u * w;
                }
            }
        }
        Given::Next(u, state) if taps == 4 => {
            // The published width, spelt out for the compiler.
            let (state, w) = (state.as_chunks_mut::<3>().0, weights.as_chunks::<4>().0);
            for (((out, bias), u), (state, w)) in out.iter_mut().zip(*bias).zip(*u).zip(state.iter_mut().zip(w)) {
                *out = (((bias + state[0] * w[0]) + state[1] * w[1]) + state[2] * w[2]) + u * w[3];
                *state = [state[1], state[2], *u];
            }
        }
        Given::Next(u, state) => {
            let past = taps - 1;
            for (c, out) in out.iter_mut().enumerate() {
                let (state, w) = (&mut state[c * past..(c + 1) * past], &weights[c * taps..(c + 1) * taps]);
                *out = bias[c];
                for (u, w) in state.iter().chain([&u[c]]).zip(w) {
                    *out += u * w;
                }
                if past > 0 {
                    state.rotate_left(1);
                    state[past - 1] = u[c];
                }
            }
        }
    }
    out.iter_mut().for_each(|x| *x = math::silu(*x));
}

/// One head's part of a scan.
pub(crate) struct Head<'a> {
    /// Which head.
    pub(crate) index: usize,
    /// `[P, N]`
    pub(crate) state: &'a mut [f32],
    /// The head's part `[P]` of each row's output.
    pub(crate) out: Vec<&'a mut [f32]>,
    /// The head's part `[P, N]` of each snapshot; empty where none are wanted.
    pub(crate) after: Vec<&'a mut [f32]>,
    /// Step size and decay for each row.
    pub(crate) steps: Vec<(f32, f32)>,
    /// `D`
    pub(crate) skip: f32,
    /// `[n, channels]`: rows `[x | B | C]`.
    pub(crate) convolved: &'a [f32],
    /// Channels of a row.
    pub(crate) channels: usize,
    /// Where in a row the head's x, B and C begin.
    pub(crate) at: [usize; 3],
    /// Size of a line of the state.
    pub(crate) d_state: usize,
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
    let mut o = vec![0.0; n * inner];
    let mut work: Vec<Head> = (state.chunks_exact_mut(p * d_state).enumerate())
        .map(|(index, state)| {
            let group = index / (heads / geometry.groups);
            let at = [index * p, inner + group * d_state, inner + (geometry.groups + group) * d_state];
            let (out, steps, skip) = (Vec::with_capacity(n), Vec::with_capacity(n), weights.d_skip[index]);
            Head { index, state, out, after: Vec::new(), steps, skip, convolved, channels, at, d_state }
        })
        .collect();
    for row in o.chunks_exact_mut(inner) {
        work.iter_mut().zip(row.chunks_exact_mut(p)).for_each(|(head, out)| head.out.push(out));
    }
    for snapshot in after.into_iter().flatten() {
        let parts = snapshot.ssm.chunks_exact_mut(p * d_state);
        work.iter_mut().zip(parts).for_each(|(head, part)| head.after.push(part));
    }
    let set = Set::of(pool.isa());
    // A few heads make a task: one row of one head is too little.
    let together = if n < LONG { heads.div_ceil(4 * pool.threads()) } else { 1 };
    pool.each(work.chunks_mut(together).collect(), |heads: &mut [Head<'_>]| {
        for head in heads {
            let a = -math::exp(weights.a_log[head.index]);
            head.steps.extend(projected.chunks_exact(width).map(|row| {
                let raw = math::softplus(row[inner + channels + head.index] + weights.dt_bias[head.index]);
                let dt = raw.clamp(geometry.dt_limit[0], geometry.dt_limit[1]);
                (dt, math::exp(dt * a))
            }));
            (set.scan)(head);
        }
    });
    o
}

/// One head over all rows.
#[inline(always)]
pub(crate) fn scan_body(head: &mut Head<'_>) {
    let (n, d_state) = (head.out.len(), head.d_state);
    for start in (0..n).step_by(STRETCH) {
        let stretch = start..(start + STRETCH).min(n);
        for (j, s) in head.state.chunks_exact_mut(d_state).enumerate() {
            for t in stretch.clone() {
                let row = &head.convolved[t * head.channels..(t + 1) * head.channels];
                let [x, b, c] = head.at;
                let (x, b, c) = (row[x + j], &row[b..b + d_state], &row[c..c + d_state]);
                let (dt, decay) = head.steps[t];
                head.out[t][j] = step(s, decay, dt * x, b, c) + head.skip * x;
                if let Some(after) = head.after.get_mut(t) {
                    after[j * d_state..(j + 1) * d_state].copy_from_slice(s);
                }
            }
        }
    }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::Isa;

    fn values(len: usize, seed: usize) -> Vec<f32> {
        (0..len).map(|i| ((i * 7919 + seed * 104_729) % 2003) as f32 / 1000.0 - 1.0).collect()
    }

    /// Every set's scan does what the plain one does, at each width that has a version of its own and at others.
    #[test]
    fn every_scan_agrees() {
        for (p, d_state) in [(16, 64), (64, 128), (48, 128), (32, 256), (8, 128), (16, 48), (3, 7)] {
            for n in [1, 2, 7, 8, 9, 33] {
                let channels = p + 2 * d_state + 5;
                let convolved = values(n * channels, 1);
                let run = |set: &Set| {
                    let mut state = values(p * d_state, 2);
                    let (mut out, mut after) = (vec![0.0; n * p], vec![0.0; n * p * d_state]);
                    let mut head = Head {
                        index: 0,
                        state: &mut state,
                        out: out.chunks_exact_mut(p).collect(),
                        after: after.chunks_exact_mut(p * d_state).collect(),
                        steps: (0..n).map(|t| (0.01 + t as f32 * 0.003, 0.99 - t as f32 * 0.01)).collect(),
                        skip: 0.5,
                        convolved: &convolved,
                        channels,
                        at: [5, 5 + p, 5 + p + d_state],
                        d_state,
                    };
                    (set.scan)(&mut head);
                    (state, out, after)
                };
                let wanted = run(Set::of(Isa::Portable));
                for isa in Isa::present() {
                    let seen = run(Set::of(isa));
                    let pairs = [(&seen.0, &wanted.0), (&seen.1, &wanted.1), (&seen.2, &wanted.2)];
                    for (seen, wanted) in pairs {
                        for (seen, wanted) in seen.iter().zip(wanted) {
                            let most = 2e-6 * (1.0 + wanted.abs()) * (d_state as f32).sqrt();
                            assert!((seen - wanted).abs() <= most, "{isa} {p} {d_state} {n}: {seen} for {wanted}");
                        }
                    }
                    assert_eq!(seen.2[(n - 1) * p * d_state..], seen.0, "the last snapshot is the state");
                }
            }
        }
    }

    /// A prompt gives the same bits however it is cut.
    #[test]
    fn a_scan_goes_on_where_it_stopped() {
        let (p, d_state, n) = (64, 128, 21);
        let channels = p + 2 * d_state;
        let convolved = values(n * channels, 3);
        for isa in Isa::present() {
            let run = |cuts: &[usize]| {
                let (mut state, mut out) = (values(p * d_state, 4), vec![0.0; n * p]);
                let mut from = 0;
                for to in cuts {
                    let mut head = Head {
                        index: 0,
                        state: &mut state,
                        out: out[from * p..to * p].chunks_exact_mut(p).collect(),
                        after: Vec::new(),
                        steps: (from..*to).map(|t| (0.02 + t as f32 * 0.001, 0.97)).collect(),
                        skip: -0.25,
                        convolved: &convolved[from * channels..],
                        channels,
                        at: [0, p, p + d_state],
                        d_state,
                    };
                    (Set::of(isa).scan)(&mut head);
                    from = *to;
                }
                (state, out)
            };
            let whole = run(&[n]);
            assert_eq!(run(&[1, 2, 5, 13, n]), whole, "{isa}");
        }
    }
}
