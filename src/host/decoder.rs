//! Block after block over the host kernels.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use thiserror::Error;

use super::draft::DraftConventions;
use super::head::{self, Pick};
use super::kernels::{self, Job, prepare, run};
use super::moe::{self, ExpertRows, Routes};
use super::{attention, mamba, norm};
use crate::host::Pool;
use crate::ids::{BlockIx, LayerIx, Position, TokenId};
use crate::knobs::Activations;
use crate::model::Model;
use crate::model::geometry::{BlockKind, Geometry};
use crate::model::state::{BlockState, MambaState, SequenceState};
use crate::model::weights::{DecoderWeights, Mixer, MoeWeights};

/// Rows that pass through all blocks together in a long prompt: enough that the
/// weights are read seldom, few enough that what a pass holds stays below some
/// hundred megabytes for the 30B model whatever the prompt's length.
const PASS_ROWS: usize = 512;

/// Where an activation stopped being finite.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// In the rows that were given.
    Input,
    /// In a block's output.
    Block(BlockIx),
    /// In the draft layer.
    Draft,
    /// In the logits.
    Head,
}

/// An activation is infinite or NaN (or so large that its square is): no token can come of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("activations are not finite after {}", match .place {
    Place::Input => "the input rows".to_owned(),
    Place::Block(block) => format!("block {block}"),
    Place::Draft => "the draft layer".to_owned(),
    Place::Head => "the head".to_owned(),
})]
pub struct NotFinite {
    /// The first place where it shows.
    pub place: Place,
}

impl NotFinite {
    /// An error unless a value that depends on all of a row's is finite.
    pub(crate) fn check(value: f32, place: Place) -> Result<(), Self> {
        if value.is_finite() { Ok(()) } else { Err(Self { place }) }
    }
}

/// Sees what passes through a forward: calibration and tests.
pub trait Observer {
    /// What one MoE layer read and where the rows went; `routes.normed` holds the experts' inputs.
    fn moe(&mut self, layer: LayerIx, routes: &Routes) {
        let _ = (layer, routes);
    }

    /// The residual rows `[n, hidden]` after a block.
    fn block(&mut self, block: BlockIx, rows: &[f32]) {
        let _ = (block, rows);
    }
}

/// Looks away.
impl Observer for () {}

/// Mamba states after each row of a verify pass, to roll back to.
#[derive(Clone, Debug)]
pub struct Snapshots {
    /// For each block, in order; empty where the block is no Mamba block.
    pub blocks: Vec<Vec<MambaState>>,
    /// Position before the pass.
    pub from: Position,
}

/// Where the weights live.
enum Source {
    Model(Arc<Model>),
    Parts(Box<(Geometry, DecoderWeights)>),
}

/// All of a decoder's functions on the CPU. Holds no sequence: states are the caller's.
pub struct Decoder {
    source: Source,
    pub(super) act: Activations,
    pub(super) pool: Pool,
    pub(super) conventions: DraftConventions,
}

impl Decoder {
    /// A decoder over an opened model.
    #[must_use]
    pub fn new(model: Arc<Model>, act: Activations, pool: Pool) -> Self {
        Self { source: Source::Model(model), act, pool, conventions: DraftConventions::default() }
    }

    /// A decoder over weights in memory.
    #[must_use]
    pub fn from_parts(geometry: Geometry, weights: DecoderWeights, act: Activations, pool: Pool) -> Self {
        let source = Source::Parts(Box::new((geometry, weights)));
        Self { source, act, pool, conventions: DraftConventions::default() }
    }

    /// The same with other conventions for drafts.
    #[must_use]
    pub fn with_draft_conventions(mut self, conventions: DraftConventions) -> Self {
        self.conventions = conventions;
        self
    }

    /// The model's shapes.
    #[must_use]
    pub fn geometry(&self) -> &Geometry {
        match &self.source {
            Source::Model(model) => &model.geometry,
            Source::Parts(parts) => &parts.0,
        }
    }

    /// Whether the file that the weights lie in still holds what was opened.
    ///
    /// # Errors
    ///
    /// Which file changed, and how.
    pub fn still_readable(&self) -> Result<(), String> {
        match &self.source {
            Source::Model(model) => {
                model.container.still_readable().map_err(|(path, changed)| format!("{}: {changed}", path.display()))
            }
            Source::Parts(_) => Ok(()),
        }
    }

