//! Norms (`model.md`, notation; §1.4 step 7).

use super::math;

/// Mean of the squares.
#[inline(always)]
fn mean_square(x: &[f32]) -> f32 {
    math::dot(x, x) / x.len() as f32
}

/// `out = w · x / sqrt(mean(x²) + eps)` for one row; returns the mean square,
/// which is finite only if the row is.
pub(crate) fn rms(x: &[f32], w: &[f32], eps: f32, out: &mut [f32]) -> f32 {
    let mean = mean_square(x);
    let factor = 1.0 / (mean + eps).sqrt();
    for ((out, x), w) in out.iter_mut().zip(x).zip(w) {
        *out = w * (x * factor);
    }
    mean
}

/// `out = w · (x − mean(x)) / sqrt(var(x) + eps)` for one row; returns the variance.
pub(crate) fn layer(x: &[f32], w: &[f32], eps: f32, out: &mut [f32]) -> f32 {
    let mean = x.iter().sum::<f32>() / x.len() as f32;
    for (out, x) in out.iter_mut().zip(x) {
        *out = x - mean;
    }
    let variance = mean_square(out);
    let factor = 1.0 / (variance + eps).sqrt();
    for (out, w) in out.iter_mut().zip(w) {
        *out *= w * factor;
    }
    variance
}

/// Gated group norm in place: `v = o · silu(z)`, each of `groups` equal parts divided by its root mean square, times `w`.
#[inline(always)]
pub(crate) fn gated_groups(o: &mut [f32], z: &[f32], w: &[f32], groups: usize, eps: f32) {
    let width = o.len() / groups;
    for ((o, z), w) in o.chunks_exact_mut(width).zip(z.chunks_exact(width)).zip(w.chunks_exact(width)) {
        for (o, z) in o.iter_mut().zip(z) {
            *o *= math::silu(*z);
        }
        let mean = mean_square(o);
        // Squares that overflow would make the group 0, a plausible value: NaN is noticed in the block's output.
        let factor = if mean.is_finite() { 1.0 / (mean + eps).sqrt() } else { f32::NAN };
        for (o, w) in o.iter_mut().zip(w) {
            *o *= factor * w;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rms_of_a_row() {
        let mut out = [0.0; 2];
        assert_eq!(rms(&[3.0, 4.0], &[1.0, 2.0], 0.0, &mut out), 12.5);
        assert!((out[0] - 3.0 / 12.5f32.sqrt()).abs() < 1e-6 && (out[1] - 8.0 / 12.5f32.sqrt()).abs() < 1e-6);
        assert!(!rms(&[f32::INFINITY, 1.0], &[1.0; 2], 1e-5, &mut out).is_finite());
        assert!(!rms(&[f32::NAN, 1.0], &[1.0; 2], 1e-5, &mut out).is_finite());
    }

    #[test]
    fn layer_norm_removes_the_mean() {
        let mut out = [0.0; 4];
        layer(&[5.0, 7.0, 5.0, 7.0], &[1.0, 1.0, 2.0, 2.0], 0.0, &mut out);
        assert_eq!(out, [-1.0, 1.0, -2.0, 2.0]);
    }

    #[test]
    fn groups_are_normed_apart() {
        let mut o = [1.0, -1.0, 100.0, 100.0];
        gated_groups(&mut o, &[20.0; 4], &[1.0; 4], 2, 0.0);
        for (seen, wanted) in o.iter().zip([1.0, -1.0, 1.0, 1.0]) {
            assert!((seen - wanted).abs() < 1e-5, "{o:?}");
        }
    }
}
