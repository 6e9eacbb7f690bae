//! `v = o * silu(z)`; per group of `D / groups` channels `out = v / sqrt(mean(v^2) + eps) * weight`
//!
//! The gate is inside the norm. Source: `model.md` §1.4, step 7.

use super::rms_norm::rms_norm;
use super::silu;

/// Gates and normalises one row.
///
/// Shapes: `o`, `z`, `weight`, `out` `[D]`, head-major; groups are contiguous.
///
/// # Panics
///
/// If the lengths differ or `groups` does not divide them.
pub fn gated_group_norm(o: &[f32], z: &[f32], weight: &[f32], groups: usize, eps: f32, out: &mut [f32]) {
    assert_eq!((o.len(), z.len(), weight.len()), (out.len(), out.len(), out.len()));
    assert!(o.len().is_multiple_of(groups), "{} channels in {groups} groups", o.len());
    let width = o.len() / groups;
    let v: Vec<f32> = o.iter().zip(z).map(|(o, z)| o * silu(*z)).collect();
    for ((v, weight), out) in v.chunks_exact(width).zip(weight.chunks_exact(width)).zip(out.chunks_exact_mut(width)) {
        rms_norm(v, weight, eps, out);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_normalised_apart_after_the_gate() {
        let z = [1.0, 2.0, 3.0, 4.0];
        let o: Vec<f32> = [1.0, 1.0, 100.0, -100.0].iter().zip(z).map(|(v, z)| v / silu(z)).collect();
        let mut out = [0.0; 4];
        gated_group_norm(&o, &z, &[1.0, 1.0, 1.0, 2.0], 2, 0.0, &mut out);
        for (got, want) in out.iter().zip([1.0, 1.0, 1.0, -2.0]) {
            assert!((got - want).abs() < 1e-6, "{out:?}");
        }
    }
}
