//! q4tp: 4-bit codes in groups of 32 columns, a group's scale a rung on its row's ladder.
//!
//! `w = (nibble − 8) · 2^(lo + rung · step)`, 32 rungs. The encoder tries all
//! of them for every group, on up to four ladders a row, and keeps the ladder
//! of least squared error. The first ladder is the peer's, so no row comes
//! out worse than by its rule.

use half::f16;
use rayon::prelude::*;

use super::{EncodeError, Rows, check_finite, round_even};
use crate::model::tensors::{Codec, Q4Planes};

/// Rungs of a ladder.
pub const RUNGS: usize = 32;
/// Columns of a group.
const GROUP: usize = Codec::GROUP;
/// Octaves a scale may have: its inverse and eight times itself stay finite.
const OCTAVES: std::ops::RangeInclusive<f64> = -120.0..=124.0;

/// Times a ladder is fitted again to the codes chosen on it, unless it stops getting better before.
const REFITS: usize = 5;

/// The 32 scales of a row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ladder {
    /// Scale of each rung.
    pub rungs: [f32; RUNGS],
}

impl Ladder {
    /// The reference evaluation: `2^lo`, then repeated multiplication by `2^step`, all in f32 (`cmf.md` §5).
    #[must_use]
    pub fn new(lo: f16, step: f16) -> Self {
        // Through f64, so that both powers are rounded right whatever the platform's library does in f32.
        let ratio = step.to_f64().exp2() as f32;
        let mut rungs = [lo.to_f64().exp2() as f32; RUNGS];
        for i in 1..RUNGS {
            rungs[i] = rungs[i - 1] * ratio;
        }
        Self { rungs }
    }

    /// The ladder of a row's parameter bytes, `lo` then `step`.
    #[must_use]
    pub fn read([a, b, c, d]: [u8; 4]) -> Self {
        Self::new(f16::from_le_bytes([a, b]), f16::from_le_bytes([c, d]))
    }

    /// Whether the ladder of a row's parameter bytes has finite scales only.
    #[must_use]
    pub fn is_finite([a, b, c, d]: [u8; 4]) -> bool {
        let (lo, step) = (f16::from_le_bytes([a, b]).to_f32(), f16::from_le_bytes([c, d]).to_f32());
        let top = lo.max(lo + (RUNGS - 1) as f32 * step).max(step);
        // Where top rung and ratio stay an octave below the largest float, rounding does not matter and no power need
        // be taken.
        let low = || top < 126.0 || Self::read([a, b, c, d]).rungs.iter().all(|rung| rung.is_finite());
        lo.is_finite() && step.is_finite() && low()
    }
}

impl Q4Planes<'_> {
    /// The ladder of row `row`.
    #[must_use]
    pub fn ladder(&self, row: usize) -> Ladder {
        Ladder::read(self.ladders.as_chunks().0[row])
    }

    /// The rung, 0 to 31, of group `group` of row `row`.
    #[must_use]
    pub fn rung(&self, row: usize, group: usize) -> usize {
        let bytes = Codec::code_bytes(self.groups);
        rung(&self.rungs[row * bytes..][..bytes], group)
    }
}

/// The 5-bit code number `group` of a row's slice.
fn rung(slice: &[u8], group: usize) -> usize {
    let (byte, bit) = (5 * group / 8, 5 * group % 8);
    // A code that crosses into the next byte always has one; another must not read past the payload.
    let high = if bit > 3 { slice[byte + 1] } else { 0 };
    usize::from(u16::from_le_bytes([slice[byte], high]) >> bit & 31)
}

/// Row `row` of a payload.
pub fn decode_row(planes: &Q4Planes<'_>, row: usize, out: &mut [f32]) {
    let ladder = planes.ladder(row);
    let nibbles = &planes.nibbles[row * planes.groups * 16..][..planes.groups * 16];
    for (group, (out, nibbles)) in out.chunks_exact_mut(GROUP).zip(nibbles.as_chunks::<16>().0).enumerate() {
        let scale = ladder.rungs[planes.rung(row, group)];
        for (pair, byte) in out.as_chunks_mut::<2>().0.iter_mut().zip(nibbles) {
            *pair = [(f32::from(byte & 15) - 8.0) * scale, (f32::from(byte >> 4) - 8.0) * scale];
        }
    }
}

