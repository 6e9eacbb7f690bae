//! The plan of a prefill pass: many rows through every block at once.
//!
//! Products read encoded rows (`prefill_encode`) and run in f32 tiles, in int8
//! tiles or through matrix units ([`Form`]). The rows of an MoE layer are
//! sorted by expert on the device; what each pick makes is written at its own
//! place, so that the closing sum adds in the picks' order wherever an output
//! came from. The scan runs in chunks. Only the last row goes through the head.

use std::collections::HashMap;

use super::super::kernels::{
    ATTN_MERGE, Choice, Encoding, Format, Kernel, PREFILL_ATTENTION, PREFILL_CONV, PREFILL_COUNT, PREFILL_ENCODE,
    PREFILL_LAST, PREFILL_MATMAT_COOP, PREFILL_MATMAT_F32, PREFILL_MATMAT_INT8, PREFILL_RING, PREFILL_ROUTE,
    PREFILL_SORT, PREFILL_SSD_OUT, PREFILL_SSD_PASS, PREFILL_SSD_STATES, PREFILL_SSD_STEPS, PREFILL_SUM, TAKE_ROWS,
};
use super::super::params::{self, NONE};
use super::super::pass::{Form, PassChoice, Source, TILE_ROWS};
use super::adapter::Context;
use super::decode::{self, Frame, RING, WG};
use super::layout::{Laid, padded};
use super::pipelines::Key;
use super::upload::buffer;
use super::weights::{AttentionLaid, BlockLaid, MambaLaid, MlpLaid, MoeLaid, Weights};
use crate::device::DeviceError;
use crate::ids::{BlockIx, LayerIx};
use crate::knobs::{Activations, DispatchClass as Class};
use crate::model::geometry::{AttentionGeometry, Geometry, MambaGeometry, MoeGeometry};
use crate::plan::record::{Grid, Name, Plan, Section};

/// Positions of a chunk of the scan, as the shaders have them.
const CHUNK: u32 = 64;

/// Rows of an attention tile, as the shader has them.
const QUERY_TILE: u32 = 64;

/// Parts of the keys where a pass has too few rows to keep a card busy.
const TAIL_SPLITS: u32 = 8;

/// Rows up to which a pass counts as such a tail.
pub const TAIL_ROWS: usize = 256;

/// Passes of fewer rows run row by row: a tile would be nearly empty.
pub const ROWS_MIN: usize = 16;

/// Invocations that encode a row.
pub(super) const ENCODE_WG: u32 = 128;

pub(super) const X: Name = Name::Wide(0);
pub(super) const ACTS: Name = Name::Wide(1);
pub(super) const ACT_SCALE: Name = Name::Wide(2);
const PROJ: Name = Name::Wide(3);
const XBC: Name = Name::Wide(4);
const STEPS: Name = Name::Wide(5);
const STATES: Name = Name::Wide(6);
const MIXED: Name = Name::Wide(7);
const NORMED: Name = Name::Wide(8);
const LOGITS: Name = Name::Wide(9);
const ROUTES: Name = Name::Wide(10);
const LIST: Name = Name::Wide(11);
const SHARED_OUT: Name = Name::Wide(12);
const PICK_INNER: Name = Name::Wide(13);
const MADE: Name = Name::Wide(14);
const PARTS: Name = Name::Wide(15);

/// What a pass is recorded for.
#[derive(Clone, Copy, Debug)]
pub struct PassFrame<'m> {
    /// Model, weights, arithmetic.
    pub frame: Frame<'m>,
    /// Whether products with quantised matrices go through matrix units.
    pub cooperative: bool,
    /// Parts of the keys, one of [`SPLITS`].
    pub splits: u32,
    /// Places that experts without one stream through, at most [`STREAM_PLACES_MAX`]; `None` halts at the first such.
    pub streamed: Option<usize>,
}

/// Most places that experts stream through.
pub const STREAM_PLACES_MAX: usize = 16;

/// Parts of the keys: one, or several where few rows stand behind many positions and would leave a card idle.
pub const SPLITS: [u32; 2] = [1, TAIL_SPLITS];

/// Which of [`SPLITS`] suits a pass of `rows` that ends at position `reach`.
#[must_use]
pub fn split_of(rows: usize, reach: usize) -> usize {
    usize::from(rows <= TAIL_ROWS && reach >= 8 * TAIL_ROWS)
}

