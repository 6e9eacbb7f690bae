//! The submitter's half: items become command buffers, in order.

use std::sync::Arc;
use std::time::Duration;

use tracing::trace_span;

use super::super::params::{Control, Flight};
use super::super::times::WorkKind;
use super::core::Core;
use super::decode::RING;
use super::landing::{Copied, RECORD_BYTES, Report, Shared, stop};
use super::layout::padded;
use super::pace::{Pace, Unit};
use super::partial::{COUNTS, Form, Held, form_behind};
use super::prefill::{ROWS_MIN, split_of};
use super::prepared::{Encoded, Prepared};
use super::rounds::draft_block;
use super::slot::ROWS;
use super::stamps::{Recording, Stamps, stamp};
use super::stream::Desk;
use super::upload::buffer;
use crate::device::{DeviceError, Item, Pass, Phase, Point, Queue, Read, Run, Seed, Staging, Stamp, Work};
use crate::ids::{BlockIx, Position, SlotIx, TokenId, Turn};
use crate::knobs::DispatchClass;
use crate::model::geometry::BlockKind;
use crate::model::state::{BlockState, KvState};
use crate::plan::record::{Dispatch, Name, Section};

/// The half itself.
#[derive(Debug)]
pub struct GpuQueue {
    pub(super) core: Core,
    pub(super) shared: Arc<Shared>,
    /// The encoder of what comes next, if anything was encoded into it: behind all that is ready.
    pub(super) open: Option<wgpu::CommandEncoder>,
    /// Encoded and not submitted.
    pub(super) ready: Vec<wgpu::CommandBuffer>,
    /// How the last run of each slot ran.
    pub(super) forms: Vec<Form>,
    /// Cures whose end is not encoded yet.
    pub(super) cures: Vec<(SlotIx, Form)>,
    /// What lies in the banks.
    pub(super) held: Held,
    /// Positions that a slot may have reached, by slot.
    pub(super) reach: Vec<usize>,
    /// Timestamps, where they are asked for.
    pub(super) stamps: Option<Stamps>,
    /// How much one submission may hold.
    pace: Pace,
    /// What the next landing ends.
    pub(super) measured: Option<(Unit, usize)>,
    /// Command buffers made ready ahead of their cure.
    pub(super) prepared: Vec<Prepared>,
    /// Where command buffers go while they are made ready: with what is copied behind each.
    pub(super) recorded: Option<Vec<Encoded>>,
    /// Mapped buffers that cures travel through.
    pub(super) cure_staging: super::prepared::Free,
    /// What waits behind a pass that streams.
    pub(super) behind: Option<std::sync::Weak<Desk>>,
}

/// Rows times blocks of one submission of a pass, at most: the host encodes the next while one runs.
const PASS_BLOCK_ROWS: usize = 8192;

/// What is profiled.
#[derive(Clone, Copy, Debug)]
enum Profiled {
    Step,
    Pass(u32),
    Draft(usize),
    Verify(usize),
}

/// Where a section stands in its batch.
fn order(section: Section, layers: usize) -> usize {
    match section {
        Section::Route(layer) => 3 * layer.index(),
        Section::Experts(layer) => 3 * layer.index() + 1,
        Section::Sum(layer) => 3 * layer.index() + 2,
        Section::Accept => 3 * layers,
    }
}

fn order_of(point: Point) -> usize {
    3 * point.layer.index() + if point.phase == Phase::Sum { 2 } else { 0 }
}

impl GpuQueue {
    /// A queue over a model's core.
    #[must_use]
    pub fn new(core: Core, shared: Arc<Shared>) -> Self {
        let reach = vec![0; core.slots.len()];
        let (forms, held) = (vec![Form::Step; core.slots.len()], Held::new(&core));
        let pace = Pace::new(core.context.submission_most);
        let stamps = core.times.clone().map(|times| Stamps::new(core.context.clone(), times));
        Self {
            core,
            shared,
            open: None,
            ready: Vec::new(),
            forms,
            cures: Vec::new(),
            held,
            reach,
            stamps,
            pace,
            measured: None,
            prepared: Vec::new(),
            recorded: None,
            cure_staging: super::prepared::Free::default(),
            behind: None,
        }
    }

    /// What it is made of.
    #[must_use]
    pub fn core(&self) -> &Core {
        &self.core
    }

    /// An encoder of one's own, to be pushed to what is ready.
    pub(super) fn encoder(&mut self) -> wgpu::CommandEncoder {
        self.close();
        self.core.context.device.create_command_encoder(&wgpu::CommandEncoderDescriptor { label: Some("flight") })
    }

