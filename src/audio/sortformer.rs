//! Who speaks when: Sortformer with an arrival-order speaker cache (`model.md` §4.4).

use std::ops::Range;

use super::config::DiarizationConfig;
use super::gemm::View;
use super::linear::Linear;
use super::logmel::STACK;
use super::tower::{Cancelled, Tower, TowerSettings, Work};
use super::weights::{PerceptionError, Scope};

/// The diarization model.
pub(crate) struct Sortformer {
    pub tower: Tower,
    encoder_proj: Linear,
    /// `[8 * hidden, 3 * hidden]`: the convolution as a product with three neighbouring rows
    upsample: Linear,
    first: Linear,
    speakers: Linear,
    /// `[width]`, what stands for silence in the speaker cache
    silence: Vec<f32>,
    settings: DiarizationConfig,
}

/// What the model remembers from chunk to chunk: frame embeddings with their probabilities.
#[derive(Default)]
pub(crate) struct Memory {
    cache: Vec<f32>,
    cache_probs: Vec<f32>,
    compressed: bool,
    fifo: Vec<f32>,
}

/// A chunk and the contexts it is computed with, in encoder frames (`model.md` §4.3).
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Window {
    /// Frames that are kept.
    pub own: Range<usize>,
    /// Frames that are read.
    pub read: Range<usize>,
}

/// What the model reads for one chunk.
pub(crate) struct Input<'a> {
    pub window: &'a Window,
    /// `[window.read, width]`
    pub embeddings: &'a [f32],
    /// How many of them belong to the recording.
    pub valid: usize,
}

impl Sortformer {
    pub(crate) fn load(
        scope: &Scope<'_>,
        settings: &DiarizationConfig,
        stacked: usize,
    ) -> Result<Self, PerceptionError> {
        let tower =
            TowerSettings { heads: settings.heads, rotary_share: settings.rotary_share, stacked: Some(stacked) };
        let tower = Tower::load(&scope.at("encoder"), tower)?;
        let modules = scope.at("sortformer_modules");
        let encoder_proj = Linear::load(&modules, "encoder_proj", [None, Some(tower.width())], true)?;
        let hidden = encoder_proj.rows();
        let upsample = upsample(&modules, hidden)?;
        let first = Linear::load(&modules, "first_hidden_to_hidden", [Some(hidden), Some(hidden)], true)?;
        let speakers = Linear::load(&modules, "single_hidden_to_spks", [None, Some(hidden)], true)?;
        let silence = modules.vector("learnable_sil_emb", Some(tower.width()))?;
        settings.check_speakers(speakers.rows())?;
        Ok(Self { tower, encoder_proj, upsample, first, speakers, silence, settings: settings.clone() })
    }

    /// Speakers told apart.
    pub(crate) fn speakers(&self) -> usize {
        self.speakers.rows()
    }

    pub(crate) fn linears(&mut self) -> impl Iterator<Item = &mut Linear> {
        self.tower.linears().chain([&mut self.encoder_proj, &mut self.upsample, &mut self.first, &mut self.speakers])
    }

    /// Speaker logits of the window's own frames, `[8 * own, speakers]`.
    ///
    /// The memory moves on only when the chunk was not cancelled.
    pub(crate) fn step(
        &self,
        memory: &mut Memory,
        input: &Input<'_>,
        work: &mut Work,
        stop: &dyn Fn() -> bool,
        layer: impl FnMut(usize, &[f32]),
    ) -> Result<Vec<f32>, Cancelled> {
        let Input { window, embeddings, valid } = *input;
        let width = self.tower.width();
        let speakers = self.speakers();
        let cached = memory.cache.len() / width;
        let remembered = cached + memory.fifo.len() / width;
        let mut states = [&memory.cache[..], &memory.fifo, embeddings].concat();
        let frames = states.len() / width;
        self.tower.run(&mut states, remembered + valid, work, stop, layer)?;
        let logits = self.head(&states, work);

        let first = remembered + window.own.start - window.read.start;
        let own = first..first + window.own.len();
        let mut probs = frame_probabilities(&logits, speakers);
        probs[(remembered + valid).min(frames) * speakers..].fill(0.0);

        let part = |range: Range<usize>| &probs[range.start * speakers..range.end * speakers];
        let mut queue_probs = [part(cached..remembered), part(own.clone())].concat();
        let skipped = (window.own.start - window.read.start) * width;
        memory.fifo.extend_from_slice(&embeddings[skipped..skipped + window.own.len() * width]);
        let queued = memory.fifo.len() / width;
        if queued > self.settings.fifo_length {
            let popped = self.settings.update_period.max(queued - self.settings.fifo_length).min(queued);
            if !memory.compressed {
                memory.cache_probs = part(0..cached).to_vec();
            }
            memory.cache.extend(memory.fifo.drain(..popped * width));
            memory.cache_probs.extend(queue_probs.drain(..popped * speakers));
            if cached + popped > self.settings.cache_length {
                self.compress(memory);
            }
        }
        Ok(logits[own.start * STACK * speakers..own.end * STACK * speakers].to_vec())
    }

