//! Elementary functions written so that the compiler vectorises them and every
//! machine gives the same bits: no fused multiply-adds, no system library.

/// Adding and subtracting it rounds a float below 2^22 to the nearest integer, ties to even.
pub(crate) const ROUND: f32 = 12_582_912.0;

/// Coefficients of `(e^r − 1 − r) / r²` on `|r| <= ln 2 / 2`, highest power first.
pub(crate) const EXP_FIRST: f32 = 1.987_569_1e-4;
/// The others.
pub(crate) const EXP_REST: [f32; 5] = [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 5.0e-1];

/// `2^k` for `k` in −126 … 127.
#[inline(always)]
fn power(k: i32) -> f32 {
    f32::from_bits(((k + 127) as u32) << 23)
}

/// `e^r · 2^k` for `|r| <= ln 2 / 2`; relative error below 2e-7 where the result is normal.
#[inline(always)]
fn scaled_exp(r: f32, k: i32) -> f32 {
    let mut p = EXP_FIRST;
    for c in EXP_REST {
        p = p * r + c;
    }
    // In two steps, so that neither factor leaves the range of floats.
    let half = k >> 1;
    (p * r * r + r + 1.0) * power(half) * power(k - half)
}

/// `e^x`; 0 and infinity beyond the range, NaN for NaN.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    let x = x.clamp(-150.0, 130.0);
    let t = x * std::f32::consts::LOG2_E + ROUND;
    let n = t - ROUND;
    let r = (x - n * 0.693_359_4) - n * -2.121_944_4e-4;
    scaled_exp(r, t.to_bits().wrapping_sub(ROUND.to_bits()) as i32)
}

/// `2^x`; 0 and infinity beyond the range, NaN for NaN.
#[inline(always)]
pub(crate) fn exp2(x: f32) -> f32 {
    let x = x.clamp(-250.0, 250.0);
    let t = x + ROUND;
    let r = (x - (t - ROUND)) * std::f32::consts::LN_2;
    scaled_exp(r, t.to_bits().wrapping_sub(ROUND.to_bits()) as i32)
}

/// The logistic function.
#[inline(always)]
pub(crate) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// `x · sigmoid(x)`
#[inline(always)]
pub(crate) fn silu(x: f32) -> f32 {
    x * sigmoid(x)
}

/// `max(x, 0)²`, NaN for NaN.
#[inline(always)]
pub(crate) fn relu2(x: f32) -> f32 {
    let x = if x < 0.0 { 0.0 } else { x };
    x * x
}

/// `ln(1 + e^x)`
pub(crate) fn softplus(x: f32) -> f32 {
    let x = f64::from(x);
    // One value a head: exactness matters more than speed, and f64 rounds to the same f32 whatever the library.
    (if x > 30.0 { x } else { x.exp().ln_1p() }) as f32
}

/// A half float's value; subnormals, infinities and NaN included.
#[inline(always)]
pub(crate) fn half(bits: u16) -> f32 {
    let bits = u32::from(bits);
    let magnitude = (bits & 0x7fff) << 13;
    let finite = (f32::from_bits(magnitude) * f32::from_bits(0x7780_0000)).to_bits();
    let value = if magnitude >= 0x7c00 << 13 { magnitude | 0x7f80_0000 } else { finite };
    f32::from_bits(value | (bits & 0x8000) << 16)
}

/// The half float in the first two bytes.
#[inline(always)]
pub(crate) fn half_at(bytes: &[u8]) -> f32 {
    half(u16::from_le_bytes([bytes[0], bytes[1]]))
}

/// Sum of 16 lanes, halves added until one is left: the order of every 16-lane sum here.
#[inline(always)]
pub(crate) fn tree(mut lanes: [f32; 16]) -> f32 {
    for width in [8, 4, 2, 1] {
        for i in 0..width {
            lanes[i] += lanes[i + width];
        }
    }
    lanes[0]
}

/// Sum, 16 lanes.
#[inline(always)]
pub(crate) fn sum(x: &[f32]) -> f32 {
    let mut lanes = [0.0; 16];
    let (whole, tail) = x.as_chunks::<16>();
    for x in whole {
        for l in 0..16 {
            lanes[l] += x[l];
        }
    }
    for (lane, x) in lanes.iter_mut().zip(tail) {
        *lane += x;
    }
    tree(lanes)
}