    /// The encoder that is open, to be put back: each one costs, so a submission has one where nothing forbids it.
    pub(super) fn take_open(&mut self) -> wgpu::CommandEncoder {
        self.open.take().unwrap_or_else(|| self.encoder())
    }

    fn close(&mut self) {
        if let Some(encoder) = self.open.take() {
            self.ready.push(encoder.finish());
        }
    }

    pub(super) fn submit(&mut self) -> wgpu::SubmissionIndex {
        self.close();
        let _span = trace_span!(target: "riparian::wgpu", "submit", buffers = self.ready.len()).entered();
        let index = self.core.context.queue.submit(self.ready.drain(..));
        if let Some(stamps) = &mut self.stamps {
            stamps.submitted();
        }
        index
    }

    /// Timestamps for a command buffer of this kind of work, where they are asked for.
    pub(super) fn stamped(&mut self, kind: WorkKind) -> Option<Recording> {
        self.stamps.as_mut().and_then(|stamps| stamps.begin(kind).ok().flatten())
    }

    pub(super) fn end_stamps(&mut self, recording: Option<Recording>, encoder: &mut wgpu::CommandEncoder) {
        if let (Some(stamps), Some(recording)) = (&mut self.stamps, recording) {
            stamps.end(recording, encoder);
        }
    }

    /// Submits what is encoded.
    pub(super) fn submit_ready(&mut self) {
        if self.open.is_some() || !self.ready.is_empty() {
            self.submit();
        }
    }

    /// Writes a slot's buffer after everything before it.
    pub(super) fn write(&mut self, slot: SlotIx, name: Name, offset: u64, bytes: &[u8]) {
        self.submit_ready();
        let _span = trace_span!(target: "riparian::wgpu", "write", bytes = bytes.len()).entered();
        let to = self.core.slots[slot.index()].slot.buffer(name);
        self.core.context.queue.write_buffer(to, offset, bytes);
    }

    fn start(&mut self, slot: SlotIx, turn: Turn, eos: &[TokenId], seed: Option<&Seed>) -> Result<(), DeviceError> {
        let mut control = Control { turn: turn.0, eos_count: eos.len() as u32, kept: 1, ..Control::default() };
        if eos.len() > control.eos.len() {
            return Err(DeviceError::Unfit { why: format!("{} end ids, of {}", eos.len(), control.eos.len()) });
        }
        for (cell, id) in control.eos.iter_mut().zip(eos) {
            *cell = id.0;
        }
        let mut encoder = self.encoder();
        let core = &self.core;
        for (_, state) in core.slots[slot.index()].slot.states(&core.geometry) {
            super::upload::clear(&core.context, &mut encoder, state);
        }
        self.ready.push(encoder.finish());
        self.reach[slot.index()] = 0;
        if let Some(seed) = seed {
            control.position = seed.state.position.0;
            self.reach[slot.index()] = seed.state.position.index();
            self.seed(slot, seed);
        }
        self.write(slot, Name::Control, 0, bytemuck::bytes_of(&control));
        if self.core.rounds.is_some() {
            // of no position yet there is no hidden row
            let stop = if control.position == 0 { stop::RETIRED } else { 0 };
            let before = Control { stop, position: control.position.wrapping_sub(1), ..control };
            self.write(slot, Name::ChainControl, 0, bytemuck::bytes_of(&before));
        }
        Ok(())
    }

    fn seed(&mut self, slot: SlotIx, seed: &Seed) {
        let geometry = self.core.geometry.clone();
        let position = seed.state.position.index();
        for (block, state) in seed.state.blocks.iter().enumerate() {
            let block = crate::ids::BlockIx::from(block);
            match state {
                BlockState::Mamba(mamba) => {
                    let g = geometry.mamba.as_ref().expect("checked on open");
                    let (channels, taps) = (g.conv_channels(), g.d_conv);
                    let mut ring = vec![0.0f32; RING * channels];
                    for (j, cell) in mamba.conv.iter().enumerate() {
                        let (channel, back) = (j / (taps - 1), taps - 1 - j % (taps - 1));
                        if position >= back {
                            ring[(position - back) % RING * channels + channel] = *cell;
                        }
                    }
                    self.write(slot, Name::Ring(block), 0, bytemuck::cast_slice(&ring));
                    self.write(slot, Name::State(block), 0, bytemuck::cast_slice(&mamba.ssm));
                }
                BlockState::Attention(kv) => {
                    self.seed_kv(slot, block, kv);
                }
                BlockState::None => {}
            }
        }
        if self.core.rounds.is_some() {
            // what a seed does not know of the draft layer is zero: drafts are worse then, ids are not
            let width = geometry.attention.as_ref().map_or(0, |g| g.kv_width());
            let mut draft = seed.state.draft.clone();
            draft.k.resize(width * position.saturating_sub(1), 0.0);
            draft.v.resize(width * position.saturating_sub(1), 0.0);
            self.seed_kv(slot, draft_block(&geometry), &draft);
            let mut hidden = seed.hidden.clone();
            hidden.resize(padded(geometry.hidden), 0.0);
            self.write(slot, Name::Hidden, 0, bytemuck::cast_slice(&hidden));
        }
    }

