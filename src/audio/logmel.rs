//! Log-mel features (`model.md` §4.1): 16 kHz samples to frames of 128 bins, ten milliseconds apart.

use std::f64::consts::PI;
use std::ops::Range;
use std::sync::Arc;

use half::bf16;
use rayon::prelude::*;
use realfft::{RealFftPlanner, RealToComplex};

use super::weights::PerceptionError;

/// Samples a second.
pub const RATE: usize = 16_000;
/// Samples between frames.
pub const HOP: usize = 160;
/// Frequency bins of a frame.
pub const BINS: usize = 128;
/// Spectrogram frames of one encoder frame.
pub const STACK: usize = 8;

const FFT: usize = 512;
const WINDOW: usize = 400;
const SPECTRUM: usize = FFT / 2 + 1;
const EMPHASIS: f32 = 0.97;
/// Frames a thread takes at a time.
const PART: usize = 256;

/// The front end: constants and an FFT plan.
pub struct LogMel {
    window: Vec<f32>,
    bank: Vec<Triangle>,
    fft: Arc<dyn RealToComplex<f32>>,
}

/// One filter, without its zeros.
struct Triangle {
    first: usize,
    weights: Vec<f32>,
}

/// Features of a whole recording.
pub struct Features {
    valid: usize,
    /// `[frames padded to a multiple of 8, bins]`, zero past the valid ones
    raw: Vec<f32>,
    /// `[bins]`
    mean: Vec<f32>,
    /// `[bins]`, one over the deviation plus 1e-5
    scale: Vec<f32>,
}

impl Default for LogMel {
    fn default() -> Self {
        Self::new()
    }
}

impl LogMel {
    /// Computes the window and the filter bank.
    #[must_use]
    pub fn new() -> Self {
        let bank = filter_bank();
        let bank = bank
            .chunks_exact(SPECTRUM)
            .map(|row| {
                let first = row.iter().position(|w| *w != 0.0).unwrap_or(0);
                let end = row.iter().rposition(|w| *w != 0.0).map_or(first, |last| last + 1);
                Triangle { first, weights: row[first..end].to_vec() }
            })
            .collect();
        Self { window: window(), bank, fft: RealFftPlanner::new().plan_fft_forward(FFT) }
    }

    /// Features of `samples` (16 kHz, mono, amplitude within [-1, 1]).
    ///
    /// # Errors
    ///
    /// [`PerceptionError::TooShort`] where there is no whole frame.
    pub fn features(&self, samples: &[f32]) -> Result<Features, PerceptionError> {
        let valid = samples.len() / HOP;
        if valid == 0 {
            return Err(PerceptionError::TooShort { samples: samples.len(), wanted: HOP });
        }
        // The centred transform has one frame more than is valid; it counts for the padding.
        let padded = (valid + 1).next_multiple_of(STACK);
        let mut raw = vec![0.0; padded * BINS];
        raw[..valid * BINS].par_chunks_mut(PART * BINS).enumerate().for_each(|(part, out)| {
            let mut frame = self.fft.make_input_vec();
            let mut spectrum = self.fft.make_output_vec();
            let mut scratch = self.fft.make_scratch_vec();
            for (i, row) in out.chunks_exact_mut(BINS).enumerate() {
                self.frame(samples, part * PART + i, &mut frame);
                self.fft.process_with_scratch(&mut frame, &mut spectrum, &mut scratch).expect("buffers of the plan");
                let power: [f32; SPECTRUM] = std::array::from_fn(|k| spectrum[k].norm_sqr());
                for (o, filter) in row.iter_mut().zip(&self.bank) {
                    let bins = &power[filter.first..][..filter.weights.len()];
                    let mel: f32 = bins.iter().zip(&filter.weights).map(|(p, w)| p * w).sum();
                    *o = (mel + 2.0f32.powi(-24)).ln();
                }
            }
        });
        let (mean, scale) = statistics(&raw[..valid * BINS]);
        Ok(Features { valid, raw, mean, scale })
    }

    /// Emphasised, windowed samples of one frame.
    fn frame(&self, samples: &[f32], index: usize, out: &mut [f32]) {
        out.fill(0.0);
        // The frame's middle lies on sample `index * HOP`.
        let start = (index * HOP) as isize - (WINDOW / 2) as isize;
        let from = start.max(0) as usize;
        let to = (start + WINDOW as isize).clamp(0, samples.len() as isize) as usize;
        let skip = (from as isize - start) as usize;
        let out = &mut out[(FFT - WINDOW) / 2 + skip..];
        let mut before = if from == 0 { 0.0 } else { samples[from - 1] };
        for ((o, x), w) in out.iter_mut().zip(&samples[from..to]).zip(&self.window[skip..]) {
            *o = (x - EMPHASIS * before) * w;
            before = *x;
        }
    }

