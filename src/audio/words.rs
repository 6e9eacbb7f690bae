//! When each word of a transcript was said (`model.md` §4.7).
//!
//! Takes what [`super::perception::Encoding::into_kept`] keeps of a recording and the transcript's
//! words as classes of the alignment tokenizer, and gives a start and an end for each word. Knows
//! nothing of text: splitting and tokenising are done by the caller.

use std::collections::{BTreeMap, BTreeSet};

use super::config::WordConfig;
use super::ctc::{self, align};
use super::gemm::View;
use super::linear::Linear;
use super::logmel::STACK;
use super::perception::{Kept, Perception, windows};
use super::sortformer::{Window, sigmoid};
use super::tower::{Tower, TowerSettings, Work};
use super::weights::{PerceptionError, Scope};

/// Seconds of a spectrogram frame.
const FRAME_S: f64 = 0.01;
/// Below this probability a row is not a speaker's.
const PRESENT: f32 = 0.01;
/// From this probability on a row is surely a speaker's.
const SURE: f32 = 0.5;
/// Least probability in an emission.
const FLOOR: f32 = 1e-6;
/// Longest word before refinement, in seconds.
const WORD_S: f64 = 1.0;
/// Rows a refined word may last or be late.
const LIMIT_ROWS: f64 = 24.0;
/// Longest row that the limit counts with, in seconds.
const LIMIT_ROW_S: f64 = 0.08;

/// The word timestamp head: a CTC classifier over upsampled speech encoder states.
pub struct WordHead {
    /// `[factor * width, width]`, row `tap * width + o`
    upsample: Linear,
    tower: Tower,
    head: Linear,
    factor: usize,
    residual: f32,
    blank: usize,
}

/// A word of a transcript: its pieces as classes of the head.
pub type WordClasses = Vec<u32>;

/// From when to when, in seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Span {
    /// Start.
    pub start: f64,
    /// End.
    pub end: f64,
}

impl WordHead {
    /// The head, or `None` where the file has none.
    pub(crate) fn load(scope: &Scope<'_>, config: &WordConfig, input: usize) -> Result<Option<Self>, PerceptionError> {
        if !scope.has_matrix("head.weight") {
            return Ok(None);
        }
        let settings = TowerSettings { heads: config.heads, rotary_share: config.rotary_share, stacked: None };
        let tower = Tower::load(&scope.at("transformer"), settings)?;
        let width = tower.width();
        let factor = config.upsampling;
        let bias = scope.vector("upsample.bias", Some(width))?;
        let upsample = Linear::load(scope, "upsample", [Some(factor * width), Some(input)], false)?;
        let head = Linear::load(scope, "head", [None, Some(width)], true)?;
        let blank = config.blank.unwrap_or(head.rows() - 1);
        if blank >= head.rows() {
            return Err(PerceptionError::Config {
                key: "word_timestamp_config.blank_token_id".into(),
                seen: blank.to_string(),
                wanted: "a class of the head",
            });
        }
        let upsample = upsample.with_bias(bias.repeat(factor));
        Ok(Some(Self { upsample, tower, head, factor, residual: config.residual_scale, blank }))
    }

    pub(crate) fn linears(&mut self) -> impl Iterator<Item = &mut Linear> {
        self.tower.linears().chain([&mut self.upsample, &mut self.head])
    }

    /// Classes, the blank included.
    #[must_use]
    pub fn classes(&self) -> usize {
        self.head.rows()
    }

    /// Class of the blank.
    #[must_use]
    pub fn blank(&self) -> usize {
        self.blank
    }

    /// Rows of a chunk before the classifier, `[factor * own, width]`.
    fn rows(&self, kept: &Kept, window: &Window, work: &mut Work) -> Vec<f32> {
        let input = self.upsample.cols();
        let x = View::dense(&kept.states[window.read.start * input..window.read.end * input], input);
        let width = self.tower.width();
        let mut up = vec![0.0; x.rows * self.factor * width];
        self.upsample.apply(x, false, &mut up, &mut work.panel);
        let mut mixed = up.clone();
        let valid = kept.frames.div_ceil(STACK).clamp(window.read.start, window.read.end) - window.read.start;
        let ran = self.tower.run(&mut mixed, valid * self.factor, work, &|| false, |_, _| ());
        ran.expect("nobody stops it");
        let row = |frame: usize| (frame - window.read.start) * self.factor * width;
        let own = row(window.own.start)..row(window.own.end);
        up[own.clone()].iter().zip(&mixed[own]).map(|(x, y)| x + self.residual * y).collect()
    }

