//! `c = x - mean(x)`, `out = weight * c / sqrt(mean(c^2) + eps)`
//!
//! No bias. Only the draft layer's last norm, under one of its conventions
//! (`model.md` §2.1).

use super::rms_norm::rms_norm;

/// Normalises one row.
///
/// Shapes: `x`, `weight`, `out` `[n]`.
///
/// # Panics
///
/// If the lengths differ.
pub fn layer_norm(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let mean = x.iter().map(|x| f64::from(*x)).sum::<f64>() / x.len() as f64;
    let centred: Vec<f32> = x.iter().map(|x| (f64::from(*x) - mean) as f32).collect();
    rms_norm(&centred, weight, eps, out);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mean_is_removed_first() {
        let mut out = [0.0; 2];
        layer_norm(&[7.0, 9.0], &[1.0, 3.0], 0.0, &mut out);
        assert_eq!(out, [-1.0, 3.0]);
    }
}
