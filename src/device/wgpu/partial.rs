//! Partial banks: what a miss leaves, its cure, and experts on their way into a place.
//!
//! A route that finds a pick without a place stops the slot. The record of a
//! landing or a peek then carries the normed rows and the picks; the layer's
//! resident and shared experts have run, into `partial` (a step) or into each
//! pick's place (a pass). A cure is written behind everything queued before
//! it and does nothing unless its stop is the slot's present one, which the
//! device itself decides.

use super::super::kernels::{CURE, Choice, Encoding, FILL_PASS, FILL_STEP, Format, RESUME_PASS, RESUME_STEP};
use super::super::params::{Flight, NONE};
use super::super::pass::TILE_ROWS;
use super::adapter::Context;
use super::core::Core;
use super::decode::{ROWS_MAX, WG, key};
use super::layout::{padded, rows_padded};
use super::pipelines::Key;
use super::prefill;
use super::queue::GpuQueue;
use super::slot::{COMPLETED_ROOM, counts_at};
use super::staged::Staged;
use super::upload::Uploader;
use super::weights::write_expert;
use crate::check;
use crate::device::{Completions, DeviceError, Item, Missed, Payload, Run, Stamp, Stop, UploadStaging, Work};
use crate::ids::{ExpertIx, LayerIx, PlaceIx, Position, SlotIx, Turn};
use crate::knobs::DispatchClass;
use crate::model::geometry::{Geometry, MoeGeometry};
use crate::plan::record::{Dispatch, Grid, Name, Plan, Section};

/// How a batch runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// Through the plan of a step.
    Step,
    /// Through the plan of a verify pass, of so many rows.
    Verify(u32),
    /// Through the plan of a pass, of so many rows.
    Pass(u32),
    /// Through the plan of a pass that brings what the bank lacks: nothing misses.
    Streamed,
}

impl Form {
    /// How a run's batches run where a route may halt them. Row by row only where there is one row: where a slot halted
    /// within a batch, its record does not say.
    #[must_use]
    pub fn of(run: &Run, hidden: usize) -> Self {
        match &run.work {
            Work::Prefill(pass) if pass.rows.len() > hidden => Self::Pass((pass.rows.len() / hidden) as u32),
            Work::Rounds { depth } => Self::Verify(*depth as u32 + 1),
            _ => Self::Step,
        }
    }

    /// Rows of a batch.
    #[must_use]
    pub const fn rows(self) -> u32 {
        match self {
            Self::Step | Self::Streamed => 1,
            Self::Verify(rows) | Self::Pass(rows) => rows,
        }
    }
}

/// What of a slot's record is there for partial banks, behind the ids: counts of all choices since the slot was made
/// `[layers, experts]`, then the picks of the last route, then its normed rows.
#[derive(Clone, Copy, Debug)]
pub struct MissLaid {
    layers: usize,
    experts: usize,
    top_k: usize,
    hidden: usize,
    /// Whether rows of a verify pass choose one by one.
    single: bool,
}

/// Which of [`MissLaid::pieces`] is the counts.
pub const COUNTS: usize = 0;

/// A copy to a record.
#[derive(Clone, Copy, Debug)]
pub struct Piece {
    /// From which buffer.
    pub from: Name,
    /// From which byte.
    pub at: u64,
    /// How many bytes.
    pub bytes: u64,
}

impl MissLaid {
    /// Of a model with experts.
    #[must_use]
    pub fn new(core: &Core, moe: &MoeGeometry) -> Self {
        let geometry = &core.geometry;
        let single = core.weights.chooses_singly(core.activations);
        let (layers, hidden) = (geometry.decoder_layers(), geometry.hidden);
        Self { layers, experts: moe.experts, top_k: moe.top_k, hidden, single }
    }

    /// What is copied, in order.
    #[must_use]
    pub fn pieces(&self, moe: &MoeGeometry, form: Form) -> [Piece; 3] {
        let first = Name::Routes(LayerIx(0));
        let piece = |from, at: usize, words: usize| Piece { from, at: 4 * at as u64, bytes: 4 * words as u64 };
        let [picks, rows] = self.words(form);
        let [of_picks, of_rows] = match form {
            Form::Step | Form::Verify(_) => [first, Name::Routing],
            Form::Pass(_) | Form::Streamed => prefill::MISS,
        };
        [piece(first, counts_at(moe), self.layers * self.experts), piece(of_picks, 0, picks), piece(of_rows, 0, rows)]
    }

