//! The transformer encoder that speech recognition, diarization and word times share (`model.md` §4.2).

use rayon::prelude::*;

use super::gelu::gelu;
use super::gemm::{Factor, Spread, View, product};
use super::linear::{Linear, Norm, Panel, each_row};
use super::weights::{PerceptionError, Scope};

/// Query rows of one tile of attention: bounds the scores to `TILE x frames` a head.
const TILE: usize = 64;

/// Frames times keys below which the heads stay on one thread.
const SPREAD_SCORES: usize = 128 * 128;

/// Bidirectional pre-norm transformer with rotary positions.
pub(crate) struct Tower {
    /// Projects stacked features; the word timestamp head has none.
    embed: Option<Linear>,
    embed_norm: Norm,
    layers: Vec<Layer>,
    final_norm: Norm,
    heads: usize,
    /// Rotated values at the start of each head.
    rotary: usize,
}

struct Layer {
    norm1: Norm,
    qkv: Linear,
    qk_norm: Option<[Norm; 2]>,
    out: Linear,
    norm2: Norm,
    up: Linear,
    down: Linear,
}

/// What the file does not say about a tower.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TowerSettings {
    pub heads: usize,
    /// Share of each head that is rotated.
    pub rotary_share: f64,
    /// Values of a stacked frame, where the tower embeds.
    pub stacked: Option<usize>,
}

/// Buffers that every layer of every tower reuses.
#[derive(Default)]
pub(crate) struct Work {
    pub panel: Panel,
    normed: Vec<f32>,
    qkv: Vec<f32>,
    heads: Vec<f32>,
    mixed: Vec<f32>,
    inner: Vec<f32>,
}

/// The caller wanted to stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Cancelled;

impl Tower {
    pub(crate) fn load(scope: &Scope<'_>, settings: TowerSettings) -> Result<Self, PerceptionError> {
        let embed_norm = Norm::load(scope, "embed_norm", None)?;
        let width = embed_norm.width();
        let TowerSettings { heads, rotary_share, stacked } = settings;
        if heads == 0 || !width.is_multiple_of(heads) {
            return Err(PerceptionError::Config {
                key: "num_attention_heads".into(),
                seen: heads.to_string(),
                wanted: "a divisor of the tower's width",
            });
        }
        let head_dim = width / heads;
        let rotary = (head_dim as f64 * rotary_share) as usize;
        if !rotary.is_multiple_of(2) || rotary > head_dim {
            return Err(PerceptionError::Config {
                key: "partial_rotary_factor".into(),
                seen: rotary_share.to_string(),
                wanted: "a share of the head that is an even number of values",
            });
        }
        let embed = stacked
            .map(|stacked| Linear::load(&scope.at("pre_encode"), "proj", [Some(width), Some(stacked)], false))
            .transpose()?;
        let mut layers = Vec::new();
        while layers.is_empty() || scope.has_floats(&format!("layers.{}.norm1.weight", layers.len())) {
            layers.push(Layer::load(&scope.at(&format!("layers.{}", layers.len())), width, head_dim)?);
        }
        let final_norm = Norm::load(scope, "final_norm", Some(width))?;
        Ok(Self { embed, embed_norm, layers, final_norm, heads, rotary })
    }

    /// Width of a state.
    pub(crate) fn width(&self) -> usize {
        self.final_norm.width()
    }

    pub(crate) fn linears(&mut self) -> impl Iterator<Item = &mut Linear> {
        let layers = self.layers.iter_mut().flat_map(|l| [&mut l.qkv, &mut l.out, &mut l.up, &mut l.down]);
        self.embed.iter_mut().chain(layers)
    }

    /// Embeds stacked frames `[n, stacked]` into `out [n, width]`.
    ///
    /// # Panics
    ///
    /// If the tower was loaded without an embedding.
    pub(crate) fn embed(&self, stacked: &[f32], out: &mut Vec<f32>, work: &mut Work) {
        let embed = self.embed.as_ref().expect("a tower that embeds");
        let x = View::dense(stacked, embed.cols());
        out.clear();
        out.resize(x.rows * embed.rows(), 0.0);
        embed.apply(x, false, out, &mut work.panel);
    }

