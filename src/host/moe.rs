//! Mixture of experts (`model.md` §1.5): route, experts, shared expert, sum.

use super::kernels::{Input, Job, Set, prepare, prepare_here, run};
use super::{math, mlp};
use crate::host::Pool;
use crate::ids::ExpertIx;
use crate::knobs::Activations;
use crate::model::geometry::MoeGeometry;
use crate::model::tensors::Codec;
use crate::model::weights::{MlpWeights, MoeWeights};

/// Where rows go in one layer.
#[derive(Clone, Debug, PartialEq)]
pub struct Routes {
    /// The rows after the block's norm, `[n, hidden]`: what every expert reads.
    pub normed: Vec<f32>,
    /// `[n, top_k]`, best selection score first, the lower number first on a tie.
    pub picks: Vec<ExpertIx>,
    /// `[n, top_k]`, normalised and scaled.
    pub weights: Vec<f32>,
}

/// The rows that want one expert.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExpertRows {
    /// The expert.
    pub expert: ExpertIx,
    /// Numbers of the rows.
    pub rows: Vec<u32>,
}

impl Routes {
    /// Rows of each chosen expert, in order of the experts.
    #[must_use]
    pub fn by_expert(&self, top_k: usize) -> Vec<ExpertRows> {
        let mut wanted = std::collections::BTreeMap::<ExpertIx, Vec<u32>>::new();
        for (row, picks) in self.picks.chunks_exact(top_k).enumerate() {
            for expert in picks {
                wanted.entry(*expert).or_default().push(row as u32);
            }
        }
        wanted.into_iter().map(|(expert, rows)| ExpertRows { expert, rows }).collect()
    }

    /// For each pick, which line of the outputs in the order of [`Routes::by_expert`] is its own.
    #[must_use]
    pub fn lines(&self, top_k: usize, wanted: &[ExpertRows]) -> Vec<usize> {
        let mut lines = vec![usize::MAX; self.picks.len()];
        let mut line = 0;
        for ExpertRows { expert, rows } in wanted {
            for row in rows {
                let first = *row as usize * top_k;
                let pick = self.picks[first..first + top_k].iter().position(|pick| pick == expert);
                lines[first + pick.expect("the row picked the expert")] = line;
                line += 1;
            }
        }
        lines
    }

    /// Brings outputs in the order of [`Routes::by_expert`] into that of the picks, `[n, top_k, width]`.
    ///
    /// # Panics
    ///
    /// If an expert's output is not among them.
    #[must_use]
    pub fn place(&self, top_k: usize, wanted: &[ExpertRows], outputs: &[f32], width: usize) -> Vec<f32> {
        let mut placed = vec![0.0; self.picks.len() * width];
        for (to, line) in placed.chunks_exact_mut(width.max(1)).zip(self.lines(top_k, wanted)) {
            to.copy_from_slice(&outputs[line * width..(line + 1) * width]);
        }
        placed
    }
}

/// Picks and weights for rows `normed [n, hidden]`.
pub(crate) fn route(
    pool: &Pool,
    geometry: &MoeGeometry,
    weights: &MoeWeights,
    normed: &[f32],
) -> (Vec<ExpertIx>, Vec<f32>) {
    let hidden = weights.gate.len() / geometry.experts;
    let n = normed.len() / hidden;
    // Experts of a task: some hundred kilobytes of the router's weights.
    const EXPERTS: usize = 16;
    // Rows of a task: some ten microseconds.
    const ROWS: usize = 16;
    let set = Set::of(pool.isa());
    let mut logits = vec![0.0; geometry.experts * n];
    let work = logits.chunks_mut(EXPERTS * n.max(1)).zip(weights.gate.chunks(EXPERTS * hidden)).collect();
    pool.each_of(weights.gate.len(), work, |(logits, gate): (&mut [f32], &[f32])| {
        (set.dots)(gate, normed, hidden, logits);
    });
    let mut picks = vec![ExpertIx(0); n * geometry.top_k];
    let mut shares = vec![0.0; n * geometry.top_k];
    let work = picks.chunks_mut(ROWS * geometry.top_k).zip(shares.chunks_mut(ROWS * geometry.top_k)).enumerate();
    pool.each_of(
        n * geometry.experts,
        work.collect(),
        |(task, (picks, shares)): (usize, (&mut [ExpertIx], &mut [f32]))| {
            let rows = picks.chunks_exact_mut(geometry.top_k).zip(shares.chunks_exact_mut(geometry.top_k));
            for (i, (picks, shares)) in rows.enumerate() {
                let i = task * ROWS + i;
                let probabilities: Vec<f32> = (0..geometry.experts).map(|e| math::sigmoid(logits[e * n + i])).collect();
                choose(geometry, &weights.bias, &probabilities, picks, shares);
            }
        },
    );
    (picks, shares)
}

