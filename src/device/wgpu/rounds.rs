//! Drafts on the device: the draft layer (`model.md` §2), verify passes, and how a batch ends where drafts are made.
//!
//! A round is a chain of drafts, each an attention and an MoE block over one
//! row, then a verify pass: the plan of a step over several rows. The accept
//! decides on the device how many rows stand; snapshots of the scan make going
//! back a choice of one of them. The draft layer's own KV is kept up by every
//! batch: the position's hidden row and the embedding behind it become one row,
//! whose keys and values are those of that position. What a chain leaves there
//! is overwritten before anybody reads it as a position's.

use std::sync::Arc;

use super::super::kernels::{ACCEPT, DRAFT_FUSE, DRAFT_PICK, DRAFT_ROWS, Format, PREFILL_ENCODE};
use super::super::params;
use super::super::pass::{PassChoice, Source};
use super::adapter::Context;
use super::core::Ready;
use super::decode::{self, Builder, Frame, OUT_ROOM, Opening, ROUNDS_ROOM, ROWS_MAX, head_groups, key};
use super::layout::{Laid, padded};
use super::pipelines::{Key, Pipelines};
use super::prefill::{self, PassFrame};
use super::slot::Slot;
use super::weights::{DraftLaid, Weights, place_of};
use crate::device::DeviceError;
use crate::host::DraftConventions;
use crate::ids::{BlockIx, TokenId};
use crate::knobs::{Activations, DispatchClass as Class};
use crate::model::geometry::Geometry;
use crate::model::weights::DecoderWeights;
use crate::plan::record::{Grid, Name, Plan};

/// How drafts are made.
#[derive(Clone, Debug, Default)]
pub struct DraftSetup {
    /// Points on which sources differ.
    pub conventions: DraftConventions,
    /// What is drafted instead of the draft layer's ids, by position. For tests.
    pub given: Option<Arc<[TokenId]>>,
}

/// The number that stands for the draft layer's blocks: the one behind the decoder's.
#[must_use]
pub fn draft_block(geometry: &Geometry) -> BlockIx {
    BlockIx::from(geometry.blocks.len())
}

/// Rows of a verify pass that the device can do.
///
/// # Errors
///
/// Why it makes no drafts of this model.
pub fn rows_of(
    context: &Context,
    geometry: &Geometry,
    decoder: &DecoderWeights,
    act: Activations,
) -> Result<usize, String> {
    let Some(draft) = decoder.draft.as_deref() else { return Err("the file has no draft layer".into()) };
    if !geometry.hidden.is_multiple_of(16) {
        return Err(format!("hidden is {}, halves of the draft layer's input take multiples of 16", geometry.hidden));
    }
    place_of(&draft.moe).map_err(|e| e.to_string())?;
    let room = (context.limits.max_compute_workgroup_storage_size as usize).saturating_sub(6 * 1024);
    let widths = [
        Some(padded(2 * geometry.hidden)),
        geometry.mamba.as_ref().map(|g| padded(g.inner())),
        geometry.attention.as_ref().map(|g| padded(g.q_width())),
        geometry.mlp_inter.map(padded),
    ];
    let widest = widths.into_iter().flatten().max().unwrap_or(0);
    // f32 rows are staged one at a time, codes with eight bytes a group all at once
    let rows = match act {
        Activations::Int8 => room / (widest + widest / 4),
        Activations::F32 => ROWS_MAX,
    };
    if 4 * padded(2 * geometry.hidden) > room || rows < 2 {
        return Err(format!("{widest} columns of several rows do not fit {room} bytes of workgroup memory"));
    }
    Ok(rows.min(ROWS_MAX))
}

/// Plans of everything that only drafts need.
#[derive(Debug)]
pub struct Rounds {
    /// Verify passes, of 2 rows and more.
    pub verify: Vec<Ready>,
    /// The first draft of a round, the second, and so on.
    pub chain: Vec<Ready>,
    /// A position's keys and values, once the row behind it is there: before a row that was given.
    pub before_row: Ready,
    /// The same for all rows of a wide pass.
    pub pass: Ready,
}

/// Bind groups of [`Rounds`].
#[derive(Debug)]
pub struct RoundsBound {
    /// As [`Rounds::verify`].
    pub verify: Vec<Vec<wgpu::BindGroup>>,
    /// As [`Rounds::chain`].
    pub chain: Vec<Vec<wgpu::BindGroup>>,
    /// As [`Rounds::before_row`].
    pub before_row: Vec<wgpu::BindGroup>,
    /// As [`Rounds::pass`].
    pub pass: Vec<wgpu::BindGroup>,
}