    /// Words of the picks and of the normed rows.
    const fn words(&self, form: Form) -> [usize; 2] {
        let hidden = self.hidden.next_multiple_of(32);
        match form {
            Form::Step | Form::Verify(_) => {
                let at_once = rows_chosen_at_once(form.rows(), self.single);
                let unions = form.rows() as usize / at_once;
                [unions * union_words(self.top_k, at_once), form.rows() as usize * hidden]
            }
            Form::Streamed => [0, 0],
            Form::Pass(rows) => [4 * rows as usize * self.top_k, rows as usize * hidden],
        }
    }

    /// Bytes of all pieces.
    #[must_use]
    pub const fn bytes(&self, form: Form) -> u64 {
        let [picks, rows] = self.words(form);
        4 * (self.layers * self.experts + picks + rows) as u64
    }

    /// How often each expert was chosen since `before`, which becomes what is now: `[layers][experts]`; empty where none
    /// was.
    #[must_use]
    pub fn routed(&self, bytes: &[u8], before: &mut Vec<u32>) -> Vec<Vec<u32>> {
        let counts: Vec<u32> = bytemuck::pod_collect_to_vec(&bytes[..4 * self.layers * self.experts]);
        before.resize(counts.len(), 0);
        if counts == *before {
            return Vec::new();
        }
        let since = |(now, before): (&u32, &u32)| now.wrapping_sub(*before);
        let layers = counts.chunks_exact(self.experts).zip(before.chunks_exact(self.experts));
        let routed = layers.map(|(now, before)| now.iter().zip(before).map(since).collect()).collect();
        *before = counts;
        routed
    }

    /// The miss at `stop`.
    #[must_use]
    pub fn missed(&self, stop: Stop, form: Form, bytes: &[u8]) -> Missed {
        let [picks, rows] = self.words(form);
        // only what this form wrote: the buffer has room for a pass, and a step's miss must not wait for its bytes
        let own = &bytes[4 * self.layers * self.experts..][..4 * (picks + rows)];
        let (picks, normed) = own.split_at(4 * picks);
        let picks: Vec<u32> = bytemuck::pod_collect_to_vec(picks);
        // (expert, place), by row and pick
        let picks: Vec<(u32, u32)> = match form {
            Form::Step | Form::Verify(_) => {
                let at_once = rows_chosen_at_once(form.rows(), self.single);
                let mut of_rows = vec![(0, NONE); form.rows() as usize * self.top_k];
                let unions = picks.chunks_exact(union_words(self.top_k, at_once));
                for (union, rows) in unions.zip(of_rows.chunks_exact_mut(at_once * self.top_k)) {
                    let entries = union[1..].chunks_exact(3 + at_once).take(union[0] as usize);
                    for entry in entries {
                        let by = (0..at_once).filter(|row| entry[2] >> row & 1 == 1);
                        by.for_each(|row| rows[row * self.top_k + entry[3 + row] as usize] = (entry[0], entry[1]));
                    }
                }
                of_rows
            }
            Form::Pass(_) | Form::Streamed => picks.chunks_exact(4).map(|pick| (pick[0], pick[1])).collect(),
        };
        let mut missed = Missed {
            stop,
            layer: stop.point.layer,
            top_k: self.top_k,
            normed: Vec::new(),
            rows: Vec::new(),
            picks: Vec::new(),
            missing: Vec::new(),
        };
        let rows = picks.chunks_exact(self.top_k).zip(normed.chunks_exact(4 * padded(self.hidden)));
        let misses = |picks: &[(u32, u32)]| picks.iter().any(|(_, place)| *place == NONE);
        let n = picks.chunks_exact(self.top_k).filter(|picks| misses(picks)).count();
        missed.normed.reserve_exact(n * self.hidden);
        for (row, (picks, normed)) in rows.enumerate().filter(|(_, (picks, _))| misses(picks)) {
            missed.rows.push(row as u32);
            let floats = normed.as_chunks().0[..self.hidden].iter().map(|word| f32::from_le_bytes(*word));
            missed.normed.extend(floats);
            missed.picks.extend(picks.iter().map(|(expert, _)| ExpertIx(*expert as u16)));
            missed.missing.extend(picks.iter().map(|(_, place)| *place == NONE));
        }
        missed
    }
}

