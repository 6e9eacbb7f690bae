//! What stands in the payloads of a synthetic model.

use half::f16;

use super::SynthOptions;
use super::random::{Random, mix, unit, word};
use super::routing;
use crate::model::container::payload_len;
use crate::model::layout::DRAFT_MARK;
use crate::model::tensors::Codec;
use crate::model::writer::Spec;

/// What a block adds to the residual stream, as a share of its norm.
const BLOCK_GAIN: f32 = 0.15;
/// Root mean square of the codes of an embedding row.
const EMBEDDING_RMS: f32 = 50.0;
/// Root mean square of uniform int8 codes.
const Q8_RMS: f32 = 73.3;
/// Root mean square of uniform 4-bit codes −7 to 7.
const Q4_RMS: f32 = 4.3;
/// Root mean square of scales spread evenly over one octave, the lowest being 1.
const OCTAVE_RMS: f32 = 1.47;
/// Tokens in a row that share a topic.
const TOPIC_TOKENS: u64 = 64;
/// Topics there are.
const TOPICS: u64 = 16;
/// Codes drawn and written at once.
const PIECE_BYTES: usize = 8 << 20;
/// Codes drawn once and used again and again, each time from another place.
const POOL_BYTES: u64 = 64 << 20;

/// Everything payloads are drawn from.
pub(super) struct Source {
    seed: u64,
    accept: f64,
    hidden: usize,
    /// Selection biases by rank.
    biases: Vec<f32>,
    /// int8 codes, −127 to 127.
    q8: Vec<u8>,
    /// Pairs of 4-bit codes, 1 to 15.
    q4: Vec<u8>,
}

/// Fills the payload of one tensor, from any thread, piece by piece.
pub(super) struct Filler<'a> {
    source: &'a Source,
    name: &'a str,
    shape: &'a [usize],
    what: What,
    /// Bytes of codes, which may be filled in pieces. The rest is filled with the last of them.
    pub(super) codes: usize,
    /// Bytes of a piece of the codes.
    pub(super) piece: usize,
    /// Bytes of the payload.
    pub(super) len: usize,
}

/// The contents of a tensor.
#[derive(Clone, Copy, Debug, PartialEq)]
enum What {
    /// Random elements with this standard deviation.
    Q8(f32),
    /// Random elements with about this standard deviation.
    Q4(f32),
    /// Embedding rows, or head rows one token on.
    Vocab { head: bool },
    /// The identity on the embedding half, next to nothing on the other.
    Fuse,
    /// f32, normal with this standard deviation.
    Normal(f32),
    /// f32, around 1.
    Norm,
    /// f32, all 1.
    Ones,
    /// f32, logarithms of 1 to 16.
    Decay,
    /// f32, biases that give step sizes of 0.001 to 0.1.
    Step,
    /// f32, selection biases in the layer's order.
    Selection,
    /// f32, 0 in the dimensions hidden from the draft layer, else 1.
    Visible,
}

impl Source {
    /// `bytes` is about what will be drawn; a small model needs no large pool.
    pub(super) fn new(options: &SynthOptions, biases: &[f32], bytes: u64) -> Self {
        let len = bytes.clamp(1 << 16, POOL_BYTES).next_multiple_of(16) as usize;
        let nibble = |code: u8| if code == 0 { 8 } else { code };
        Self {
            seed: options.seed,
            accept: options.accept,
            hidden: options.geometry.hidden,
            biases: biases.to_vec(),
            q8: pool(mix(options.seed ^ 1), len, |byte| if byte == 0x80 { 0 } else { byte }),
            q4: pool(mix(options.seed ^ 2), len, |byte| nibble(byte & 15) | (nibble(byte >> 4) << 4)),
        }
    }

    /// What fills this tensor.
    pub(super) fn filler<'a>(&'a self, spec: &'a Spec) -> Filler<'a> {
        let what = self.what(spec);
        let len = payload_len(spec.codec, &spec.shape).unwrap_or(0);
        let codes = match spec.codec {
            Codec::Q8_2f => spec.shape.iter().product(),
            Codec::Q4tp => spec.shape.iter().product::<usize>() / 2,
            Codec::F32 | Codec::F16 | Codec::Bf16 => 0,
        };
        // Where rows are drawn one by one, a piece is whole rows; eight of them are a multiple of 8 bytes.
        let piece = match what {
            What::Vocab { .. } | What::Fuse => {
                let eight = 8 * spec.shape[1];
                (PIECE_BYTES / eight).max(1) * eight
            }
            _ => PIECE_BYTES,
        };
        Filler { source: self, name: &spec.name, shape: &spec.shape, what, codes, piece, len }
    }