    fn seed_kv(&mut self, slot: SlotIx, block: BlockIx, kv: &KvState) {
        let width = self.core.geometry.attention.as_ref().expect("checked on open").kv_width();
        let mut rows = Vec::with_capacity(kv.k.len() * 2);
        for (k, v) in kv.k.chunks_exact(width).zip(kv.v.chunks_exact(width)) {
            rows.extend_from_slice(k);
            rows.extend_from_slice(v);
        }
        if !rows.is_empty() {
            self.write(slot, Name::Kv(block), 0, bytemuck::cast_slice(&rows));
        }
    }

    fn flight(&mut self, stamp: Stamp, limit: Position, rows: u32, advance: u32, accept: bool, ends: bool) {
        let flight = self.flight_of(stamp, limit, rows, advance, accept, ends);
        self.write(stamp.slot, Name::Flight, 0, bytemuck::bytes_of(&flight));
    }

    pub(super) fn flight_of(
        &self,
        stamp: Stamp,
        limit: Position,
        rows: u32,
        advance: u32,
        accept: bool,
        ends: bool,
    ) -> Flight {
        Flight {
            turn: stamp.turn.0,
            rows,
            flight: [stamp.flight.0 as u32, (stamp.flight.0 >> 32) as u32],
            limit: limit.0,
            accept: u32::from(accept),
            advance,
            ends: u32::from(ends),
        }
    }

    fn run(&mut self, run: &Run) -> Result<(), DeviceError> {
        let slot = run.stamp.slot;
        match &run.work {
            Work::Steps => {
                self.flight(run.stamp, run.limit, 1, 1, true, true);
                self.reach[slot.index()] += run.accepts() as usize;
                self.begin_run(run);
                self.batches(run, None);
            }
            Work::Prefill(pass) => self.prefill(run, pass)?,
            Work::Rounds { depth } if *depth > 0 && *depth < self.core.sizes.snapshots => {
                self.flight(run.stamp, run.limit, *depth as u32 + 1, 1, true, true);
                let most = self.core.sizes.positions;
                let reach = &mut self.reach[slot.index()];
                *reach = (*reach + run.accepts() as usize * (depth + 1)).min(most);
                self.begin_run(run);
                self.batches(run, None);
            }
            Work::Verify(_) | Work::Rounds { .. } => {
                return Err(DeviceError::Unfit { why: format!("{:?} on a device that offered no such", run.work) });
            }
        }
        Ok(())
    }

    /// Rows of a prefill pass.
    pub(super) fn pass_rows(&self, run: &Run) -> Option<usize> {
        match &run.work {
            Work::Prefill(pass) => Some(pass.rows.len() / self.core.geometry.hidden),
            _ => None,
        }
    }

    fn prefill(&mut self, run: &Run, pass: &Pass) -> Result<(), DeviceError> {
        let n = pass.rows.len() / self.core.geometry.hidden;
        let wide = if self.core.mend.is_some() { n > 1 } else { n >= ROWS_MIN };
        if self.core.streamed.as_ref().is_some_and(|streamed| streamed.takes(run, n)) {
            self.prefill_streamed(run, pass, n)?;
        } else if n > self.core.sizes.given {
            return Err(DeviceError::Unfit { why: format!("a pass of {n} rows, of {}", self.core.sizes.given) });
        } else if wide {
            self.prefill_wide(run, pass, n);
        } else {
            self.prefill_rows(run, pass);
        }
        Ok(())
    }

    /// Writes what the dispatches of a wide pass look at, and begins it.
    pub(super) fn begin_pass(&mut self, run: &Run, pass: &Pass, n: usize) {
        self.flight(run.stamp, run.limit, n as u32, n as u32, false, true);
        let last = self.flight_of(run.stamp, run.limit, 1, n as u32, pass.accept, true);
        self.write(run.stamp.slot, Name::FlightLast, 0, bytemuck::bytes_of(&last));
        self.begin_run(run);
        self.reach[run.stamp.slot.index()] += if run.from.is_batch_start() { n } else { 0 };
    }