/// One row's picks and weights from its probabilities `[experts]`.
fn choose(geometry: &MoeGeometry, bias: &[f32], probabilities: &[f32], picks: &mut [ExpertIx], shares: &mut [f32]) {
    let mut scores: Vec<f32> = probabilities.iter().zip(bias).map(|(p, b)| p + b).collect();
    if geometry.n_group > 1 {
        let size = geometry.experts / geometry.n_group;
        let strengths: Vec<f32> = (scores.chunks_exact(size))
            .map(|group| best(group, 2.min(size)).into_iter().map(|e| group[e]).sum())
            .collect();
        let kept = best(&strengths, geometry.topk_group);
        for (g, group) in scores.chunks_exact_mut(size).enumerate() {
            if !kept.contains(&g) {
                group.fill(f32::NEG_INFINITY);
            }
        }
    }
    let chosen = best(&scores, geometry.top_k);
    let sum: f32 = if geometry.norm_topk { chosen.iter().map(|e| probabilities[*e]).sum::<f32>() + 1e-20 } else { 1.0 };
    for ((pick, share), e) in picks.iter_mut().zip(shares).zip(chosen) {
        *pick = ExpertIx::from(e);
        *share = probabilities[e] / sum * geometry.scale;
    }
}

/// Places of the `k` largest values, largest first, the lower place first on a tie.
fn best(values: &[f32], k: usize) -> Vec<usize> {
    let mut best: Vec<usize> = Vec::with_capacity(k + 1);
    for (place, value) in values.iter().enumerate() {
        let after = best.iter().position(|b| value.total_cmp(&values[*b]).is_gt()).unwrap_or(best.len());
        if after < k {
            best.insert(after, place);
            best.truncate(k);
        }
    }
    best
}

/// Unweighted outputs of experts, in the order of `wanted` and of its rows: `[sum of rows, width]`, width being the
/// latent one where there is one. With `shared` `[n, hidden]` the shared expert's output too, in the same region.
pub(crate) fn experts(
    pool: &Pool,
    weights: &MoeWeights,
    act: Activations,
    normed: &[f32],
    wanted: &[ExpertRows],
    shared: Option<&mut [f32]>,
) -> Vec<f32> {
    let total: usize = wanted.iter().map(|w| w.rows.len()).sum();
    let width = weights.experts.first().map_or(0, |one| one.down.rows());
    let mut out = vec![0.0; total * width];
    let latent = weights.latent.as_ref().filter(|_| total > 0).map(|[fc1, _]| {
        let mut rows = vec![0.0; normed.len() / fc1.cols() * fc1.rows()];
        let input = prepare(pool, fc1, act, normed);
        run(pool, vec![Job { matrix: fc1, input: &input, out: &mut rows }]);
        rows
    });
    let common = Common::new(pool, weights, act, latent.as_deref().unwrap_or(normed), wanted);
    // What does not take all rows takes some of them.
    let mut own: Vec<Option<Input>> = wanted.iter().map(|_| None).collect();
    let values = total * weights.experts.first().map_or(0, |one| one.up.cols());
    pool.each_of(values, own.iter_mut().zip(wanted).collect(), |(own, wanted): (&mut Option<Input>, &ExpertRows)| {
        *own = common.gather(weights, act, wanted);
    });
    let input_of = |i: usize| own[i].as_ref().unwrap_or_else(|| common.whole(weights, &wanted[i]));
    let shared_input = shared.is_some().then(|| prepare(pool, &weights.shared.up, act, normed));
    let mut jobs = Vec::with_capacity(wanted.len() + 1);
    // The longest first.
    if let (Some(out), Some(input)) = (shared, &shared_input) {
        jobs.push(mlp::Job { weights: &weights.shared, input, out });
    }
    let mut rest = &mut out[..];
    for (i, ExpertRows { expert, rows }) in wanted.iter().enumerate() {
        let (out, tail) = std::mem::take(&mut rest).split_at_mut(rows.len() * width);
        rest = tail;
        jobs.push(mlp::Job { weights: &weights.experts[expert.index()], input: input_of(i), out });
    }
    jobs.retain(|job| job.input.n() > 0);
    mlp::run(pool, act, jobs);
    out
}