/// The payload of `source`.
///
/// # Errors
///
/// A value that is not finite, or columns that are no multiple of 32.
pub fn encode(source: &dyn Rows) -> Result<Vec<u8>, EncodeError> {
    let [rows, cols] = source.shape();
    let len =
        Codec::Q4tp.payload_len(rows, cols).ok_or(EncodeError::Shape { codec: Codec::Q4tp, shape: [rows, cols] })?;
    let groups = cols / GROUP;
    let mut payload = vec![0; len];
    let (nibbles, rest) = payload.split_at_mut(rows * groups * 16);
    let (ladders, rungs) = rest.split_at_mut(rows * 4);
    nibbles
        .par_chunks_exact_mut(groups * 16)
        .zip(ladders.as_chunks_mut::<4>().0.par_iter_mut())
        .zip(rungs.par_chunks_exact_mut(Codec::code_bytes(groups)))
        .enumerate()
        .try_for_each_init(
            || vec![0.0; cols],
            |values, (row, ((nibbles, ladder), rungs))| {
                source.read(row, values);
                check_finite(row, values)?;
                let fit = fit(values.as_chunks().0);
                let [lo, step] = [fit.lo.to_le_bytes(), fit.step.to_le_bytes()];
                *ladder = [lo[0], lo[1], step[0], step[1]];
                write_row(values.as_chunks().0, &fit, nibbles, rungs);
                Ok(())
            },
        )?;
    Ok(payload)
}

fn write_row(values: &[[f32; GROUP]], fit: &Fit, nibbles: &mut [u8], rungs: &mut [u8]) {
    let ladder = Ladder::new(fit.lo, fit.step);
    for (group, (values, nibbles)) in values.iter().zip(nibbles.as_chunks_mut::<16>().0).enumerate() {
        let code = usize::from(fit.codes[group]);
        let scale = ladder.rungs[code];
        for (byte, pair) in nibbles.iter_mut().zip(values.as_chunks::<2>().0) {
            let [low, high] = pair.map(|value| (quantize(value / scale) + 8.0) as u8);
            *byte = low | high << 4;
        }
        let (byte, bit) = (5 * group / 8, 5 * group % 8);
        let [low, high] = ((code as u16) << bit).to_le_bytes();
        rungs[byte] |= low;
        if bit > 3 {
            rungs[byte + 1] |= high;
        }
    }
}

fn quantize(value: f32) -> f32 {
    round_even(value.clamp(-8.0, 7.0))
}

/// A ladder for a row and the rung of each group.
struct Fit {
    lo: f16,
    step: f16,
    codes: Vec<u8>,
    /// Squared error of the row.
    error: f64,
}

impl Fit {
    /// The one of smaller error; `self` where they are equal.
    fn or(self, other: Self) -> Self {
        if other.error < self.error { other } else { self }
    }
}

/// The ends of the ladder that suits the nibbles chosen on this one, or `None` where that is not defined.
///
/// For its nibbles each group has a best scale of its own, and an error that grows with the square of the distance
/// from it: a line through the octaves of those scales over the codes, by weighted least squares.
fn refit(values: &[[f32; GROUP]], fit: &Fit) -> Option<(f64, f64)> {
    let rungs = Ladder::new(fit.lo, fit.step).rungs;
    let (mut sum, mut sum_x, mut sum_y, mut sum_xx, mut sum_xy) = (0.0, 0.0, 0.0, 0.0, 0.0);
    for (values, code) in values.iter().zip(&fit.codes) {
        let scale = rungs[usize::from(*code)];
        let (mut product, mut square) = (0.0, 0.0);
        for value in values {
            let nibble = f64::from(quantize(value / scale));
            product += nibble * f64::from(*value);
            square += nibble * nibble;
        }
        // Nibbles that are all zero want no scale.
        if product > 0.0 {
            let best = product / square;
            let (x, y, weight) = (f64::from(*code), best.log2(), square * best * best);
            sum += weight;
            sum_x += weight * x;
            sum_y += weight * y;
            sum_xx += weight * x * x;
            sum_xy += weight * x * y;
        }
    }
    let spread = sum * sum_xx - sum_x * sum_x;
    // One code for all groups defines no line.
    if spread <= 1e-9 * sum * sum_xx {
        return None;
    }
    let step = (sum * sum_xy - sum_x * sum_y) / spread;
    let low = (sum_y - step * sum_x) / sum;
    let high = low + (RUNGS - 1) as f64 * step;
    (step > 0.0 && OCTAVES.contains(&low) && OCTAVES.contains(&high)).then_some((low, high))
}