    /// Logits of all classes, `[factor * frames, classes]`; for comparison with a reference.
    #[doc(hidden)]
    pub fn logits(&self, kept: &Kept, perception: &Perception) -> Vec<f32> {
        let mut work = Work::default();
        let mut logits = Vec::new();
        for window in windows(self.frames(kept), &perception.config().diarization) {
            let rows = self.rows(kept, &window, &mut work);
            let x = View::dense(&rows, self.tower.width());
            let start = logits.len();
            logits.resize(start + x.rows * self.classes(), 0.0);
            self.head.apply(x, false, &mut logits[start..], &mut work.panel);
        }
        logits
    }

    fn frames(&self, kept: &Kept) -> usize {
        kept.states.len() / self.upsample.cols()
    }

    /// Log-probabilities of some classes in every row. The other classes only count for the sum.
    fn log_probabilities(&self, kept: &Kept, perception: &Perception, classes: Vec<usize>) -> LogProbs {
        let mut work = Work::default();
        let mut table = Vec::new();
        let mut block = Vec::new();
        for window in windows(self.frames(kept), &perception.config().diarization) {
            let rows = self.rows(kept, &window, &mut work);
            let x = View::dense(&rows, self.tower.width());
            let start = table.len();
            table.resize(start + x.rows * classes.len(), 0.0f32);
            let mut sums = vec![(f32::NEG_INFINITY, 0.0f64); x.rows];
            self.head.apply_panelwise(x, &mut work.panel, &mut block, |range, logits| {
                let wanted = classes.partition_point(|c| *c < range.start)..classes.partition_point(|c| *c < range.end);
                for (i, row) in logits.chunks_exact(range.len()).enumerate() {
                    let top = row.iter().copied().fold(sums[i].0, f32::max);
                    let old = if sums[i].1 > 0.0 { sums[i].1 * f64::from(sums[i].0 - top).exp() } else { 0.0 };
                    sums[i] = (top, old + row.iter().map(|v| f64::from((v - top).exp())).sum::<f64>());
                    for j in wanted.clone() {
                        table[start + i * classes.len() + j] = row[classes[j] - range.start];
                    }
                }
            });
            for (row, (top, sum)) in table[start..].chunks_exact_mut(classes.len()).zip(sums) {
                let log_sum = f64::from(top) + sum.ln();
                row.iter_mut().for_each(|v| *v = (f64::from(*v) - log_sum) as f32);
            }
        }
        LogProbs { classes, table }
    }
}

/// Log-probabilities of the classes an alignment needs.
struct LogProbs {
    /// In ascending order.
    classes: Vec<usize>,
    /// `[rows, classes]`
    table: Vec<f32>,
}

impl LogProbs {
    fn index(&self, class: usize) -> usize {
        self.classes.binary_search(&class).expect("a class that was asked for")
    }

    fn row(&self, row: usize) -> &[f32] {
        &self.table[row * self.classes.len()..(row + 1) * self.classes.len()]
    }

    fn rows(&self) -> usize {
        self.table.len() / self.classes.len()
    }
}

/// Emissions of the rows in which one speaker may speak.
struct SpeakerEmissions<'a> {
    log_probs: &'a LogProbs,
    blank: usize,
    /// Rows of the recording, with the logarithm of the speaker's probability.
    rows: Vec<(usize, f32)>,
}

impl ctc::Emissions for SpeakerEmissions<'_> {
    fn rows(&self) -> usize {
        self.rows.len()
    }

    fn blank(&self, row: usize) -> f32 {
        self.log_probs.row(self.rows[row].0)[self.blank]
    }

    fn classes(&self, row: usize) -> (f32, &[f32]) {
        let (row, speaker) = self.rows[row];
        (speaker, self.log_probs.row(row))
    }
}