    /// Encoder states `[t, width]` to speaker logits `[8 t, speakers]`.
    fn head(&self, states: &[f32], work: &mut Work) -> Vec<f32> {
        let hidden = self.encoder_proj.rows();
        let x = View::dense(states, self.tower.width());
        let frames = x.rows;
        // A row of zeros on both sides, so that three neighbouring rows are one longer row.
        let mut padded = vec![0.0; (frames + 2) * hidden];
        self.encoder_proj.apply(x, false, &mut padded[hidden..(frames + 1) * hidden], &mut work.panel);
        let mut fine = vec![0.0; frames * STACK * hidden];
        let triples = View { data: &padded, rows: frames, cols: 3 * hidden, stride: hidden };
        self.upsample.apply(triples, false, &mut fine, &mut work.panel);
        relu(&mut fine);
        let mut mixed = vec![0.0; fine.len()];
        self.first.apply(View::dense(&fine, hidden), false, &mut mixed, &mut work.panel);
        relu(&mut mixed);
        let mut logits = vec![0.0; frames * STACK * self.speakers()];
        self.speakers.apply(View::dense(&mixed, hidden), false, &mut logits, &mut work.panel);
        logits
    }

    /// Keeps the frames that tell the speakers apart best.
    fn compress(&self, memory: &mut Memory) {
        let width = self.tower.width();
        let speakers = self.speakers();
        let kept = select(&memory.cache_probs, speakers, &self.settings);
        let mut cache = Vec::with_capacity(kept.len() * width);
        let mut probs = Vec::with_capacity(kept.len() * speakers);
        for frame in kept {
            match frame {
                Some(t) => {
                    cache.extend_from_slice(&memory.cache[t * width..(t + 1) * width]);
                    probs.extend_from_slice(&memory.cache_probs[t * speakers..(t + 1) * speakers]);
                }
                None => {
                    cache.extend_from_slice(&self.silence);
                    probs.resize(probs.len() + speakers, 0.0);
                }
            }
        }
        (memory.cache, memory.cache_probs, memory.compressed) = (cache, probs, true);
    }
}

/// The convolution over frames as a matrix over `[t - 1 | t | t + 1]`.
fn upsample(modules: &Scope<'_>, hidden: usize) -> Result<Linear, PerceptionError> {
    let shape = [Some(STACK * hidden), Some(hidden), Some(3)];
    let (_, values) = modules.floats("subpixel_upsample.weight", &shape)?;
    let bias = modules.vector("subpixel_upsample.bias", Some(STACK * hidden))?;
    let mut weight = vec![0.0; values.len()];
    for (from, to) in values.chunks_exact(3 * hidden).zip(weight.chunks_exact_mut(3 * hidden)) {
        for (input, taps) in from.chunks_exact(3).enumerate() {
            for (tap, value) in taps.iter().enumerate() {
                to[tap * hidden + input] = *value;
            }
        }
    }
    Ok(Linear::from_floats(weight, bias))
}

fn relu(x: &mut [f32]) {
    x.iter_mut().for_each(|v| *v = v.max(0.0));
}

/// The logistic function.
pub(crate) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

/// Mean of `sigmoid` over a frame's 8 rows: `[8 n, speakers]` to `[n, speakers]`.
pub(crate) fn frame_probabilities(logits: &[f32], speakers: usize) -> Vec<f32> {
    logits
        .chunks_exact(STACK * speakers)
        .flat_map(|rows| {
            (0..speakers).map(|s| rows.chunks_exact(speakers).map(|row| sigmoid(row[s])).sum::<f32>() / STACK as f32)
        })
        .collect()
}