/// The best of the ladders tried for a row.
fn fit(values: &[[f32; GROUP]]) -> Fit {
    let largest: Vec<f32> =
        values.iter().map(|group| group.iter().fold(0.0, |max, w| f32::max(max, w.abs()))).collect();
    // Octave of the scale that clips nothing but −8.
    let octaves: Vec<f64> = (largest.iter().filter(|max| **max > 0.0))
        .map(|max| (f64::from(*max) / 7.0).log2().clamp(*OCTAVES.start(), *OCTAVES.end()))
        .collect();
    let Some((low, high)) = range(octaves.iter().copied()) else {
        // All zero. Any ladder will do; this is the peer's.
        return Fit { lo: f16::from_f64(-14.0), step: f16::from_bits(1), codes: vec![0; values.len()], error: 0.0 };
    };
    // The peer's ladder, which rounds nominal scales to halves and so never starts under 2^-14.
    let mut best = search(values, &largest, low.max(-14.0).min(high), high);
    // Room below: most groups want a scale that clips their largest value a little.
    let wide = search(values, &largest, low - 0.45, high);
    // Once more, over the scales that were chosen from there.
    let ladder = Ladder::new(wide.lo, wide.step);
    let chosen = (wide.codes.iter().zip(&largest).filter(|(_, max)| **max > 0.0))
        .map(|(code, _)| f64::from(ladder.rungs[usize::from(*code)]).log2());
    if let Some((low, high)) = range(chosen) {
        best = best.or(search(values, &largest, low, high));
    }
    best = best.or(wide);
    for _ in 0..REFITS {
        match refit(values, &best).map(|(low, high)| search(values, &largest, low, high)) {
            Some(fit) if fit.error < best.error => best = fit,
            _ => break,
        }
    }
    // A few small groups must not make the steps coarse for the others.
    let median = median(octaves);
    if low < median - 4.0 {
        best = best.or(search(values, &largest, median - 2.0, high));
    }
    best
}

fn range(values: impl Iterator<Item = f64>) -> Option<(f64, f64)> {
    values.fold(None, |range, value| match range {
        None => Some((value, value)),
        Some((low, high)) => Some((low.min(value), high.max(value))),
    })
}

fn median(mut values: Vec<f64>) -> f64 {
    let middle = values.len() / 2;
    *values.select_nth_unstable_by(middle, f64::total_cmp).1
}

/// The best rung for each group on the ladder from octave `low` to octave `high`.
fn search(values: &[[f32; GROUP]], largest: &[f32], low: f64, high: f64) -> Fit {
    let lo = f16::from_f64(low.max(*OCTAVES.start()));
    let mut step = f16::from_f64(((high - lo.to_f64()) / (RUNGS - 1) as f64).max(0.0));
    // Rounding must not leave the top rung short, and a ladder climbs.
    while step.to_bits() == 0 || lo.to_f64() + (RUNGS - 1) as f64 * step.to_f64() < high {
        step = f16::from_bits(step.to_bits() + 1);
    }
    let rungs = Ladder::new(lo, step).rungs;
    let inverse = rungs.map(|rung| 1.0 / rung);
    let mut error = 0.0;
    let mut codes = vec![0; values.len()];
    for ((values, largest), code) in values.iter().zip(largest).zip(&mut codes) {
        if *largest == 0.0 {
            continue;
        }
        // From the nominal rung, where the error is small already, so that the bound below cuts early.
        let nominal = ((f64::from(*largest) / 7.0).log2() - lo.to_f64()) / step.to_f64();
        let nominal = nominal.round().clamp(0.0, (RUNGS - 1) as f64) as usize;
        let mut best = (group_error(values, rungs[nominal], inverse[nominal]), nominal);
        for rung in 0..RUNGS {
            // What clipping the largest value costs alone.
            let clipped = (largest - 8.0 * rungs[rung]).max(0.0);
            if rung == nominal || clipped * clipped >= best.0 {
                continue;
            }
            let error = group_error(values, rungs[rung], inverse[rung]);
            if error < best.0 {
                best = (error, rung);
            }
        }
        error += f64::from(best.0);
        *code = best.1 as u8;
    }
    Fit { lo, step, codes, error }
}

