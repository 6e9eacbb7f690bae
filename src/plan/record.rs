//! The device's work as data: dispatches recorded once, encoded for every flight.
//!
//! Names stand for buffers, so one record serves every slot. What is dispatched
//! with (`P`, a pipeline) is the device's own affair.

use crate::ids::{BlockIx, LayerIx};
use crate::knobs::DispatchClass;

/// A buffer by what it holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Name {
    /// What the queue writes before a flight.
    Flight,
    /// The same for the last row alone of a wide pass.
    FlightLast,
    /// The stop that a cure is for, as the flight that met it.
    FlightCure,
    /// What a cure or a fill is about.
    Cure,
    /// What the host made of missing experts.
    Completed,
    /// The slot's own words.
    Control,
    /// A block's weights.
    Arena(BlockIx),
    /// A layer's experts.
    Bank(LayerIx),
    /// A part of the head, with the final norm.
    Head(u16),
    /// A part of the embedding.
    Embedding(u16),
    /// Where every expert of every layer lies.
    Map,
    /// The same with numbers for experts that have no place and stream through.
    StreamMap,
    /// Places that experts stream through.
    Stream,
    /// Rows from the host.
    Given,
    /// The residual rows.
    X,
    /// What the opening projection of a block makes.
    Proj,
    /// What the closing projection reads.
    Inner,
    /// Sums of squares of `Inner`.
    Squares,
    /// Normed rows and router logits.
    Routing,
    /// The shared expert's encoded activations.
    SharedAct,
    /// Their scales.
    SharedScale,
    /// The routed experts' encoded activations.
    PickAct,
    /// Their scales.
    PickScale,
    /// What the layer's route left. A buffer a layer, so that a dispatch beside it is not made to wait.
    Routes(LayerIx),
    /// The layer's shared expert's output. A buffer a layer, for the same reason.
    SharedOut(LayerIx),
    /// A layer's sum without residual and missing experts.
    Partial,
    /// Parts of an attention.
    Parts,
    /// Best logits of the head's workgroups.
    Best,
    /// Logits on request.
    Logits,
    /// Ids of the flight.
    Out,
    /// The convolution's past inputs.
    Ring(BlockIx),
    /// The scan's states.
    State(BlockIx),
    /// Keys and values.
    Kv(BlockIx),
    /// Rows of the last batch as the draft layer reads them.
    Hidden,
    /// Embeddings behind the rows that stand.
    Next,
    /// What the draft layer makes of both: its residual, a row for each.
    DraftRows,
    /// The residual of a draft, in turn.
    DraftX(u8),
    /// The draft layer's output row, less its mean (0), and normed (1).
    DraftOut(u8),
    /// Drafts of the round.
    Drafts,
    /// Drafts that tests give, by position.
    DraftsGiven,
    /// The slot's words as the draft layer's rows see them.
    RowsControl,
    /// The slot's words as a chain of drafts sees them.
    ChainControl,
    /// Scratch of wide passes, by number.
    Wide(u8),
    /// A few bytes that nobody reads.
    Nothing,
}

/// What a dispatch belongs to, as the queue's items name it (`protocol.md` §2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Section {
    /// Up to and with the layer's route.
    Route(LayerIx),
    /// The layer's resident and shared experts.
    Experts(LayerIx),
    /// The layer's closing sum.
    Sum(LayerIx),
    /// The rest of the batch.
    Accept,
}

/// How often a dispatch runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Grid {
    /// As many workgroups.
    Fixed([u32; 3]),
    /// `[x, ceil(rows / per), z]`
    Rows {
        /// Rows of a workgroup.
        per: u32,
        /// Workgroups along x.
        x: u32,
        /// Workgroups along z.
        z: u32,
    },
    /// `[rows, 1, 1]`
    Along,
    /// `[x, tiles, 1]`, with a tile for every `per` picks and one more for every place that may hold a part of one.
    Tiles {
        /// Picks of a tile.
        per: u32,
        /// Workgroups along x.
        x: u32,
        /// Picks of a row.
        top_k: u32,
        /// Places of the bank.
        places: u32,
    },
}

impl Grid {
    /// Workgroups for a batch of `rows`.
    #[must_use]
    pub const fn groups(self, rows: u32) -> [u32; 3] {
        match self {
            Grid::Fixed(groups) => groups,
            Grid::Rows { per, x, z } => [x, rows.div_ceil(per), z],
            Grid::Along => [rows, 1, 1],
            Grid::Tiles { per, x, top_k, places } => {
                let picks = rows * top_k;
                [x, picks / per + if places < picks { places } else { picks }, 1]
            }
        }
    }
}

/// One dispatch.
#[derive(Clone, Debug)]
pub struct Dispatch {
    /// Which of the plan's pipelines.
    pub pipeline: usize,
    /// What it is counted as.
    pub class: DispatchClass,
    /// Where its uniform struct lies in the plan's.
    pub params: Option<usize>,
    /// Its storage buffers, in the order of the bindings that are not uniform.
    pub buffers: Vec<Name>,
    /// Workgroups.
    pub grid: Grid,
    /// What it belongs to.
    pub section: Section,
    /// The block it computes; `None` for the head.
    pub block: Option<BlockIx>,
}

/// A batch's dispatches, in order.
#[derive(Clone, Debug)]
pub struct Plan<P> {
    /// Each once.
    pub pipelines: Vec<P>,
    /// In order.
    pub dispatches: Vec<Dispatch>,
    /// Uniform structs, each at a multiple of [`Plan::ALIGN`].
    pub uniforms: Vec<u8>,
}

impl<P: PartialEq> Default for Plan<P> {
    fn default() -> Self {
        Self { pipelines: Vec::new(), dispatches: Vec::new(), uniforms: Vec::new() }
    }
}

impl<P: PartialEq> Plan<P> {
    /// Every device takes uniform offsets at multiples of this.
    pub const ALIGN: usize = 256;

    /// Appends a dispatch.
    pub fn push(
        &mut self,
        pipeline: P,
        class: DispatchClass,
        (section, block): (Section, Option<BlockIx>),
        params: &[u8],
        buffers: &[Name],
        grid: Grid,
    ) {
        let pipeline = self.pipelines.iter().position(|p| *p == pipeline).unwrap_or_else(|| {
            self.pipelines.push(pipeline);
            self.pipelines.len() - 1
        });
        let params = (!params.is_empty()).then(|| {
            let at = self.uniforms.len();
            self.uniforms.extend_from_slice(params);
            self.uniforms.resize(self.uniforms.len().next_multiple_of(Self::ALIGN), 0);
            at
        });
        self.dispatches.push(Dispatch { pipeline, class, params, buffers: buffers.to_vec(), grid, section, block });
    }
}
