//! Mixture of experts (`model.md` §1.5): route, experts, shared expert, sum.

use super::kernels::{Input, Job, prepare, run};
use super::{math, mlp};
use crate::host::Pool;
use crate::ids::ExpertIx;
use crate::knobs::Activations;
use crate::model::geometry::MoeGeometry;
use crate::model::weights::MoeWeights;

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

    /// Brings outputs in the order of [`Routes::by_expert`] into that of the picks, `[n, top_k, width]`.
    ///
    /// # Panics
    ///
    /// If an expert's output is not among them.
    #[must_use]
    pub fn place(&self, top_k: usize, wanted: &[ExpertRows], outputs: &[f32], width: usize) -> Vec<f32> {
        let mut placed = vec![0.0; self.picks.len() * width];
        let mut at = 0;
        for ExpertRows { expert, rows } in wanted {
            for row in rows {
                let picks = &self.picks[*row as usize * top_k..(*row as usize + 1) * top_k];
                let pick = picks.iter().position(|pick| pick == expert).expect("the row picked the expert");
                let to = (*row as usize * top_k + pick) * width;
                placed[to..to + width].copy_from_slice(&outputs[at * width..(at + 1) * width]);
                at += 1;
            }
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
    let mut logits = vec![0.0; geometry.experts * n];
    let work = logits.chunks_mut(EXPERTS * n.max(1)).zip(weights.gate.chunks(EXPERTS * hidden)).collect();
    pool.each(work, |(logits, gate): (&mut [f32], &[f32])| {
        for (logits, gate) in logits.chunks_exact_mut(n).zip(gate.chunks_exact(hidden)) {
            for (logit, row) in logits.iter_mut().zip(normed.chunks_exact(hidden)) {
                *logit = math::dot(gate, row);
            }
        }
    });
    let (mut picks, mut shares) = (Vec::with_capacity(n * geometry.top_k), Vec::with_capacity(n * geometry.top_k));
    for i in 0..n {
        let probabilities: Vec<f32> = (0..geometry.experts).map(|e| math::sigmoid(logits[e * n + i])).collect();
        choose(geometry, &weights.bias, &probabilities, &mut picks, &mut shares);
    }
    (picks, shares)
}

/// One row's picks and weights from its probabilities `[experts]`.
fn choose(
    geometry: &MoeGeometry,
    bias: &[f32],
    probabilities: &[f32],
    picks: &mut Vec<ExpertIx>,
    shares: &mut Vec<f32>,
) {
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
    for e in chosen {
        picks.push(ExpertIx::from(e));
        shares.push(probabilities[e] / sum * geometry.scale);
    }
}

/// Places of the `k` largest values, largest first, the lower place first on a tie.
fn best(values: &[f32], k: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by(|a, b| values[*b].total_cmp(&values[*a]).then(a.cmp(b)));
    order.truncate(k);
    order
}

/// Unweighted outputs of experts, in the order of `wanted` and of its rows:
/// `[sum of rows, width]`, width being the latent one where there is one.
pub(crate) fn experts(
    pool: &Pool,
    weights: &MoeWeights,
    act: Activations,
    normed: &[f32],
    wanted: &[ExpertRows],
) -> Vec<f32> {
    let total: usize = wanted.iter().map(|w| w.rows.len()).sum();
    let Some(one) = weights.experts.first() else { return Vec::new() };
    let width = one.down.rows();
    let mut out = vec![0.0; total * width];
    if total == 0 {
        return out;
    }
    let latent = weights.latent.as_ref().map(|[fc1, _]| {
        let mut rows = vec![0.0; normed.len() / fc1.cols() * fc1.rows()];
        let input = prepare(pool, fc1, act, normed);
        run(pool, vec![Job { matrix: fc1, input: &input, out: &mut rows }]);
        rows
    });
    let rows = latent.as_deref().unwrap_or(normed);
    let all = |picks: &[u32]| picks.iter().enumerate().all(|(i, row)| i == *row as usize);
    let n = rows.len() / one.up.cols();
    // Rows prepared for one q4tp or float matrix serve them all; q8_2f matrices have fields of their own.
    let mut common: Vec<(_, Input)> = Vec::new();
    let inputs: Vec<Option<Input>> = (wanted.iter())
        .map(|ExpertRows { expert, rows: picks }| {
            let up = &weights.experts[expert.index()].up;
            if up.codec() == crate::model::tensors::Codec::Q8_2f {
                let width = up.cols();
                let chosen: Vec<f32> =
                    picks.iter().flat_map(|i| &rows[*i as usize * width..(*i as usize + 1) * width]).copied().collect();
                return Some(prepare(pool, up, act, &chosen));
            }
            if !common.iter().any(|(codec, _)| *codec == up.codec()) {
                common.push((up.codec(), prepare(pool, up, act, rows)));
            }
            let whole = &common.iter().find(|(codec, _)| *codec == up.codec())?.1;
            (picks.len() != n || !all(picks)).then(|| whole.gather(picks))
        })
        .collect();
    let mut rest = &mut out[..];
    let mut jobs = Vec::with_capacity(wanted.len());
    for (ExpertRows { expert, rows: picks }, input) in wanted.iter().zip(&inputs) {
        let (out, tail) = std::mem::take(&mut rest).split_at_mut(picks.len() * width);
        rest = tail;
        let weights = &weights.experts[expert.index()];
        let shared = || common.iter().find(|(codec, _)| *codec == weights.up.codec()).map(|(_, input)| input);
        let input = input.as_ref().or_else(shared).expect("prepared above");
        jobs.push(mlp::Job { weights, input, out });
    }
    mlp::run(pool, act, jobs);
    out
}

/// The shared expert's output, `[n, hidden]`.
pub(crate) fn shared(pool: &Pool, weights: &MoeWeights, act: Activations, normed: &[f32]) -> Vec<f32> {
    dense(pool, &weights.shared, act, normed)
}

/// `down relu²(up x)` for rows `[n, up.cols()]`.
pub(crate) fn dense(
    pool: &Pool,
    weights: &crate::model::weights::MlpWeights,
    act: Activations,
    normed: &[f32],
) -> Vec<f32> {
    let input = prepare(pool, &weights.up, act, normed);
    let mut out = vec![0.0; input.n() * weights.down.rows()];
    mlp::run(pool, act, vec![mlp::Job { weights, input: &input, out: &mut out }]);
    out
}

/// `rows += fc2(sum of weight · output) + shared`, picks in order.
///
/// `outputs [n, top_k, width]`; the order of additions is fixed, so the result
/// does not depend on who computed an output.
pub(crate) fn sum(
    pool: &Pool,
    weights: &MoeWeights,
    act: Activations,
    rows: &mut [f32],
    shares: &[f32],
    outputs: &[f32],
    shared: &[f32],
) {
    if shares.is_empty() {
        return;
    }
    let width = outputs.len() / shares.len();
    let hidden = weights.shared.down.rows();
    let n = rows.len() / hidden;
    let top_k = shares.len() / n;
    let mut routed = vec![0.0; n * width];
    for ((routed, shares), outputs) in
        routed.chunks_exact_mut(width).zip(shares.chunks_exact(top_k)).zip(outputs.chunks_exact(top_k * width))
    {
        for (share, output) in shares.iter().zip(outputs.chunks_exact(width)) {
            for (routed, output) in routed.iter_mut().zip(output) {
                *routed += share * output;
            }
        }
    }
    if let Some([_, fc2]) = &weights.latent {
        let mut wide = vec![0.0; n * hidden];
        let input = prepare(pool, fc2, act, &routed);
        run(pool, vec![Job { matrix: fc2, input: &input, out: &mut wide }]);
        routed = wide;
    }
    for ((row, routed), shared) in rows.iter_mut().zip(&routed).zip(shared) {
        *row += routed + shared;
    }
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
        let (mut picks, mut shares) = (Vec::new(), Vec::new());
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