    /// Encodes and submits the dispatches of a wide pass whose order lies in `range`, the step's head behind the last.
    /// `split` is which of the passes' plans; `None` the one that streams.
    pub(super) fn blocks(&mut self, slot: SlotIx, split: Option<usize>, n: usize, range: std::ops::Range<usize>) {
        let layers = self.core.weights.banks.len();
        let end = 3 * layers + 1;
        // a command buffer for every few blocks, each submitted by itself: a long one would trip a watchdog
        let blocks = self.core.geometry.blocks.len();
        let at_once = (self.pace.at_once(Unit::BlockRow).min(PASS_BLOCK_ROWS) / n).max(1);
        let in_range = |dispatch: &Dispatch| range.contains(&order(dispatch.section, layers));
        // what belongs to no block stands behind them all
        let place = |dispatch: &Dispatch| dispatch.block.map_or(blocks, crate::ids::BlockIx::index);
        let streamed = self.core.streamed.clone();
        for first in (0..=blocks).step_by(at_once) {
            let wanted = |d: &Dispatch| in_range(d) && (first..first + at_once).contains(&place(d));
            let head = (first..first + at_once).contains(&blocks) && range.end == end;
            let of_step = |ready: &super::core::Ready| ready.plan.dispatches.iter().any(wanted);
            let any = match split {
                Some(split) => of_step(&self.core.pass[split]),
                None => of_step(&streamed.as_ref().expect("a device that streams").pass),
            };
            if !any && !head {
                continue;
            }
            let mut encoder = self.encoder();
            let mut stamps = self.stamped(WorkKind::Prefill);
            {
                let bound = &self.core.slots[slot.index()];
                let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
                let wide = bound.streamed.as_ref();
                let (ready, groups) = match (split, &streamed, wide) {
                    (None, Some(streamed), Some(wide)) => (&streamed.pass, &wide.pass),
                    (split, ..) => (&self.core.pass[split.unwrap_or(0)], &bound.pass[split.unwrap_or(0)]),
                };
                ready.encode(&mut pass, groups, n as u32, wanted, |p, c| stamp(&mut stamps, p, c));
                if head {
                    if let (Some(rounds), Some(groups)) = (&self.core.rounds, &bound.rounds) {
                        let groups = wide.filter(|_| split.is_none()).map_or(&groups.pass, |wide| &wide.rounds);
                        let taken = |p: &mut wgpu::ComputePass<'_>, c| stamp(&mut stamps, p, c);
                        rounds.pass.encode(&mut pass, groups, n as u32, |_| true, taken);
                    }
                    let head = |dispatch: &Dispatch| dispatch.block.is_none();
                    self.core.step.encode(&mut pass, &bound.last, 1, head, |p, c| stamp(&mut stamps, p, c));
                }
            }
            self.end_stamps(stamps, &mut encoder);
            self.ready.push(encoder.finish());
            self.submit();
        }
    }

    /// All rows at once, through the plan of a pass; the last row goes through the step's head.
    fn prefill_wide(&mut self, run: &Run, pass: &Pass, n: usize) {
        let slot = run.stamp.slot;
        if run.from.is_batch_start() {
            self.write(slot, Name::Given, 0, &super::layout::rows_padded(&pass.rows, self.core.geometry.hidden));
        }
        let before = self.reach[slot.index()];
        self.begin_pass(run, pass, n);
        let split = split_of(n, before + n);

        let layers = self.core.weights.banks.len();
        let end = 3 * layers + 1;
        let mut peeks = run.peeks.iter().peekable();
        let mut at = order_of(run.from);
        let to = if run.to.batch == run.from.batch { order_of(run.to) } else { end };
        while at < to {
            let cut = peeks.next();
            let until = cut.map_or(to, |(point, _)| order_of(*point) + 1);
            self.blocks(slot, Some(split), n, at..until);
            if let Some((_, staging)) = cut {
                self.land(run.stamp, staging.0 as usize, Report::Peek);
            }
            at = until;
        }
        self.measured = Some((Unit::BlockRow, n * self.core.geometry.blocks.len()));
    }

