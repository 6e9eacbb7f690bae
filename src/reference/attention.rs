//! One query row over all keys and values so far.
//!
//! `out_h = sum_s softmax_s(q_h . k_s / sqrt(head_dim)) * v_s`, query head `h`
//! reading KV head `h / (heads / kv_heads)`. No positions, no window: causal
//! because the caller hands over only the positions up to the row's own.
//! Source: `model.md` §1.3.

use super::dot;
use crate::model::geometry::AttentionGeometry;

/// Attends with one row.
///
/// Shapes: `q`, `out` `[heads, head_dim]`; `k`, `v` `[positions, kv_heads, head_dim]`, at least one position.
///
/// # Panics
///
/// If the lengths do not fit the geometry.
pub fn attention(geometry: &AttentionGeometry, q: &[f32], k: &[f32], v: &[f32], out: &mut [f32]) {
    let (dim, width) = (geometry.head_dim, geometry.kv_width());
    let positions = k.len() / width;
    assert_eq!((q.len(), out.len()), (geometry.q_width(), geometry.q_width()));
    assert!(
        positions > 0 && k.len() == positions * width && v.len() == k.len(),
        "{} keys, {} values",
        k.len(),
        v.len()
    );
    for h in 0..geometry.heads {
        let column = h / (geometry.heads / geometry.kv_heads) * dim;
        let q = &q[h * dim..][..dim];
        let scores: Vec<f64> =
            (0..positions).map(|s| dot(q, &k[s * width + column..][..dim]) / (dim as f64).sqrt()).collect();
        let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = scores.iter().map(|score| (score - max).exp()).collect();
        let sum: f64 = weights.iter().sum();
        for i in 0..dim {
            let mut acc = 0.0;
            for (s, weight) in weights.iter().enumerate() {
                acc += weight * f64::from(v[s * width + column + i]);
            }
            out[h * dim + i] = (acc / sum) as f32;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GEOMETRY: AttentionGeometry = AttentionGeometry { heads: 4, kv_heads: 2, head_dim: 1 };

    #[test]
    fn query_heads_share_kv_heads_in_order() {
        let mut out = [0.0; 4];
        // zero queries: the mean over positions of the value of each head's KV head
        attention(&GEOMETRY, &[0.0; 4], &[1.0; 4], &[1.0, 10.0, 3.0, 30.0], &mut out);
        assert_eq!(out, [2.0, 2.0, 20.0, 20.0]);
    }

    #[test]
    fn one_position_gives_its_value_and_large_scores_do_not_overflow() {
        let mut out = [0.0; 4];
        attention(&GEOMETRY, &[1e20; 4], &[1e18; 2], &[5.0, 6.0], &mut out);
        assert_eq!(out, [5.0, 5.0, 6.0, 6.0]);
        attention(&GEOMETRY, &[1e4; 4], &[1.0, 1.0, 2.0, -2.0], &[5.0, 6.0, 7.0, 8.0], &mut out);
        assert_eq!(out, [7.0, 7.0, 6.0, 6.0]);
    }
}