/// Words of every buffer that a pass of `rows` needs beside the slot's own, that of rounds aside, over banks of at most
/// `places` (none where there are no banks) and with or without the draft layer.
fn plain_needs(geometry: &Geometry, places: Option<usize>, drafts: bool, rows: usize) -> Vec<(Name, usize)> {
    let hidden = padded(geometry.hidden);
    // encoded rows are largest as f32
    let (mut acts, mut proj, mut mixed) = (rows * hidden, 0, 0);
    let mut all = vec![(X, rows * hidden), (NORMED, rows * hidden)];
    if let Some(g) = &geometry.mamba {
        proj = proj.max(rows * g.in_proj_rows());
        mixed = mixed.max(rows * padded(g.inner()));
        all.extend([
            (XBC, rows * g.conv_channels()),
            (STEPS, rows * g.heads * 4),
            (STATES, rows.div_ceil(CHUNK as usize) * g.ssm_state_len()),
        ]);
    }
    if let Some(g) = &geometry.attention {
        proj = proj.max(rows * padded(g.q_width()));
        mixed = mixed.max(rows * padded(g.q_width()));
        all.push((PARTS, rows.min(TAIL_ROWS) * g.heads * TAIL_SPLITS as usize * (g.head_dim + 2)));
    }
    if let Some(inter) = geometry.mlp_inter {
        proj = proj.max(rows * padded(inter));
    }
    if let (Some(g), Some(places)) = (geometry.moe.as_ref(), places) {
        let (inter, picks) = (padded(g.inter), rows * g.top_k);
        acts = acts.max(picks * hidden.max(inter));
        proj = proj.max(rows * padded(g.shared_inter));
        all.extend([
            (LOGITS, rows * g.experts),
            (ROUTES, picks * 4),
            (LIST, order_at(picks, places) + 2 * picks),
            (SHARED_OUT, rows * hidden),
            (PICK_INNER, picks * inter),
            (MADE, picks * hidden),
        ]);
    }
    if drafts {
        acts = acts.max(rows * padded(2 * geometry.hidden));
    }
    acts = acts.max(proj).max(mixed);
    all.extend([(ACTS, acts), (ACT_SCALE, acts / 32), (PROJ, proj), (MIXED, mixed)]);
    all.retain(|(_, words)| *words > 0);
    all
}

/// Words of every buffer that a pass of `rows` needs beside the slot's own.
fn needs(geometry: &Geometry, weights: &Weights, rows: usize) -> Vec<(Name, usize)> {
    let places = weights.banks.iter().map(|bank| bank.residents.len()).max();
    let mut all = plain_needs(geometry, places, weights.draft.is_some(), rows);
    all.extend(super::rounds::needs(geometry, weights, rows).into_iter().filter(|(_, words)| *words > 0));
    all
}

/// Word of the list where sorted rows begin: behind the largest number of tiles.
fn order_at(picks: usize, places: usize) -> usize {
    4 + 4 * (picks / TILE_ROWS as usize + places.max(STREAM_PLACES_MAX))
}

/// Most rows, up to `wanted`, whose buffers the device can bind.
#[must_use]
pub fn rows_that_fit(context: &Context, geometry: &Geometry, weights: &Weights, wanted: usize) -> usize {
    let room = context.limits.max_storage_buffer_binding_size.min(context.limits.max_buffer_size);
    let fits = |rows: usize| needs(geometry, weights, rows).iter().all(|(_, words)| 4 * *words as u64 <= room);
    let mut rows = wanted;
    while rows > 1 && !fits(rows) {
        rows /= 2;
    }
    rows
}

/// Bytes that passes of `rows` need, shared by all slots, over banks of at most `places`.
#[must_use]
pub fn bytes(geometry: &Geometry, places: Option<usize>, rows: usize) -> u64 {
    plain_needs(geometry, places, geometry.draft, rows).iter().map(|(_, words)| 4 * *words as u64).sum()
}

/// Whether a buffer of a pass must survive a stop: with partial banks it is the slot's own (`protocol.md` §2).
#[must_use]
pub fn survives(name: Name) -> bool {
    [X, NORMED, ROUTES, SHARED_OUT, MADE, super::rounds::TAKEN].contains(&name)
}

/// Those of such buffers that need not.
pub(super) fn scratch(buffers: &HashMap<Name, wgpu::Buffer>) -> impl Iterator<Item = (&Name, &wgpu::Buffer)> {
    buffers.iter().filter(|(name, _)| matches!(name, Name::Wide(_)) && !survives(**name))
}

/// What a pass's route and norm left, for the record of a miss.
pub const MISS: [Name; 2] = [ROUTES, NORMED];

/// What a cure writes and a fill sorts.
pub const CURED: [Name; 3] = [MADE, ROUTES, LIST];

/// Word of a layer's list where sorted rows begin, in passes of up to `rows`.
#[must_use]
pub fn sorted_at(moe: &MoeGeometry, rows: usize, places: usize) -> u32 {
    order_at(rows * moe.top_k, places) as u32
}