    /// Row by row: the plan of a step, the rows taken from those given.
    fn prefill_rows(&mut self, run: &Run, pass: &Pass) {
        let hidden = self.core.geometry.hidden;
        let slot = run.stamp.slot;
        let n = pass.rows.len() / hidden;
        let given = super::layout::rows_padded(&pass.rows, hidden);
        self.write(slot, Name::Given, 0, &given);
        for row in 0..n {
            let last = row + 1 == n;
            if row == 0 || last {
                self.flight(run.stamp, run.limit, 1, 1, last && pass.accept, last);
            }
            if row == 0 {
                self.begin_run(run);
            }
            self.batches(run, Some(row));
        }
        self.reach[slot.index()] += n;
        debug_assert!(given.len() <= 4 * self.core.sizes.given * padded(hidden));
    }

    /// Encodes the run's batches from its first point to its last. `row` is the given row that a batch begins with.
    pub(super) fn batches(&mut self, run: &Run, row: Option<usize>) {
        let _span = trace_span!(target: "riparian::wgpu", "encode").entered();
        let layers = self.core.weights.banks.len();
        let end = 3 * layers + 1;
        let mut peeks = run.peeks.iter().peekable();
        let at_once = self.pace.at_once(Unit::Step);
        self.measured = Some((Unit::Step, (run.to.batch - run.from.batch).max(1) as usize));
        for batch in run.from.batch..=run.to.batch {
            if batch > run.from.batch && ((batch - run.from.batch) as usize).is_multiple_of(at_once) {
                match &mut self.recorded {
                    Some(recorded) => recorded.extend(self.open.take().map(|encoder| (encoder.finish(), None))),
                    None => self.submit_ready(),
                }
            }
            let mut at = if batch == run.from.batch { order_of(run.from) } else { 0 };
            let to = if batch == run.to.batch { order_of(run.to) } else { end };
            while at < to {
                let cut = peeks.next_if(|(point, _)| point.batch == batch);
                let until = cut.map_or(to, |(point, _)| order_of(*point) + 1);
                let mut encoder = self.take_open();
                let mut stamps = self.stamped(if row.is_some() { WorkKind::Prefill } else { WorkKind::Decode });
                {
                    let bound = &self.core.slots[run.stamp.slot.index()];
                    let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
                    if at == 0
                        && let Some(row) = row
                    {
                        let take = &self.core.take;
                        pass.set_pipeline(&take.pipelines[0].pipeline);
                        pass.set_bind_group(0, &bound.take[row], &[]);
                        pass.dispatch_workgroups(1, 1, 1);
                        if let (Some(rounds), Some(groups)) = (&self.core.rounds, &bound.rounds) {
                            rounds.before_row.encode(&mut pass, &groups.before_row, 1, |_| true, |_, _| {});
                        }
                    }
                    let (mut ready, mut groups, mut rows) = (&self.core.step, &bound.step, 1);
                    if let (Work::Rounds { depth }, Some(rounds), Some(bound)) =
                        (&run.work, &self.core.rounds, &bound.rounds)
                    {
                        if at == 0 {
                            stamps.iter_mut().for_each(|stamps| stamps.now(WorkKind::Draft));
                            for (ready, groups) in rounds.chain.iter().zip(&bound.chain).take(*depth) {
                                ready.encode(&mut pass, groups, 1, |_| true, |p, c| stamp(&mut stamps, p, c));
                            }
                        }
                        stamps.iter_mut().for_each(|stamps| stamps.now(WorkKind::Verify));
                        (ready, groups, rows) =
                            (&rounds.verify[depth - 1], &bound.verify[depth - 1], *depth as u32 + 1);
                    }
                    let wanted = |dispatch: &Dispatch| (at..until).contains(&order(dispatch.section, layers));
                    ready.encode(&mut pass, groups, rows, wanted, |p, c| stamp(&mut stamps, p, c));
                }
                self.end_stamps(stamps, &mut encoder);
                self.open = Some(encoder);
                if let Some((_, staging)) = cut {
                    self.land(run.stamp, staging.0 as usize, Report::Peek);
                }
                at = until;
            }
        }
    }

    /// Encodes the copy of a slot's record, of batches that ran so.
    pub(super) fn copy_record(&mut self, slot: SlotIx, staging: usize, report: Report, form: Form) {
        let _span = trace_span!(target: "riparian::wgpu", "copy").entered();
        let mut encoder = self.take_open();
        let slot = &self.core.slots[slot.index()].slot;
        let to = self.shared.record(staging).clone();
        let head = size_of::<Control>() as u64;
        encoder.copy_buffer_to_buffer(slot.buffer(Name::Control), 0, &to, 0, head);
        encoder.copy_buffer_to_buffer(slot.buffer(Name::Out), 0, &to, head, RECORD_BYTES - head);
        if let (Some(laid), Some(moe)) = (self.shared.miss(), &self.core.geometry.moe) {
            let mut at = RECORD_BYTES;
            for (i, piece) in laid.pieces(moe, form).into_iter().enumerate() {
                if piece.bytes > 0 && (i != COUNTS || report == Report::Land) {
                    encoder.copy_buffer_to_buffer(slot.buffer(piece.from), piece.at, &to, at, piece.bytes);
                }
                at += piece.bytes;
            }
        }
        self.open = Some(encoder);
    }

