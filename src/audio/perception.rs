//! The perception module: recordings in, rows for the decoder out (`model.md` §4.3, §4.5).
//!
//! [`Perception::encode`] computes the features of a whole recording (they are normalised over it)
//! and gives an [`Encoding`], which yields the rows chunk by chunk, so that a decoder starts on the
//! first chunk before the last one is encoded. Work is spread over the rayon pool it is called from.

use std::ops::Range;
use std::sync::Arc;

use super::config::{AudioConfig, DiarizationConfig};
use super::gemm::View;
use super::linear::{Linear, Norm};
use super::logmel::{BINS, Features, LogMel, STACK};
use super::sortformer::{Input, Memory, Sortformer, Window, frame_probabilities};
use super::tower::{Cancelled, Tower, TowerSettings, Work};
use super::weights::{PerceptionError, Scope, Tensors};
use super::words::WordHead;
use crate::model::Model;

/// Modules with at most this many weights are converted to f32 once (64 MiB): for short recordings
/// the conversion would otherwise cost as much as the products.
const KEEP_FLOATS: usize = 16 << 20;

/// Towers, fusion and projection, ready to encode. Shared by all recordings.
pub struct Perception {
    mel: LogMel,
    asr: Tower,
    asr_norm: Norm,
    diarizer: Sortformer,
    diar_norm: Norm,
    /// `[speakers, width]`: what a speaker adds to a state
    speaker_table: Vec<f32>,
    proj: Linear,
    words: Option<WordHead>,
    config: AudioConfig,
}

/// One recording on its way through the towers.
pub struct Encoding {
    perception: Arc<Perception>,
    features: Features,
    windows: std::vec::IntoIter<Window>,
    memory: Memory,
    work: Work,
    kept: Option<Kept>,
}

/// Rows of one chunk.
#[derive(Clone, Debug, PartialEq)]
pub struct Chunk {
    /// Rows of the recording that these are; the first chunk starts at 0, the next where this ends.
    pub range: Range<usize>,
    /// `[range, hidden]`
    pub rows: Vec<f32>,
}

/// What one step of an [`Encoding`] gave.
#[derive(Clone, Debug, PartialEq)]
pub enum Step {
    /// The next rows.
    Rows(Chunk),
    /// `stop` said so; the step can be taken again.
    Cancelled,
    /// All rows were given.
    Done,
}

/// What word times need of a recording that was encoded (`model.md` §4.7).
#[derive(Clone, Debug, Default)]
pub struct Kept {
    /// Speech encoder states before `asr_norm`, `[encoder frames, width]`.
    pub states: Vec<f32>,
    /// Speaker logits, `[8 * encoder frames, speakers]`, one row every 10 ms.
    pub speaker_logits: Vec<f32>,
    /// `F`: spectrogram frames of the recording.
    pub frames: usize,
}

/// Intermediate values of a step, for comparison with a reference.
#[doc(hidden)]
#[derive(Clone, Debug, Default)]
pub struct Probe {
    /// Stacked and embedded features of the speech encoder, contexts included.
    pub asr_embedded: Vec<f32>,
    /// States after each layer of the speech encoder, contexts included.
    pub asr_layers: Vec<Vec<f32>>,
    /// States after each layer of the diarization model, memories and contexts included.
    pub diar_layers: Vec<Vec<f32>>,
    /// The chunk's own frames, before the projection.
    pub fused: Vec<f32>,
    /// The chunk's own mean speaker probabilities.
    pub frame_probs: Vec<f32>,
}

impl Perception {
    /// The perception module of a model, or `None` where the file has none.
    ///
    /// # Errors
    ///
    /// As [`Perception::load`]; also rows that the decoder cannot read.
    pub fn open(model: &Model) -> Result<Option<Self>, PerceptionError> {
        const PROJ: &str = "perception.proj.weight";
        let Some(proj) = model.container.tensor(PROJ) else { return Ok(None) };
        let (seen, hidden) = (proj.shape().to_vec(), model.geometry.hidden);
        if seen.first() != Some(&hidden) {
            let wanted = [&[hidden], seen.get(1..).unwrap_or_default()].concat();
            return Err(PerceptionError::Shape { name: PROJ.into(), seen, wanted });
        }
        Self::load(&model.container, AudioConfig::from_json(&model.provenance)?).map(Some)
    }