impl Rounds {
    /// Records and builds them. `frame` is a step's.
    ///
    /// # Errors
    ///
    /// [`DeviceError`] where the driver refuses a pipeline or a buffer.
    pub fn new(
        context: &Context,
        pipelines: &mut Pipelines,
        frame: Frame<'_>,
        pass: PassFrame<'_>,
        setup: &DraftSetup,
        finish: impl Fn(Plan<Key>) -> Plan<Key>,
    ) -> Result<Self, DeviceError> {
        let depths = 0..frame.snapshots - 1;
        let verify: Vec<_> = depths.clone().map(|at| finish(decode::record(Frame { rows: at + 2, ..frame }))).collect();
        let chain: Vec<_> = depths.map(|at| finish(draft(frame, setup, at))).collect();
        let (before_row, pass) = (before_row(frame), finish(pass_rows(pass)));
        // all of them on all threads, before one is asked for
        let plans = verify.iter().chain(&chain).chain([&before_row, &pass]);
        pipelines.prepare(context, plans.flat_map(|plan| &plan.pipelines))?;
        let mut ready = |plan| Ready::new(context, pipelines, plan);
        let verify = verify.into_iter().map(&mut ready).collect::<Result<_, _>>()?;
        let chain = chain.into_iter().map(&mut ready).collect::<Result<_, _>>()?;
        let (before_row, pass) = (ready(before_row)?, ready(pass)?);
        Ok(Self { verify, chain, before_row, pass })
    }

    /// Bind groups over a slot.
    #[must_use]
    pub fn bind(&self, context: &Context, weights: &Weights, slot: &Slot) -> RoundsBound {
        let bind =
            |ready: &Ready| slot.bind(context, weights, &ready.plan, &ready.pipelines, &ready.uniforms, Name::Flight);
        RoundsBound {
            verify: self.verify.iter().map(bind).collect(),
            chain: self.chain.iter().map(bind).collect(),
            before_row: bind(&self.before_row),
            pass: bind(&self.pass),
        }
    }
}

/// How rows come to the draft layer, as `draft_rows.wgsl` numbers it.
#[derive(Clone, Copy)]
enum How {
    AsIs = 0,
    Normed = 1,
    Centred = 2,
}

/// What is fused.
struct Fuse {
    following: Name,
    from: usize,
    hidden: Name,
    out: Name,
    tail: Option<Name>,
}

/// Draft `at` of a round. The first goes on from the row that the accept left, each further one from the one before it.
fn draft(frame: Frame<'_>, setup: &DraftSetup, at: usize) -> Plan<Key> {
    let conventions = setup.conventions;
    let mut b = Builder::new(Frame { rows: 1, full: true, ..frame });
    b.control = Name::ChainControl;
    let (block, laid) = (draft_block(frame.geometry), b.draft());
    // an output row is normed from the residual, or from what is left of it without its mean
    let source = |at: usize| if conventions.layer_norm { Name::DraftOut(0) } else { Name::DraftX((at % 2) as u8) };
    b.x = Name::DraftX((at % 2) as u8);
    if at > 0 {
        b.rows(How::Normed, laid.final_norm, source(at - 1), Name::DraftOut(1));
        let (hidden, out) = (Name::DraftOut(1), b.x);
        b.fuse(&Fuse { following: Name::X, from: at, hidden, out, tail: None });
    }
    let all = b.openings();
    let (openings, kv) = if at > 0 { (&all[..], Name::Kv(block)) } else { (&all[..1], Name::Nothing) };
    b.norm_proj(block, Class::Qkv, laid.attention.norm, false, openings, Name::Proj, kv);
    b.attend(block, laid.attention.o);
    b.moe(block, &laid.moe);
    if conventions.layer_norm {
        let x = b.x;
        b.rows(How::Centred, 0, x, Name::DraftOut(0));
    }
    b.x = source(at);
    b.head(true);
    b.pick_draft(at, setup.given.as_ref().map_or(0, |given| given.len()));
    b.plan
}

/// The row in the residual and the hidden row before it, as keys and values of the position before.
fn before_row(frame: Frame<'_>) -> Plan<Key> {
    let mut b = Builder::new(frame);
    b.control = Name::ChainControl;
    b.fuse(&Fuse { following: Name::X, from: 0, hidden: Name::Hidden, out: Name::DraftRows, tail: None });
    b.keys_and_values();
    b.plan
}