    fn land(&mut self, stamp: Stamp, staging: usize, report: Report) {
        let form = self.forms[stamp.slot.index()];
        self.copy_record(stamp.slot, staging, report, form);
        if let Some(recorded) = &mut self.recorded {
            recorded.extend(self.open.take().map(|encoder| (encoder.finish(), Some((staging, report)))));
            return;
        }
        self.submit_landing(stamp, staging, report, form);
    }

    /// Submits a record's copy with what comes before it.
    pub(super) fn submit_landing(&mut self, stamp: Stamp, staging: usize, report: Report, form: Form) {
        let to = self.shared.record(staging).clone();
        let submission = self.submit();
        if let Some((unit, units)) = self.measured.take() {
            self.pace.measure(&self.core.context.queue, unit, units);
        }
        self.shared.expect(staging, to, Copied::Record(stamp, form, report), submission);
    }

    fn read(&mut self, slot: SlotIx, what: Read, staging: usize) -> Result<(), DeviceError> {
        let geometry = self.core.geometry.clone();
        let room = self.reach[slot.index()].min(self.core.sizes.positions);
        let mut copies = Vec::new();
        let copied = match what {
            Read::Logits => {
                copies.push((Name::Logits, 4 * geometry.vocab));
                Copied::Logits(geometry.vocab)
            }
            Read::State => {
                copies.push((Name::Control, size_of::<Control>()));
                for (i, kind) in geometry.blocks.iter().enumerate() {
                    let block = crate::ids::BlockIx::from(i);
                    match kind {
                        BlockKind::Mamba => {
                            let g = geometry.mamba.as_ref().expect("checked on open");
                            copies.push((Name::Ring(block), 4 * RING * g.conv_channels()));
                            copies.push((Name::State(block), 4 * self.core.sizes.snapshots * g.ssm_state_len()));
                        }
                        BlockKind::Attention => {
                            let width = geometry.attention.as_ref().expect("checked on open").kv_width();
                            copies.push((Name::Kv(block), 4 * room * 2 * width));
                        }
                        BlockKind::Moe | BlockKind::Mlp => {}
                    }
                }
                if self.core.rounds.is_some() {
                    let width = geometry.attention.as_ref().expect("the draft layer attends").kv_width();
                    copies.push((Name::Kv(draft_block(&geometry)), 4 * room * 2 * width));
                    copies.push((Name::Hidden, 4 * ROWS * padded(geometry.hidden)));
                }
                Copied::State(room)
            }
        };
        let bytes: usize = copies.iter().map(|(_, n)| n).sum();
        let usage = wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST;
        let to = buffer(&self.core.context, "read", bytes as u64, usage)?;
        let mut encoder = self.encoder();
        let mut at = 0;
        for (name, n) in copies.iter().filter(|(_, n)| *n > 0) {
            let part = self.core.slots[slot.index()].slot.buffer(*name);
            encoder.copy_buffer_to_buffer(part, 0, &to, at, *n as u64);
            at += *n as u64;
        }
        self.ready.push(encoder.finish());
        let submission = self.submit();
        self.shared.expect(staging, to, copied, submission);
        Ok(())
    }

    /// One item of an append; `form` is how the run behind it runs.
    fn item(&mut self, item: Item, form: Option<Form>) -> Result<(), DeviceError> {
        match item {
            Item::Start { slot, turn, eos, seed, .. } => self.start(slot, turn, &eos, seed.as_deref())?,
            Item::Retire { slot, turn } => {
                let control = Control { turn: turn.0, stop: stop::RETIRED, ..Control::default() };
                self.write(slot, Name::Control, 0, bytemuck::bytes_of(&control));
            }
            Item::Run(run) => self.run(&run)?,
            Item::Land { stamp, staging } => self.land(stamp, staging.0 as usize, Report::Land),
            Item::Read { slot, what, staging } => self.read(slot, what, staging.0 as usize)?,
            Item::Upload { layer, place, payload, staging } => self.upload(layer, place, &payload, staging)?,
            Item::Resume { stop, turn, made } => self.resume(stop, turn, &made, form.unwrap_or(Form::Step))?,
            Item::Fill { stamp, layer, place, expert } => {
                self.fill(stamp, layer, place, expert, form.unwrap_or(Form::Step))?;
            }
            Item::Rollback { .. } => {
                return Err(DeviceError::Unfit { why: "a rollback on a device without drafts".into() });
            }
        }
        Ok(())
    }