/// Squared error of a group at one scale.
fn group_error(values: &[f32; GROUP], scale: f32, inverse: f32) -> f32 {
    let mut sums = [0.0; 8];
    for values in values.as_chunks::<8>().0 {
        for i in 0..8 {
            let off = values[i] - quantize(values[i] * inverse) * scale;
            sums[i] += off * off;
        }
    }
    sums.iter().sum()
}

#[cfg(test)]
#[allow(clippy::print_stdout, reason = "the error figures, for a reader with --nocapture")]
mod tests {
    use super::super::{Floats, sample};
    use super::*;
    use crate::model::quant::dequantize;
    use crate::model::tensors::Matrix;

    fn decoded(data: &[f32], cols: usize) -> Vec<f32> {
        let payload = encode(&Floats::new(data, cols)).unwrap();
        dequantize(&Matrix::from_payload("w", Codec::Q4tp, [data.len() / cols, cols], payload))
    }

    /// The peer's rule (`cmf.md` §5), written plainly: four rungs around the nominal one.
    fn peer(data: &[f32], cols: usize) -> Vec<f32> {
        let mut out = Vec::with_capacity(data.len());
        for row in data.chunks(cols) {
            let octave = |group: &[f32]| {
                let max = group.iter().fold(0.0f32, |max, w| max.max(w.abs()));
                (max > 0.0).then(|| f16::from_f32(max / 7.0).to_f64().max(2f64.powi(-14)).log2())
            };
            let octaves: Vec<Option<f64>> = row.chunks(GROUP).map(octave).collect();
            let (low, high) = range(octaves.iter().flatten().copied()).unwrap_or((-14.0, -14.0));
            let lo = f16::from_f64(low);
            let mut step = f16::from_f64(((high - lo.to_f64()) / 31.0).max(0.0));
            while step.to_bits() == 0 || lo.to_f64() + 31.0 * step.to_f64() < high {
                step = f16::from_bits(step.to_bits() + 1);
            }
            let ladder = Ladder::new(lo, step);
            for (group, octave) in row.chunks(GROUP).zip(octaves) {
                let nominal = octave.map_or(0, |o| ((o - lo.to_f64()) / step.to_f64()).round().clamp(0.0, 31.0) as i32);
                let at = |scale: f32| -> Vec<f32> {
                    group.iter().map(|w| (w / scale).round_ties_even().clamp(-8.0, 7.0) * scale).collect()
                };
                let cost = |got: &[f32]| group.iter().zip(got).map(|(w, g)| f64::from(w - g).powi(2)).sum::<f64>();
                let best = (nominal - 2..=nominal + 1)
                    .filter(|code| (0..32).contains(code))
                    .map(|code| at(ladder.rungs[code as usize]))
                    .min_by(|a, b| cost(a).total_cmp(&cost(b)));
                out.extend(best.unwrap());
            }
        }
        out
    }

    /// All 32 rungs of the peer's ladder.
    fn all_rungs(data: &[f32], cols: usize) -> Vec<f32> {
        let mut out = Vec::with_capacity(data.len());
        for row in data.chunks(cols) {
            let row = row.as_chunks().0;
            let largest: Vec<f32> =
                row.iter().map(|group| group.iter().fold(0.0, |max, w| f32::max(max, w.abs()))).collect();
            let (low, high) = range(largest.iter().map(|max| f64::from(max / 7.0).log2())).unwrap();
            let fit = search(row, &largest, low, high);
            let ladder = Ladder::new(fit.lo, fit.step);
            for (group, code) in row.iter().zip(fit.codes) {
                let scale = ladder.rungs[usize::from(code)];
                out.extend(group.map(|w| quantize(w / scale) * scale));
            }
        }
        out
    }

