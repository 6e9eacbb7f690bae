//! The plan of a step (or of a verify pass of a few rows): which kernels, over which buffers, in which order.

use super::super::kernels::{
    ATTN_MERGE, ATTN_SPLIT, CLOSE_PROJ, Choice, EXPERTS_DOWN, EXPERTS_UP, Encoding, Format, HEAD, Kernel, MOE_IN,
    NORM_PROJ, PICK_EMBED, PROJ_ACT, ROUTE, SSM_STEP, Team,
};
use super::super::params::{self, NONE};
use super::layout::{Laid, padded};
use super::pipelines::Key;
use super::weights::{AttentionLaid, BlockLaid, MambaLaid, MlpLaid, MoeLaid, Weights};
use crate::host::DraftConventions;
use crate::ids::BlockIx;
use crate::knobs::{Activations, DispatchClass as Class};
use crate::model::geometry::{AttentionGeometry, Geometry, MambaGeometry, MoeGeometry};
use crate::plan::record::{Grid, Name, Plan, Section};

/// Invocations of a workgroup.
pub const WG: u32 = 256;

/// Ids that the out record has room for.
pub const OUT_ROOM: usize = 1024;

/// Rounds that it has room for behind them.
pub const ROUNDS_ROOM: usize = 256;

/// Parts of a decode attention.
pub const SPLITS: u32 = 128;

/// Positions that a decode attention takes at once.
const TILE: u32 = 16;

/// Positions whose convolution inputs are kept.
pub const RING: usize = 16;

/// Channels of a head that a workgroup of the scan has.
const P_BLOCK: u32 = 16;

/// Rows of a batch that one dispatch can share weights between.
pub const ROWS_MAX: usize = 5;

/// Rows that a workgroup of the head computes.
const HEAD_BLOCK: u32 = 128;

/// What a plan is made for.
#[derive(Clone, Copy, Debug)]
pub struct Frame<'m> {
    /// The model's shapes.
    pub geometry: &'m Geometry,
    /// Its weights on the device.
    pub weights: &'m Weights,
    /// How invocations sum.
    pub team: Team,
    /// The arithmetic.
    pub activations: Activations,
    /// Row blocks that a workgroup of the experts has.
    pub bank_rep: usize,
    /// Rows of the batch.
    pub rows: usize,
    /// Snapshots of the scan state that a slot keeps.
    pub snapshots: usize,
    /// Whether every expert is resident.
    pub full: bool,
    /// Whether the head keeps its logits.
    pub keep_logits: bool,
    /// How drafts are made, where they are; the weights then have the draft layer.
    pub drafts: Option<DraftConventions>,
}

/// Channels of the scan that a workgroup has.
#[must_use]
pub fn p_block(mamba: &MambaGeometry) -> usize {
    let most = P_BLOCK as usize;
    (1..=most.min(mamba.head_dim)).rev().find(|n| mamba.head_dim.is_multiple_of(*n)).unwrap_or(1)
}

/// Workgroups of all parts of the head.
#[must_use]
pub fn head_groups(weights: &Weights) -> u32 {
    weights.head.iter().map(|part| (part.laid.rows as u32).div_ceil(HEAD_BLOCK)).sum()
}

/// Rows that one dispatch shares each weight read between.
#[must_use]
pub fn rows_at_once(rows: usize, encoding: Encoding) -> usize {
    if encoding == Encoding::F32 { 1 } else { rows.clamp(1, ROWS_MAX) }
}

/// The key of a kernel: the overrides that its text names.
#[must_use]
pub fn key(kernel: &Kernel, choice: &Choice, numbers: &[(&'static str, usize)], floats: &[(&'static str, f32)]) -> Key {
    let variant = kernel.variant(choice);
    let text = variant.source();
    let named = |name: &str| text.contains(&format!("override {name}:"));
    let mut numbers: Vec<_> =
        numbers.iter().filter(|(name, _)| named(name)).map(|(name, n)| (*name, *n as u32)).collect();
    numbers.push(("WG", WG));
    let floats = floats.iter().filter(|(name, _)| named(name)).map(|(name, f)| (*name, f.to_bits())).collect();
    Key { variant, numbers, floats }
}

pub(super) struct Builder<'m> {
    pub(super) frame: Frame<'m>,
    pub(super) plan: Plan<Key>,
    section: Section,
    block: Option<BlockIx>,
    /// The residual.
    pub(super) x: Name,
    /// Which of the slot's words a dispatch looks at.
    pub(super) control: Name,
}