/// Makes those buffers of passes of `rows` of which `wanted` holds.
///
/// # Errors
///
/// [`DeviceError::OutOfMemory`].
pub fn buffers(
    context: &Context,
    geometry: &Geometry,
    weights: &Weights,
    rows: usize,
    wanted: impl Fn(Name) -> bool,
) -> Result<HashMap<Name, wgpu::Buffer>, DeviceError> {
    let usage = wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_SRC | wgpu::BufferUsages::COPY_DST;
    (needs(geometry, weights, rows).into_iter())
        .filter(|(name, _)| wanted(*name))
        .map(|(name, words)| Ok((name, buffer(context, "pass", 4 * (words as u64).next_multiple_of(4), usage)?)))
        .collect()
}

pub(super) struct Builder<'m> {
    pass: PassFrame<'m>,
    pub(super) plan: Plan<Key>,
    section: Section,
    block: Option<BlockIx>,
    /// Places of the experts that products are of.
    places: usize,
}

/// Records a pass.
#[must_use]
pub fn record(pass: PassFrame<'_>) -> Plan<Key> {
    let none = pass.frame.weights.banks.is_empty();
    let section = if none { Section::Accept } else { Section::Route(LayerIx(0)) };
    // the rows' arrival counts as the first block's
    let mut b = Builder { pass, plan: Plan::default(), section, block: Some(BlockIx(0)), places: 0 };
    b.take();
    for (i, block) in pass.frame.weights.blocks.iter().enumerate() {
        let block_ix = BlockIx::from(i);
        b.block = Some(block_ix);
        match block {
            BlockLaid::Mamba(laid) => b.mamba(block_ix, laid),
            BlockLaid::Attention(laid) => b.attention(block_ix, laid),
            BlockLaid::Moe(laid) => b.moe(block_ix, laid),
            BlockLaid::Mlp(laid) => b.mlp(block_ix, laid),
        }
    }
    b.section = Section::Accept;
    b.block = None;
    b.last();
    b.plan
}

/// Runs that `experts` at most take through `places`.
#[must_use]
pub fn chunks_of(experts: usize, places: usize) -> usize {
    experts.div_ceil(places)
}

/// Products of a layer's experts.
pub const EXPERT_DISPATCHES: usize = 4;

/// Records what a pass does with experts that stream through places: for each layer a sort for each run of them, as many
/// as [`chunks_of`] all experts, then the products of any run, [`EXPERT_DISPATCHES`].
///
/// # Panics
///
/// If the pass has no such places.
#[must_use]
pub fn record_stream(pass: PassFrame<'_>) -> Plan<Key> {
    let places = pass.streamed.expect("places to stream through");
    let mut b = Builder::bare(pass);
    b.places = places;
    for (i, block) in pass.frame.weights.blocks.iter().enumerate() {
        let BlockLaid::Moe(laid) = block else { continue };
        b.block = Some(BlockIx::from(i));
        b.section = Section::Experts(laid.layer);
        let residents = pass.frame.weights.banks[laid.layer.index()].residents.len();
        for run in 0..chunks_of(b.moe_geometry().experts, places) {
            b.sort(laid.layer, residents + run * places, true);
        }
        b.experts(laid.layer, Name::Stream);
    }
    b.plan
}

/// Rows to encode.
struct Encode {
    norm: u32,
    field: u32,
    /// vec4s of a place, where experts are.
    place: u32,
    source: Name,
    /// Floats from row to row of the source.
    stride: usize,
    width: usize,
    layer: u32,
    listed: Listed,
}

/// Which rows of the pass, as `rows_of_norm.wgsl` numbers them.
#[derive(Clone, Copy, PartialEq)]
enum Listed {
    InOrder = 0,
    ByPick = 1,
    Sorted = 2,
}

/// Where a product goes, as `matmat.wgsl` numbers it.
#[derive(Clone, Copy)]
enum To {
    Row = 0,
    Sum = 1,
    Position = 2,
    Before = 3,
    Pick = 4,
}

/// A product of encoded rows.
struct Product {
    /// The buffer of the matrix: an arena or a bank.
    from: Name,
    laid: Laid,
    /// vec4s of a place, where experts are.
    place: u32,
    out: Name,
    stride: usize,
    offset: usize,
    to: To,
    relu2: bool,
    layer: u32,
}

impl<'m> Builder<'m> {
    fn int8(&self) -> bool {
        self.pass.frame.activations == Activations::Int8
    }

