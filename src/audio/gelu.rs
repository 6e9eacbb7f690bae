//! Exact (erf) GELU: `x * Phi(x)`, with `Phi` from a table of cubics.
//!
//! Cubic Hermite pieces of width 1/64 leave an error of 1e-9 in `Phi`, far below f32's own
//! rounding, and cost a few multiply-adds where `erf` costs an exponential.

use std::sync::OnceLock;

/// Pieces a unit.
const STEPS: f32 = 64.0;
/// Beyond this `Phi` is 1 in f32.
const END: f32 = 6.0;
const PIECES: usize = (END * STEPS) as usize;

/// Coefficients of `Phi` on piece `i`, in the local coordinate `0..1`.
static TABLE: OnceLock<Vec<[f32; 4]>> = OnceLock::new();

/// `Phi(x)` for `x >= 0` by the series `1/2 + phi(x) (x + x^3/3 + x^5/(3*5) + ..)`, all terms positive.
fn phi_series(x: f64) -> f64 {
    let density = (-0.5 * x * x).exp() / (2.0 * std::f64::consts::PI).sqrt();
    let (mut term, mut sum, mut odd) = (x, x, 1.0);
    while term > 1e-18 * sum.max(1e-300) {
        odd += 2.0;
        term *= x * x / odd;
        sum += term;
    }
    0.5 + density * sum
}

fn table() -> &'static [[f32; 4]] {
    TABLE.get_or_init(|| {
        let h = 1.0 / f64::from(STEPS);
        let slope = |x: f64| h * (-0.5 * x * x).exp() / (2.0 * std::f64::consts::PI).sqrt();
        (0..PIECES)
            .map(|i| {
                let (a, b) = (i as f64 * h, (i + 1) as f64 * h);
                let (y0, y1, d0, d1) = (phi_series(a), phi_series(b), slope(a), slope(b));
                let rise = y1 - y0;
                [y0 as f32, d0 as f32, (3.0 * rise - 2.0 * d0 - d1) as f32, (d0 + d1 - 2.0 * rise) as f32]
            })
            .collect()
    })
}

/// `x <- gelu(x)` for every value.
pub(crate) fn gelu(x: &mut [f32]) {
    let table = table();
    for v in x {
        let size = v.abs() * STEPS;
        let piece = size as usize;
        let upper = if let Some([c0, c1, c2, c3]) = table.get(piece) {
            let u = size - piece as f32;
            c0 + u * (c1 + u * (c2 + u * c3))
        } else {
            1.0
        };
        *v *= if *v < 0.0 { 1.0 - upper } else { upper };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equals_the_series() {
        let mut worst = 0.0f64;
        for i in -80_000..=80_000 {
            let x = i as f32 * 1e-4;
            let mut y = [x];
            gelu(&mut y);
            let size = f64::from(x.abs());
            let phi = if x < 0.0 { 1.0 - phi_series(size) } else { phi_series(size) };
            worst = worst.max((f64::from(y[0]) - f64::from(x) * phi).abs() / (1.0 + size));
        }
        assert!(worst < 1.5e-7, "{worst:e}");
    }

    #[test]
    fn known_values_and_extremes() {
        // Phi(1) = 0.8413447460685429, Phi(-2) = 0.0227501319481792
        let mut x = [0.0, 1.0, -2.0, 50.0, -50.0, f32::INFINITY, f32::NAN, -0.0];
        gelu(&mut x);
        assert_eq!(x[0], 0.0);
        assert!((x[1] - 0.841_344_8).abs() < 1e-7 && (x[2] + 0.045_500_264).abs() < 1e-6, "{x:?}");
        assert_eq!((x[3], x[4].abs(), x[5]), (50.0, 0.0, f32::INFINITY));
        assert!(x[6].is_nan());
    }
}