    /// Runs one block alone over a row: the slot must be started, `position` is the row's. For tests.
    ///
    /// # Errors
    ///
    /// [`DeviceError`].
    pub fn run_block(
        &mut self,
        slot: SlotIx,
        block: crate::ids::BlockIx,
        position: Position,
        row: &[f32],
    ) -> Result<Vec<f32>, DeviceError> {
        let given = super::layout::rows_padded(row, row.len());
        self.write(slot, Name::X, 0, &given);
        self.set_position(slot, position);
        self.write(slot, Name::Flight, 0, bytemuck::bytes_of(&Flight { rows: 1, ..Flight::default() }));
        let mut encoder = self.encoder();
        {
            let bound = &self.core.slots[slot.index()];
            let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
            self.core.step.encode(&mut pass, &bound.step, 1, |dispatch| dispatch.block == Some(block), |_, _| {});
        }
        self.ready.push(encoder.finish());
        self.words(slot, Name::X, row.len()).map(bytemuck::cast_vec)
    }

    /// Sets a slot's position, turn 0 and no stop. For tests.
    pub fn set_position(&mut self, slot: SlotIx, position: Position) {
        let control = Control { position: position.0, ..Control::default() };
        self.write(slot, Name::Control, 0, bytemuck::bytes_of(&control));
        self.reach[slot.index()] = position.index() + 1;
    }

    /// The first words of a slot's buffer. Waits for the device; for tests.
    ///
    /// # Errors
    ///
    /// [`DeviceError`].
    pub fn words(&mut self, slot: SlotIx, name: Name, words: usize) -> Result<Vec<u32>, DeviceError> {
        let context = self.core.context.clone();
        let usage = wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST;
        let read = buffer(&context, "words", 4 * words as u64, usage)?;
        let mut encoder = self.encoder();
        let from = self.core.slots[slot.index()].slot.buffer(name);
        encoder.copy_buffer_to_buffer(from, 0, &read, 0, 4 * words as u64);
        self.ready.push(encoder.finish());
        let index = self.submit();
        read.map_async(wgpu::MapMode::Read, .., |_| {});
        let waited = context.device.poll(wgpu::PollType::Wait { submission_index: Some(index), timeout: None });
        waited.map_err(|e| DeviceError::Lost { why: e.to_string() })?;
        let view = read.get_mapped_range(..).map_err(|e| DeviceError::Lost { why: e.to_string() })?;
        Ok(bytemuck::pod_collect_to_vec(&view[..4 * words]))
    }

    /// Runs one step of a slot with a timestamp before each dispatch and after the last: microseconds by class, and how
    /// many dispatches each has. The slot's flight must be live. For benches.
    ///
    /// # Errors
    ///
    /// [`DeviceError`] where the adapter has no timestamps.
    pub fn profile(&mut self, slot: SlotIx) -> Result<Vec<(DispatchClass, u32, Duration)>, DeviceError> {
        self.profile_plan(slot, Profiled::Step)
    }

    /// As [`GpuQueue::profile`], of draft `at` of a round.
    ///
    /// # Errors
    ///
    /// As there, and where no drafts are made.
    pub fn profile_draft(
        &mut self,
        slot: SlotIx,
        at: usize,
    ) -> Result<Vec<(DispatchClass, u32, Duration)>, DeviceError> {
        self.profile_plan(slot, Profiled::Draft(at))
    }

    /// As [`GpuQueue::profile`], of a verify pass over `rows` rows.
    ///
    /// # Errors
    ///
    /// As there, and where no drafts are made.
    pub fn profile_verify(
        &mut self,
        slot: SlotIx,
        rows: usize,
    ) -> Result<Vec<(DispatchClass, u32, Duration)>, DeviceError> {
        self.profile_plan(slot, Profiled::Verify(rows))
    }

    /// As [`GpuQueue::profile`], of a pass over `rows` rows that lie in the slot.
    ///
    /// # Errors
    ///
    /// As there.
    pub fn profile_pass(
        &mut self,
        slot: SlotIx,
        rows: u32,
    ) -> Result<Vec<(DispatchClass, u32, Duration)>, DeviceError> {
        self.profile_plan(slot, Profiled::Pass(rows))
    }