    /// Builds the module from a file's tensors.
    ///
    /// # Errors
    ///
    /// Whatever is missing or does not fit, by name.
    pub fn load(tensors: &dyn Tensors, config: AudioConfig) -> Result<Self, PerceptionError> {
        let root = Scope::new(tensors, "perception.");
        let encoder = root.at("encoder");
        let stacked = STACK * BINS;
        let asr =
            TowerSettings { heads: config.asr_heads, rotary_share: config.asr_rotary_share, stacked: Some(stacked) };
        let asr = Tower::load(&encoder.at("asr_encoder"), asr)?;
        let asr_norm = Norm::load(&encoder, "asr_norm", Some(asr.width()))?;
        let diarizer = Sortformer::load(&encoder.at("diarization_model"), &config.diarization, stacked)?;
        let diar_norm = Norm::load(&encoder, "diar_norm", Some(diarizer.speakers()))?;
        let proj = Linear::load(&root, "proj", [None, Some(asr.width())], true)?;
        let words = WordHead::load(&Scope::new(tensors, "ctc_timestamp."), &config.words, asr.width())?;
        let speaker_table = speaker_table(diarizer.speakers(), asr.width());
        let mut perception =
            Self { mel: LogMel::new(), asr, asr_norm, diarizer, diar_norm, speaker_table, proj, words, config };
        if perception.linears().map(|l| l.mapped_floats()).sum::<usize>() <= KEEP_FLOATS {
            perception.linears().for_each(Linear::keep_floats);
        }
        Ok(perception)
    }

    fn linears(&mut self) -> impl Iterator<Item = &mut Linear> {
        let words = self.words.iter_mut().flat_map(WordHead::linears);
        self.asr.linears().chain(self.diarizer.linears()).chain([&mut self.proj]).chain(words)
    }

    /// Width of the rows, which must be the decoder's hidden size.
    #[must_use]
    pub fn hidden(&self) -> usize {
        self.proj.rows()
    }

    /// Speakers that are told apart.
    #[must_use]
    pub fn speakers(&self) -> usize {
        self.diarizer.speakers()
    }

    /// The settings it was built with.
    #[must_use]
    pub fn config(&self) -> &AudioConfig {
        &self.config
    }

    /// The word timestamp head, where the file has one.
    #[must_use]
    pub fn words(&self) -> Option<&WordHead> {
        self.words.as_ref()
    }

    /// Rows a recording of `samples` samples gives, one every 80 ms.
    #[must_use]
    pub fn rows_of(samples: usize) -> usize {
        (samples / super::logmel::HOP).div_ceil(STACK)
    }

    /// Computes the features of `samples` (16 kHz, mono) and starts on their rows.
    ///
    /// `keep` retains what word times need: 5 KB for each 80 ms of a 30B model.
    ///
    /// # Errors
    ///
    /// [`PerceptionError::TooShort`] for less than 10 ms; [`PerceptionError::NoWords`] where `keep`
    /// is set and the file has no word timestamp head.
    pub fn encode(self: &Arc<Self>, samples: &[f32], keep: bool) -> Result<Encoding, PerceptionError> {
        if keep && self.words.is_none() {
            return Err(PerceptionError::NoWords { why: "the file has no word timestamp head" });
        }
        let features = self.mel.features(samples)?;
        let windows = windows(features.encoder_frames(), &self.config.diarization).into_iter();
        let kept = keep.then(|| Kept { frames: features.frames(), ..Kept::default() });
        let (memory, work) = (Memory::default(), Work::default());
        Ok(Encoding { perception: Arc::clone(self), features, windows, memory, work, kept })
    }
}

