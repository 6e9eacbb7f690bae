//! Cures made ready while the host still completes.
//!
//! Encoding what follows a stop takes longer than submitting it, and all of it
//! is known but for a few words and the completions. So as soon as a stop is
//! known its cure and the flight behind it are encoded, with a copy from a
//! buffer that is still empty in front; when the answer comes it is written
//! there, and the device has it all with one submission a landing.

use std::sync::Arc;

use parking_lot::Mutex;
use tracing::trace_span;

use super::super::params::Flight;
use super::landing::Report;
use super::layout::padded;
use super::partial::Form;
use super::queue::GpuQueue;
use crate::device::{Completions, DeviceError, Item, Point, Run, Staging, Stamp, Stop, Work};
use crate::ids::{Position, SlotIx, Turn};
use crate::plan::record::Name;

/// Mapped buffers that nobody uses.
pub(super) type Free = Arc<Mutex<Vec<wgpu::Buffer>>>;

/// A command buffer, and the record that its end copies: staging buffer and for whom.
pub(super) type Encoded = (wgpu::CommandBuffer, Option<(usize, Report)>);

/// A cure and the flight behind it, encoded.
#[derive(Debug)]
pub(super) struct Prepared {
    slot: SlotIx,
    ends: [Point; 2],
    form: Form,
    peeks: Vec<(Point, Staging)>,
    landing: Staging,
    /// Where the cure goes before it is submitted.
    staged: wgpu::Buffer,
    buffers: Vec<Encoded>,
}

/// How a cure lies in its staging buffer.
#[derive(Clone, Copy, Debug)]
struct Laid {
    /// Completions that there is room for.
    most: usize,
    /// Bytes of a row.
    row: usize,
}

impl Laid {
    const FLIGHT: usize = size_of::<Flight>();
    /// The stop, as the flight that met it; then the flight that follows.
    const CURE: usize = 2 * Self::FLIGHT;

    const fn completed(self) -> usize {
        Self::CURE + 4 * (4 + self.most)
    }

    const fn bytes(self) -> usize {
        self.completed() + self.most * self.row
    }
}

impl GpuQueue {
    fn cure_laid(&self, form: Form) -> Option<Laid> {
        let moe = self.core.geometry.moe.filter(|_| self.core.mend.is_some())?;
        let most = form.rows() as usize * moe.top_k;
        Some(Laid { most, row: 4 * padded(self.core.geometry.hidden) })
    }

    fn take_staging(&self, bytes: u64) -> wgpu::Buffer {
        let mut free = self.cure_staging.lock();
        if let Some(at) = free.iter().position(|buffer| buffer.size() >= bytes) {
            return free.swap_remove(at);
        }
        self.core.context.device.create_buffer(&wgpu::BufferDescriptor {
            label: Some("cure"),
            size: bytes.next_multiple_of(256),
            usage: wgpu::BufferUsages::MAP_WRITE | wgpu::BufferUsages::COPY_SRC,
            // as a used one comes back
            mapped_at_creation: true,
        })
    }

    /// Encodes a cure's end and the steps behind it. Passes of many rows are not worth it, and timestamps want to know
    /// when a submission was made.
    pub(super) fn make_ready(&mut self, run: &Run, landing: Staging) {
        let slot = run.stamp.slot;
        self.forget_prepared(slot);
        let form = match run.work {
            Work::Steps | Work::Rounds { .. } => Form::of(run, self.core.geometry.hidden),
            _ => return,
        };
        let Some(laid) = self.cure_laid(form) else { return };
        if self.stamps.is_some()
            || self.open.is_some()
            || !self.ready.is_empty()
            || self.core.context.lost.get().is_some()
        {
            return;
        }
        let _span = trace_span!(target: "riparian::wgpu", "prepare").entered();
        let staged = self.take_staging(laid.bytes() as u64);
        let mut encoder = self.take_open();
        let bound = &self.core.slots[slot.index()].slot;
        let flight = Laid::FLIGHT as u64;
        for (to, at, bytes) in [
            (Name::FlightCure, 0, flight),
            (Name::Flight, flight, flight),
            (Name::Cure, Laid::CURE as u64, (laid.completed() - Laid::CURE) as u64),
            (Name::Completed, laid.completed() as u64, (laid.most * laid.row) as u64),
        ] {
            encoder.copy_buffer_to_buffer(&staged, at, bound.buffer(to), 0, bytes);
        }
        self.open = Some(encoder);
        self.end_cure_of_step(slot, form.rows());
        let before = (std::mem::replace(&mut self.forms[slot.index()], form), self.measured);
        self.recorded = Some(Vec::new());
        self.batches(run, None);
        self.copy_record(slot, landing.0 as usize, Report::Land, form);
        let mut buffers = self.recorded.take().unwrap_or_default();
        buffers.extend(self.open.take().map(|encoder| (encoder.finish(), Some((landing.0 as usize, Report::Land)))));
        (self.forms[slot.index()], self.measured) = before;
        let (ends, peeks) = ([run.from, run.to], run.peeks.clone());
        self.prepared.push(Prepared { slot, ends, form, peeks, landing, staged, buffers });
    }

