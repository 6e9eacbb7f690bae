//! The plain decoder: all blocks, one position at a time.
//!
//! What leaves it is the definition of "the ids of the plain model"
//! (`runtime.md` §3). Its whole memory is the [`SequenceState`] the caller
//! holds: seeding is handing one over, reading back is looking at it.

use super::argmax::{Pick, argmax};
use super::block::Frame;
use super::embed::embed;
use super::matvec::matmul;
use super::rms_norm::rms_norm;
use crate::ids::{BlockIx, ExpertIx, Position, TokenId};
use crate::knobs::Activations;
use crate::model::geometry::Geometry;
use crate::model::state::{BlockState, SequenceState};
use crate::model::weights::{DecoderWeights, Mixer};

/// A model evaluated by plain loops.
#[derive(Clone, Copy, Debug)]
pub struct PlainDecoder<'a> {
    pub(super) frame: Frame<'a>,
    pub(super) weights: &'a DecoderWeights,
}

/// What comes out of [`PlainDecoder::forward`].
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Forward {
    /// After the last block, `[n, hidden]`.
    pub residual: Vec<f32>,
    /// After the final norm, `[n, hidden]`: what the head reads.
    pub normed: Vec<f32>,
}

/// What [`PlainDecoder::forward`] records on the way; rows in order, later calls append.
#[derive(Clone, Debug, Default)]
pub struct Capture {
    /// `[blocks]` of `[n, hidden]`: the residual after each block.
    pub residual: Vec<Vec<f32>>,
    /// `[blocks]`: of MoE blocks their inputs and choices, of the others nothing.
    pub moe: Vec<MoeCapture>,
}

/// Inputs and choices of one MoE block.
#[derive(Clone, Debug, Default)]
pub struct MoeCapture {
    /// `[n, hidden]`, what router and experts read
    pub normed: Vec<f32>,
    /// `[n, experts]`, before the sigmoid
    pub logits: Vec<f32>,
    /// `[n, k]`, best first
    pub picks: Vec<ExpertIx>,
    /// `[n, k]`
    pub weights: Vec<f32>,
    /// `[n]`, see [`super::router::Route::gap`]
    pub gaps: Vec<f32>,
}

impl Capture {
    fn rows(&mut self, blocks: usize) {
        self.residual.resize(blocks, Vec::new());
        self.moe.resize(blocks, MoeCapture::default());
    }
}

impl MoeCapture {
    /// Appends one row.
    pub(super) fn push(&mut self, routed: super::block::Routed) {
        self.normed.extend(routed.normed);
        self.logits.extend(routed.route.logits);
        self.picks.extend(routed.route.picks);
        self.weights.extend(routed.route.weights);
        self.gaps.push(routed.route.gap);
    }
}

/// A greedy continuation.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Greedy {
    /// Ids with their logits, in order.
    pub picks: Vec<Pick>,
    /// Smallest router gap at each position that was read: the prompt's rows, then every id but the last.
    pub path_gaps: Vec<f32>,
}

impl Greedy {
    /// The ids alone.
    #[must_use]
    pub fn ids(&self) -> Vec<TokenId> {
        self.picks.iter().map(|pick| pick.id).collect()
    }
}

impl<'a> PlainDecoder<'a> {
    /// A decoder over weights that somebody else holds.
    #[must_use]
    pub fn new(geometry: &'a Geometry, weights: &'a DecoderWeights, act: Activations) -> Self {
        Self { frame: Frame { geometry, act }, weights }
    }