/// Records a batch.
#[must_use]
pub fn record(frame: Frame<'_>) -> Plan<Key> {
    let first = frame.weights.banks.is_empty();
    let section = if first { Section::Accept } else { Section::Route(crate::ids::LayerIx(0)) };
    let mut b = Builder { section, ..Builder::new(frame) };
    for (i, block) in frame.weights.blocks.iter().enumerate() {
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
    b.head(false);
    if frame.drafts.is_some() {
        b.accept()
    } else {
        b.pick()
    }
    b.plan
}

impl<'m> Builder<'m> {
    /// A plan of what belongs to no block.
    pub(super) fn new(frame: Frame<'m>) -> Self {
        let (x, control) = (Name::X, Name::Control);
        Self { frame, plan: Plan::default(), section: Section::Accept, block: None, x, control }
    }

    pub(super) fn int8(&self) -> bool {
        self.frame.activations == Activations::Int8
    }

    pub(super) fn hidden(&self) -> usize {
        padded(self.frame.geometry.hidden)
    }

    fn mamba_geometry(&self) -> &'m MambaGeometry {
        self.frame.geometry.mamba.as_ref().expect("checked on open")
    }

    pub(super) fn attention_geometry(&self) -> &'m AttentionGeometry {
        self.frame.geometry.attention.as_ref().expect("checked on open")
    }

    fn moe_geometry(&self) -> &'m MoeGeometry {
        self.frame.geometry.moe.as_ref().expect("checked on open")
    }

    pub(super) fn choice(&self, format: Format, wide: usize) -> Choice {
        let encoding = format.encoding(self.int8());
        Choice {
            team: self.frame.team,
            format,
            int8: self.int8(),
            out: encoding,
            rows: rows_at_once(self.frame.rows, encoding),
            wide,
            group_norm: false,
            full: self.frame.full,
            pass: false,
        }
    }

    /// Overrides of a matrix product whose activations are staged.
    pub(super) fn staged(&self, choice: &Choice, cols: usize) -> Vec<(&'static str, usize)> {
        let encoding = choice.format.encoding(choice.int8);
        let scales = if encoding == Encoding::F32 { 1 } else { choice.rows * cols / 32 };
        vec![
            ("COLS", cols),
            ("SIDE_WORDS", choice.format.side_words(cols)),
            ("STAGED_VECS", choice.rows * cols / 32 * encoding.vecs()),
            ("STAGED_SCALES", scales),
            ("HIDDEN", self.frame.geometry.hidden),
            ("NORM_CELLS", choice.rows * WG as usize / 4),
        ]
    }

    pub(super) fn batches(&self, at_once: usize) -> u32 {
        self.frame.rows.div_ceil(at_once) as u32
    }

    pub(super) fn push(&mut self, key: Key, class: Class, params: &[u8], buffers: &[Name], groups: [u32; 3]) {
        self.plan.push(key, class, (self.section, self.block), params, buffers, Grid::Fixed(groups));
    }

    pub(super) fn floats(&self) -> [(&'static str, f32); 1] {
        [("EPS", self.frame.geometry.norm_eps)]
    }

    /// Up to three matrices behind a norm, one dispatch where they are of one format, else one each.
    #[expect(clippy::too_many_arguments, reason = "what a dispatch reads and writes, each named once")]
    pub(super) fn norm_proj(
        &mut self,
        block: BlockIx,
        class: Class,
        norm: u32,
        relu2: bool,
        outs: &[Opening],
        out: Name,
        kv: Name,
    ) {
        const BLOCK: u32 = 32;
        for run in outs.chunk_by(|a, b| a.laid.format == b.laid.format) {
            let laid = run[0].laid;
            let choice = self.choice(laid.format, 4);
            let mut params = params::NormProj {
                norm,
                segments: run.len() as u32,
                relu2: u32::from(relu2),
                ..params::NormProj::default()
            };
            let mut groups = 0;
            for (segment, opening) in params.segment.iter_mut().zip(run) {
                *segment = params::Segment {
                    first_group: groups,
                    rows: opening.laid.rows as u32,
                    base: opening.laid.base,
                    side: opening.laid.side,
                    field: opening.laid.field,
                    kept: u32::from(opening.kept),
                    offset: opening.offset as u32,
                    stride: opening.stride as u32,
                };
                groups += (opening.laid.rows as u32).div_ceil(BLOCK);
            }
            let mut numbers = self.staged(&choice, laid.cols);
            numbers.push(("BLOCK", BLOCK as usize));
            let key = key(&NORM_PROJ, &choice, &numbers, &self.floats());
            let arena = Name::Arena(block);
            let buffers = [self.control, arena, arena, self.x, out, kv];
            let y = self.batches(choice.rows);
            self.push(key, class, bytemuck::bytes_of(&params), &buffers, [groups, y, 1]);
        }
    }

    pub(super) fn close_proj(&mut self, block: BlockIx, class: Class, laid: Laid, group_norm: Option<u32>) {
        const BLOCK: u32 = 8;
        let mut choice = self.choice(laid.format, 1);
        choice.group_norm = group_norm.is_some();
        let params = params::CloseProj {
            norm: group_norm.unwrap_or(NONE),
            rows: laid.rows as u32,
            base: laid.base,
            side: laid.side,
            field: laid.field,
            stride: self.hidden() as u32,
            pad: [0; 2],
        };
        let mut numbers = self.staged(&choice, laid.cols);
        numbers.push(("BLOCK", BLOCK as usize));
        if group_norm.is_some() {
            let g = self.mamba_geometry();
            let cells = g.inner() / p_block(g);
            numbers.extend([("GROUP_COLS", g.inner() / g.groups), ("GROUP_CELLS", cells / g.groups), ("CELLS", cells)]);
            numbers.push(("GROUP_SCALES", choice.rows * g.groups));
        }
        let key = key(&CLOSE_PROJ, &choice, &numbers, &self.floats());
        let arena = Name::Arena(block);
        let squares = if group_norm.is_some() { Name::Squares } else { Name::Nothing };
        let buffers = [self.control, arena, arena, Name::Inner, squares, self.x];
        let groups = [(laid.rows as u32).div_ceil(BLOCK), self.batches(choice.rows), 1];
        self.push(key, class, bytemuck::bytes_of(&params), &buffers, groups);
    }

    fn mamba(&mut self, block: BlockIx, laid: &MambaLaid) {
        let g = self.mamba_geometry();
        let proj = g.in_proj_rows();
        let opening = Opening { laid: laid.in_proj, kept: false, offset: 0, stride: proj };
        self.norm_proj(block, Class::InProj, laid.norm, false, &[opening], Name::Proj, Name::Nothing);

        let [conv, conv_bias, a_log, d_skip, dt_bias] = laid.vectors;
        let state = (g.ssm_state_len() / 4) as u32;
        let params = params::SsmStep {
            conv,
            conv_bias,
            a_log,
            d_skip,
            dt_bias,
            snapshot: if self.frame.snapshots > 1 { state } else { 0 },
            dt_min: g.dt_limit[0],
            // a shader has no infinity; no step size is larger than this
            dt_max: g.dt_limit[1].min(f32::MAX),
        };
        let mut choice = self.choice(Format::F32, 1);
        choice.rows = self.frame.rows.min(ROWS_MAX);
        let p = p_block(g);
        let numbers = [
            ("HEADS", g.heads),
            ("P", g.head_dim),
            ("GROUPS", g.groups),
            ("N", g.d_state),
            ("TAPS", g.d_conv),
            ("RING", RING),
            ("PROJ", proj),
            ("P_BLOCK", p),
            ("CONV_CELLS", choice.rows * (p + 2 * g.d_state)),
            ("OUT_CELLS", choice.rows * p),
        ];
        let key = key(&SSM_STEP, &choice, &numbers, &[]);
        let buffers = [
            self.control,
            Name::Arena(block),
            Name::Proj,
            Name::Ring(block),
            Name::State(block),
            Name::Inner,
            Name::Squares,
        ];
        self.push(key, Class::Scan, bytemuck::bytes_of(&params), &buffers, [(g.inner() / p) as u32, 1, 1]);
        self.close_proj(block, Class::OutProj, laid.out_proj, Some(laid.group_norm));
    }

    fn attention(&mut self, block: BlockIx, laid: &AttentionLaid) {
        let g = self.attention_geometry();
        let (q, kv) = (g.q_width(), g.kv_width());
        let [lq, lk, lv] = laid.qkv;
        let openings = [
            Opening { laid: lq, kept: false, offset: 0, stride: q },
            Opening { laid: lk, kept: true, offset: 0, stride: 2 * kv },
            Opening { laid: lv, kept: true, offset: kv, stride: 2 * kv },
        ];
        self.norm_proj(block, Class::Qkv, laid.norm, false, &openings, Name::Proj, Name::Kv(block));
        self.attend(block, laid.o);
    }

    /// What follows queries, keys and values.
    pub(super) fn attend(&mut self, block: BlockIx, o: Laid) {
        let g = self.attention_geometry();
        let q = g.q_width();
        let queries = g.heads / g.kv_heads;
        let rows = self.frame.rows as u32;
        let choice = self.choice(Format::F32, 1);
        let numbers = [
            ("D", g.head_dim),
            ("HEADS", g.heads),
            ("KV_HEADS", g.kv_heads),
            ("QUERIES", queries),
            ("SPLITS", SPLITS as usize),
            ("TILE", TILE as usize),
            ("Q_CELLS", queries * (g.head_dim / 4 + 1)),
            ("S_CELLS", queries * TILE as usize),
            ("O_CELLS", queries * g.head_dim / 4),
            ("K_CELLS", TILE as usize * (g.head_dim / 4 + 1)),
        ];
        let params = params::AttnSplit { stride: q as u32, offset: 0, scale: 1.0 / (g.head_dim as f32).sqrt(), pad: 0 };
        self.push(
            key(&ATTN_SPLIT, &choice, &numbers, &[]),
            Class::Attn,
            bytemuck::bytes_of(&params),
            &[self.control, Name::Proj, Name::Kv(block), Name::Parts],
            [g.kv_heads as u32, SPLITS, rows],
        );
        self.push(
            key(&ATTN_MERGE, &choice, &numbers, &[]),
            Class::Attn,
            &[],
            &[self.control, Name::Parts, Name::Inner],
            [g.heads as u32, rows, 1],
        );
        self.close_proj(block, Class::OProj, o, None);
    }

    fn mlp(&mut self, block: BlockIx, laid: &MlpLaid) {
        let [up, down] = laid.mlp;
        let opening = Opening { laid: up, kept: false, offset: 0, stride: down.cols };
        self.norm_proj(block, Class::InProj, laid.norm, true, &[opening], Name::Inner, Name::Nothing);
        self.close_proj(block, Class::OutProj, down, None);
    }

    pub(super) fn moe(&mut self, block: BlockIx, laid: &MoeLaid) {
        const BLOCK: usize = 32;
        // as in `moe_in.wgsl`
        const ROUTER_BLOCK: usize = 4;
        const DOWN_BLOCK: u32 = 8;
        let g = self.moe_geometry();
        let (hidden, layer) = (self.hidden(), laid.layer);
        let bank = self.frame.weights.bank(layer);
        let [up, down] = laid.shared;
        let [expert_up, expert_down] = bank.place.mlp;
        let logits = (self.buffer_rows() * hidden) as u32;
        self.section = Section::Route(layer);
        // What a partial bank's route left must be found by the copy that does not know where the slot halted.
        let routes = Name::Routes(if self.frame.full { layer } else { crate::ids::LayerIx(0) });

        let mut choice = self.choice(up.format, 4);
        choice.out = down.format.encoding(self.int8());
        let router_groups = g.experts.div_ceil(ROUTER_BLOCK) as u32;
        let params = params::MoeIn {
            norm: laid.norm,
            gate: laid.gate,
            router_groups,
            rows: up.rows as u32,
            base: up.base,
            side: up.side,
            field: up.field,
            next_field: down.field,
            logits,
            ..params::MoeIn::default()
        };
        let mut numbers = self.staged(&choice, hidden);
        numbers.extend([
            ("BLOCK", BLOCK),
            ("EXPERTS", g.experts),
            ("OUT_COLS", down.cols),
            ("OUT_CELLS", choice.rows * BLOCK),
        ]);
        let arena = Name::Arena(block);
        let groups = [router_groups + (down.cols as u32).div_ceil(BLOCK as u32), self.batches(choice.rows), 1];
        self.push(
            key(&MOE_IN, &choice, &numbers, &self.floats()),
            Class::Router,
            bytemuck::bytes_of(&params),
            &[self.control, arena, arena, self.x, Name::Routing, Name::SharedAct, Name::SharedScale],
            groups,
        );

        let shared_down = |b: &mut Self| {
            let choice = b.choice(down.format, 1);
            let params = params::ProjAct {
                layer: u32::from(layer.0),
                rows: down.rows as u32,
                base: down.base,
                side: down.side,
                stride: hidden as u32,
                ..params::ProjAct::default()
            };
            let mut numbers = b.staged(&choice, down.cols);
            numbers.push(("BLOCK", DOWN_BLOCK as usize));
            let groups = [(down.rows as u32).div_ceil(DOWN_BLOCK), b.batches(choice.rows), 1];
            b.push(
                key(&PROJ_ACT, &choice, &numbers, &[]),
                Class::ShDown,
                bytemuck::bytes_of(&params),
                &[b.control, arena, arena, Name::SharedAct, Name::SharedScale, Name::SharedOut(layer), Name::Routing],
                groups,
            );
        };

        // The route, then the shared down beside the experts. With a full bank the route never halts the slot, so the
        // shared down runs beside the route instead.
        if self.frame.full {
            shared_down(self);
        }
        let mut choice = self.choice(expert_up.format, 1);
        let at_once = choice.rows.min(rows_at_once(self.frame.rows, expert_down.format.encoding(self.int8())));
        let single = !self.frame.full && self.frame.weights.chooses_singly(self.frame.activations);
        let at_once = if single { 1 } else { at_once };
        choice.rows = at_once;
        let batches = self.batches(at_once);
        let weights_at = batches * (1 + at_once * g.top_k * (3 + at_once)) as u32;
        let params = params::Route {
            logits,
            bias: laid.bias,
            map: layer.0 as u32 * g.experts as u32,
            layer: u32::from(layer.0),
            weights_at,
            norm_topk: u32::from(g.norm_topk),
            scale: g.scale,
            counts: (super::slot::counts_at(g) + layer.index() * g.experts) as u32,
        };
        let numbers = [
            ("EXPERTS", g.experts),
            ("TOP_K", g.top_k),
            ("N_GROUP", g.n_group),
            ("TOPK_GROUP", g.topk_group),
            ("SCORES", at_once * g.experts),
            ("PICKS", at_once * g.top_k),
            ("GROUPS", at_once * g.n_group),
            ("AT_CELLS", at_once * at_once * g.top_k),
            ("BATCHES", batches as usize),
        ];
        self.push(
            key(&ROUTE, &choice, &numbers, &[]),
            Class::Router,
            bytemuck::bytes_of(&params),
            &[self.control, arena, Name::Routing, Name::Map, routes],
            [1, 1, 1],
        );
        self.section = Section::Experts(layer);
        if !self.frame.full {
            shared_down(self);
        }

        let mut choice = self.choice(expert_up.format, 2);
        choice.rows = at_once;
        choice.out = expert_down.format.encoding(self.int8());
        let params = params::ExpertsUp {
            layer: u32::from(layer.0),
            place: (bank.place.bytes / 16) as u32,
            base: expert_up.base,
            side: expert_up.side,
            field: expert_up.field,
            rows: expert_up.rows as u32,
            next_field: expert_down.field,
            pad: 0,
        };
        let (block, down_block) = (BLOCK * self.frame.bank_rep, DOWN_BLOCK * self.frame.bank_rep as u32);
        let mut numbers = self.staged(&choice, hidden);
        numbers.extend([
            ("BLOCK", block),
            ("TOP_K", g.top_k),
            ("OUT_COLS", expert_down.cols),
            ("OUT_CELLS", at_once * block),
        ]);
        let experts = (at_once * g.top_k).min(g.experts) as u32;
        let bank_name = Name::Bank(layer);
        self.push(
            key(&EXPERTS_UP, &choice, &numbers, &[]),
            Class::ExpUp,
            bytemuck::bytes_of(&params),
            &[
                self.control,
                bank_name,
                bank_name,
                Name::Routing,
                routes,
                Name::PickAct,
                Name::PickScale,
                Name::SharedAct,
            ],
            [(expert_down.cols as u32).div_ceil(block as u32), experts, batches],
        );

        // With a partial bank the sum belongs to the experts: it is left in `partial` where the slot halted, and the cure
        // adds what was missing. So nothing is left to do from the layer's sum on.
        if self.frame.full {
            self.section = Section::Sum(layer);
        }
        let mut choice = self.choice(expert_down.format, 1);
        choice.rows = at_once;
        let params = params::ExpertsDown {
            layer: u32::from(layer.0),
            place: (bank.place.bytes / 16) as u32,
            base: expert_down.base,
            side: expert_down.side,
            rows: expert_down.rows as u32,
            stride: hidden as u32,
            weights_at,
            pad: 0,
        };
        let numbers = [
            ("COLS", expert_down.cols),
            ("SIDE_WORDS", expert_down.format.side_words(expert_down.cols)),
            ("TOP_K", g.top_k),
            ("BLOCK", down_block as usize),
            ("PICKS", at_once * g.top_k),
            ("WEIGHTS", at_once * at_once * g.top_k),
            ("BY_PICK", usize::from(choice.by_pick())),
        ];
        self.push(
            key(&EXPERTS_DOWN, &choice, &numbers, &[]),
            Class::ExpDown,
            bytemuck::bytes_of(&params),
            &[
                self.control,
                bank_name,
                bank_name,
                Name::PickAct,
                Name::PickScale,
                routes,
                Name::SharedOut(layer),
                self.x,
                Name::Partial,
            ],
            [(expert_down.rows as u32).div_ceil(down_block), 1, batches],
        );
        let next = crate::ids::LayerIx(layer.0 + 1);
        self.section =
            if next.index() < self.frame.weights.banks.len() { Section::Route(next) } else { Section::Accept };
    }

    /// Rows that the slot's buffers hold.
    fn buffer_rows(&self) -> usize {
        super::slot::ROWS
    }

    /// Logits of the decoder's rows, or of the draft layer's.
    pub(super) fn head(&mut self, draft: bool) {
        let groups = head_groups(self.frame.weights);
        let mut first_group = 0;
        for (i, part) in self.frame.weights.head.iter().enumerate() {
            let choice = self.choice(part.laid.format, 4);
            let own = (part.laid.rows as u32).div_ceil(HEAD_BLOCK);
            let params = params::Head {
                norm: if draft { part.draft_norm } else { part.norm },
                rows: part.laid.rows as u32,
                first_id: part.first as u32,
                base: part.laid.base,
                side: part.laid.side,
                field: part.laid.field,
                groups,
                first_group,
                vocab: self.frame.geometry.vocab as u32,
                keep_logits: u32::from(self.frame.keep_logits && !draft),
                pad: [0; 2],
            };
            first_group += own;
            let mut numbers = self.staged(&choice, part.laid.cols);
            numbers.extend([("BLOCK", HEAD_BLOCK as usize), ("BEST_CELLS", choice.rows * WG as usize / 4)]);
            let name = Name::Head(i as u16);
            self.push(
                key(&HEAD, &choice, &numbers, &self.floats()),
                Class::Head,
                bytemuck::bytes_of(&params),
                &[self.control, name, name, self.x, Name::Best, Name::Logits],
                [own, self.batches(choice.rows), 1],
            );
        }
    }

    /// The id of a step, and its embedding.
    fn pick(&mut self) {
        let groups = head_groups(self.frame.weights);
        let last = self.frame.weights.embedding.len() - 1;
        for (i, part) in self.frame.weights.embedding.iter().enumerate() {
            let choice = self.choice(part.laid.format, 1);
            let params = params::PickEmbed {
                groups,
                rows: part.laid.rows as u32,
                first_id: part.first as u32,
                base: part.laid.base,
                side: part.laid.side,
                field: part.laid.field,
                last: u32::from(i == last),
                room: OUT_ROOM as u32,
            };
            let layers = self.frame.weights.banks.len() as u32;
            let numbers = [("COLS", self.hidden()), ("LAST_BLOCK", (2 * layers).saturating_sub(1) as usize)];
            let name = Name::Embedding(i as u16);
            self.push(
                key(&PICK_EMBED, &choice, &numbers, &[]),
                Class::Final,
                bytemuck::bytes_of(&params),
                &[self.control, name, name, Name::Best, Name::Out, self.x],
                [1, 1, 1],
            );
        }
    }
}

/// One matrix of an opening projection and where its outputs go.
pub(super) struct Opening {
    pub(super) laid: Laid,
    pub(super) kept: bool,
    pub(super) offset: usize,
    pub(super) stride: usize,
}