impl Perception {
    /// Start and end of every word, where they can be told.
    ///
    /// `tags` are the speakers of a transcript (N of `<spk:N>`), in any order, each with all its words in
    /// the order they were said. Words that stand before any tag are those of `None`: the diarization is not
    /// asked about them, and the whole recording is theirs. Pieces that are no class of the head leave their
    /// word without times.
    ///
    /// # Errors
    ///
    /// [`PerceptionError::NoWords`] where the file has no word timestamp head.
    pub fn word_times(
        &self,
        kept: &Kept,
        tags: &[(Option<u32>, Vec<WordClasses>)],
    ) -> Result<Vec<Vec<Option<Span>>>, PerceptionError> {
        let head = self.words().ok_or(PerceptionError::NoWords { why: "the file has no word timestamp head" })?;
        let known = |word: &&WordClasses| {
            !word.is_empty() && word.iter().all(|c| (*c as usize) < head.classes() && *c as usize != head.blank)
        };
        let pieces = |words: &[WordClasses]| -> Vec<usize> {
            words.iter().filter(known).flatten().map(|c| *c as usize).collect()
        };
        let tokens: Vec<Vec<usize>> = tags.iter().map(|(_, words)| pieces(words)).collect();
        let classes: BTreeSet<usize> = tokens.iter().flatten().copied().chain([head.blank]).collect();
        let mut log_probs = head.log_probabilities(kept, self, classes.into_iter().collect());
        let tokens: Vec<Vec<usize>> =
            tokens.iter().map(|tag| tag.iter().map(|c| log_probs.index(*c)).collect()).collect();

        let speakers = self.speakers();
        // The wholly invalid frame that some recordings end with has no part in this.
        let rows = kept.frames.div_ceil(STACK) * head.factor;
        log_probs.table.truncate(rows * log_probs.classes.len());
        let activity = Activity::new(kept, speakers);
        let presence: Vec<Vec<f32>> = (0..speakers).map(|s| activity.resampled(s, rows)).collect();
        let blank = log_probs.index(head.blank);
        let heard = greedy_tokens(&log_probs, blank, &presence);
        let tagged: Vec<usize> = (0..tags.len()).filter(|i| tags[*i].0.is_some()).collect();
        let told: Vec<Vec<usize>> = tagged.iter().map(|i| tokens[*i].clone()).collect();
        let matched: BTreeMap<usize, Option<usize>> = tagged.into_iter().zip(match_speakers(&told, &heard)).collect();
        let row_s = kept.frames as f64 * FRAME_S / rows as f64;

        let mut times = Vec::with_capacity(tags.len());
        for (i, ((_, words), tokens)) in tags.iter().zip(&tokens).enumerate() {
            let mut spans = vec![None; words.len()];
            let (rows, segments) = match matched.get(&i) {
                None => {
                    let whole = Span { start: 0.0, end: kept.frames as f64 * FRAME_S };
                    ((0..rows).map(|row| (row, 0.0)).collect(), vec![whole])
                }
                Some(Some(speaker)) => {
                    let present = presence[*speaker].iter().enumerate().filter(|(_, p)| **p >= PRESENT);
                    (present.map(|(row, p)| (row, p.max(FLOOR).ln())).collect(), activity.segments(*speaker))
                }
                Some(None) => (Vec::new(), Vec::new()),
            };
            let emissions = SpeakerEmissions { log_probs: &log_probs, blank, rows };
            if let Some(aligned) = align(tokens, &emissions) {
                let mut aligned = aligned.into_iter();
                let mut said = Vec::new();
                for (index, word) in words.iter().enumerate().filter(|(_, w)| known(w)) {
                    let first = aligned.next().expect("a span for each token");
                    let last = aligned.by_ref().take(word.len() - 1).last().unwrap_or_else(|| first.clone());
                    let start = emissions.rows[*first.start()].0 as f64 * row_s;
                    let end = (emissions.rows[*last.end()].0 + 1) as f64 * row_s;
                    said.push((index, Span { start, end: end.min(start + WORD_S) }));
                }
                refine(&mut said, &segments, row_s);
                said.into_iter().for_each(|(index, span)| spans[index] = Some(span));
            }
            times.push(spans);
        }
        Ok(times)
    }
}

/// Speaker probabilities every 10 ms.
struct Activity {
    /// `[frames, speakers]`, the padding frames included
    probs: Vec<f32>,
    speakers: usize,
    /// Frames of the recording.
    valid: usize,
}

impl Activity {
    fn new(kept: &Kept, speakers: usize) -> Self {
        let probs = kept.speaker_logits.iter().map(|l| sigmoid(*l)).collect();
        Self { probs, speakers, valid: kept.frames }
    }