    /// The window, `[400]`, rounded to bf16 as the checkpoints hold it.
    #[must_use]
    pub fn window(&self) -> &[f32] {
        &self.window
    }

    /// The filter bank, `[128, 257]`, rounded to bf16 as the checkpoints hold it.
    #[must_use]
    pub fn bank(&self) -> Vec<f32> {
        filter_bank()
    }
}

impl Features {
    /// `F`: frames of the recording itself.
    #[must_use]
    pub fn frames(&self) -> usize {
        self.valid
    }

    /// Encoder frames, the wholly invalid one at the end included.
    #[must_use]
    pub fn encoder_frames(&self) -> usize {
        self.raw.len() / (STACK * BINS)
    }

    /// Encoder frames whose first spectrogram frame is valid: the rows a decoder gets.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.valid.div_ceil(STACK)
    }

    /// Log-mel values, `[frames padded to a multiple of 8, 128]`.
    #[must_use]
    pub fn raw(&self) -> &[f32] {
        &self.raw
    }

    /// Stacked raw features of some encoder frames, `[n, 1024]`.
    #[must_use]
    pub fn stacked(&self, frames: Range<usize>) -> &[f32] {
        &self.raw[frames.start * STACK * BINS..frames.end * STACK * BINS]
    }

    /// Stacked features of some encoder frames, `[n, 1024]`, normalised over the recording.
    pub fn normalized(&self, frames: Range<usize>, out: &mut Vec<f32>) {
        let first = frames.start * STACK;
        out.clear();
        out.extend_from_slice(self.stacked(frames));
        for (i, row) in out.chunks_exact_mut(BINS).enumerate() {
            // Frames past the recording are zero already.
            if first + i < self.valid {
                for ((v, mean), scale) in row.iter_mut().zip(&self.mean).zip(&self.scale) {
                    *v = (*v - mean) * scale;
                }
            }
        }
    }
}

/// Mean and inverse deviation of each bin over the frames of the recording.
fn statistics(raw: &[f32]) -> (Vec<f32>, Vec<f32>) {
    let frames = raw.len() / BINS;
    let mut mean = vec![0.0f64; BINS];
    for row in raw.chunks_exact(BINS) {
        mean.iter_mut().zip(row).for_each(|(m, v)| *m += f64::from(*v));
    }
    mean.iter_mut().for_each(|m| *m /= frames as f64);
    let mut square = vec![0.0f64; BINS];
    for row in raw.chunks_exact(BINS) {
        for ((s, v), m) in square.iter_mut().zip(row).zip(&mean) {
            *s += (f64::from(*v) - m) * (f64::from(*v) - m);
        }
    }
    let divisor = frames.saturating_sub(1).max(1) as f64;
    let scale = square.iter().map(|s| (1.0 / ((s / divisor).sqrt() + 1e-5)) as f32).collect();
    (mean.iter().map(|m| *m as f32).collect(), scale)
}

fn round(x: f64) -> f32 {
    bf16::from_f32(x as f32).to_f32()
}

/// Symmetric Hann window.
fn window() -> Vec<f32> {
    (0..WINDOW).map(|n| round(0.5 - 0.5 * (2.0 * PI * n as f64 / (WINDOW - 1) as f64).cos())).collect()
}

