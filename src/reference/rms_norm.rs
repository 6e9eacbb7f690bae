//! `out = weight * x / sqrt(mean(x^2) + eps)`
//!
//! One row. Source: `model.md`, notation.

/// Normalises one row.
///
/// Shapes: `x`, `weight`, `out` `[n]`.
///
/// # Panics
///
/// If the lengths differ.
pub fn rms_norm(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    assert_eq!((x.len(), weight.len()), (out.len(), out.len()));
    let mut square_sum = 0.0f64;
    for x in x {
        square_sum += f64::from(*x) * f64::from(*x);
    }
    let mean = square_sum / x.len() as f64;
    let factor = (1.0 / (mean + f64::from(eps)).sqrt()) as f32;
    for ((out, x), weight) in out.iter_mut().zip(x).zip(weight) {
        *out = weight * (x * factor);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mean_of_squares_becomes_one() {
        let mut out = [0.0; 2];
        // mean of squares 12.5
        rms_norm(&[3.0, -4.0], &[1.0, 2.0], 0.0, &mut out);
        assert!(
            (out[0] - 3.0 / 12.5f32.sqrt()).abs() < 1e-6 && (out[1] + 8.0 / 12.5f32.sqrt()).abs() < 1e-6,
            "{out:?}"
        );
    }

    #[test]
    fn zeros_stay_zero_and_huge_values_do_not_overflow() {
        let mut out = [1.0; 3];
        rms_norm(&[0.0; 3], &[1.0; 3], 1e-5, &mut out);
        assert_eq!(out, [0.0; 3]);
        rms_norm(&[1e30; 3], &[1.0; 3], 1e-5, &mut out);
        assert!(out.iter().all(|x| (x - 1.0).abs() < 1e-6), "{out:?}");
    }
}