    /// Turns embeddings `x [t, width]` into states. Only the first `keys` frames are attended to.
    ///
    /// `stop` is asked before every layer; `layer` sees the states after each, before the final norm.
    pub(crate) fn run(
        &self,
        x: &mut [f32],
        keys: usize,
        work: &mut Work,
        stop: &dyn Fn() -> bool,
        mut layer: impl FnMut(usize, &[f32]),
    ) -> Result<(), Cancelled> {
        let width = self.width();
        let frames = x.len() / width;
        let rotation = Rotation::new(frames, self.rotary);
        self.embed_norm.rows_in_place(x);
        for (i, weights) in self.layers.iter().enumerate() {
            if stop() {
                return Err(Cancelled);
            }
            weights.norm1.rows(x, &mut work.normed);
            work.qkv.resize(frames * 3 * width, 0.0);
            weights.qkv.apply(View::dense(&work.normed, width), false, &mut work.qkv, &mut work.panel);
            self.rotate(weights, &rotation, &mut work.qkv);
            self.attend(&work.qkv, keys.min(frames), &mut work.heads, &mut work.mixed);
            weights.out.apply(View::dense(&work.mixed, width), true, x, &mut work.panel);

            weights.norm2.rows(x, &mut work.normed);
            let inner = weights.up.rows();
            work.inner.resize(frames * inner, 0.0);
            weights.up.apply(View::dense(&work.normed, width), false, &mut work.inner, &mut work.panel);
            each_row(&mut work.inner, inner, gelu);
            weights.down.apply(View::dense(&work.inner, inner), true, x, &mut work.panel);
            layer(i, x);
        }
        self.final_norm.rows_in_place(x);
        Ok(())
    }

    /// Norms and rotates queries and keys in place.
    fn rotate(&self, weights: &Layer, rotation: &Rotation, qkv: &mut [f32]) {
        let width = self.width();
        let head_dim = width / self.heads;
        let turn = |t: usize, row: &mut [f32]| {
            for (part, half) in row[..2 * width].chunks_exact_mut(width).enumerate() {
                for head in half.chunks_exact_mut(head_dim) {
                    if let Some(norms) = &weights.qk_norm {
                        norms[part].row(head);
                    }
                    rotation.apply(t, head);
                }
            }
        };
        if qkv.len() <= 3 * width * TILE {
            qkv.chunks_exact_mut(3 * width).enumerate().for_each(|(t, row)| turn(t, row));
        } else {
            qkv.par_chunks_exact_mut(3 * width).with_min_len(16).enumerate().for_each(|(t, row)| turn(t, row));
        }
    }

    /// Softmax attention of every head over the first `keys` frames: `mixed [t, width]`.
    fn attend(&self, qkv: &[f32], keys: usize, heads: &mut Vec<f32>, mixed: &mut Vec<f32>) {
        let width = self.width();
        let head_dim = width / self.heads;
        let stride = 3 * width;
        let frames = qkv.len() / stride;
        // A head writes rows of its own; they are woven together afterwards.
        heads.clear();
        heads.resize(frames * width, 0.0);
        let scale = 1.0 / (head_dim as f32).sqrt();
        let head = |h: usize, out: &mut [f32]| {
            let view = |part: usize, first: usize, rows: usize| {
                let offset = first * stride + part * width + h * head_dim;
                View { data: &qkv[offset..], rows, cols: head_dim, stride }
            };
            let (k, v) = (view(1, 0, keys), view(2, 0, keys));
            let mut scores = vec![0.0; TILE.min(frames) * keys];
            for first in (0..frames).step_by(TILE) {
                let rows = TILE.min(frames - first);
                let scores = &mut scores[..rows * keys];
                product(view(0, first, rows), Factor::Transposed(k), scale, false, scores, keys, Spread::One);
                scores.chunks_exact_mut(keys).for_each(softmax);
                let out = &mut out[first * head_dim..(first + rows) * head_dim];
                product(View::dense(scores, keys), Factor::Plain(v), 1.0, false, out, head_dim, Spread::One);
            }
        };
        if keys > 0 {
            let parts = heads.chunks_exact_mut(frames * head_dim);
            if frames * keys < SPREAD_SCORES {
                parts.enumerate().for_each(|(h, out)| head(h, out));
            } else {
                heads.par_chunks_exact_mut(frames * head_dim).enumerate().for_each(|(h, out)| head(h, out));
            }
        }
        mixed.resize(frames * width, 0.0);
        for (h, part) in heads.chunks_exact(frames * head_dim).enumerate() {
            for (t, row) in part.chunks_exact(head_dim).enumerate() {
                mixed[t * width + h * head_dim..][..head_dim].copy_from_slice(row);
            }
        }
    }
}