impl<'m> Builder<'m> {
    fn draft(&self) -> &'m DraftLaid {
        self.frame.weights.draft.as_ref().expect("drafts have a draft layer")
    }

    fn arena(&self) -> Name {
        Name::Arena(draft_block(self.frame.geometry))
    }

    /// Queries, keys and values of the draft layer.
    fn openings(&self) -> [Opening; 3] {
        let g = self.attention_geometry();
        let (q, kv) = (g.q_width(), g.kv_width());
        let [lq, lk, lv] = self.draft().attention.qkv;
        [
            Opening { laid: lq, kept: false, offset: 0, stride: q },
            Opening { laid: lk, kept: true, offset: 0, stride: 2 * kv },
            Opening { laid: lv, kept: true, offset: kv, stride: 2 * kv },
        ]
    }

    fn rows(&mut self, how: How, norm: u32, x: Name, out: Name) {
        let numbers = [("COLS", self.hidden()), ("HIDDEN", self.frame.geometry.hidden)];
        let params = params::DraftRows { norm, how: how as u32, before: 0, pad: 0 };
        let key = key(&DRAFT_ROWS, &self.choice(Format::F32, 1), &numbers, &self.floats());
        let buffers = [self.control, self.arena(), x, Name::Nothing, out];
        let groups = [self.frame.rows as u32, 1, 1];
        self.push(key, Class::Final, bytemuck::bytes_of(&params), &buffers, groups);
    }

    fn fuse(&mut self, fuse: &Fuse) {
        const BLOCK: u32 = 8;
        let draft = self.draft();
        let laid = draft.eh_proj;
        let choice = self.choice(laid.format, 1);
        let params = params::DraftFuse {
            enorm: draft.enorm,
            hnorm: draft.hnorm,
            rows: laid.rows as u32,
            base: laid.base,
            side: laid.side,
            field: laid.field,
            hidden_first: u32::from(self.frame.drafts.is_some_and(|c| c.hidden_first)),
            start: fuse.from as u32,
            tail: u32::from(fuse.tail.is_some()),
            ..params::DraftFuse::default()
        };
        let mut numbers = self.staged(&choice, laid.cols);
        numbers.extend([("BLOCK", BLOCK as usize), ("ROW", self.hidden())]);
        let key = key(&DRAFT_FUSE, &choice, &numbers, &self.floats());
        let tail = fuse.tail.unwrap_or(Name::Nothing);
        let buffers = [self.control, self.arena(), self.arena(), fuse.following, fuse.hidden, fuse.out, tail];
        let groups = [(laid.rows as u32).div_ceil(BLOCK), self.batches(choice.rows), 1];
        self.push(key, Class::InProj, bytemuck::bytes_of(&params), &buffers, groups);
    }

    /// Of the fused rows.
    fn keys_and_values(&mut self) {
        let [_, k, v] = self.openings();
        let block = draft_block(self.frame.geometry);
        let norm = self.draft().attention.norm;
        self.x = Name::DraftRows;
        self.norm_proj(block, Class::Qkv, norm, false, &[k, v], Name::Nothing, Name::Kv(block));
    }

    /// The end of a batch: rows that stand, the row that follows, and the draft layer's keys and values of them.
    pub(super) fn accept(&mut self) {
        let draft = self.draft();
        let pre = self.frame.drafts.is_some_and(|c| c.pre_norm);
        self.rows(if pre { How::AsIs } else { How::Normed }, draft.decoder_norm, Name::X, Name::Hidden);

        let groups = head_groups(self.frame.weights);
        let layers = self.frame.weights.banks.len();
        let numbers = [("COLS", self.hidden()), ("LAST_BLOCK", (2 * layers).saturating_sub(1))];
        let last = self.frame.weights.embedding.len() - 1;
        for (i, part) in self.frame.weights.embedding.iter().enumerate() {
            let params = params::Accept {
                groups,
                rows: part.laid.rows as u32,
                first_id: part.first as u32,
                base: part.laid.base,
                side: part.laid.side,
                field: part.laid.field,
                last: u32::from(i == last),
                room: OUT_ROOM as u32,
                rounds: ROUNDS_ROOM as u32,
                ..params::Accept::default()
            };
            let key = key(&ACCEPT, &self.choice(part.laid.format, 1), &numbers, &[]);
            let name = Name::Embedding(i as u16);
            let buffers = [
                Name::Control,
                name,
                name,
                Name::Best,
                Name::Out,
                Name::X,
                Name::Next,
                Name::Drafts,
                Name::RowsControl,
                Name::ChainControl,
            ];
            self.push(key, Class::Final, bytemuck::bytes_of(&params), &buffers, [1, 1, 1]);
        }
        self.control = Name::RowsControl;
        let tail = Some(Name::DraftX(0));
        self.fuse(&Fuse { following: Name::Next, from: 0, hidden: Name::Hidden, out: Name::DraftRows, tail });
        self.keys_and_values();
    }

    fn pick_draft(&mut self, at: usize, given: usize) {
        let groups = head_groups(self.frame.weights);
        let last = self.frame.weights.embedding.len() - 1;
        for (i, part) in self.frame.weights.embedding.iter().enumerate() {
            let params = params::DraftPick {
                groups,
                rows: part.laid.rows as u32,
                first_id: part.first as u32,
                base: part.laid.base,
                side: part.laid.side,
                field: part.laid.field,
                last: u32::from(i == last),
                at: at as u32,
                given: given as u32,
                ..params::DraftPick::default()
            };
            let key = key(&DRAFT_PICK, &self.choice(part.laid.format, 1), &[("COLS", self.hidden())], &[]);
            let name = Name::Embedding(i as u16);
            let buffers = [Name::ChainControl, name, name, Name::Best, Name::X, Name::Drafts, Name::DraftsGiven];
            self.push(key, Class::Final, bytemuck::bytes_of(&params), &buffers, [1, 1, 1]);
        }
    }
}