    /// The model's weights.
    #[must_use]
    pub fn weights(&self) -> &DecoderWeights {
        match &self.source {
            Source::Model(model) => &model.decoder,
            Source::Parts(parts) => &parts.1,
        }
    }

    /// The activations of quantised products.
    #[must_use]
    pub fn activations(&self) -> Activations {
        self.act
    }

    /// The threads.
    #[must_use]
    pub fn pool(&self) -> &Pool {
        &self.pool
    }

    /// The embedding row of `id`, `out [hidden]`.
    ///
    /// # Panics
    ///
    /// If the id has no row or `out` another length.
    pub fn embed(&self, id: TokenId, out: &mut [f32]) {
        kernels::row(&self.weights().embedding, id.index(), out);
    }

    /// `rows [n, hidden] += mixer(norm(rows))` for a Mamba, attention or dense block.
    ///
    /// The state moves on by `n` rows; `snapshots` gets the Mamba state as it is after each row.
    ///
    /// # Errors
    ///
    /// [`NotFinite`] if a row is not; it names what made the rows.
    ///
    /// # Panics
    ///
    /// If the block is an MoE block, or the state is another kind of block's.
    pub fn mix(
        &self,
        block: BlockIx,
        rows: &mut [f32],
        state: &mut BlockState,
        snapshots: Option<&mut Vec<MambaState>>,
    ) -> Result<(), NotFinite> {
        let (geometry, weights) = (self.geometry(), &self.weights().blocks[block.index()]);
        let normed = self.normed(rows, &weights.norm, before(block))?;
        let mixed = match (&weights.mixer, state) {
            (Mixer::Mamba(weights), BlockState::Mamba(state)) => {
                let mamba = geometry.mamba.as_ref().expect("checked on open");
                mamba::mix(&self.pool, mamba, geometry.norm_eps, weights, self.act, &normed, state, snapshots)
            }
            (Mixer::Attention(weights), BlockState::Attention(kv)) => {
                let attention = geometry.attention.as_ref().expect("checked on open");
                attention::mix(&self.pool, attention, weights, self.act, &normed, kv)
            }
            (Mixer::Mlp(weights), _) => moe::dense(&self.pool, weights, self.act, &normed),
            (mixer, _) => panic!("{block:?} is mixed with another block's state or has experts: {mixer:?}"),
        };
        rows.iter_mut().zip(&mixed).for_each(|(x, m)| *x += m);
        Ok(())
    }

    /// Where residual rows `[n, hidden]` go in a layer; the draft layer's bank is the last one.
    ///
    /// # Errors
    ///
    /// [`NotFinite`] if a row is not; it names what made the rows.
    pub fn route(&self, layer: LayerIx, rows: &[f32]) -> Result<Routes, NotFinite> {
        let (norm, weights, place) = self.layer(layer);
        let normed = self.normed(rows, norm, place)?;
        let geometry = self.geometry().moe.as_ref().expect("checked on open");
        let (picks, shares) = moe::route(&self.pool, geometry, weights, &normed);
        Ok(Routes { normed, picks, weights: shares })
    }

    /// Unweighted outputs of a layer's experts in the order of `wanted` and of its rows:
    /// `[sum of rows, width]`, width being the latent one where there is one, else hidden.
    ///
    /// Each expert's weights are read once for all its rows.
    pub fn experts(&self, layer: LayerIx, normed: &[f32], wanted: &[ExpertRows]) -> Vec<f32> {
        moe::experts(&self.pool, self.layer(layer).1, self.act, normed, wanted, None)
    }

    /// [`Decoder::experts`] and [`Decoder::shared`] in one parallel region.
    pub fn experts_and_shared(&self, layer: LayerIx, normed: &[f32], wanted: &[ExpertRows]) -> (Vec<f32>, Vec<f32>) {
        let mut shared = vec![0.0; normed.len()];
        let weights = self.layer(layer).1;
        let outputs = moe::experts(&self.pool, weights, self.act, normed, wanted, Some(&mut shared));
        (outputs, shared)
    }