    fn forget_prepared(&mut self, slot: SlotIx) {
        if let Some(at) = self.prepared.iter().position(|prepared| prepared.slot == slot) {
            let prepared = self.prepared.swap_remove(at);
            self.cure_staging.lock().push(prepared.staged);
        }
    }

    /// Submits what was made ready for these items; gives them back where nothing was.
    pub(super) fn append_prepared(&mut self, items: Vec<Item>) -> Result<Option<Vec<Item>>, DeviceError> {
        let [Item::Resume { stop, turn, made }, Item::Run(run), Item::Land { staging, .. }] = items.as_slice() else {
            return Ok(Some(items));
        };
        let hidden = self.core.geometry.hidden;
        let fits = |p: &Prepared| {
            p.slot == run.stamp.slot
                && p.ends == [run.from, run.to]
                && p.form == Form::of(run, hidden)
                && p.peeks == run.peeks
                && p.landing == *staging
                && matches!(run.work, Work::Steps | Work::Rounds { .. })
        };
        let (Some(at), true) = (self.prepared.iter().position(fits), self.open.is_none() && self.ready.is_empty())
        else {
            return Ok(Some(items));
        };
        let prepared = self.prepared.swap_remove(at);
        let (slot, form) = (prepared.slot, prepared.form);
        self.write_cure(&prepared, run, *stop, *turn, made)?;
        let positions = run.accepts() as usize * form.rows() as usize;
        self.reach[slot.index()] = (self.reach[slot.index()] + positions).min(self.core.sizes.positions);
        self.forms[slot.index()] = form;
        let units = (run.to.batch - run.from.batch).max(1) as usize;
        let mut staged = Some(prepared.staged);
        for (buffer, copied) in prepared.buffers {
            self.ready.push(buffer);
            match copied {
                Some((staging, report)) => {
                    if report == Report::Land {
                        self.measured = Some((super::pace::Unit::Step, units));
                    }
                    self.submit_landing(run.stamp, staging, report, form);
                }
                None => drop(self.submit()),
            }
            if let Some(staged) = staged.take() {
                let (mapped, free) = (staged.clone(), self.cure_staging.clone());
                staged.map_async(wgpu::MapMode::Write, .., move |done| {
                    if done.is_ok() {
                        free.lock().push(mapped);
                    }
                });
            }
        }
        Ok(None)
    }

    fn write_cure(
        &self,
        prepared: &Prepared,
        run: &Run,
        stop: Stop,
        turn: Turn,
        made: &Completions,
    ) -> Result<(), DeviceError> {
        let Some(laid) = self.cure_laid(prepared.form) else {
            return Err(DeviceError::Unfit { why: "a miss on a device whose banks are full".into() });
        };
        let hidden = self.core.geometry.hidden;
        let of_stop = Stamp { flight: stop.flight, slot: stop.slot, turn: stop.turn };
        let rows = prepared.form.rows();
        let flights = [
            self.flight_of(of_stop, Position(0), rows, 0, false, false),
            self.flight_of(run.stamp, run.limit, rows, 1, true, true),
        ];
        let good: Vec<(u32, &[f32])> = (made.at.iter().copied())
            .zip(made.outputs.chunks_exact(hidden))
            .filter(|(at, _)| (*at as usize) < laid.most)
            .take(laid.most)
            .collect();
        let mut cure = vec![turn.0, u32::from(stop.point.layer.0), good.len() as u32, self.weights_at(prepared.form)];
        cure.extend(good.iter().map(|(at, _)| *at));
        {
            let mapped = prepared.staged.get_mapped_range_mut(..laid.bytes() as u64);
            let mut view = mapped.map_err(|e| DeviceError::Lost { why: e.to_string() })?;
            let mut put = |at: usize, bytes: &[u8]| view.slice(at..at + bytes.len()).copy_from_slice(bytes);
            put(0, bytemuck::cast_slice(&flights));
            put(Laid::CURE, bytemuck::cast_slice(&cure));
            for (i, (_, output)) in good.iter().enumerate() {
                // columns past the row's width are nobody's
                put(laid.completed() + i * laid.row, bytemuck::cast_slice(output));
            }
        }
        prepared.staged.unmap();
        Ok(())
    }
}