    /// Probability of a speaker at the middle of each of `rows` rows, by linear interpolation.
    fn resampled(&self, speaker: usize, rows: usize) -> Vec<f32> {
        let frames = self.valid.next_multiple_of(STACK);
        let at = |frame: usize| if frame < self.valid { self.probs[frame * self.speakers + speaker] } else { 0.0 };
        let scale = frames as f64 / rows as f64;
        (0..rows)
            .map(|row| {
                let place = ((row as f64 + 0.5) * scale - 0.5).max(0.0);
                let (low, share) = (place as usize, place.fract() as f32);
                at(low) * (1.0 - share) + at((low + 1).min(frames - 1)) * share
            })
            .collect()
    }

    /// Runs of 10 ms frames in which a speaker is active, in seconds.
    fn segments(&self, speaker: usize) -> Vec<Span> {
        let mut segments = Vec::new();
        let mut start = None;
        let frames = self.valid.min(self.probs.len() / self.speakers);
        for frame in 0..=frames {
            let active = frame < frames && self.probs[frame * self.speakers + speaker] > SURE;
            match (active, start) {
                (true, None) => start = Some(frame),
                (false, Some(first)) => {
                    segments.push(Span { start: first as f64 * FRAME_S, end: frame as f64 * FRAME_S });
                    start = None;
                }
                _ => {}
            }
        }
        segments
    }
}

/// What was greedily heard of each speaker: tokens at rows that are surely theirs.
fn greedy_tokens(log_probs: &LogProbs, blank: usize, presence: &[Vec<f32>]) -> Vec<Vec<usize>> {
    let mut heard = vec![Vec::new(); presence.len()];
    let mut before = blank;
    for row in 0..log_probs.rows() {
        let values = log_probs.row(row);
        let best = (1..values.len()).fold(0, |best, i| if values[i] > values[best] { i } else { best });
        if best != before && best != blank {
            for (tokens, presence) in heard.iter_mut().zip(presence) {
                if presence[row] >= SURE {
                    tokens.push(best);
                }
            }
        }
        before = best;
    }
    heard
}

/// The speaker of each tag, by the largest total similarity of what was written and what was heard.
fn match_speakers(tags: &[Vec<usize>], heard: &[Vec<usize>]) -> Vec<Option<usize>> {
    let speakers = heard.len();
    let mut having: BTreeMap<usize, usize> = BTreeMap::new();
    for tokens in heard {
        for token in tokens.iter().collect::<BTreeSet<_>>() {
            *having.entry(*token).or_default() += 1;
        }
    }
    let vector = |tokens: &[usize]| -> BTreeMap<usize, f64> {
        let mut counts: BTreeMap<usize, f64> = BTreeMap::new();
        tokens.iter().for_each(|t| *counts.entry(*t).or_default() += 1.0);
        for (token, n) in &mut counts {
            let with = having.get(token).copied().unwrap_or(0);
            *n = (*n * (1.0 + speakers as f64 / (1 + with) as f64).ln()).sqrt();
        }
        counts
    };
    let norm = |v: &BTreeMap<usize, f64>| v.values().map(|x| x * x).sum::<f64>().sqrt();
    let heard: Vec<_> = heard.iter().map(|tokens| (tokens.len(), vector(tokens))).collect();
    let similarity: Vec<Vec<f64>> = tags
        .iter()
        .map(|tokens| {
            let tag = vector(tokens);
            let row = heard.iter().map(|(count, speaker)| {
                let dot: f64 = tag.iter().filter_map(|(t, x)| speaker.get(t).map(|y| x * y)).sum();
                let norms = norm(&tag) * norm(speaker);
                let cosine = if norms > 0.0 { dot / norms } else { 0.0 };
                cosine - 0.1 * ((tokens.len() + 1) as f64 / (count + 1) as f64).ln().abs()
            });
            row.collect()
        })
        .collect();
    assign(&similarity, speakers)
}