/// Dot product, 16 lanes.
#[inline(always)]
pub(crate) fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut lanes = [0.0; 16];
    let (a16, a_tail) = a.as_chunks::<16>();
    let (b16, b_tail) = b.as_chunks::<16>();
    for (a, b) in a16.iter().zip(b16) {
        for l in 0..16 {
            lanes[l] += a[l] * b[l];
        }
    }
    for (l, (a, b)) in a_tail.iter().zip(b_tail).enumerate() {
        lanes[l] += a * b;
    }
    tree(lanes)
}

/// Dot product of long rows: 64 lanes, the four sixteens added `(0 + 1) + (2 + 3)`.
#[inline(always)]
pub(crate) fn wide_dot(a: &[f32], b: &[f32]) -> f32 {
    let mut lanes = [0.0; 64];
    let (a64, a_tail) = a.as_chunks::<64>();
    let (b64, b_tail) = b.as_chunks::<64>();
    for (a, b) in a64.iter().zip(b64) {
        for l in 0..64 {
            lanes[l] += a[l] * b[l];
        }
    }
    for (l, (a, b)) in a_tail.iter().zip(b_tail).enumerate() {
        lanes[l] += a * b;
    }
    let mut sum = [0.0; 16];
    for l in 0..16 {
        sum[l] = (lanes[l] + lanes[16 + l]) + (lanes[32 + l] + lanes[48 + l]);
    }
    tree(sum)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn close(seen: f32, wanted: f64, relative: f64) {
        assert!((f64::from(seen) - wanted).abs() <= relative * wanted.abs() + 1e-44, "{seen:e} for {wanted:e}");
    }

    #[test]
    fn exponentials_over_their_range() {
        for i in -100_000..=100_000 {
            let x = i as f32 * 8.7e-4;
            close(exp(x), f64::from(x).exp(), 3e-7);
            let x = i as f32 * 1.25e-3;
            close(exp2(x), f64::from(x).exp2(), 3e-7);
        }
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp2(7.0), 128.0);
        assert_eq!((exp(-1e30), exp(f32::NEG_INFINITY), exp(200.0)), (0.0, 0.0, f32::INFINITY));
        assert_eq!((exp2(-1e30), exp2(1e30)), (0.0, f32::INFINITY));
        assert!(exp(f32::NAN).is_nan() && exp2(f32::NAN).is_nan() && relu2(f32::NAN).is_nan());
        assert!(silu(f32::NAN).is_nan() && softplus(f32::NAN).is_nan());
    }

    #[test]
    fn softplus_and_silu() {
        for i in -1000..1000 {
            let x = i as f32 * 0.1;
            close(softplus(x), f64::from(x).exp().ln_1p(), 1e-6);
            let wanted = f64::from(x) / (1.0 + (-f64::from(x)).exp());
            // Beyond -88.7 the exponential is infinite and the result 0.
            if x > -88.0 {
                close(silu(x), wanted, 1e-6);
            } else {
                assert!((f64::from(silu(x)) - wanted).abs() < 1e-35, "{x}");
            }
        }
    }

    #[test]
    fn halves_exactly() {
        for bits in 0..=u16::MAX {
            let (seen, wanted) = (half(bits), half::f16::from_bits(bits).to_f32());
            assert!(seen.to_bits() == wanted.to_bits() || (seen.is_nan() && wanted.is_nan()), "{bits:#x}");
        }
    }

    #[test]
    fn dots_with_tails() {
        for len in [0, 1, 15, 16, 17, 64, 100] {
            let a: Vec<f32> = (0..len).map(|i| i as f32 - 7.0).collect();
            let b: Vec<f32> = (0..len).map(|i| 3.0 - i as f32).collect();
            let wanted: f32 = a.iter().zip(&b).map(|(a, b)| a * b).sum();
            assert_eq!((dot(&a, &b), wide_dot(&a, &b)), (wanted, wanted));
        }
    }
}