impl Layer {
    fn load(scope: &Scope<'_>, width: usize, head_dim: usize) -> Result<Self, PerceptionError> {
        let width = Some(width);
        let attn = scope.at("attn");
        let qk_norm = attn.has_floats("q_norm.weight").then(|| {
            Ok::<_, PerceptionError>([
                Norm::load(&attn, "q_norm", Some(head_dim))?,
                Norm::load(&attn, "k_norm", Some(head_dim))?,
            ])
        });
        let up = Linear::load(scope, "ffn.net.0", [None, width], true)?;
        Ok(Self {
            norm1: Norm::load(scope, "norm1", width)?,
            qkv: Linear::load(&attn, "w_qkv", [width.map(|w| 3 * w), width], false)?,
            qk_norm: qk_norm.transpose()?,
            out: Linear::load(&attn, "out_proj", [width, width], true)?,
            norm2: Norm::load(scope, "norm2", width)?,
            down: Linear::load(scope, "ffn.net.3", [width, Some(up.rows())], true)?,
            up,
        })
    }
}

/// Cosines and sines of the rotary angles, in f64 until rounded.
struct Rotation {
    half: usize,
    /// `[t, half]` pairs
    turns: Vec<[f32; 2]>,
}

impl Rotation {
    fn new(frames: usize, rotary: usize) -> Self {
        let half = rotary / 2;
        let turns = (0..frames)
            .flat_map(|t| {
                (0..half).map(move |j| {
                    let angle = t as f64 * 10_000f64.powf(-2.0 * j as f64 / rotary as f64);
                    [angle.cos() as f32, angle.sin() as f32]
                })
            })
            .collect();
        Self { half, turns }
    }

    fn apply(&self, t: usize, head: &mut [f32]) {
        let (a, rest) = head.split_at_mut(self.half);
        for ((a, b), [cos, sin]) in a.iter_mut().zip(rest).zip(&self.turns[t * self.half..]) {
            (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
        }
    }
}

/// `x <- softmax(x)`.
fn softmax(x: &mut [f32]) {
    let top = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    for v in x.iter_mut() {
        *v = exp_below_zero(*v - top);
    }
    let scale = 1.0 / x.iter().sum::<f32>();
    x.iter_mut().for_each(|v| *v *= scale);
}

/// `e^x` for `x <= 0` to two units in the last place, without branches so that a loop over it vectorises.
fn exp_below_zero(x: f32) -> f32 {
    // Adding and taking away 1.5 * 2^23 rounds to the nearest whole number.
    const ROUND: f32 = 12_582_912.0;
    let x = x.max(-87.0);
    let whole = (x * std::f32::consts::LOG2_E + ROUND) - ROUND;
    // ln 2 in two parts, the first exact in products with small whole numbers.
    let r = (x - whole * (355.0 / 512.0)) + whole * 2.121_944_4e-4;
    let p = 1.0 + r * (1.0 + r * (0.5 + r * (1.0 / 6.0 + r * (1.0 / 24.0 + r * (1.0 / 120.0 + r * (1.0 / 720.0))))));
    p * f32::from_bits(((whole as i32 + 127) << 23) as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exponential_is_accurate() {
        for i in 0..=870_000 {
            let x = i as f32 * -1e-4;
            let want = f64::from(x).exp();
            let error = (f64::from(exp_below_zero(x)) - want).abs() / want;
            assert!(error < 3e-7, "{x}: {error:e}");
        }
        assert_eq!(exp_below_zero(0.0), 1.0);
        assert!(exp_below_zero(f32::NEG_INFINITY) < 1e-37);
    }

    #[test]
    fn softmax_sums_to_one_far_from_zero() {
        let mut x = [1000.0, 999.0, -1000.0, 1000.0];
        softmax(&mut x);
        let unit = 1.0 / (2.0 + (-1.0f32).exp());
        assert!((x[0] - unit).abs() < 1e-6 && x[0] == x[3] && x[2] < 1e-30, "{x:?}");
        assert!((x.iter().sum::<f32>() - 1.0).abs() < 1e-6);
    }

    #[test]
    fn rotation_keeps_what_lies_past_it() {
        let rotation = Rotation::new(3, 4);
        let mut head = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
        rotation.apply(0, &mut head);
        assert_eq!(head, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        rotation.apply(2, &mut head);
        let (c0, s0, c1, s1) = (2f32.cos(), 2f32.sin(), 0.02f32.cos(), 0.02f32.sin());
        let want = [c0 - 3.0 * s0, 2.0 * c1 - 4.0 * s1, 3.0 * c0 + s0, 4.0 * c1 + 2.0 * s1, 5.0, 6.0];
        for (seen, want) in head.iter().zip(want) {
            assert!((seen - want).abs() < 1e-6, "{head:?}");
        }
    }
}