    /// Standard deviations that keep every activation near 1 and every block's share at [`BLOCK_GAIN`].
    fn what(&self, spec: &Spec) -> What {
        let root = |n: usize| (n as f32).sqrt();
        let cols = spec.shape.last().copied().unwrap_or(1);
        let matrix = |std| if spec.codec == Codec::Q4tp { What::Q4(std) } else { What::Q8(std) };
        let last = spec.name.trim_end_matches(".weight");
        let last = last.rsplit('.').next().unwrap_or(last);
        match (spec.name.as_str(), last) {
            (DRAFT_MARK, _) => What::Fuse,
            (_, "embed_tokens") => What::Vocab { head: false },
            (_, "lm_head") => What::Vocab { head: true },
            (_, "enorm") => What::Visible,
            (_, "gate") => What::Normal(1.0 / root(self.hidden)),
            (_, "e_score_correction_bias") => What::Selection,
            (name, "conv1d") if name.ends_with(".weight") => What::Normal(0.5),
            (_, "bias") => What::Normal(0.1),
            (_, "A_log") => What::Decay,
            (_, "D") => What::Ones,
            (_, "dt_bias") => What::Step,
            (_, "out_proj") => matrix(BLOCK_GAIN / root(cols)),
            (_, "o_proj") => matrix(2.0 * BLOCK_GAIN / root(cols)),
            (_, "down_proj") => matrix(0.8 * BLOCK_GAIN / root(cols)),
            _ if spec.codec == Codec::F32 => What::Norm,
            _ => matrix(1.0 / root(cols)),
        }
    }

    /// Codes of one row of the vocabulary: three quarters of the energy are the token's, one quarter the topic's.
    fn vocab_row(&self, token: u64, topic: bool, row: &mut [u8]) {
        let key = mix(self.seed ^ mix(token));
        let hard = unit(key) >= self.accept;
        let topic_key = mix(self.seed ^ mix(mix(token / TOPIC_TOKENS) % TOPICS + 1).rotate_left(17));
        let own = (EMBEDDING_RMS * 3f32.sqrt()) as i32;
        let shared = (EMBEDDING_RMS / 3f32.sqrt()) as i32;
        let sign = |byte: u8, amplitude: i32| if byte & 1 == 0 { amplitude } else { -amplitude };
        for (at, codes) in row.chunks_mut(8).enumerate() {
            let own_bytes = word(key, at as u64).to_le_bytes();
            let topic_bytes = word(topic_key, at as u64).to_le_bytes();
            for (i, code) in codes.iter_mut().enumerate() {
                let visible = is_visible(at * 8 + i);
                let mut value = match (visible, hard) {
                    (true, false) => (i32::from(own_bytes[i].cast_signed()) * own) >> 7,
                    (false, true) => sign(own_bytes[i], own),
                    _ => 0,
                };
                if topic && visible {
                    value += sign(topic_bytes[i], shared);
                }
                *code = (value.clamp(-127, 127) as i8).cast_unsigned();
            }
        }
    }
}

/// Whether the draft layer sees this dimension of an embedding.
fn is_visible(dimension: usize) -> bool {
    dimension % 4 != 3
}

fn pool(key: u64, len: usize, code: impl Fn(u8) -> u8 + Sync) -> Vec<u8> {
    use rayon::prelude::*;
    let mut pool = vec![0; len];
    pool.par_chunks_mut(1 << 16).enumerate().for_each(|(block, bytes)| {
        for (i, bytes) in bytes.chunks_mut(8).enumerate() {
            let drawn = word(key, (block * (1 << 13) + i) as u64).to_le_bytes();
            bytes.iter_mut().zip(drawn).for_each(|(byte, drawn)| *byte = code(drawn));
        }
    });
    pool
}

/// Fills `out` with the pool's bytes from `start` on, around its end.
fn draw(pool: &[u8], start: usize, mut out: &mut [u8]) {
    let mut at = start % pool.len();
    while !out.is_empty() {
        let (now, rest) = out.split_at_mut(out.len().min(pool.len() - at));
        now.copy_from_slice(&pool[at..at + now.len()]);
        (out, at) = (rest, 0);
    }
}

/// Writes halves one after the other.
fn halves(out: &mut [u8], values: impl IntoIterator<Item = f32>) {
    for (out, value) in out.as_chunks_mut::<2>().0.iter_mut().zip(values) {
        *out = f16::from_f32(value).to_le_bytes();
    }
}