impl Encoding {
    /// Rows of the whole recording: `ceil(F / 8)`.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.features.rows()
    }

    /// Chunks that are still to come.
    #[must_use]
    pub fn chunks_left(&self) -> usize {
        self.windows.as_slice().len()
    }

    /// Features of the recording.
    #[must_use]
    pub fn features(&self) -> &Features {
        &self.features
    }

    /// Encodes the next chunk. `stop` is asked before each layer of each tower.
    pub fn step(&mut self, stop: &dyn Fn() -> bool) -> Step {
        self.probed_step(stop, &mut None)
    }

    /// As [`Encoding::step`], writing down what happens on the way.
    #[doc(hidden)]
    pub fn probed_step(&mut self, stop: &dyn Fn() -> bool, probe: &mut Option<Probe>) -> Step {
        loop {
            let Some(window) = self.windows.as_slice().first().cloned() else { return Step::Done };
            let Ok(rows) = self.chunk(&window, stop, probe) else { return Step::Cancelled };
            self.windows.next();
            // The last chunk may hold the invalid frame alone.
            let range = window.own.start..window.own.end.min(self.features.rows());
            if !range.is_empty() {
                return Step::Rows(Chunk { range, rows });
            }
        }
    }

    /// What word times need, once all rows were given.
    ///
    /// # Errors
    ///
    /// [`PerceptionError::NoWords`] where the recording was not encoded to its end or without `keep`.
    pub fn into_kept(self) -> Result<Kept, PerceptionError> {
        if self.chunks_left() > 0 {
            return Err(PerceptionError::NoWords { why: "the recording was not encoded to its end" });
        }
        self.kept.ok_or(PerceptionError::NoWords { why: "the recording was encoded without keeping its states" })
    }

    fn chunk(
        &mut self,
        window: &Window,
        stop: &dyn Fn() -> bool,
        probe: &mut Option<Probe>,
    ) -> Result<Vec<f32>, Cancelled> {
        let Self { perception, features, memory, work, kept, .. } = self;
        let Perception { asr, asr_norm, diarizer, diar_norm, proj, speaker_table, config, .. } = &**perception;
        let width = asr.width();
        let valid = features.rows().clamp(window.read.start, window.read.end) - window.read.start;
        let frame = window.own.start - window.read.start..window.own.end - window.read.start;

        let (mut stacked, mut states) = (Vec::new(), Vec::new());
        features.normalized(window.read.clone(), &mut stacked);
        asr.embed(&stacked, &mut states, work);
        if let Some(probe) = probe {
            probe.asr_embedded.clone_from(&states);
        }
        asr.run(&mut states, valid, work, stop, |_, x| {
            if let Some(probe) = probe {
                probe.asr_layers.push(x.to_vec());
            }
        })?;
        let states = &states[frame.start * width..frame.end * width];

        let mut embeddings = Vec::new();
        diarizer.tower.embed(features.stacked(window.read.clone()), &mut embeddings, work);
        let input = Input { window, embeddings: &embeddings, valid };
        let logits = diarizer.step(memory, &input, work, stop, |_, x| {
            if let Some(probe) = probe {
                probe.diar_layers.push(x.to_vec());
            }
        })?;
        let probs = frame_probabilities(&logits, diarizer.speakers());

        let mut fused = Vec::new();
        asr_norm.rows(states, &mut fused);
        for (row, probs) in fused.chunks_exact_mut(width).zip(probs.chunks_exact(diarizer.speakers())) {
            let mut active: Vec<f32> =
                probs.iter().map(|p| f32::from(u8::from(*p > config.activity_threshold))).collect();
            diar_norm.row(&mut active);
            for (share, speaker) in active.iter().zip(speaker_table.chunks_exact(width)) {
                row.iter_mut().zip(speaker).for_each(|(x, s)| *x += share * s);
            }
        }
        let own = window.own.end.min(features.rows()).saturating_sub(window.own.start);
        let mut rows = vec![0.0; own * proj.rows()];
        proj.apply(View::dense(&fused[..own * width], width), false, &mut rows, &mut work.panel);

        if let Some(kept) = kept {
            kept.states.extend_from_slice(states);
            kept.speaker_logits.extend_from_slice(&logits);
        }
        if let Some(probe) = probe {
            (probe.fused, probe.frame_probs) = (fused, probs);
        }
        Ok(rows)
    }
}

/// Chunks of a recording of `frames` encoder frames, with their contexts.
pub(crate) fn windows(frames: usize, config: &DiarizationConfig) -> Vec<Window> {
    (0..frames)
        .step_by(config.chunk_length)
        .map(|start| {
            let end = (start + config.chunk_length).min(frames);
            let read = start.saturating_sub(config.chunk_left)..(end + config.chunk_right).min(frames);
            Window { own: start..end, read }
        })
        .collect()
}

/// `T[s, 2j] = sin(s w_j)`, `T[s, 2j + 1] = cos(s w_j)`, `w_j = 10000^(-2j / width)`.
fn speaker_table(speakers: usize, width: usize) -> Vec<f32> {
    (0..speakers)
        .flat_map(|s| {
            (0..width).map(move |i| {
                let angle = s as f64 * 10_000f64.powf(-((i / 2 * 2) as f64) / width as f64);
                (if i % 2 == 0 { angle.sin() } else { angle.cos() }) as f32
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_cover_each_frame_once() {
        let config = DiarizationConfig { chunk_length: 20, chunk_left: 6, chunk_right: 5, ..Default::default() };
        let window = |own: Range<usize>, read: Range<usize>| Window { own, read };
        let want = [window(0..20, 0..25), window(20..40, 14..45), window(40..60, 34..65), window(60..67, 54..67)];
        assert_eq!(windows(67, &config), want);
        assert_eq!(windows(20, &config), [window(0..20, 0..20)]);
        assert_eq!(windows(1, &config), [window(0..1, 0..1)]);
        assert_eq!(windows(0, &config), []);
        assert_eq!(windows(500, &DiarizationConfig::default()), [window(0..500, 0..500)]);
    }

    #[test]
    fn rows_of_samples() {
        let rows = [0, 159, 160, 1_279, 1_280, 1_440, 16_000 * 3_600].map(Perception::rows_of);
        assert_eq!(rows, [0, 0, 1, 1, 1, 2, 45_000]);
    }
}