/// Rows prepared once for all experts that read them alike: those of one codec, but for q8_2f, whose fields differ.
struct Common<'a> {
    set: &'static Set,
    /// `[n, width]`
    rows: &'a [f32],
    prepared: Vec<(Codec, Input)>,
}

impl<'a> Common<'a> {
    fn new(pool: &Pool, weights: &MoeWeights, act: Activations, rows: &'a [f32], wanted: &[ExpertRows]) -> Self {
        let mut prepared: Vec<(Codec, Input)> = Vec::new();
        for ExpertRows { expert, .. } in wanted {
            let up = &weights.experts[expert.index()].up;
            if up.codec() != Codec::Q8_2f && prepared.iter().all(|(codec, _)| *codec != up.codec()) {
                prepared.push((up.codec(), prepare(pool, up, act, rows)));
            }
        }
        Self { set: Set::of(pool.isa()), rows, prepared }
    }

    /// All rows, for an expert that [`Common::gather`] gave none of its own.
    fn whole(&self, weights: &MoeWeights, wanted: &ExpertRows) -> &Input {
        let codec = weights.experts[wanted.expert.index()].up.codec();
        self.prepared.iter().find(|(seen, _)| *seen == codec).map(|(_, input)| input).expect("prepared for every codec")
    }

    /// An expert's rows, unless they are all rows in order and prepared.
    fn gather(&self, weights: &MoeWeights, act: Activations, wanted: &ExpertRows) -> Option<Input> {
        let up = &weights.experts[wanted.expert.index()].up;
        if up.codec() == Codec::Q8_2f {
            let width = up.cols();
            let chosen = wanted.rows.iter().flat_map(|i| &self.rows[*i as usize * width..][..width]);
            return Some(prepare_here(self.set, up, act, &chosen.copied().collect::<Vec<_>>()));
        }
        let whole = self.whole(weights, wanted);
        let all = wanted.rows.len() == whole.n() && wanted.rows.iter().enumerate().all(|(i, row)| i == *row as usize);
        (!all).then(|| whole.gather(&wanted.rows))
    }
}

/// The shared expert's output, `[n, hidden]`.
pub(crate) fn shared(pool: &Pool, weights: &MoeWeights, act: Activations, normed: &[f32]) -> Vec<f32> {
    dense(pool, &weights.shared, act, normed)
}

/// `down relu²(up x)` for rows `[n, up.cols()]`.
pub(crate) fn dense(pool: &Pool, weights: &MlpWeights, act: Activations, normed: &[f32]) -> Vec<f32> {
    let input = prepare(pool, &weights.up, act, normed);
    let mut out = vec![0.0; input.n() * weights.down.rows()];
    mlp::run(pool, act, vec![mlp::Job { weights, input: &input, out: &mut out }]);
    out
}

/// Experts' outputs.
#[derive(Clone, Copy)]
pub(crate) struct Outputs<'a> {
    /// `[.., width]`
    pub(crate) values: &'a [f32],
    /// For each pick the line that is its own.
    pub(crate) lines: &'a [usize],
}