// ------------------------------------------------------------------ wide passes

/// Rows of a wide pass as the draft layer reads them, one behind the position before the pass.
pub(super) const HIDDEN: Name = Name::Wide(16);

/// What it makes of them.
pub(super) const FUSED: Name = Name::Wide(17);

/// Rows of a wide pass as they came.
pub(super) const TAKEN: Name = Name::Wide(18);

/// Keys and values of a wide pass, each row's with the row that was read next to it; the last one's waits.
fn pass_rows(pass: PassFrame<'_>) -> Plan<Key> {
    let frame = pass.frame;
    let mut b = prefill::Builder::bare(pass);
    let draft = frame.weights.draft.as_ref().expect("drafts have a draft layer");
    let conventions = frame.drafts.unwrap_or_default();
    let block = draft_block(frame.geometry);
    let arena = Name::Arena(block);
    let (hidden, width) = (padded(frame.geometry.hidden), frame.geometry.hidden);
    let eps = frame.geometry.norm_eps;

    let how = if conventions.pre_norm { How::AsIs } else { How::Normed };
    let params = params::DraftRows { norm: draft.decoder_norm, how: how as u32, before: 1, pad: 0 };
    let choice = Builder::new(frame).choice(Format::F32, 1);
    let rows = key(&DRAFT_ROWS, &choice, &[("COLS", hidden), ("HIDDEN", width)], &[("EPS", eps)]);
    let buffers = [Name::Control, arena, prefill::X, Name::Hidden, HIDDEN];
    b.push(rows, Class::Final, bytemuck::bytes_of(&params), &buffers, Grid::Along);

    let Laid { field, cols, format, .. } = draft.eh_proj;
    let form = b.form(format);
    let params = params::EncodeFuse {
        norm: draft.enorm,
        other_norm: draft.hnorm,
        field,
        stride: (hidden / 4) as u32,
        width: width as u32,
        eps,
        hidden_first: u32::from(conventions.hidden_first),
        layer: params::NONE,
    };
    let choice = PassChoice { format: Format::F32, form, experts: false, source: Source::Fuse };
    let numbers = [("COLS", cols), ("INT8", usize::from(frame.activations == Activations::Int8))];
    let encode = prefill::Builder::key(&PREFILL_ENCODE, choice, prefill::ENCODE_WG, &numbers);
    b.push(
        encode,
        Class::InProj,
        bytemuck::bytes_of(&params),
        &[Name::Control, arena, TAKEN, HIDDEN, prefill::ACTS, prefill::ACT_SCALE],
        Grid::Rows { per: 1, x: 1, z: 1 },
    );
    b.product_to_rows(Class::InProj, arena, draft.eh_proj, FUSED);
    let kv = frame.geometry.attention.as_ref().expect("the draft layer attends").kv_width();
    let [_, k, v] = draft.attention.qkv;
    for (laid, offset) in [(k, 0), (v, kv)] {
        b.before(Class::Qkv, arena, (FUSED, draft.attention.norm), laid, Name::Kv(block), (2 * kv, offset));
    }
    b.plan
}

/// Words of the buffers that [`pass_rows`] needs, for passes of `rows`.
pub(super) fn needs(geometry: &Geometry, weights: &Weights, rows: usize) -> Vec<(Name, usize)> {
    if weights.draft.is_none() {
        return Vec::new();
    }
    let hidden = padded(geometry.hidden);
    vec![(HIDDEN, rows * hidden), (FUSED, rows * hidden), (TAKEN, rows * hidden)]
}