/// Linear assignment of rows to columns with the largest total; as many rows as possible get a column.
///
/// Exact by dynamic programming over the sets of columns taken: there are at most a few speakers.
fn assign(gain: &[Vec<f64>], columns: usize) -> Vec<Option<usize>> {
    const MOST: usize = 16;
    let columns = columns.min(MOST);
    let spare = gain.len().saturating_sub(columns);
    let sets = 1usize << columns;
    // Best total for each set after some rows; what the last row took to get there.
    let mut totals = vec![f64::NEG_INFINITY; sets];
    totals[0] = 0.0;
    let mut taken: Vec<Vec<Option<usize>>> = Vec::with_capacity(gain.len());
    for (row, gains) in gain.iter().enumerate() {
        let mut next = vec![f64::NEG_INFINITY; sets];
        let mut took = vec![None; sets];
        for (set, total) in totals.iter().enumerate().filter(|(_, t)| **t > f64::NEG_INFINITY) {
            let skipped = row - set.count_ones() as usize;
            if skipped < spare && *total > next[set] {
                (next[set], took[set]) = (*total, None);
            }
            for (column, gain) in gains.iter().enumerate().take(columns) {
                let with = set | 1 << column;
                if with != set && total + gain > next[with] {
                    (next[with], took[with]) = (total + gain, Some(column));
                }
            }
        }
        totals = next;
        taken.push(took);
    }
    let best = (0..sets).max_by(|a, b| totals[*a].total_cmp(&totals[*b])).unwrap_or(0);
    let mut set = best;
    let mut matched: Vec<Option<usize>> = taken
        .iter()
        .rev()
        .map(|took| {
            let column = took[set];
            if let Some(column) = column {
                set &= !(1 << column);
            }
            column
        })
        .collect();
    matched.reverse();
    matched
}

/// Moves starts and ends to the speaker's activity; `said` is in the order of the words.
fn refine(said: &mut [(usize, Span)], segments: &[Span], row_s: f64) {
    let limit = LIMIT_ROWS * row_s.min(LIMIT_ROW_S);
    let segment_of = |span: &Span| segments.iter().position(|s| span.start < s.end && span.end > s.start);
    let places: Vec<Option<usize>> = said.iter().map(|(_, span)| segment_of(span)).collect();
    for i in 0..said.len() {
        let here = places[i];
        if let Some(segment) = here.map(|s| segments[s]) {
            let first = i == 0 || places[i - 1] != here;
            if first && said[i].1.start - segment.start <= limit {
                said[i].1.start = segment.start;
            }
        }
    }
    for i in 0..said.len() {
        let next = said.get(i + 1).map(|(_, span)| span.start);
        let last = i + 1 == said.len() || places[i + 1] != places[i];
        let segment = places[i].map(|s| segments[s]);
        let span = &mut said[i].1;
        match (last, segment, next) {
            (true, Some(segment), _) => span.end = segment.end,
            (false, _, Some(next)) => span.end = next,
            _ => {}
        }
        span.end = span.end.clamp(span.start, span.start + limit);
    }
}

#[cfg(test)]
mod tests {
    use std::ops::Range;

    use super::*;

    /// Rows of words in which nothing overlaps, for tests.
    fn spans(rows: &[Range<u32>]) -> Vec<(usize, Span)> {
        let span = |r: &Range<u32>| Span { start: f64::from(r.start) / 100.0, end: f64::from(r.end) / 100.0 };
        rows.iter().map(span).enumerate().collect()
    }

    #[test]
    fn assignment_is_the_best_of_all() {
        let gain = vec![vec![0.9, 0.8, 0.1], vec![0.85, 0.1, 0.0], vec![0.2, 0.1, 0.05]];
        assert_eq!(assign(&gain, 3), [Some(1), Some(0), Some(2)]);
        // More tags than speakers: the one that gains least is left out.
        assert_eq!(assign(&[vec![0.2], vec![0.9], vec![0.3]], 1), [None, Some(0), None]);
        // Negative similarities are assigned all the same.
        assert_eq!(assign(&[vec![-1.0, -2.0]], 2), [Some(0)]);
        assert_eq!(assign(&[], 2), []);
    }

    #[test]
    fn tags_find_who_said_their_words() {
        let tags = [vec![1, 2, 3, 1], vec![5, 6, 7]];
        let heard = [vec![], vec![5, 6, 7], vec![1, 2, 3, 1]];
        assert_eq!(match_speakers(&tags, &heard), [Some(2), Some(1)]);
    }

    #[test]
    fn refinement_follows_the_activity() {
        let segments = [Span { start: 0.1, end: 1.0 }, Span { start: 2.0, end: 4.0 }];
        let mut said = spans(&[20..30, 50..60, 210..220, 230..235]);
        refine(&mut said, &segments, 0.04);
        let seen: Vec<(f64, f64)> = said.iter().map(|(_, s)| (s.start, s.end)).collect();
        let want = [(0.1, 0.5), (0.5, 1.0), (2.0, 2.3), (2.3, 3.26)];
        for ((a, b), (c, d)) in seen.iter().zip(want) {
            assert!((a - c).abs() < 1e-9 && (b - d).abs() < 1e-9, "{seen:?}");
        }
    }
}