    fn geometry(&self) -> &'m Geometry {
        self.pass.frame.geometry
    }

    fn hidden(&self) -> usize {
        padded(self.geometry().hidden)
    }

    /// A plan of what belongs to no block.
    pub(super) fn bare(pass: PassFrame<'m>) -> Self {
        Self { pass, plan: Plan::default(), section: Section::Accept, block: None, places: 0 }
    }

    /// A matrix over the rows encoded last.
    pub(super) fn product_to_rows(&mut self, class: Class, from: Name, laid: Laid, out: Name) {
        let stride = self.hidden();
        let to = To::Row;
        let product = Product { from, laid, place: 0, out, stride, offset: 0, to, relu2: false, layer: NONE };
        self.product(class, &product, ACTS);
    }

    /// A matrix over other rows behind a norm, each to the position before its own.
    pub(super) fn before(
        &mut self,
        class: Class,
        from: Name,
        (source, norm): (Name, u32),
        laid: Laid,
        out: Name,
        (stride, offset): (usize, usize),
    ) {
        let (hidden, width) = (self.hidden(), self.geometry().hidden);
        let listed = Listed::InOrder;
        let e = Encode { norm, field: laid.field, place: 0, source, stride: hidden, width, layer: NONE, listed };
        self.encode(class, self.form(laid.format), &e, from);
        let product = Product { from, laid, place: 0, out, stride, offset, to: To::Before, relu2: false, layer: NONE };
        self.product(class, &product, ACTS);
    }

    pub(super) fn form(&self, format: Format) -> Form {
        Form::of(format, self.int8(), self.pass.cooperative)
    }

    fn mamba_geometry(&self) -> &'m MambaGeometry {
        self.geometry().mamba.as_ref().expect("checked on open")
    }

    fn attention_geometry(&self) -> &'m AttentionGeometry {
        self.geometry().attention.as_ref().expect("checked on open")
    }

    fn moe_geometry(&self) -> &'m MoeGeometry {
        self.geometry().moe.as_ref().expect("checked on open")
    }

    pub(super) fn key(kernel: &Kernel, choice: PassChoice, wg: u32, numbers: &[(&'static str, usize)]) -> Key {
        let variant = kernel.pass_variant(&choice);
        let text = variant.source();
        let named = |name: &str| text.contains(&format!("override {name}:"));
        let mut numbers: Vec<_> =
            numbers.iter().filter(|(name, _)| named(name)).map(|(name, n)| (*name, *n as u32)).collect();
        if named("WG") {
            numbers.push(("WG", wg));
        }
        Key { variant, numbers, floats: Vec::new() }
    }

    const PLAIN: PassChoice = PassChoice { format: Format::F32, form: Form::F32, experts: false, source: Source::Rows };

    pub(super) fn push(&mut self, key: Key, class: Class, params: &[u8], buffers: &[Name], grid: Grid) {
        self.plan.push(key, class, (self.section, self.block), params, buffers, grid);
    }

    /// Picks and places behind which sorted rows lie in the list.
    fn order(&self, layer: LayerIx) -> u32 {
        let picks = self.pass.frame.rows * self.moe_geometry().top_k;
        order_at(picks, self.pass.frame.weights.banks[layer.index()].residents.len()) as u32
    }

    fn take(&mut self) {
        let choice = Choice {
            team: self.pass.frame.team,
            format: Format::F32,
            int8: false,
            out: Encoding::F32,
            rows: 1,
            wide: 1,
            group_norm: false,
            full: true,
            pass: true,
        };
        let key = decode::key(&TAKE_ROWS, &choice, &[("COLS", self.hidden())], &[]);
        let params = params::TakeRows::default();
        // a workgroup a row, along x
        let buffers = [Name::Control, Name::Given, X];
        self.push(key.clone(), Class::Final, bytemuck::bytes_of(&params), &buffers, Grid::Along);
        if self.pass.frame.weights.draft.is_some() {
            // the draft layer reads them at the pass's end, when the rows of a later pass may lie where they came from
            let buffers = [Name::Control, Name::Given, super::rounds::TAKEN];
            self.push(key, Class::Final, bytemuck::bytes_of(&params), &buffers, Grid::Along);
        }
    }

    fn encode(&mut self, class: Class, form: Form, e: &Encode, arena: Name) {
        let cols = padded(e.width);
        let top_k = if e.listed == Listed::InOrder { 1 } else { self.moe_geometry().top_k };
        let choice = PassChoice { form, ..Self::PLAIN };
        let numbers = [("COLS", cols), ("TOP_K", top_k), ("INT8", usize::from(self.int8()))];
        let order = if e.listed == Listed::InOrder { 0 } else { self.order(LayerIx(e.layer as u16)) };
        let params = params::EncodeRows {
            norm: e.norm,
            field: e.field,
            place: e.place,
            stride: (e.stride / 4) as u32,
            width: e.width as u32,
            eps: self.geometry().norm_eps,
            layer: e.layer,
            listed: e.listed as u32,
            order,
            ..params::EncodeRows::default()
        };
        let list = if e.listed == Listed::InOrder { Name::Nothing } else { LIST };
        self.push(
            Self::key(&PREFILL_ENCODE, choice, ENCODE_WG, &numbers),
            class,
            bytemuck::bytes_of(&params),
            &[Name::Control, arena, e.source, list, ACTS, ACT_SCALE],
            Grid::Rows { per: 1, x: 1, z: top_k as u32 },
        );
    }

    /// The normed rows of a block, encoded for one of its matrices.
    fn encode_norm(&mut self, class: Class, arena: Name, norm: u32, laid: &Laid) {
        let (hidden, width) = (self.hidden(), self.geometry().hidden);
        let e = Encode {
            norm,
            field: laid.field,
            place: 0,
            source: X,
            stride: hidden,
            width,
            layer: NONE,
            listed: Listed::InOrder,
        };
        self.encode(class, self.form(laid.format), &e, arena);
    }

    fn product(&mut self, class: Class, p: &Product, acts: Name) {
        let laid = p.laid;
        let form = self.form(laid.format);
        let kernel = match form {
            Form::F32 => &PREFILL_MATMAT_F32,
            Form::Int8 => &PREFILL_MATMAT_INT8,
            Form::Half => &PREFILL_MATMAT_COOP,
        };
        let experts = p.place > 0;
        let choice = PassChoice { format: laid.format, form, experts, source: Source::Rows };
        let numbers = [("COLS", laid.cols), ("SIDE_WORDS", laid.format.side_words(laid.cols))];
        let order = if experts { self.order(LayerIx(p.layer as u16)) } else { 0 };
        let params = params::Matmat {
            rows: laid.rows as u32,
            base: laid.base,
            side: laid.side,
            place: p.place,
            stride: p.stride as u32,
            offset: p.offset as u32,
            to: p.to as u32,
            relu2: u32::from(p.relu2),
            layer: p.layer,
            order,
            pad: [0; 2],
        };
        let x = (laid.rows as u32).div_ceil(form.tile_cols());
        let grid = if experts {
            let (top_k, places) = (self.moe_geometry().top_k as u32, self.places as u32);
            Grid::Tiles { per: TILE_ROWS, x, top_k, places }
        } else {
            Grid::Rows { per: TILE_ROWS, x, z: 1 }
        };
        let list = if experts { LIST } else { Name::Nothing };
        let scale = if form == Form::F32 { Name::Nothing } else { ACT_SCALE };
        self.push(
            Self::key(kernel, choice, WG, &numbers),
            class,
            bytemuck::bytes_of(&params),
            &[Name::Control, p.from, p.from, acts, scale, list, p.out],
            grid,
        );
    }

    /// A matrix of a block over its normed rows.
    #[allow(clippy::too_many_arguments, reason = "each says another thing about one product")]
    fn open(
        &mut self,
        class: Class,
        block: BlockIx,
        norm: u32,
        laid: Laid,
        out: Name,
        (stride, offset): (usize, usize),
        to: To,
        relu2: bool,
    ) {
        let arena = Name::Arena(block);
        self.encode_norm(class, arena, norm, &laid);
        let product = Product { from: arena, laid, place: 0, out, stride, offset, to, relu2, layer: NONE };
        self.product(class, &product, ACTS);
    }

    /// The residual, plus a matrix over the rows encoded last.
    fn close(&mut self, class: Class, block: BlockIx, laid: Laid) {
        let stride = self.hidden();
        let from = Name::Arena(block);
        let to = To::Sum;
        let product = Product { from, laid, place: 0, out: X, stride, offset: 0, to, relu2: false, layer: NONE };
        self.product(class, &product, ACTS);
    }

    fn mamba(&mut self, block: BlockIx, laid: &MambaLaid) {
        let g = self.mamba_geometry();
        let (proj, channels, inner) = (g.in_proj_rows(), g.conv_channels(), g.inner());
        self.open(Class::InProj, block, laid.norm, laid.in_proj, PROJ, (proj, 0), To::Row, false);

        let arena = Name::Arena(block);
        let [conv, conv_bias, a_log, d_skip, dt_bias] = laid.vectors;
        let numbers = [
            ("INNER", inner),
            ("CHANNELS", channels),
            ("TAPS", g.d_conv),
            ("RING", RING),
            ("PROJ", proj),
            ("HEADS", g.heads),
            ("P", g.head_dim),
            ("GROUPS", g.groups),
            ("N", g.d_state),
            ("DT_AT", inner + channels),
        ];
        let key = |kernel: &Kernel| Self::key(kernel, Self::PLAIN, WG, &numbers);
        let blocks = (channels as u32).div_ceil(WG);
        let params = params::PassConv { conv, conv_bias, pad: [0; 2] };
        self.push(
            key(&PREFILL_CONV),
            Class::Scan,
            bytemuck::bytes_of(&params),
            &[Name::Control, arena, PROJ, Name::Ring(block), XBC],
            Grid::Rows { per: 1, x: blocks, z: 1 },
        );
        let back = g.d_conv as u32 - 1;
        if back > 0 {
            self.push(
                key(&PREFILL_RING),
                Class::Scan,
                &[],
                &[Name::Control, PROJ, Name::Ring(block)],
                Grid::Fixed([blocks, back, 1]),
            );
        }
        let params = params::SsdSteps {
            a_log,
            dt_bias,
            dt_min: g.dt_limit[0],
            // a shader has no infinity; no step size is larger than this
            dt_max: g.dt_limit[1].min(f32::MAX),
        };
        let heads = g.heads as u32;
        self.push(
            key(&PREFILL_SSD_STEPS),
            Class::Scan,
            bytemuck::bytes_of(&params),
            &[Name::Control, arena, PROJ, STEPS],
            Grid::Rows { per: CHUNK, x: heads.div_ceil(WG), z: 1 },
        );
        let (p_tiles, n_tiles) = (g.head_dim.div_ceil(64) as u32, g.d_state.div_ceil(64) as u32);
        self.push(
            key(&PREFILL_SSD_STATES),
            Class::Scan,
            &[],
            &[Name::Control, XBC, STEPS, STATES],
            Grid::Rows { per: CHUNK, x: p_tiles * n_tiles, z: heads },
        );
        let snapshot = if self.pass.frame.snapshots > 1 { (g.ssm_state_len() / 4) as u32 } else { 0 };
        let params = params::SsdPass { snapshot, ..params::SsdPass::default() };
        self.push(
            key(&PREFILL_SSD_PASS),
            Class::Scan,
            bytemuck::bytes_of(&params),
            &[Name::Control, STEPS, STATES, Name::State(block)],
            Grid::Fixed([((g.ssm_state_len() / 4) as u32).div_ceil(WG), 1, 1]),
        );
        let params = params::SsdOut { d_skip, ..params::SsdOut::default() };
        self.push(
            key(&PREFILL_SSD_OUT),
            Class::Scan,
            bytemuck::bytes_of(&params),
            &[Name::Control, arena, XBC, STEPS, STATES, MIXED],
            Grid::Rows { per: CHUNK, x: p_tiles, z: heads },
        );

        let form = self.form(laid.out_proj.format);
        let choice = PassChoice { form, source: Source::Gate, ..Self::PLAIN };
        let numbers = [("COLS", laid.out_proj.cols), ("GROUPS", g.groups), ("INT8", usize::from(self.int8()))];
        let params = params::EncodeGate {
            norm: laid.group_norm,
            field: laid.out_proj.field,
            gate_stride: proj as u32,
            width: inner as u32,
            eps: self.geometry().norm_eps,
            layer: NONE,
            pad: [0; 2],
        };
        self.push(
            Self::key(&PREFILL_ENCODE, choice, WG, &numbers),
            Class::OutProj,
            bytemuck::bytes_of(&params),
            &[Name::Control, arena, MIXED, PROJ, ACTS, ACT_SCALE],
            Grid::Rows { per: 1, x: 1, z: 1 },
        );
        self.close(Class::OutProj, block, laid.out_proj);
    }

    fn attention(&mut self, block: BlockIx, laid: &AttentionLaid) {
        let g = self.attention_geometry();
        let (q, kv) = (g.q_width(), g.kv_width());
        let [lq, lk, lv] = laid.qkv;
        self.open(Class::Qkv, block, laid.norm, lq, PROJ, (q, 0), To::Row, false);
        self.open(Class::Qkv, block, laid.norm, lk, Name::Kv(block), (2 * kv, 0), To::Position, false);
        self.open(Class::Qkv, block, laid.norm, lv, Name::Kv(block), (2 * kv, kv), To::Position, false);

        let splits = self.pass.splits;
        let numbers = [("D", g.head_dim), ("HEADS", g.heads), ("KV_HEADS", g.kv_heads), ("SPLITS", splits as usize)];
        let params = params::PassAttention {
            stride: (q / 4) as u32,
            offset: 0,
            scale: 1.0 / (g.head_dim as f32).sqrt(),
            pad: 0,
        };
        let out = if splits > 1 { PARTS } else { MIXED };
        self.push(
            Self::key(&PREFILL_ATTENTION, Self::PLAIN, WG, &numbers),
            Class::Attn,
            bytemuck::bytes_of(&params),
            &[Name::Control, PROJ, Name::Kv(block), out],
            Grid::Rows { per: QUERY_TILE, x: g.heads as u32, z: splits },
        );
        if splits > 1 {
            let choice = Choice {
                team: self.pass.frame.team,
                format: Format::F32,
                int8: false,
                out: Encoding::F32,
                rows: 1,
                wide: 1,
                group_norm: false,
                full: true,
                pass: true,
            };
            let merge = decode::key(&ATTN_MERGE, &choice, &numbers, &[]);
            let grid = Grid::Rows { per: 1, x: g.heads as u32, z: 1 };
            self.push(merge, Class::Attn, &[], &[Name::Control, PARTS, MIXED], grid);
        }
        self.mixed(Class::OProj, block, laid.o, MIXED, q);
    }

    /// Encodes rows as they are and closes the block with a matrix over them.
    fn mixed(&mut self, class: Class, block: BlockIx, laid: Laid, source: Name, width: usize) {
        let e = Encode {
            norm: NONE,
            field: laid.field,
            place: 0,
            source,
            stride: padded(width),
            width,
            layer: NONE,
            listed: Listed::InOrder,
        };
        self.encode(class, self.form(laid.format), &e, Name::Arena(block));
        self.close(class, block, laid);
    }

    fn mlp(&mut self, block: BlockIx, laid: &MlpLaid) {
        let [up, down] = laid.mlp;
        self.open(Class::InProj, block, laid.norm, up, PROJ, (padded(up.rows), 0), To::Row, true);
        self.mixed(Class::OutProj, block, down, PROJ, up.rows);
    }

    fn moe(&mut self, block: BlockIx, laid: &MoeLaid) {
        let g = self.moe_geometry();
        let (hidden, width, layer) = (self.hidden(), self.geometry().hidden, laid.layer);
        let arena = Name::Arena(block);
        self.section = Section::Route(layer);

        // normed rows, as router and experts read them
        let numbers = [("COLS", hidden), ("TOP_K", 1)];
        let params = params::EncodeRows {
            norm: laid.norm,
            field: NONE,
            stride: (hidden / 4) as u32,
            width: width as u32,
            eps: self.geometry().norm_eps,
            layer: NONE,
            ..params::EncodeRows::default()
        };
        self.push(
            Self::key(&PREFILL_ENCODE, Self::PLAIN, ENCODE_WG, &numbers),
            Class::Router,
            bytemuck::bytes_of(&params),
            &[Name::Control, arena, X, Name::Nothing, NORMED, ACT_SCALE],
            Grid::Rows { per: 1, x: 1, z: 1 },
        );
        let gate = Laid { format: Format::F32, rows: g.experts, cols: hidden, base: laid.gate, side: 0, field: NONE };
        let product = Product {
            from: arena,
            laid: gate,
            place: 0,
            out: LOGITS,
            stride: g.experts,
            offset: 0,
            to: To::Row,
            relu2: false,
            layer: NONE,
        };
        self.product(Class::Router, &product, NORMED);
        let numbers = [
            ("EXPERTS", g.experts),
            ("TOP_K", g.top_k),
            ("N_GROUP", g.n_group),
            ("TOPK_GROUP", g.topk_group),
            ("SCORES", g.experts),
            ("PICKS", g.top_k),
            ("GROUPS", g.n_group),
            ("AT_CELLS", g.top_k),
        ];
        let params = params::PassRoute {
            bias: laid.bias,
            map: u32::from(layer.0) * g.experts as u32,
            norm_topk: u32::from(g.norm_topk),
            scale: g.scale,
            ..params::PassRoute::default()
        };
        self.push(
            Self::key(&PREFILL_ROUTE, Self::PLAIN, ENCODE_WG, &numbers),
            Class::Router,
            bytemuck::bytes_of(&params),
            &[
                Name::Control,
                arena,
                LOGITS,
                if self.pass.streamed.is_some() { Name::StreamMap } else { Name::Map },
                ROUTES,
            ],
            Grid::Rows { per: 1, x: 1, z: 1 },
        );
        if !self.pass.frame.full {
            let at = (super::slot::counts_at(g) + layer.index() * g.experts) as u32;
            let params = params::PassCount { at, ..params::PassCount::default() };
            self.push(
                Self::key(&PREFILL_COUNT, Self::PLAIN, WG, &[("TOP_K", g.top_k), ("EXPERTS", g.experts)]),
                Class::Router,
                bytemuck::bytes_of(&params),
                &[Name::Control, ROUTES, Name::Routes(LayerIx(0))],
                Grid::Fixed([1, 1, 1]),
            );
        }
        self.places = self.pass.frame.weights.banks[layer.index()].residents.len();
        self.sort(layer, 0, self.pass.streamed.is_some());

        self.section = Section::Experts(layer);
        let of_layer = u32::from(layer.0);
        let [shared_up, shared_down] = laid.shared;
        let e = Encode {
            norm: NONE,
            field: shared_up.field,
            place: 0,
            source: NORMED,
            stride: hidden,
            width,
            layer: of_layer,
            listed: Listed::InOrder,
        };
        self.encode(Class::ShDown, self.form(shared_up.format), &e, arena);
        let product = Product {
            from: arena,
            laid: shared_up,
            place: 0,
            out: PROJ,
            stride: padded(g.shared_inter),
            offset: 0,
            to: To::Row,
            relu2: true,
            layer: of_layer,
        };
        self.product(Class::ShDown, &product, ACTS);
        let e = Encode {
            field: shared_down.field,
            source: PROJ,
            stride: padded(g.shared_inter),
            width: g.shared_inter,
            ..e
        };
        self.encode(Class::ShDown, self.form(shared_down.format), &e, arena);
        let product = Product { laid: shared_down, out: SHARED_OUT, stride: hidden, relu2: false, ..product };
        self.product(Class::ShDown, &product, ACTS);

        self.experts(layer, Name::Bank(layer));

        self.section = Section::Sum(layer);
        let params = params::PassSum { stride: hidden as u32, width: width as u32, alone: 0, weighted: 1 };
        self.push(
            Self::key(&PREFILL_SUM, Self::PLAIN, ENCODE_WG, &[("TOP_K", g.top_k)]),
            Class::ExpDown,
            bytemuck::bytes_of(&params),
            &[Name::Control, ROUTES, MADE, SHARED_OUT, X],
            Grid::Rows { per: 1, x: (width as u32).div_ceil(ENCODE_WG), z: 1 },
        );
        let next = LayerIx(layer.0 + 1);
        let more = next.index() < self.pass.frame.weights.banks.len();
        self.section = if more { Section::Route(next) } else { Section::Accept };
    }

    /// The pass's picks among the builder's places, of which the map calls the first `first`.
    fn sort(&mut self, layer: LayerIx, first: usize, others: bool) {
        let top_k = self.moe_geometry().top_k;
        let numbers = [("TOP_K", top_k), ("PLACES", self.places), ("TILE_ROWS", TILE_ROWS as usize)];
        let params = params::PassSort {
            layer: u32::from(layer.0),
            order: self.order(layer),
            first: first as u32,
            others: u32::from(others),
        };
        self.push(
            Self::key(&PREFILL_SORT, Self::PLAIN, WG, &numbers),
            Class::Router,
            bytemuck::bytes_of(&params),
            &[Name::Control, ROUTES, LIST],
            Grid::Fixed([1, 1, 1]),
        );
    }

    /// Up and down of the experts in places of `from`, for the picks sorted last.
    fn experts(&mut self, layer: LayerIx, from: Name) {
        let g = self.moe_geometry();
        let (hidden, width, of_layer) = (self.hidden(), self.geometry().hidden, u32::from(layer.0));
        let bank = &self.pass.frame.weights.banks[layer.index()];
        let [up, down] = bank.place.mlp;
        let form = self.form(up.format);
        let place = (bank.place.bytes / 16) as u32;
        let e = Encode {
            norm: NONE,
            field: up.field,
            place,
            source: NORMED,
            stride: hidden,
            width,
            layer: of_layer,
            listed: Listed::ByPick,
        };
        self.encode(Class::ExpUp, form, &e, from);
        let product = Product {
            from,
            laid: up,
            place,
            out: PICK_INNER,
            stride: padded(g.inter),
            offset: 0,
            to: To::Row,
            relu2: true,
            layer: of_layer,
        };
        self.product(Class::ExpUp, &product, ACTS);
        let e = Encode {
            field: down.field,
            source: PICK_INNER,
            stride: padded(g.inter),
            width: g.inter,
            listed: Listed::Sorted,
            ..e
        };
        self.encode(Class::ExpDown, self.form(down.format), &e, from);
        let product = Product { laid: down, out: MADE, stride: hidden, to: To::Pick, relu2: false, ..product };
        self.product(Class::ExpDown, &product, ACTS);
    }

    fn last(&mut self) {
        let key = Self::key(&PREFILL_LAST, Self::PLAIN, WG, &[("COLS", self.hidden())]);
        self.push(key, Class::Final, &[], &[Name::Control, X, Name::X], Grid::Fixed([1, 1, 1]));
    }
}