    #[test]
    fn errors_stay_under_the_specification_s_figures() {
        // cmf.md §5: the peer's four candidates, all rungs of its ladder, and the ladder fitted again. Samples differ by
        // some tenths of a per cent, so the gains are compared on the same rows.
        for (name, data, four, all, fitted) in [
            ("gaussian", sample::gaussian(48, 2688), 9.249, 8.654, 8.643),
            ("student t", sample::student(48, 2688), 11.376, 11.049, 11.036),
            ("uneven columns", sample::uneven(48, 2688), 11.697, 11.359, 11.349),
        ] {
            let ours = 100.0 * sample::error(&data, &decoded(&data, 2688));
            let theirs = 100.0 * sample::error(&data, &peer(&data, 2688));
            let every = 100.0 * sample::error(&data, &all_rungs(&data, 2688));
            println!(
                "{name}: {ours:.3} %, all rungs {every:.3} %, the peer's rule {theirs:.3} % \
                 (specification: {fitted}, {all}, {four})"
            );
            assert!(ours < theirs, "{name}: {ours} is not below the peer's {theirs}");
            assert!(ours / every <= fitted / all, "{name}: {ours} against {every} of all rungs");
            assert!(ours <= fitted || name == "uneven columns", "{name}: {ours}, wanted at most {fitted}");
        }
    }

    #[test]
    fn never_worse_than_the_peer_s_rule() {
        let mut random = sample::Uniform(5);
        for round in 0..40 {
            let (rows, cols) = (1 + round % 5, 32 * (1 + round % 9));
            // Groups and rows of very different sizes, some zero.
            let mut data = Vec::new();
            for _ in 0..rows * cols / GROUP {
                let size = random.next().powi(round as i32 % 12) * f64::from(random.next() > 0.1);
                data.extend((0..GROUP).map(|_| (size * random.gaussian()) as f32));
            }
            let (ours, theirs) =
                (sample::error(&data, &decoded(&data, cols)), sample::error(&data, &peer(&data, cols)));
            assert!(ours <= theirs * (1.0 + 1e-6) || ours.is_nan(), "{rows} x {cols}: {ours} against {theirs}");
        }
    }

    #[test]
    fn extremes_have_a_ladder() {
        for value in [f32::MIN_POSITIVE / 4.0, 1e-38, 1e-20, 1e10, 1e30, f32::MAX] {
            let mut data = vec![0.0; 64];
            (data[3], data[40]) = (value, -value / 3.0);
            let payload = encode(&Floats::new(&data, 64)).unwrap();
            let matrix = Matrix::from_payload("w", Codec::Q4tp, [1, 64], payload);
            assert!(Ladder::is_finite(matrix.q4tp().ladders.try_into().unwrap()), "{value}");
            let got = dequantize(&matrix);
            assert!(got.iter().all(|w| w.is_finite()), "{value}");
            if value > 1e-30 && value < 1e38 {
                assert!((got[3] / value - 1.0).abs() < 0.1, "{value}: {}", got[3]);
            }
        }
    }

    #[test]
    fn finite_ladders_are_told_from_others() {
        for lo in (0..=u16::MAX).step_by(131) {
            for step in (0..=u16::MAX).step_by(173) {
                let ([a, b], [c, d]) = (lo.to_le_bytes(), step.to_le_bytes());
                let halves = [f16::from_bits(lo), f16::from_bits(step)];
                let rungs = Ladder::read([a, b, c, d]).rungs;
                let want = halves.iter().all(|half| half.is_finite()) && rungs.iter().all(|rung| rung.is_finite());
                assert_eq!(Ladder::is_finite([a, b, c, d]), want, "{halves:?}");
            }
        }
    }

    #[test]
    fn the_last_code_reads_no_byte_it_has_not() {
        // 8 groups: 40 bits, five bytes to the bit; 7: 35 bits.
        for groups in [1, 2, 3, 5, 7, 8, 84] {
            let mut slice = vec![0; Codec::code_bytes(groups)];
            let want: Vec<usize> = (0..groups).map(|g| (g * 11 + 31) % 32).collect();
            for (group, code) in want.iter().enumerate() {
                let (byte, bit) = (5 * group / 8, 5 * group % 8);
                let [low, high] = ((*code as u16) << bit).to_le_bytes();
                slice[byte] |= low;
                if bit > 3 {
                    slice[byte + 1] |= high;
                }
            }
            assert_eq!((0..groups).map(|g| rung(&slice, g)).collect::<Vec<_>>(), want);
        }
    }

    #[test]
    fn columns_that_make_no_groups_are_refused() {
        let error = encode(&Floats::new(&[0.0; 48], 48)).unwrap_err();
        assert_eq!(error, EncodeError::Shape { codec: Codec::Q4tp, shape: [1, 48] });
    }
}
