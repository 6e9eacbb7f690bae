//! Attention in parts over the positions (split-K), and the merge of the parts.
//!
//! ```text
//! part:   m = max score    l = sum e^(score - m)    a = sum e^(score - m) * v
//! merge:  M = max m        out = sum e^(m - M) a / sum e^(m - M) l
//! ```
//! A part without positions has `m = -inf`, `l = 0`, `a = 0`. Source:
//! `runtime.md` §4; equal to [`super::attention::attention`] but for rounding.

use super::dot;

/// What one part of the positions says of one query head.
#[derive(Clone, Debug, PartialEq)]
pub struct Partial {
    /// Largest score of the part.
    pub max: f32,
    /// `sum e^(score - max)`
    pub sum: f32,
    /// `sum e^(score - max) * v`, `[head_dim]`
    pub acc: Vec<f32>,
}

/// One part of one head.
///
/// Shapes: `q` `[head_dim]`; `k`, `v` `[positions, head_dim]`, one KV head; no position is allowed.
///
/// # Panics
///
/// If the lengths do not fit each other.
#[must_use]
pub fn attention_part(q: &[f32], k: &[f32], v: &[f32]) -> Partial {
    assert!(k.len() == v.len() && k.len().is_multiple_of(q.len()));
    let scale = (q.len() as f64).sqrt();
    let scores: Vec<f32> = k.chunks_exact(q.len()).map(|k| (dot(q, k) / scale) as f32).collect();
    let max = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let weights: Vec<f32> = scores.iter().map(|score| (score - max).exp()).collect();
    let sum = weights.iter().sum();
    let acc = (0..q.len())
        .map(|i| weights.iter().zip(v.chunks_exact(q.len())).map(|(w, v)| f64::from(w * v[i])).sum::<f64>() as f32)
        .collect();
    Partial { max, sum, acc }
}

/// One head's output, `[head_dim]`, from its parts; at least one of them has a position.
///
/// # Panics
///
/// If there is no part.
#[must_use]
pub fn softmax_merge(parts: &[Partial]) -> Vec<f32> {
    let max = parts.iter().map(|part| part.max).fold(f32::NEG_INFINITY, f32::max);
    // a part without positions would give -inf - -inf
    let weight = |part: &Partial| if part.sum == 0.0 { 0.0 } else { (part.max - max).exp() };
    let sum: f32 = parts.iter().map(|part| weight(part) * part.sum).sum();
    (0..parts[0].acc.len()).map(|i| parts.iter().map(|part| weight(part) * part.acc[i]).sum::<f32>() / sum).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::geometry::AttentionGeometry;
    use crate::reference::attention::attention;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn any_split_equals_the_plain_softmax(
            positions in 1usize..40, cuts in prop::collection::vec(0usize..40, 0..6), size in 0.1f32..30.0, phase in 0f32..6.0,
        ) {
            const DIM: usize = 8;
            let geometry = AttentionGeometry { heads: 1, kv_heads: 1, head_dim: DIM };
            let wave = |n: usize, phase: f32| (0..n).map(|i| (i as f32 * 1.7 + phase).sin()).collect::<Vec<_>>();
            let q: Vec<f32> = wave(DIM, phase).iter().map(|q| q * size).collect();
            let (k, v) = (wave(positions * DIM, phase + 1.0), wave(positions * DIM, phase + 2.0));
            let mut want = [0.0; DIM];
            attention(&geometry, &q, &k, &v, &mut want);

            let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.min(positions)).chain([0, positions]).collect();
            cuts.sort_unstable();
            let parts: Vec<Partial> = cuts
                .windows(2)
                .map(|cut| attention_part(&q, &k[cut[0] * DIM..cut[1] * DIM], &v[cut[0] * DIM..cut[1] * DIM]))
                .collect();
            for (got, want) in softmax_merge(&parts).iter().zip(want) {
                // e^x of a score of size s carries s * 2^-24
                prop_assert!((got - want).abs() < 1e-6 * (1.0 + size), "{got} {want}");
            }
        }
    }

    #[test]
    fn an_empty_part_changes_nothing() {
        let part = attention_part(&[1.0, 2.0], &[0.5, 0.5], &[3.0, 4.0]);
        let empty = attention_part(&[1.0, 2.0], &[], &[]);
        assert_eq!(softmax_merge(&[empty.clone(), part, empty]), [3.0, 4.0]);
    }
}