/// Rows that one union of choices is of.
const fn rows_chosen_at_once(rows: u32, single: bool) -> usize {
    if single { 1 } else { rows as usize }
}

/// Words of a union of choices, as `routes.wgsl` has it.
const fn union_words(top_k: usize, at_once: usize) -> usize {
    1 + at_once * top_k * (3 + at_once)
}

const SUM_OF_STEP: usize = 0;
const PICKS_OF_PASS: usize = 1;
const END: usize = 2;
const FILL_OF_PASS: usize = 3;
/// For one row chosen at once; those for more come behind it.
const FILL_OF_STEP: usize = 4;

/// The dispatches of cures and fills, each used by itself.
#[must_use]
pub fn plan(context: &Context, geometry: &Geometry, moe: &MoeGeometry) -> Plan<Key> {
    let choice = Choice {
        team: context.team,
        format: Format::F32,
        int8: false,
        out: Encoding::F32,
        rows: 1,
        wide: 1,
        group_norm: false,
        full: false,
        pass: false,
    };
    let hidden = padded(geometry.hidden);
    let numbers = [("COLS", hidden), ("TOP_K", moe.top_k)];
    let [made, routes, list] = prefill::CURED;
    let first = Name::Routes(LayerIx(0));
    let of_step = [Name::Control, Name::Cure, Name::Completed, first, Name::Partial, Name::X];
    let all: [(_, &[Name], _); 4] = [
        (&RESUME_STEP, &of_step, Grid::Rows { per: 1, x: (hidden as u32).div_ceil(WG), z: 1 }),
        (&RESUME_PASS, &[Name::Control, Name::Cure, Name::Completed, made], Grid::Fixed([COMPLETED_ROOM as u32, 1, 1])),
        (&CURE, &[Name::Control, Name::Cure], Grid::Fixed([1, 1, 1])),
        (&FILL_PASS, &[Name::Control, Name::Cure, routes, list], Grid::Fixed([1, 1, 1])),
    ];
    let mut plan = Plan::default();
    for (kernel, buffers, grid) in all {
        let key = key(kernel, &choice, &numbers, &[]);
        plan.push(key, DispatchClass::Final, (Section::Accept, None), &[], buffers, grid);
    }
    for rows in 1..=ROWS_MAX {
        let key = key(&FILL_STEP, &Choice { rows, ..choice }, &numbers, &[]);
        let buffers = [Name::Control, Name::Cure, first];
        // a workgroup a union
        let grid = Grid::Rows { per: rows as u32, x: 1, z: 1 };
        plan.push(key, DispatchClass::Final, (Section::Accept, None), &[], &buffers, grid);
    }
    plan
}

/// What lies where, as of the end of the queue.
#[derive(Clone, Debug)]
pub struct Held {
    /// `[layer][place]`
    places: Vec<Vec<Option<ExpertIx>>>,
    experts: usize,
}

impl Held {
    /// As the banks were filled.
    #[must_use]
    pub fn new(core: &Core) -> Self {
        let places = core.weights.banks.iter().map(|bank| bank.residents.clone()).collect();
        Self { places, experts: core.geometry.moe.map_or(0, |moe| moe.experts) }
    }

    /// What lies in the places: `[layer][place]`.
    #[must_use]
    pub fn places(&self) -> &[Vec<Option<ExpertIx>>] {
        &self.places
    }

    /// Experts of a layer.
    #[must_use]
    pub fn experts(&self) -> usize {
        self.experts
    }

    /// Words of the map that change when an expert comes to a place, with their new values. The spare place is in no map.
    fn moves(&mut self, layer: LayerIx, place: PlaceIx, expert: ExpertIx) -> Vec<(u64, u32)> {
        let at = |expert: ExpertIx| (layer.index() * self.experts + expert.index()) as u64;
        let places = &mut self.places[layer.index()];
        if place.index() >= places.len() {
            return Vec::new();
        }
        let mut moves = Vec::new();
        // an expert that lies elsewhere already leaves that place empty
        for held in places.iter_mut().filter(|held| **held == Some(expert)) {
            *held = None;
        }
        if let Some(out) = places[place.index()].replace(expert) {
            moves.push((at(out), NONE));
        }
        moves.push((at(expert), place.index() as u32));
        moves
    }
}

