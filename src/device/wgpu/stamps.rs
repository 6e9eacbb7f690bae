//! Device timestamps around every dispatch (`CMF_NEMO_TS`): sums by class, and an event for each.
//!
//! An event has the target `riparian::device`, the class, when it began
//! (`age_us` before the event) and how long it took (`dur_us`), and the kind of work
//! it belongs to (`decode`, `prefill`, `draft`, `verify`). The device's clock is set against ours by
//! the earliest answer seen: an answer is never here before its work is done.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use super::super::times::{ClassTimes, WorkKind};
use super::adapter::Context;
use super::upload::buffer;
use crate::device::DeviceError;
use crate::knobs::DispatchClass;

/// Queries of a set; a command buffer with more dispatches leaves the rest unmeasured. wgpu allows 4096.
const ROOM: u32 = 1024;

/// Command buffers measured at a time: two flights of steps, and a pass. What is over goes unmeasured.
const SETS_MAX: usize = 96;

/// Queries with where they go.
#[derive(Debug)]
struct Set {
    queries: wgpu::QuerySet,
    resolved: wgpu::Buffer,
    read: wgpu::Buffer,
}

/// One command buffer's stamps while it is encoded.
#[derive(Debug)]
pub struct Recording {
    set: Set,
    /// What begins at each stamp, and what for; nothing behind the last of a plan.
    classes: Vec<(WorkKind, Option<DispatchClass>)>,
    stamps: u32,
    kind: WorkKind,
}

/// Stamps on their way back.
#[derive(Debug)]
struct Flying {
    recording: Recording,
    /// When they were here.
    here: Arc<OnceLock<Instant>>,
}

/// All of it.
#[derive(Debug)]
pub struct Stamps {
    context: Arc<Context>,
    times: Arc<ClassTimes>,
    free: Vec<Set>,
    made: usize,
    /// Encoded, not submitted.
    encoded: Vec<Recording>,
    flying: Vec<Flying>,
    /// The program's clock begins here.
    origin: Instant,
    /// Nanoseconds from the device's clock to ours, the least seen.
    offset_ns: Option<f64>,
}

impl Stamps {
    /// None taken yet.
    #[must_use]
    pub fn new(context: Arc<Context>, times: Arc<ClassTimes>) -> Self {
        Self {
            context,
            times,
            free: Vec::new(),
            made: 0,
            encoded: Vec::new(),
            flying: Vec::new(),
            origin: Instant::now(),
            offset_ns: None,
        }
    }

    fn set(&mut self) -> Result<Option<Set>, DeviceError> {
        if let Some(set) = self.free.pop() {
            return Ok(Some(set));
        }
        if self.made == SETS_MAX {
            return Ok(None);
        }
        self.made += 1;
        let usage = wgpu::BufferUsages::QUERY_RESOLVE | wgpu::BufferUsages::COPY_SRC;
        let bytes = 8 * u64::from(ROOM);
        Ok(Some(Set {
            queries: self.context.device.create_query_set(&wgpu::QuerySetDescriptor {
                label: Some("stamps"),
                ty: wgpu::QueryType::Timestamp,
                count: ROOM,
            }),
            resolved: buffer(&self.context, "stamps", bytes, usage)?,
            read: buffer(&self.context, "stamps", bytes, wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST)?,
        }))
    }

    /// Begins with a command buffer of this kind of work.
    ///
    /// # Errors
    ///
    /// [`DeviceError::OutOfMemory`]
    pub fn begin(&mut self, kind: WorkKind) -> Result<Option<Recording>, DeviceError> {
        Ok(self.set()?.map(|set| Recording { set, classes: Vec::new(), stamps: 0, kind }))
    }

    /// Ends a command buffer's stamps.
    pub fn end(&mut self, recording: Recording, encoder: &mut wgpu::CommandEncoder) {
        let n = recording.stamps;
        if n < 2 {
            self.free.push(recording.set);
            return;
        }
        encoder.resolve_query_set(&recording.set.queries, 0..n, &recording.set.resolved, 0);
        encoder.copy_buffer_to_buffer(&recording.set.resolved, 0, &recording.set.read, 0, 8 * u64::from(n));
        self.encoded.push(recording);
    }

    /// What was encoded has been submitted.
    pub fn submitted(&mut self) {
        for recording in self.encoded.drain(..) {
            let here = Arc::new(OnceLock::new());
            let seen = here.clone();
            recording.set.read.map_async(wgpu::MapMode::Read, .., move |mapped| {
                if mapped.is_ok() {
                    let _ = seen.set(Instant::now());
                }
            });
            self.flying.push(Flying { recording, here });
        }
    }

    /// Takes what has come back, in order.
    pub fn take(&mut self) {
        while let Some(at) = self.flying.first().and_then(|flying| flying.here.get().copied()) {
            let Flying { recording, .. } = self.flying.remove(0);
            let bytes = 8 * recording.stamps as usize;
            let stamps: Vec<u64> = match recording.set.read.get_mapped_range(..) {
                Ok(view) => bytemuck::pod_collect_to_vec(&view[..bytes]),
                Err(_) => Vec::new(),
            };
            recording.set.read.unmap();
            self.tell(&recording, &stamps, at);
            self.free.push(recording.set);
        }
    }

    fn tell(&mut self, recording: &Recording, stamps: &[u64], here: Instant) {
        let period_ns = f64::from(self.context.queue.get_timestamp_period());
        let ns = |ticks: u64| ticks as f64 * period_ns;
        let Some(last) = stamps.last() else { return };
        let offset_ns = here.duration_since(self.origin).as_nanos() as f64 - ns(*last);
        let offset_ns = self.offset_ns.map_or(offset_ns, |before| before.min(offset_ns));
        self.offset_ns = Some(offset_ns);
        let now_ns = self.origin.elapsed().as_nanos() as f64;
        for ((kind, class), pair) in recording.classes.iter().zip(stamps.windows(2)) {
            let Some(class) = class else { continue };
            let took_ns = ns(pair[1].saturating_sub(pair[0]));
            self.times.add(*kind, *class, Duration::from_nanos(took_ns as u64));
            let age_us = (now_ns - (ns(pair[0]) + offset_ns)).max(0.0) / 1e3;
            let (class, kind, dur_us) = (class.name(), kind.name(), took_ns / 1e3);
            tracing::trace!(target: "riparian::device", class, kind, age_us, dur_us);
        }
    }
}

impl Recording {
    /// What follows in the command buffer is another kind of work.
    pub fn now(&mut self, kind: WorkKind) {
        self.kind = kind;
    }

    /// Before a dispatch of a class, and after the last.
    pub fn stamp(&mut self, pass: &mut wgpu::ComputePass<'_>, class: Option<DispatchClass>) {
        if self.stamps == ROOM {
            return;
        }
        pass.write_timestamp(&self.set.queries, self.stamps);
        self.stamps += 1;
        self.classes.push((self.kind, class));
    }
}

/// Stamps a dispatch where there is a recording.
pub fn stamp(recording: &mut Option<Recording>, pass: &mut wgpu::ComputePass<'_>, class: Option<DispatchClass>) {
    if let Some(recording) = recording {
        recording.stamp(pass, class);
    }
}