    /// The shared expert's output, `[n, hidden]`.
    pub fn shared(&self, layer: LayerIx, normed: &[f32]) -> Vec<f32> {
        moe::shared(&self.pool, self.layer(layer).1, self.act, normed)
    }

    /// Ends a layer: `rows += fc2(sum of weight · output) + shared` (fc2 in latent models alone).
    ///
    /// `outputs [n, top_k, width]` in the order of the picks. The order of additions is fixed:
    /// picks in order, fc2, shared, residual; so it does not matter where outputs came from.
    pub fn sum(&self, layer: LayerIx, rows: &mut [f32], routes: &Routes, outputs: &[f32], shared: &[f32]) {
        let lines: Vec<usize> = (0..routes.picks.len()).collect();
        let outputs = moe::Outputs { values: outputs, lines: &lines };
        moe::sum(&self.pool, self.layer(layer).1, self.act, rows, &routes.weights, outputs, shared);
    }

    /// The decoder's last norm, `[n, hidden]`.
    ///
    /// # Errors
    ///
    /// [`NotFinite`] if a row is not; it names the last block.
    pub fn final_norm(&self, rows: &[f32]) -> Result<Vec<f32>, NotFinite> {
        self.normed(rows, &self.weights().final_norm, before(BlockIx::from(self.geometry().blocks.len())))
    }

    /// The greedy choice for each normed row `[n, hidden]`; no logits are kept.
    ///
    /// # Errors
    ///
    /// [`NotFinite`] if a logit is NaN or the largest one infinite.
    pub fn head(&self, normed: &[f32]) -> Result<Vec<Pick>, NotFinite> {
        let picks = head::picks(&self.pool, &self.weights().head, self.act, normed);
        picks.iter().try_for_each(|pick| NotFinite::check(pick.logit, Place::Head))?;
        Ok(picks)
    }

    /// Logits of normed rows, `[n, vocab]`.
    #[must_use]
    pub fn logits(&self, normed: &[f32]) -> Vec<f32> {
        let head = &self.weights().head;
        let mut out = vec![0.0; normed.len() / head.cols() * head.rows()];
        let input = prepare(&self.pool, head, self.act, normed);
        run(&self.pool, vec![Job { matrix: head, input: &input, out: &mut out }]);
        out
    }

    /// Rows `[n, hidden]` through all blocks; they are left as the residual after the last one.
    ///
    /// Any number of rows: they pass in stretches of bounded memory.
    ///
    /// # Errors
    ///
    /// [`NotFinite`], naming the block; the state is then of no use.
    pub fn forward(
        &self,
        rows: &mut [f32],
        state: &mut SequenceState,
        observer: &mut dyn Observer,
    ) -> Result<(), NotFinite> {
        for rows in rows.chunks_mut(PASS_ROWS * self.geometry().hidden) {
            self.pass(rows, state, None, observer)?;
        }
        Ok(())
    }

    /// As [`Decoder::forward`] for a few rows, keeping what [`Decoder::roll_back`] needs.
    ///
    /// # Errors
    ///
    /// [`NotFinite`], naming the block; the state is then of no use.
    pub fn verify(&self, rows: &mut [f32], state: &mut SequenceState) -> Result<Snapshots, NotFinite> {
        let from = state.position;
        let mut blocks = vec![Vec::new(); self.geometry().blocks.len()];
        self.pass(rows, state, Some(&mut blocks), &mut ())?;
        Ok(Snapshots { blocks, from })
    }

    /// Takes a state back to where it was after the first `kept` rows of a verify pass.
    ///
    /// # Panics
    ///
    /// If `kept` is zero or more than the pass had.
    pub fn roll_back(&self, state: &mut SequenceState, snapshots: Snapshots, kept: usize) {
        assert!(kept > 0 && snapshots.from.index() + kept <= state.position.index(), "{kept} rows kept");
        let position = snapshots.from.index() + kept;
        for (block, mut after) in state.blocks.iter_mut().zip(snapshots.blocks) {
            match block {
                BlockState::Mamba(mamba) => *mamba = after.swap_remove(kept - 1),
                BlockState::Attention(kv) => {
                    let width = self.geometry().attention.as_ref().expect("checked on open").kv_width();
                    kv.truncate(position, width);
                }
                BlockState::None => {}
            }
        }
        state.position = Position::from(position);
    }

