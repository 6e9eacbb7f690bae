//! int8 codes of one activation row.
//!
//! Groups of 32 consecutive columns, the last padded with zeros;
//! `d = max|a| / 127`, `q = clamp(round half to even(a / d), -127, 127)`. Where
//! `d` is zero or subnormal the codes are 0 and `d` is 0. Of a NaN `d` is NaN.
//! Source: `runtime.md` §3a.

use crate::model::tensors::Codec;

/// A row of activations as int8 codes.
#[derive(Clone, Debug, PartialEq)]
pub struct ActivationCodes {
    /// `[groups * 32]`; the padding of the last group is 0
    pub codes: Vec<i8>,
    /// `d`, `[groups]`
    pub scales: Vec<f32>,
}

/// Quantises one row `[cols]`; for q8_2f the caller has multiplied it by the column field.
#[must_use]
pub fn quantize_activations(a: &[f32]) -> ActivationCodes {
    let groups = a.len().div_ceil(Codec::GROUP);
    let mut out = ActivationCodes { codes: vec![0; groups * Codec::GROUP], scales: vec![0.0; groups] };
    for (group, a) in a.chunks(Codec::GROUP).enumerate() {
        // by its bits, which order as magnitudes do, with NaN above all: what is not finite stays seen
        let d = f32::from_bits(a.iter().map(|a| a.abs().to_bits()).max().unwrap_or(0)) / 127.0;
        if d < f32::MIN_POSITIVE {
            continue;
        }
        out.scales[group] = d;
        for (code, a) in out.codes[group * Codec::GROUP..].iter_mut().zip(a) {
            *code = (a / d).round_ties_even().clamp(-127.0, 127.0) as i8;
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn zeros_and_subnormal_scales_give_no_codes() {
        for a in [0.0, f32::from_bits(1), f32::MIN_POSITIVE, 126.0 * f32::MIN_POSITIVE] {
            let coded = quantize_activations(&[a; 32]);
            assert_eq!(coded, ActivationCodes { codes: vec![0; 32], scales: vec![0.0] }, "{a:e}");
        }
        // the smallest maximum whose scale is a normal number
        let coded = quantize_activations(&[127.0 * f32::MIN_POSITIVE; 32]);
        assert_eq!((coded.codes[0], coded.scales[0]), (127, f32::MIN_POSITIVE));
    }

    #[test]
    fn what_is_not_finite_shows_in_the_scale() {
        for (bad, want) in [(f32::NAN, f32::NAN), (-f32::NAN, f32::NAN), (f32::NEG_INFINITY, f32::INFINITY)] {
            let mut row = [1.0; 64];
            row[40] = bad;
            let coded = quantize_activations(&row);
            assert_eq!(coded.scales[0], 1.0 / 127.0);
            assert!(
                coded.scales[1].is_nan() == want.is_nan() && (want.is_nan() || coded.scales[1] == want),
                "{bad}: {coded:?}"
            );
        }
    }

    #[test]
    fn ties_go_to_even_and_the_last_group_is_padded() {
        let mut row = vec![0.0; 35];
        row[..6].copy_from_slice(&[127.0, 0.5, 1.5, 2.5, -0.5, -1.5]);
        row[32..].copy_from_slice(&[-254.0, 1.0, 3.0]);
        let coded = quantize_activations(&row);
        assert_eq!(coded.codes[..6], [127, 0, 2, 2, 0, -2]);
        assert_eq!(coded.codes[32..36], [-127, 0, 2, 0]);
        assert_eq!((coded.codes.len(), &coded.scales[..]), (64, &[1.0, 2.0][..]));
    }

    #[test]
    fn the_largest_float_does_not_overflow() {
        let coded = quantize_activations(&[f32::MAX, -f32::MAX]);
        assert_eq!(coded.codes[..2], [127, -127]);
        assert!(coded.scales[0].is_finite());
    }

    #[test]
    fn no_row_no_groups() {
        assert_eq!(quantize_activations(&[]), ActivationCodes { codes: vec![], scales: vec![] });
    }

    proptest! {
        #[test]
        fn codes_are_within_half_a_step(row in prop::collection::vec(-1e3f32..1e3, 1..100)) {
            let coded = quantize_activations(&row);
            for (c, a) in row.iter().enumerate() {
                let d = coded.scales[c / 32];
                let error = (f32::from(coded.codes[c]) * d - a).abs();
                prop_assert!(error <= 0.5001 * d + f32::MIN_POSITIVE * 127.0, "{a} {error} {d}");
            }
        }
    }
}