/// Triangles on the Slaney mel scale with area normalisation, `[128, 257]`.
fn filter_bank() -> Vec<f32> {
    let log_step = 6.4f64.ln() / 27.0;
    let to_hz = |mel: f64| if mel < 15.0 { mel * 200.0 / 3.0 } else { 1000.0 * ((mel - 15.0) * log_step).exp() };
    let top = 15.0 + (RATE as f64 / 2.0 / 1000.0).ln() / log_step;
    let corner = |i: usize| to_hz(top * i as f64 / (BINS + 1) as f64);
    let mut bank = Vec::with_capacity(BINS * SPECTRUM);
    for j in 0..BINS {
        let (low, peak, high) = (corner(j), corner(j + 1), corner(j + 2));
        for k in 0..SPECTRUM {
            let f = k as f64 * RATE as f64 / FFT as f64;
            let height = ((f - low) / (peak - low)).min((high - f) / (high - peak)).max(0.0);
            bank.push(round(height * 2.0 / (high - low)));
        }
    }
    bank
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The same maths as plain sums in f64, without an FFT.
    fn plain(samples: &[f32], index: usize) -> Vec<f64> {
        let (window, bank) = (window(), filter_bank());
        let x = |i: isize| if i < 0 { 0.0 } else { samples.get(i as usize).map_or(0.0, |v| f64::from(*v)) };
        let inside = |i: isize| i >= 0 && (i as usize) < samples.len();
        let frame: Vec<f64> = (0..WINDOW as isize)
            .map(|n| {
                let i = (index * HOP) as isize + n - 200;
                let value = if inside(i) { x(i) - 0.97 * x(i - 1) } else { 0.0 };
                value * f64::from(window[n as usize])
            })
            .collect();
        let power: Vec<f64> = (0..SPECTRUM)
            .map(|k| {
                let angle = |n: usize| 2.0 * PI * ((k * n) % FFT) as f64 / FFT as f64;
                let re: f64 = frame.iter().enumerate().map(|(n, v)| v * angle(n).cos()).sum();
                let im: f64 = frame.iter().enumerate().map(|(n, v)| v * angle(n).sin()).sum();
                re * re + im * im
            })
            .collect();
        bank.chunks_exact(SPECTRUM)
            .map(|w| (w.iter().zip(&power).map(|(w, p)| f64::from(*w) * p).sum::<f64>() + 2f64.powi(-24)).ln())
            .collect()
    }

    #[test]
    fn equals_plain_sums() {
        let mut state = 1u32;
        let mut noise = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 24) as f32 - 0.5
        };
        let samples: Vec<f32> =
            (0..1_234).map(|i| (i as f32 * 0.37).sin() * 0.3 + (i as f32 * 1.9).sin() * 0.3 + noise() * 0.2).collect();
        let features = LogMel::new().features(&samples).unwrap();
        assert_eq!((features.frames(), features.encoder_frames(), features.rows()), (7, 1, 1));
        for frame in 0..7 {
            let want = plain(&samples, frame);
            // f32 rounds in proportion to the loudest bin's amplitude, in all of them.
            let amplitude = |log: f64| (0.5 * log).exp();
            let loudest = want.iter().copied().map(amplitude).fold(0.0, f64::max);
            for (seen, want) in features.raw()[frame * BINS..].iter().zip(want) {
                let off = (amplitude(f64::from(*seen)) - amplitude(want)).abs();
                assert!(off < 1e-6 * loudest, "frame {frame}: {seen} {want}, {:e}", off / loudest);
            }
        }
        assert!(features.raw()[7 * BINS..].iter().all(|v| *v == 0.0));
    }

    #[test]
    fn counts_of_frames() {
        let mel = LogMel::new();
        for (samples, frames, encoder, rows) in
            [(160, 1, 1, 1), (800, 5, 1, 1), (1_119, 6, 1, 1), (1_120, 7, 1, 1), (1_280, 8, 2, 1), (1_440, 9, 2, 2)]
        {
            let features = mel.features(&vec![0.1; samples]).unwrap();
            assert_eq!((features.frames(), features.encoder_frames(), features.rows()), (frames, encoder, rows));
        }
        for short in [0, 1, 159] {
            let error = mel.features(&vec![0.1; short]).err().unwrap();
            assert!(matches!(error, PerceptionError::TooShort { samples, wanted: 160 } if samples == short));
        }
    }

    #[test]
    fn silence_is_finite_and_normalises_to_zero() {
        let features = LogMel::new().features(&[0.0; 3_200]).unwrap();
        let floor = 2f32.powi(-24).ln();
        assert!(features.raw()[..20 * BINS].iter().all(|v| *v == floor));
        let mut out = Vec::new();
        features.normalized(0..features.encoder_frames(), &mut out);
        assert!(out.iter().all(|v| v.abs() < 1e-3));
    }

    #[test]
    fn normalised_bins_have_unit_deviation() {
        let samples: Vec<f32> =
            (0..16_000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 8) as f32 / 2e7 - 0.4).collect();
        let features = LogMel::new().features(&samples).unwrap();
        let mut out = Vec::new();
        features.normalized(0..features.encoder_frames(), &mut out);
        for bin in [0, 64, 127] {
            let values: Vec<f64> = (0..100).map(|f| f64::from(out[f * BINS + bin])).collect();
            let mean = values.iter().sum::<f64>() / 100.0;
            let var = values.iter().map(|v| (v - mean) * (v - mean)).sum::<f64>() / 99.0;
            assert!(mean.abs() < 1e-4 && (var - 1.0).abs() < 1e-2, "{bin}: {mean} {var}");
        }
        let mut part = Vec::new();
        features.normalized(3..5, &mut part);
        assert_eq!(part, out[3 * 1024..5 * 1024]);
    }
}