    /// One pass of rows that fit in memory together.
    fn pass(
        &self,
        rows: &mut [f32],
        state: &mut SequenceState,
        mut snapshots: Option<&mut Vec<Vec<MambaState>>>,
        observer: &mut dyn Observer,
    ) -> Result<(), NotFinite> {
        let geometry = self.geometry();
        let mut layer = 0;
        for (i, kind) in geometry.blocks.iter().enumerate() {
            if *kind == BlockKind::Moe {
                self.mix_experts(LayerIx::from(layer), rows, observer)?;
                layer += 1;
            } else {
                let snapshots = snapshots.as_deref_mut().map(|all| &mut all[i]);
                self.mix(BlockIx::from(i), rows, &mut state.blocks[i], snapshots)?;
            }
            observer.block(BlockIx::from(i), rows);
        }
        state.position = Position::from(state.position.index() + rows.len() / geometry.hidden);
        Ok(())
    }

    /// One MoE layer from residual rows to residual rows.
    pub(super) fn mix_experts(
        &self,
        layer: LayerIx,
        rows: &mut [f32],
        observer: &mut dyn Observer,
    ) -> Result<(), NotFinite> {
        let routes = self.route(layer, rows)?;
        observer.moe(layer, &routes);
        let top_k = self.geometry().moe.as_ref().expect("checked on open").top_k;
        let wanted = routes.by_expert(top_k);
        let lines = routes.lines(top_k, &wanted);
        let weights = self.layer(layer).1;
        let (outputs, shared) = self.experts_and_shared(layer, &routes.normed, &wanted);
        let outputs = moe::Outputs { values: &outputs, lines: &lines };
        moe::sum(&self.pool, weights, self.act, rows, &routes.weights, outputs, &shared);
        Ok(())
    }

    /// `rms(rows; w)`, noticing what is not finite.
    pub(super) fn normed(&self, rows: &[f32], w: &[f32], place: Place) -> Result<Vec<f32>, NotFinite> {
        let (hidden, eps) = (self.geometry().hidden, self.geometry().norm_eps);
        assert_eq!(rows.len() % hidden, 0, "rows of {hidden} columns");
        // Rows of a task: some ten microseconds.
        const ROWS: usize = 8;
        let mut out = vec![0.0; rows.len()];
        let finite = AtomicBool::new(true);
        let work = out.chunks_mut(ROWS * hidden).zip(rows.chunks(ROWS * hidden)).collect();
        self.pool.each_of(rows.len(), work, |(out, rows): (&mut [f32], &[f32])| {
            for (out, row) in out.chunks_exact_mut(hidden).zip(rows.chunks_exact(hidden)) {
                if !norm::rms(row, w, eps, out).is_finite() {
                    finite.store(false, Ordering::Relaxed);
                }
            }
        });
        if finite.into_inner() { Ok(out) } else { Err(NotFinite { place }) }
    }

    /// A layer's norm and experts, and what made the rows that it reads.
    fn layer(&self, layer: LayerIx) -> (&[f32], &MoeWeights, Place) {
        if Some(layer) == self.geometry().draft_layer() {
            let draft = self.weights().draft.as_ref().expect("checked on open");
            return (&draft.moe_norm, &draft.moe, Place::Draft);
        }
        let block = self.geometry().blocks_of(BlockKind::Moe).nth(layer.index()).expect("a layer of the model");
        let weights = &self.weights().blocks[block.index()];
        let Mixer::Moe(moe) = &weights.mixer else { panic!("{block:?} has no experts") };
        (&weights.norm, moe, before(block))
    }
}

/// What made the rows that a block reads.
fn before(block: BlockIx) -> Place {
    block.0.checked_sub(1).map_or(Place::Input, |block| Place::Block(BlockIx(block)))
}

/// Weights of [`Arc`]ed models are shared between decoders of different threads.
const _: fn() = || {
    fn shared<T: Send + Sync>() {}
    shared::<Arc<Decoder>>();
};