impl Filler<'_> {
    /// Fills the bytes from `offset` on.
    pub(super) fn fill(&self, offset: usize, out: &mut [u8]) {
        let (codes, rest) = out.split_at_mut(out.len().min(self.codes.saturating_sub(offset)));
        let mut random = Random::new(self.source.seed, self.name);
        let start = (random.word() % POOL_BYTES) as usize & !15;
        match self.what {
            What::Q8(std) => {
                draw(&self.source.q8, start + offset, codes);
                // The scale is shared by both fields, so that neither becomes a subnormal half.
                let base = (std / Q8_RMS).sqrt();
                halves(rest, std::iter::repeat_with(|| base * (0.8 + 0.4 * random.unit() as f32)));
            }
            What::Q4(std) => {
                draw(&self.source.q4, start + offset, codes);
                if !rest.is_empty() {
                    self.ladders(rest, std, &mut random);
                }
            }
            What::Vocab { head } => {
                self.vocab(offset, codes, head);
                let rms = EMBEDDING_RMS * if head { (self.shape[1] as f32).sqrt() } else { 1.0 };
                halves(rest, std::iter::repeat((1.0 / rms).sqrt()));
            }
            What::Fuse => {
                let width = self.shape[1];
                draw(&self.source.q8, start + offset, codes);
                codes.iter_mut().for_each(|code| *code = (*code % 3).wrapping_sub(1));
                let rows = codes.chunks_exact_mut(width).zip(offset / width..);
                rows.for_each(|(row, diagonal)| row[diagonal] = 127);
                let (scales, fields) = rest.split_at_mut(rest.len().min(2 * self.shape[0]));
                halves(scales, std::iter::repeat(1.0 / 127.0));
                halves(fields, std::iter::repeat(1.0));
            }
            what => self.floats(what, rest, &mut random),
        }
    }

    fn vocab(&self, offset: usize, codes: &mut [u8], head: bool) {
        let (vocab, width) = (self.shape[0] as u64, self.shape[1]);
        for (row, index) in codes.chunks_exact_mut(width).zip((offset / width) as u64..) {
            let token = if head { (index + vocab - 1) % vocab } else { index };
            self.source.vocab_row(token, !head, row);
        }
    }

    /// The ladders of q4tp rows, one octave each, and random rungs.
    fn ladders(&self, out: &mut [u8], std: f32, random: &mut Random) {
        let (rows, groups) = (self.shape[0], self.shape[1] / Codec::GROUP);
        let (ladders, rungs) = out.split_at_mut(4 * rows);
        let low = (std / (Q4_RMS * OCTAVE_RMS)).log2();
        let ladder = |_| [low + 0.2 * (random.unit() as f32 - 0.5), 1.0 / 31.0];
        halves(ladders, (0..rows).flat_map(ladder));
        draw(&self.source.q8, random.word() as usize % self.source.q8.len(), rungs);
        let used = groups * 5 % 8;
        if used != 0 {
            // Bits no group has stay 0, as the peer writes them.
            let rows = rungs.chunks_exact_mut((groups * 5).div_ceil(8));
            rows.for_each(|row| *row.last_mut().expect("a group or more") &= (1 << used) - 1);
        }
    }

    fn floats(&self, what: What, out: &mut [u8], random: &mut Random) {
        if what == What::Selection {
            let prefix = self.name.trim_end_matches("gate.e_score_correction_bias");
            for (&expert, bias) in
                routing::order(self.source.seed, prefix, self.shape[0]).iter().zip(&self.source.biases)
            {
                out[4 * expert..][..4].copy_from_slice(&bias.to_le_bytes());
            }
            return;
        }
        for (i, out) in out.as_chunks_mut::<4>().0.iter_mut().enumerate() {
            let value = match what {
                What::Normal(std) => std * random.normal(),
                What::Decay => (1.0 + 15.0 * random.unit()).ln() as f32,
                // The inverse of softplus, of a step drawn evenly over the logarithm.
                What::Step => (1e-3f64.ln() + random.unit() * 100f64.ln()).exp().exp_m1().ln() as f32,
                What::Ones => 1.0,
                What::Visible => f32::from(u8::from(is_visible(i))),
                _ => 1.0 + 0.05 * random.normal(),
            };
            *out = value.to_le_bytes();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::preset;
    use super::*;

    #[test]
    fn pieces_of_any_payload_are_parts_of_the_whole() {
        let geometry = preset("tiny").unwrap();
        let options = SynthOptions {
            name: "tiny".into(),
            geometry,
            experts: Codec::Q4tp,
            seed: 1,
            zipf: 0.8,
            accept: 0.5,
            hot: true,
        };
        let source = Source::new(&options, &[0.0; 8], 1 << 20);
        for (name, codec, shape) in [
            ("lm_head.weight", Codec::Q8_2f, [320, 128]),
            ("model.embed_tokens.weight", Codec::Q8_2f, [320, 128]),
            (DRAFT_MARK, Codec::Q8_2f, [128, 256]),
            ("a.q_proj.weight", Codec::Q8_2f, [77, 333]),
            ("a.experts.0.up_proj.weight", Codec::Q4tp, [77, 96]),
        ] {
            let spec = Spec { name: name.into(), codec, shape: shape.to_vec() };
            let filler = source.filler(&spec);
            let mut whole = vec![0; filler.len];
            filler.fill(0, &mut whole);
            let cut = filler.codes / 2 / (8 * shape[1]) * 8 * shape[1];
            let mut parts = vec![0; filler.len];
            let (first, second) = parts.split_at_mut(cut);
            filler.fill(cut, second);
            filler.fill(0, first);
            assert!(cut > 0 && parts == whole, "{name}");
        }
    }
}