impl GpuQueue {
    /// Puts an expert into a place, and the map right, behind everything queued before.
    pub(super) fn upload(
        &mut self,
        layer: LayerIx,
        place: PlaceIx,
        payload: &Payload,
        staging: UploadStaging,
    ) -> Result<(), DeviceError> {
        check!(Place, payload.layer == layer, "{payload:?} arrived in {layer:?}");
        self.end_cures();
        self.submit_ready();
        let context = self.core.context.clone();
        let laid = payload.staged.as_ref().and_then(|staged| staged.downcast_ref::<Staged>());
        if let Some(laid) = laid {
            let mut encoder = self.take_open();
            let bank = &self.core.weights.banks[layer.index()];
            let at = place.index() as u64 * bank.place.bytes;
            encoder.copy_buffer_to_buffer(laid.buffer(), 0, &bank.buffer, at, bank.place.bytes);
            self.open = Some(encoder);
        } else {
            check!(Place, payload.is_intact(), "{payload:?} arrived changed");
            let bank = &self.core.weights.banks[layer.index()];
            let expert = bank.expert_of(payload.expert, &payload.bytes)?;
            write_expert(&Uploader::new(&context, u64::MAX), bank, place, &expert);
        }
        // written before the copy runs, which nobody sees: nothing else goes with this submission
        for (word, value) in self.held.moves(layer, place, payload.expert) {
            context.queue.write_buffer(&self.core.weights.map, 4 * word, bytemuck::bytes_of(&value));
        }
        let submission = self.submit();
        self.shared.expect_upload(staging, submission);
        Ok(())
    }

    /// Begins a cure. Its last dispatches are encoded by whatever follows, into the same submission.
    pub(super) fn resume(&mut self, stop: Stop, turn: Turn, made: &Completions, form: Form) -> Result<(), DeviceError> {
        let Some(moe) = self.core.geometry.moe.filter(|_| self.core.mend.is_some()) else {
            return Err(DeviceError::Unfit { why: "a miss on a device whose banks are full".into() });
        };
        self.end_cures();
        let (slot, hidden) = (stop.slot, self.core.geometry.hidden);
        let rows = form.rows();
        let most = rows as usize * moe.top_k;
        let weights_at = self.weights_at(form);
        let good: Vec<(u32, &[f32])> = (made.at.iter().copied())
            .zip(made.outputs.chunks_exact(hidden))
            .filter(|(at, _)| (*at as usize) < most)
            .collect();
        let of_stop = Stamp { flight: stop.flight, slot, turn: stop.turn };
        let flight = self.flight_of(of_stop, Position(0), rows, 0, false, false);
        self.write(slot, Name::FlightCure, 0, bytemuck::bytes_of(&flight));
        let mut parts = good.chunks(COMPLETED_ROOM).peekable();
        loop {
            let part = parts.next().unwrap_or(&[]);
            let mut cure = vec![turn.0, u32::from(stop.point.layer.0), part.len() as u32, weights_at];
            cure.extend(part.iter().map(|(at, _)| *at));
            self.write(slot, Name::Cure, 0, bytemuck::cast_slice(&cure));
            if part.len() * hidden == made.outputs.len() && padded(hidden) == hidden {
                // as they lie: these floats were written by other cores, and each look at them costs
                self.write(slot, Name::Completed, 0, bytemuck::cast_slice(&made.outputs));
            } else if !part.is_empty() {
                let floats: Vec<f32> = part.iter().flat_map(|(_, made)| *made).copied().collect();
                self.write(slot, Name::Completed, 0, &rows_padded(&floats, hidden));
            }
            if parts.peek().is_none() {
                break;
            }
            self.mend(slot, &[PICKS_OF_PASS], rows);
        }
        self.cures.push((slot, form));
        Ok(())
    }

    /// Word behind the picks of a route, where their weights lie.
    pub(super) fn weights_at(&self, form: Form) -> u32 {
        self.shared.miss().map_or(0, |laid| laid.words(form)[0]) as u32
    }

    /// Encodes the end of a step's cure.
    pub(super) fn end_cure_of_step(&mut self, slot: SlotIx, rows: u32) {
        self.mend(slot, &[SUM_OF_STEP, END], rows);
    }