/// Frames that a full cache keeps, `cache_length` of them; `None` is silence.
fn select(probs: &[f32], speakers: usize, settings: &DiarizationConfig) -> Vec<Option<usize>> {
    let frames = probs.len() / speakers;
    let length = settings.cache_length;
    let silences = settings.silence_frames;
    let budget = length / speakers - silences;
    let ln2 = std::f32::consts::LN_2;
    let floor = settings.score_threshold;
    let quiet = |p: f32| (1.0 - p).max(floor).ln();

    // Speaker-major: `scores[s * rows + t]`, the silence rows last.
    let rows = frames + silences;
    let mut scores = vec![f32::INFINITY; speakers * rows];
    for (t, p) in probs.chunks_exact(speakers).enumerate() {
        let others: f32 = p.iter().map(|p| quiet(*p)).sum();
        for (s, p) in p.iter().enumerate() {
            let score = p.max(floor).ln() - quiet(*p) + others + ln2;
            scores[s * rows + t] = if *p > 0.5 { score } else { f32::NEG_INFINITY };
        }
    }
    for table in scores.chunks_exact_mut(rows) {
        let table = &mut table[..frames];
        let positive = table.iter().filter(|s| **s > 0.0).count();
        if positive >= share(budget, settings.min_positive_rate) {
            table.iter_mut().filter(|s| **s <= 0.0).for_each(|s| *s = f32::NEG_INFINITY);
        }
        table.iter_mut().skip(length).for_each(|s| *s += settings.latest_boost);
        boost(table, share(budget, settings.strong_rate), 2.0 * ln2);
        boost(table, share(budget, settings.weak_rate), ln2);
    }

    let mut order: Vec<usize> = (0..scores.len()).collect();
    order.sort_by(|a, b| scores[*b].total_cmp(&scores[*a]));
    order.truncate(length);
    // Pairs without a score go last; the rest by speaker, then by time.
    order.sort_by_key(|i| if scores[*i] == f32::NEG_INFINITY { usize::MAX } else { *i });
    let frame = |i: usize| (scores[i] != f32::NEG_INFINITY && i % rows < frames).then_some(i % rows);
    order.into_iter().map(frame).collect()
}

/// `floor(budget * rate)`.
fn share(budget: usize, rate: f64) -> usize {
    (budget as f64 * rate) as usize
}

/// Adds `gain` to the best `count` scores.
fn boost(scores: &mut [f32], count: usize, gain: f32) {
    let mut order: Vec<usize> = (0..scores.len()).collect();
    order.sort_by(|a, b| scores[*b].total_cmp(&scores[*a]));
    order.iter().take(count).for_each(|i| scores[*i] += gain);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(cache_length: usize) -> DiarizationConfig {
        DiarizationConfig { cache_length, ..DiarizationConfig::default() }
    }

    #[test]
    fn selection_groups_by_speaker_in_time_order() {
        // Two speakers; speaker 1 speaks in frames 1 and 4, speaker 0 in 0, 2 and 3; frame 5 is silent.
        let probs = [0.9, 0.1, 0.1, 0.9, 0.8, 0.1, 0.95, 0.1, 0.1, 0.7, 0.1, 0.1];
        let kept = select(&probs, 2, &settings(7));
        // Budget 2 a speaker; one silence slot each follows its speaker's frames.
        assert_eq!(kept, [Some(0), Some(2), Some(3), None, Some(1), Some(4), None]);
    }

    #[test]
    fn selection_fills_up_with_silence() {
        let kept = select(&[0.1; 2 * 9], 2, &settings(8));
        assert_eq!(kept, [None; 8]);
    }

    #[test]
    fn probabilities_are_means_over_eight_rows() {
        let mut logits = vec![0.0; 16 * 2];
        logits[0] = 100.0;
        logits[17] = -100.0;
        let probs = frame_probabilities(&logits, 2);
        let want = [4.5 / 8.0, 0.5, 0.5, 3.5 / 8.0];
        assert!(probs.iter().zip(want).all(|(p, w): (&f32, f32)| (p - w).abs() < 1e-6), "{probs:?}");
    }
}