/// `rows += fc2(sum of weight · output) + shared`, picks in order.
///
/// The order of additions is fixed, so the result does not depend
/// on who computed an output.
pub(crate) fn sum(
    pool: &Pool,
    weights: &MoeWeights,
    act: Activations,
    rows: &mut [f32],
    shares: &[f32],
    outputs: Outputs<'_>,
    shared: &[f32],
) {
    if shares.is_empty() {
        return;
    }
    // Rows of a task: some ten microseconds.
    const ROWS: usize = 8;
    let width = weights.experts.first().map_or(0, |one| one.down.rows());
    let hidden = weights.shared.down.rows();
    let n = rows.len() / hidden;
    let top_k = shares.len() / n;
    let mut routed = vec![0.0; n * width];
    let work = routed.chunks_mut(ROWS * width).enumerate().collect();
    pool.each_of(n * top_k * width, work, |(task, routed): (usize, &mut [f32])| {
        for (i, routed) in routed.chunks_exact_mut(width).enumerate() {
            let first = (task * ROWS + i) * top_k;
            for (share, line) in shares[first..].iter().zip(&outputs.lines[first..]).take(top_k) {
                for (routed, output) in routed.iter_mut().zip(&outputs.values[line * width..]) {
                    *routed += share * output;
                }
            }
        }
    });
    if let Some([_, fc2]) = &weights.latent {
        let mut wide = vec![0.0; n * hidden];
        let input = prepare(pool, fc2, act, &routed);
        run(pool, vec![Job { matrix: fc2, input: &input, out: &mut wide }]);
        routed = wide;
    }
    let work = rows.chunks_mut(ROWS * hidden).zip(routed.chunks(ROWS * hidden)).zip(shared.chunks(ROWS * hidden));
    pool.each_of(n * hidden, work.collect(), |((rows, routed), shared): ((&mut [f32], &[f32]), &[f32])| {
        for ((row, routed), shared) in rows.iter_mut().zip(routed).zip(shared) {
            *row += routed + shared;
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn geometry(experts: usize, top_k: usize, n_group: usize, topk_group: usize, norm_topk: bool) -> MoeGeometry {
        MoeGeometry {
            experts,
            top_k,
            inter: 1,
            shared_inter: 1,
            latent: None,
            n_group,
            topk_group,
            scale: 2.0,
            norm_topk,
        }
    }

    fn chosen(geometry: &MoeGeometry, bias: &[f32], p: &[f32]) -> (Vec<usize>, Vec<f32>) {
        let (mut picks, mut shares) = (vec![ExpertIx(0); geometry.top_k], vec![0.0; geometry.top_k]);
        choose(geometry, bias, p, &mut picks, &mut shares);
        (picks.into_iter().map(ExpertIx::index).collect(), shares)
    }

    #[test]
    fn the_bias_selects_and_does_not_weigh() {
        let (picks, shares) = chosen(&geometry(4, 2, 1, 1, true), &[0.0, 0.0, 0.0, 1.0], &[0.2, 0.6, 0.3, 0.1]);
        assert_eq!(picks, [3, 1]);
        assert!((shares[0] - 2.0 * 0.1 / 0.7).abs() < 1e-6 && (shares[1] - 2.0 * 0.6 / 0.7).abs() < 1e-6);
        let (_, shares) = chosen(&geometry(4, 2, 1, 1, false), &[0.0; 4], &[0.2, 0.6, 0.3, 0.1]);
        assert_eq!(shares, [1.2, 0.6]);
    }

    #[test]
    fn groups_limit_the_choice_and_ties_go_low() {
        // Group strengths: 0.9, 1.0, 0.8; the best single score lies in the last one.
        let p = [0.5, 0.4, 0.5, 0.5, 0.8, 0.0];
        assert_eq!(chosen(&geometry(6, 3, 3, 2, true), &[0.0; 6], &p).0, [0, 2, 3]);
        assert_eq!(chosen(&geometry(6, 3, 1, 1, true), &[0.0; 6], &p).0, [4, 0, 2]);
    }

    #[test]
    fn outputs_find_their_picks() {
        let routes = Routes { normed: vec![], picks: [3, 1, 1, 2].map(ExpertIx).to_vec(), weights: vec![1.0; 4] };
        let wanted = routes.by_expert(2);
        assert_eq!(
            wanted.iter().map(|w| (w.expert.0, w.rows.clone())).collect::<Vec<_>>(),
            [(1, vec![0, 1]), (2, vec![1]), (3, vec![0]),]
        );
        assert_eq!(routes.place(2, &wanted, &[10.0, 11.0, 21.0, 30.0], 1), [30.0, 10.0, 11.0, 21.0]);
    }
}