    /// Encodes the ends of cures that were begun.
    pub(super) fn end_cures(&mut self) {
        for (slot, form) in std::mem::take(&mut self.cures) {
            let first = if matches!(form, Form::Pass(_)) { PICKS_OF_PASS } else { SUM_OF_STEP };
            self.mend(slot, &[first, END], form.rows());
        }
    }

    /// Computes a missing expert from the place it was uploaded to, for all rows that miss it.
    pub(super) fn fill(
        &mut self,
        stamp: Stamp,
        layer: LayerIx,
        place: PlaceIx,
        expert: ExpertIx,
        form: Form,
    ) -> Result<(), DeviceError> {
        let Some(moe) = self.core.geometry.moe.filter(|_| self.core.mend.is_some()) else {
            return Err(DeviceError::Unfit { why: "a miss on a device whose banks are full".into() });
        };
        self.end_cures();
        let slot = stamp.slot;
        let rows = form.rows();
        let flight = self.flight_of(stamp, Position(0), rows, 0, false, false);
        let bank = &self.core.weights.banks[layer.index()];
        let sorted = prefill::sorted_at(&moe, self.core.sizes.given, bank.residents.len());
        let cure = [u32::from(expert.0), place.index() as u32, sorted, TILE_ROWS];
        self.write(slot, Name::Flight, 0, bytemuck::bytes_of(&flight));
        self.write(slot, Name::FlightCure, 0, bytemuck::bytes_of::<Flight>(&flight));
        self.write(slot, Name::Cure, 0, bytemuck::cast_slice(&cure));
        let step = !matches!(form, Form::Pass(_));
        let at_once = rows_chosen_at_once(rows, self.core.weights.chooses_singly(self.core.activations));
        self.mend(slot, &[if step { FILL_OF_STEP + at_once - 1 } else { FILL_OF_PASS }], rows);
        let mut encoder = self.encoder();
        if step {
            // resident and shared experts are in the residual already
            let shared = self.core.slots[slot.index()].slot.buffer(Name::SharedOut(layer));
            super::upload::clear(&self.core.context, &mut encoder, shared);
        }
        {
            let bound = &self.core.slots[slot.index()];
            let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
            let wanted = |dispatch: &Dispatch| {
                dispatch.section == Section::Experts(layer)
                    && matches!(dispatch.class, DispatchClass::ExpUp | DispatchClass::ExpDown)
            };
            match form {
                Form::Step => self.core.step.encode(&mut pass, &bound.step, 1, wanted, |_, _| {}),
                Form::Verify(rows) => {
                    let at = rows as usize - 2;
                    if let (Some(rounds), Some(bound)) = (&self.core.rounds, &bound.rounds) {
                        rounds.verify[at].encode(&mut pass, &bound.verify[at], rows, wanted, |_, _| {});
                    }
                }
                Form::Pass(_) | Form::Streamed => {
                    self.core.pass[0].encode(&mut pass, &bound.pass[0], rows, wanted, |_, _| {})
                }
            }
        }
        self.ready.push(encoder.finish());
        Ok(())
    }

    /// What comes before a run's first dispatch: ends of cures.
    pub(super) fn begin_run(&mut self, run: &Run) {
        self.forms[run.stamp.slot.index()] = Form::of(run, self.core.geometry.hidden);
        self.end_cures();
    }

    /// Encodes dispatches of the cures' plan.
    fn mend(&mut self, slot: SlotIx, which: &[usize], rows: u32) {
        let mut encoder = self.take_open();
        {
            let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
            let ready = self.core.mend.as_ref().expect("a partial bank");
            let groups = &self.core.slots[slot.index()].mend;
            for at in which {
                let dispatch = &ready.plan.dispatches[*at];
                pass.set_pipeline(&ready.pipelines[dispatch.pipeline].pipeline);
                pass.set_bind_group(0, &groups[*at], &[]);
                let [x, y, z] = dispatch.grid.groups(rows);
                pass.dispatch_workgroups(x, y, z);
            }
        }
        self.open = Some(encoder);
    }
}

/// How the run behind item `at` of an append runs.
pub(super) fn form_behind(items: &[Item], at: usize, hidden: usize) -> Option<Form> {
    items[at..].iter().find_map(|item| match item {
        Item::Run(run) => Some(Form::of(run, hidden)),
        _ => None,
    })
}