    fn profile_plan(
        &mut self,
        slot: SlotIx,
        what: Profiled,
    ) -> Result<Vec<(DispatchClass, u32, Duration)>, DeviceError> {
        let context = self.core.context.clone();
        let none = || DeviceError::Unfit { why: format!("no {what:?} here") };
        let mut encoder = self.encoder();
        let (rounds, bound) = (self.core.rounds.as_ref(), &self.core.slots[slot.index()]);
        let found = match what {
            Profiled::Step => Some((&self.core.step, &bound.step, 1)),
            Profiled::Pass(rows) => Some((&self.core.pass[0], &bound.pass[0], rows)),
            Profiled::Draft(at) => (rounds.and_then(|r| r.chain.get(at)))
                .zip(bound.rounds.as_ref().and_then(|r| r.chain.get(at)))
                .map(|(ready, groups)| (ready, groups, 1)),
            Profiled::Verify(rows) => (rounds.and_then(|r| r.verify.get(rows.checked_sub(2)?)))
                .zip(bound.rounds.as_ref().and_then(|r| r.verify.get(rows.checked_sub(2)?)))
                .map(|(ready, groups)| (ready, groups, rows as u32)),
        };
        let (ready, groups, rows) = found.ok_or_else(none)?;
        let dispatches = ready.plan.dispatches.len() as u32;
        if !context.timestamps {
            return Err(DeviceError::Unfit { why: "the adapter has no timestamps".into() });
        }
        let n = dispatches + 1;
        let queries = context.device.create_query_set(&wgpu::QuerySetDescriptor {
            label: Some("profile"),
            ty: wgpu::QueryType::Timestamp,
            count: n,
        });
        let resolve = buffer(
            &context,
            "stamps",
            8 * u64::from(n),
            wgpu::BufferUsages::QUERY_RESOLVE | wgpu::BufferUsages::COPY_SRC,
        )?;
        let read =
            buffer(&context, "stamps", 8 * u64::from(n), wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST)?;
        let mut classes = Vec::new();
        {
            let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
            let mut at = 0;
            ready.encode(
                &mut pass,
                groups,
                rows,
                |_| true,
                |pass, class| {
                    pass.write_timestamp(&queries, at);
                    at += 1;
                    classes.extend(class);
                },
            );
        }
        encoder.resolve_query_set(&queries, 0..n, &resolve, 0);
        encoder.copy_buffer_to_buffer(&resolve, 0, &read, 0, 8 * u64::from(n));
        self.ready.push(encoder.finish());
        let index = self.submit();
        read.map_async(wgpu::MapMode::Read, .., |_| {});
        let waited = context.device.poll(wgpu::PollType::Wait { submission_index: Some(index), timeout: None });
        waited.map_err(|e| DeviceError::Lost { why: e.to_string() })?;
        let view = read.get_mapped_range(..).map_err(|e| DeviceError::Lost { why: e.to_string() })?;
        let stamps: Vec<u64> = bytemuck::pod_collect_to_vec(&view[..8 * n as usize]);
        let period = f64::from(context.queue.get_timestamp_period());
        let mut out: Vec<(DispatchClass, u32, Duration)> = Vec::new();
        for (class, pair) in classes.into_iter().zip(stamps.windows(2)) {
            let took = Duration::from_secs_f64(pair[1].saturating_sub(pair[0]) as f64 * period * 1e-9);
            match out.iter_mut().find(|(c, _, _)| *c == class) {
                Some((_, count, sum)) => {
                    *count += 1;
                    *sum += took;
                }
                None => out.push((class, 1, took)),
            }
        }
        Ok(out)
    }
}

impl Queue for GpuQueue {
    fn append(&mut self, items: Vec<Item>) -> Result<(), DeviceError> {
        if let Some(why) = self.core.context.lost.get() {
            return Err(DeviceError::Lost { why: why.clone() });
        }
        if let Some(stamps) = &mut self.stamps {
            stamps.take();
        }
        let Some(items) = self.append_prepared(items)? else { return Ok(()) };
        let hidden = self.core.geometry.hidden;
        let forms: Vec<_> = (0..items.len()).map(|at| form_behind(&items, at, hidden)).collect();
        for (item, form) in items.into_iter().zip(forms) {
            self.item(item, form)?;
        }
        self.end_cures();
        self.submit_ready();
        Ok(())
    }

    fn prepare(&mut self, run: &Run, landing: Staging) {
        self.make_ready(run, landing);
    }
}
