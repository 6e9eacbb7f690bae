//! Which experts a row goes to, and with what weights.
//!
//! ```text
//! r = gate y    p = sigma(r)    c = p + bias
//! groups, if any: strength = sum of a group's two largest c; outside the topk_group strongest c = -inf
//! picks = the k largest c, best first        w = p of the picks; norm_topk: w / (sum w + 1e-20); w * scale
//! ```
//! On a tie the lowest index goes first. Everything in f32. Source: `model.md` §1.5.

use super::{dot, sigmoid};
use crate::ids::ExpertIx;
use crate::model::geometry::MoeGeometry;

/// The routing of one row.
#[derive(Clone, Debug, PartialEq)]
pub struct Route {
    /// `[experts]`, before the sigmoid
    pub logits: Vec<f32>,
    /// `[k]`, best selection score first
    pub picks: Vec<ExpertIx>,
    /// `[k]`, normalised and scaled
    pub weights: Vec<f32>,
    /// Selection score of the last pick minus that of the best expert not picked; infinite when all are picked.
    pub gap: f32,
}

/// Routes one row.
///
/// Shapes: `gate` `[experts, hidden]`, `bias` `[experts]`, `normed` `[hidden]`.
///
/// # Panics
///
/// If the lengths do not fit the geometry.
#[must_use]
pub fn router(geometry: &MoeGeometry, gate: &[f32], bias: &[f32], normed: &[f32]) -> Route {
    assert_eq!((gate.len(), bias.len()), (geometry.experts * normed.len(), geometry.experts));
    let logits: Vec<f32> = gate.chunks_exact(normed.len()).map(|row| dot(row, normed) as f32).collect();
    select(geometry, logits, bias)
}

/// The part of [`router`] after its product.
///
/// # Panics
///
/// If the lengths do not fit the geometry.
#[must_use]
pub fn select(geometry: &MoeGeometry, logits: Vec<f32>, bias: &[f32]) -> Route {
    let p: Vec<f32> = logits.iter().map(|r| sigmoid(*r)).collect();
    let mut c: Vec<f32> = p.iter().zip(bias).map(|(p, bias)| p + bias).collect();

    if geometry.n_group > 1 {
        let width = geometry.experts / geometry.n_group;
        let strengths: Vec<f32> =
            c.chunks_exact(width).map(|group| top_k(group, 2).iter().map(|i| group[*i]).sum()).collect();
        let kept = top_k(&strengths, geometry.topk_group);
        for (group, c) in c.chunks_exact_mut(width).enumerate() {
            if !kept.contains(&group) {
                c.fill(f32::NEG_INFINITY);
            }
        }
    }

    let order = top_k(&c, geometry.top_k + 1);
    let picks = &order[..geometry.top_k];
    let gap = order.get(geometry.top_k).map_or(f32::INFINITY, |next| c[picks[geometry.top_k - 1]] - c[*next]);

    let mut weights: Vec<f32> = picks.iter().map(|e| p[*e]).collect();
    if geometry.norm_topk {
        let sum: f32 = weights.iter().sum::<f32>() + 1e-20;
        weights.iter_mut().for_each(|w| *w /= sum);
    }
    weights.iter_mut().for_each(|w| *w *= geometry.scale);
    Route { picks: picks.iter().map(|e| ExpertIx::from(*e)).collect(), logits, weights, gap }
}

/// Indices of the `k` largest scores, largest first, the lowest index first on a tie; fewer if there are fewer.
#[must_use]
pub fn top_k(scores: &[f32], k: usize) -> Vec<usize> {
    let mut picked = Vec::new();
    while picked.len() < k.min(scores.len()) {
        let mut best: Option<usize> = None;
        for (i, score) in scores.iter().enumerate() {
            if !picked.contains(&i) && best.is_none_or(|best| *score > scores[best]) {
                best = Some(i);
            }
        }
        picked.extend(best);
    }
    picked
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn geometry(experts: usize, top_k: usize) -> MoeGeometry {
        MoeGeometry {
            experts,
            top_k,
            inter: 1,
            shared_inter: 1,
            latent: None,
            n_group: 1,
            topk_group: 1,
            scale: 2.5,
            norm_topk: true,
        }
    }

    fn experts(picks: &[ExpertIx]) -> Vec<usize> {
        picks.iter().map(|e| e.index()).collect()
    }

    proptest! {
        #[test]
        fn top_k_is_a_stable_sort_cut_short(scores in prop::collection::vec(0u8..6, 1..40), k in 0usize..45) {
            let scores: Vec<f32> = scores.into_iter().map(f32::from).collect();
            let mut sorted: Vec<usize> = (0..scores.len()).collect();
            sorted.sort_by(|a, b| scores[*b].total_cmp(&scores[*a]));
            sorted.truncate(k);
            prop_assert_eq!(top_k(&scores, k), sorted);
        }
    }

    #[test]
    fn the_bias_selects_but_does_not_weigh() {
        let route = select(&geometry(3, 2), vec![0.0, 2.0, -1.0], &[0.0, 0.0, 5.0]);
        assert_eq!(experts(&route.picks), [2, 1]);
        let (a, b) = (sigmoid(-1.0), sigmoid(2.0));
        assert!((route.weights[0] - 2.5 * a / (a + b)).abs() < 1e-6);
        assert!((route.weights[1] - 2.5 * b / (a + b)).abs() < 1e-6);
        assert!((route.gap - (b - 0.5)).abs() < 1e-6);
    }

    #[test]
    fn without_normalisation_the_weights_are_the_scaled_sigmoids() {
        let geometry = MoeGeometry { norm_topk: false, ..geometry(2, 2) };
        let route = select(&geometry, vec![1.0, 1.0], &[0.0; 2]);
        assert_eq!(experts(&route.picks), [0, 1]);
        assert_eq!(route.weights, [2.5 * sigmoid(1.0); 2]);
        assert_eq!(route.gap, f32::INFINITY);
    }

    #[test]
    fn only_the_strongest_groups_are_chosen_from() {
        // strengths: 0 with one high score, 1 with two middling ones, 2 weak
        let geometry = MoeGeometry { n_group: 3, topk_group: 1, ..geometry(6, 2) };
        let route = select(&geometry, vec![0.0; 6], &[0.9, 0.0, 0.5, 0.5, 0.1, 0.1]);
        assert_eq!(experts(&route.picks), [2, 3]);
        assert_eq!(route.gap, f32::INFINITY);
        let two = MoeGeometry { topk_group: 2, ..geometry };
        assert_eq!(experts(&select(&two, vec![0.0; 6], &[0.9, 0.0, 0.5, 0.5, 0.1, 0.1]).picks), [0, 2]);
    }
}