    /// The model's shapes.
    #[must_use]
    pub fn geometry(&self) -> &'a Geometry {
        self.frame.geometry
    }

    /// The embeddings of some ids, `[n, hidden]`.
    ///
    /// # Panics
    ///
    /// If an id is past the vocabulary.
    #[must_use]
    pub fn embed(&self, ids: &[TokenId]) -> Vec<f32> {
        let hidden = self.geometry().hidden;
        let mut rows = vec![0.0; ids.len() * hidden];
        for (id, row) in ids.iter().zip(rows.chunks_exact_mut(hidden)) {
            embed(&self.weights.embedding, *id, row);
        }
        rows
    }

    /// One block over one row, in place.
    ///
    /// # Panics
    ///
    /// If the state is not that of the block's kind.
    pub fn block(&self, block: BlockIx, row: &mut [f32], state: &mut BlockState, capture: Option<&mut MoeCapture>) {
        let weights = &self.weights.blocks[block.index()];
        match (&weights.mixer, state) {
            (Mixer::Mamba(mixer), BlockState::Mamba(state)) => self.frame.mamba(&weights.norm, mixer, row, state),
            (Mixer::Attention(mixer), BlockState::Attention(kv)) => {
                self.frame.attention(&weights.norm, mixer, row, kv);
            }
            (Mixer::Moe(mixer), BlockState::None) => {
                let routed = self.frame.moe(&weights.norm, mixer, row);
                if let Some(capture) = capture {
                    capture.push(routed);
                }
            }
            (Mixer::Mlp(mixer), BlockState::None) => self.frame.mlp(&weights.norm, mixer, row),
            (mixer, state) => panic!("{block:?} {mixer:?} with the state of another kind: {state:?}"),
        }
    }

    /// Reads rows `[n, hidden]`, position by position.
    ///
    /// # Panics
    ///
    /// If `rows` is no whole number of rows, or the state is another geometry's.
    pub fn forward(&self, rows: &[f32], state: &mut SequenceState, mut capture: Option<&mut Capture>) -> Forward {
        let blocks = self.weights.blocks.len();
        let mut out = Forward::default();
        if let Some(capture) = capture.as_deref_mut() {
            capture.rows(blocks);
        }
        for row in self.rows(rows) {
            let mut row = row.to_vec();
            for i in 0..blocks {
                let moe = capture.as_deref_mut().map(|capture| &mut capture.moe[i]);
                self.block(BlockIx::from(i), &mut row, &mut state.blocks[i], moe);
                if let Some(capture) = capture.as_deref_mut() {
                    capture.residual[i].extend_from_slice(&row);
                }
            }
            state.position = Position(state.position.0 + 1);
            out.normed.extend(self.final_norm(&row));
            out.residual.extend(row);
        }
        out
    }

    /// As [`PlainDecoder::forward`], block by block over all rows, with the scan in chunks: prefill as it is usually
    /// computed. Equal to it but for rounding, whatever the chunk and the split over calls.
    ///
    /// # Panics
    ///
    /// As [`PlainDecoder::forward`], or if `chunk` is 0.
    pub fn forward_chunked(
        &self,
        rows: &[f32],
        state: &mut SequenceState,
        chunk: usize,
        mut capture: Option<&mut Capture>,
    ) -> Forward {
        let (blocks, hidden) = (self.weights.blocks.len(), self.geometry().hidden);
        if let Some(capture) = capture.as_deref_mut() {
            capture.rows(blocks);
        }
        let positions = self.rows(rows).len();
        let mut rows = rows.to_vec();
        for (i, block) in self.weights.blocks.iter().enumerate() {
            if let (Mixer::Mamba(mixer), BlockState::Mamba(state)) = (&block.mixer, &mut state.blocks[i]) {
                self.frame.mamba_chunked(&block.norm, mixer, &mut rows, state, chunk);
            } else {
                for row in rows.chunks_exact_mut(hidden) {
                    let moe = capture.as_deref_mut().map(|capture| &mut capture.moe[i]);
                    self.block(BlockIx::from(i), row, &mut state.blocks[i], moe);
                }
            }
            if let Some(capture) = capture.as_deref_mut() {
                capture.residual[i].extend_from_slice(&rows);
            }
        }
        state.position = Position::from(state.position.index() + positions);
        let normed = rows.chunks_exact(hidden).flat_map(|row| self.final_norm(row)).collect();
        Forward { residual: rows, normed }
    }

    /// Logits of normed rows: `[n, hidden]` to `[n, vocab]`.
    #[must_use]
    pub fn logits(&self, normed: &[f32]) -> Vec<f32> {
        matmul(&self.weights.head, normed, self.frame.act)
    }

    /// The choice after each normed row `[n, hidden]`.
    #[must_use]
    pub fn head(&self, normed: &[f32]) -> Vec<Pick> {
        self.logits(normed).chunks_exact(self.geometry().vocab).map(argmax).collect()
    }

    /// Reads `rows` and goes on greedily for `steps` ids, each id's embedding being the next row. The state ends
    /// having read all ids but the last.
    ///
    /// # Panics
    ///
    /// As [`PlainDecoder::forward`]; if there is no row and `steps` is not 0.
    pub fn greedy(&self, rows: &[f32], state: &mut SequenceState, steps: usize) -> Greedy {
        let hidden = self.geometry().hidden;
        let mut capture = Capture::default();
        let mut out = Greedy::default();
        let mut last = self.forward(rows, state, Some(&mut capture)).normed;
        while out.picks.len() < steps {
            let pick = self.head(&last[last.len() - hidden..])[0];
            out.picks.push(pick);
            if out.picks.len() < steps {
                last = self.forward(&self.embed(&[pick.id]), state, Some(&mut capture)).normed;
            }
        }
        let positions = capture.residual.first().map_or(0, |rows| rows.len() / hidden);
        let gap =
            |t: usize| capture.moe.iter().filter_map(|moe| moe.gaps.get(t)).copied().fold(f32::INFINITY, f32::min);
        out.path_gaps = (0..positions).map(gap).collect();
        out
    }

    /// The final norm of one row.
    #[must_use]
    pub fn final_norm(&self, row: &[f32]) -> Vec<f32> {
        let mut normed = vec![0.0; row.len()];
        rms_norm(row, &self.weights.final_norm, self.geometry().norm_eps, &mut normed);
        normed
    }

    fn rows<'r>(&self, rows: &'r [f32]) -> std::slice::ChunksExact<'r, f32> {
        let hidden = self.geometry().hidden;
        assert!(rows.len().is_multiple_of(hidden), "{} floats are no whole number of rows of {hidden}", rows.len());
        rows.chunks_exact(hidden)
    }
}
