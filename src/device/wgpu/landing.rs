//! Readback's half: waits for copies to staging buffers and reads them.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::super::params::Control;
use super::adapter::Context;
use super::core::Core;
use super::decode::{OUT_ROOM, RING, ROUNDS_ROOM};
use super::layout::padded;
use super::partial::{Form, MissLaid};
use super::slot::ROWS;
use super::upload::buffer;
use crate::device::{
    DeviceError, Landing, Landings, Out, Phase, Point, Record, Round, Seed, Stamp, Stop, StopKind, UploadStaging, Wait,
};
use crate::host::Spin;
use crate::ids::{BlockIx, FlightId, LayerIx, Position, TokenId, Turn};
use crate::model::geometry::{BlockKind, Geometry};
use crate::model::state::{BlockState, KvState, MambaState, SequenceState};

/// `stop` words, as `guard.wgsl` has them.
pub mod stop {
    /// A pick has no place.
    pub const MISS: u32 = 1;
    /// A draft was refused.
    pub const SHORT: u32 = 2;
    /// An end id or the limit.
    pub const END: u32 = 3;
    /// No finite logit.
    pub const NOT_FINITE: u32 = 4;
    /// The session is over.
    pub const RETIRED: u32 = 5;
}

/// Bytes of a record: the slot's words, the ids, then the rounds.
pub const RECORD_BYTES: u64 = (size_of::<Control>() + 4 * (OUT_ROOM + ROUNDS_ROOM)) as u64;

/// Readback looks for so long before it sleeps: a landing of a few layers comes within it.
const LOOK: Duration = Duration::from_millis(1);

const WAITING: u8 = 0;
const MAPPED: u8 = 1;
const FAILED: u8 = 2;

/// For whom a record was copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Report {
    /// A peek, which has no counts.
    Peek,
    /// A flight's landing.
    Land,
}

/// What was copied.
#[derive(Clone, Debug)]
pub enum Copied {
    /// A slot's record for a flight, and how its batches ran.
    Record(Stamp, Form, Report),
    /// A slot's state with room for so many positions.
    State(usize),
    /// Logits.
    Logits(usize),
}

#[derive(Debug)]
struct Pending {
    buffer: wgpu::Buffer,
    copied: Copied,
    submission: wgpu::SubmissionIndex,
    flag: Arc<AtomicU8>,
}

/// What both halves know of staging.
#[derive(Debug)]
pub struct Shared {
    context: Arc<Context>,
    geometry: Geometry,
    /// One a staging buffer, for records.
    records: Vec<wgpu::Buffer>,
    pending: Mutex<Vec<Option<Pending>>>,
    uploads: Mutex<Vec<Option<Upload>>>,
    /// What the queue has not come to: it waits behind a pass that streams.
    owed: Mutex<Vec<Wait>>,
    /// What records hold for partial banks.
    miss: Option<MissLaid>,
    /// Snapshots of the scan's state.
    snapshots: usize,
    /// Whether the draft layer's state is there too.
    drafts: bool,
    /// The last miss that was read, by slot: a peek's is not read again at the landing.
    told: Mutex<Vec<Option<Stop>>>,
    /// How long readback looks before it sleeps.
    spin: Spin,
    /// Counts of the slots' choices as they last landed: `[slot][layers * experts]`.
    counts: Mutex<Vec<Vec<u32>>>,
}

#[derive(Debug)]
struct Upload {
    submission: wgpu::SubmissionIndex,
    done: Arc<AtomicU8>,
}

impl Shared {
    /// Makes the staging buffers.
    ///
    /// # Errors
    ///
    /// [`DeviceError::OutOfMemory`].
    pub fn new(
        context: Arc<Context>,
        geometry: &Geometry,
        core: &Core,
        staging: usize,
        upload_staging: usize,
    ) -> Result<Self, DeviceError> {
        let usage = wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST;
        let moe = geometry.moe.as_ref().filter(|_| core.mend.is_some());
        let miss = moe.map(|moe| MissLaid::new(core, moe));
        let largest = [Form::Verify(core.sizes.snapshots as u32), Form::Pass(core.sizes.given as u32)];
        let more = miss.map_or(0, |miss| largest.map(|form| miss.bytes(form)).into_iter().max().unwrap_or(0));
        let records =
            (0..staging).map(|_| buffer(&context, "record", RECORD_BYTES + more, usage)).collect::<Result<_, _>>()?;
        let pending = Mutex::new((0..staging).map(|_| None).collect());
        let uploads = Mutex::new((0..upload_staging).map(|_| None).collect());
        let (snapshots, drafts) = (core.sizes.snapshots, core.rounds.is_some());
        let told = Mutex::new(vec![None; core.slots.len()]);
        // with full banks nothing waits for a landing but the eye
        let spin = if miss.is_some() { Spin::up_to(LOOK) } else { Spin::NONE };
        let counts = Mutex::new(vec![Vec::new(); core.slots.len()]);
        Ok(Self {
            context,
            geometry: geometry.clone(),
            records,
            pending,
            uploads,
            owed: Mutex::default(),
            miss,
            snapshots,
            drafts,
            told,
            spin,
            counts,
        })
    }

    /// What records hold for partial banks.
    #[must_use]
    pub fn miss(&self) -> Option<MissLaid> {
        self.miss
    }

    /// Remembers that an upload has come with `submission`.
    pub fn expect_upload(&self, staging: UploadStaging, submission: wgpu::SubmissionIndex) {
        let done = Arc::new(AtomicU8::new(WAITING));
        let seen = done.clone();
        let held = self.context.faults.holds_callbacks();
        self.context.queue.on_submitted_work_done(move || {
            if !held {
                seen.store(MAPPED, Ordering::Release);
            }
        });
        self.uploads.lock()[staging.0 as usize] = Some(Upload { submission, done });
        self.paid(|wait| *wait == Wait::Upload(staging));
    }

    /// Something will be copied to a staging buffer, though nothing is queued yet.
    pub fn owe(&self, wait: Wait) {
        self.owed.lock().push(wait);
    }

    /// It is queued.
    fn paid(&self, what: impl Fn(&Wait) -> bool) {
        self.owed.lock().retain(|wait| !what(wait));
    }

    /// The device is lost, if it was not.
    pub fn lose(&self, why: &DeviceError) {
        let _ = self.context.lost.set(match why {
            DeviceError::Lost { why } => why.clone(),
            other => other.to_string(),
        });
    }

    fn take_upload(&self, staging: UploadStaging) -> Option<Landing> {
        let mut uploads = self.uploads.lock();
        let upload = &mut uploads[staging.0 as usize];
        // what nobody queued, nobody has to wait for
        let done = upload.as_ref().is_none_or(|upload| upload.done.load(Ordering::Acquire) == MAPPED);
        done.then(|| {
            *upload = None;
            Landing::Uploaded
        })
    }

    /// With which submission `wait` lands, as far as that is known.
    fn submission_of(&self, wait: Wait) -> Option<wgpu::SubmissionIndex> {
        match wait {
            Wait::Upload(at) => self.uploads.lock()[at.0 as usize].as_ref().map(|upload| upload.submission.clone()),
            Wait::Peek(s) | Wait::Land(s) | Wait::Read(s) => {
                self.pending.lock()[s.0 as usize].as_ref().map(|pending| pending.submission.clone())
            }
        }
    }

    /// The staging buffer for a record.
    #[must_use]
    pub fn record(&self, staging: usize) -> &wgpu::Buffer {
        &self.records[staging]
    }

    /// Maps `buffer` once `submission` is done and keeps it for whoever waits.
    ///
    /// # Panics
    ///
    /// If the staging buffer is in use: its owner takes every landing before it names it again.
    pub fn expect(&self, staging: usize, buffer: wgpu::Buffer, copied: Copied, submission: wgpu::SubmissionIndex) {
        let flag = Arc::new(AtomicU8::new(WAITING));
        let seen = flag.clone();
        let held = self.context.faults.holds_callbacks();
        buffer.map_async(wgpu::MapMode::Read, .., move |mapped| {
            if !held {
                seen.store(if mapped.is_ok() { MAPPED } else { FAILED }, Ordering::Release);
            }
        });
        let before = self.pending.lock()[staging].replace(Pending { buffer, copied, submission, flag });
        assert!(before.is_none(), "staging buffer {staging} is still in use");
        let own = |wait: &Wait| match wait {
            Wait::Peek(s) | Wait::Land(s) | Wait::Read(s) => s.0 as usize == staging,
            Wait::Upload(_) => false,
        };
        self.paid(own);
    }

    /// Why the device is lost, if it is.
    #[must_use]
    pub fn lost(&self) -> Option<DeviceError> {
        self.context.lost.get().map(|why| DeviceError::Lost { why: why.clone() })
    }

    fn take(&self, staging: usize) -> Result<Option<Landing>, DeviceError> {
        let mut pending = self.pending.lock();
        let Some(waiting) = &pending[staging] else {
            panic!("nothing was queued for staging buffer {staging}");
        };
        match waiting.flag.load(Ordering::Acquire) {
            WAITING => Ok(None),
            MAPPED => {
                let waiting = pending[staging].take().expect("seen above");
                drop(pending);
                let _span = tracing::trace_span!(target: "riparian::wgpu", "parse").entered();
                let landing = {
                    let view =
                        (waiting.buffer.get_mapped_range(..)).map_err(|e| DeviceError::Lost { why: e.to_string() })?;
                    self.read(&waiting.copied, &view)
                };
                waiting.buffer.unmap();
                Ok(Some(landing))
            }
            _ => Err(self.lost().unwrap_or_else(|| DeviceError::Lost { why: "a staging buffer did not map".into() })),
        }
    }

    fn read(&self, copied: &Copied, bytes: &[u8]) -> Landing {
        match copied {
            Copied::Record(stamp, form, report) => {
                Landing::Record(Box::new(self.record_of(*stamp, *form, *report, bytes)))
            }
            Copied::State(positions) => Landing::State(Box::new(self.state_of(bytes, *positions))),
            Copied::Logits(vocab) => Landing::Logits(bytemuck::pod_collect_to_vec(&bytes[..4 * vocab])),
        }
    }

    fn record_of(&self, stamp: Stamp, form: Form, report: Report, bytes: &[u8]) -> Record {
        let (bytes, more) = bytes.split_at(RECORD_BYTES as usize);
        let (head, ids) = bytes.split_at(size_of::<Control>());
        let control: Control = bytemuck::pod_read_unaligned(head);
        let words = |from: usize, n: u32, room: usize| -> Vec<u32> {
            bytemuck::pod_collect_to_vec(&ids[4 * from..4 * (from + (n as usize).min(room))])
        };
        let rounds = words(OUT_ROOM, control.round_count, ROUNDS_ROOM);
        let ids = words(0, control.out_count, OUT_ROOM);
        let kind = match control.stop {
            stop::MISS => Some(StopKind::Miss),
            stop::SHORT => Some(StopKind::Short),
            stop::END => Some(StopKind::End),
            stop::NOT_FINITE => Some(StopKind::NotFiniteBy(BlockIx::from(self.geometry.blocks.len() - 1))),
            _ => None,
        };
        let [batch, at] = control.stop_point;
        let point = Point {
            batch,
            layer: LayerIx((at / 2) as u16),
            phase: if at % 2 == 1 { Phase::Sum } else { Phase::Route },
        };
        let stop = kind.map(|kind| Stop {
            kind,
            slot: stamp.slot,
            turn: Turn(control.turn),
            flight: flight_of(control.stop_flight),
            point,
        });
        let mut out = Out {
            flight: flight_of(control.out_flight),
            ids: ids.into_iter().map(TokenId).collect(),
            rounds: rounds.into_iter().map(|word| Round { offered: word >> 16, kept: word & 0xffff }).collect(),
            routed: Vec::new(),
        };
        let mut missed = None;
        if let Some(laid) = &self.miss {
            let routed = match report {
                Report::Land => laid.routed(more, &mut self.counts.lock()[stamp.slot.index()]),
                Report::Peek => Vec::new(),
            };
            // a flight that routed and accepted nothing leaves the ids of the one before lying
            if out.flight != stamp.flight && !routed.is_empty() {
                out = Out { flight: stamp.flight, ..Out::default() };
            }
            if out.flight == stamp.flight {
                out.routed = routed;
            }
            // of an older flight's miss the record may have another form
            let told = &mut self.told.lock()[stamp.slot.index()];
            missed = stop
                .filter(|stop| stop.kind == StopKind::Miss && stop.flight == stamp.flight && *told != Some(*stop))
                .map(|stop| Arc::new(laid.missed(stop, form, more)));
            if let Some(missed) = &missed {
                *told = Some(missed.stop);
            }
        }
        Record { flight: stamp.flight, out, stop, missed, busy: None }
    }

    fn state_of(&self, bytes: &[u8], room: usize) -> Seed {
        let control: Control = bytemuck::pod_read_unaligned(&bytes[..size_of::<Control>()]);
        let position = control.position as usize;
        let floats: Vec<f32> = bytemuck::pod_collect_to_vec(&bytes[size_of::<Control>()..]);
        let mut rest = floats.as_slice();
        let mut next = |n: usize| {
            let (some, more) = rest.split_at(n);
            rest = more;
            some
        };
        let mut state = SequenceState::new(&self.geometry);
        state.position = Position(control.position);
        for (i, kind) in self.geometry.blocks.iter().enumerate() {
            match kind {
                BlockKind::Mamba => {
                    let g = self.geometry.mamba.as_ref().expect("checked on open");
                    let (channels, taps) = (g.conv_channels(), g.d_conv);
                    let ring = next(RING * channels);
                    let mut conv = vec![0.0; g.conv_state_len()];
                    for (j, cell) in conv.iter_mut().enumerate() {
                        let (channel, back) = (j / (taps - 1), taps - 1 - j % (taps - 1));
                        if position >= back {
                            *cell = ring[(position - back) % RING * channels + channel];
                        }
                    }
                    let snapshots = next(self.snapshots * g.ssm_state_len());
                    let ssm = snapshots[control.scan_at as usize * g.ssm_state_len()..][..g.ssm_state_len()].to_vec();
                    state.blocks[i] = BlockState::Mamba(MambaState { conv, ssm });
                }
                BlockKind::Attention => {
                    let width = self.geometry.attention.as_ref().expect("checked on open").kv_width();
                    state.blocks[i] = BlockState::Attention(kv_of(next(room * 2 * width), width, position));
                }
                BlockKind::Moe | BlockKind::Mlp => {}
            }
        }
        let mut hidden = Vec::new();
        if self.drafts && position > 0 {
            // the last position's row waits for what follows: its keys and values are made with that
            let width = self.geometry.attention.as_ref().expect("the draft layer attends").kv_width();
            state.draft = kv_of(next(room * 2 * width), width, position - 1);
            let row = (control.kept as usize - 1) * padded(self.geometry.hidden);
            hidden = next(ROWS * padded(self.geometry.hidden))[row..][..self.geometry.hidden].to_vec();
        }
        Seed { state, hidden }
    }
}

/// Keys and values of the first positions, from rows that hold both.
fn kv_of(rows: &[f32], width: usize, positions: usize) -> KvState {
    let mut kv = KvState::default();
    for row in rows.chunks_exact(2 * width).take(positions) {
        kv.k.extend_from_slice(&row[..width]);
        kv.v.extend_from_slice(&row[width..]);
    }
    kv
}

fn flight_of([low, high]: [u32; 2]) -> FlightId {
    FlightId(u64::from(high) << 32 | u64::from(low))
}

/// The half itself.
#[derive(Debug)]
pub struct GpuLandings {
    shared: Arc<Shared>,
}

impl GpuLandings {
    /// Waits for what `shared` knows of.
    #[must_use]
    pub fn new(shared: Arc<Shared>) -> Self {
        Self { shared }
    }

    /// What both halves know.
    #[must_use]
    pub fn shared(&self) -> Arc<Shared> {
        self.shared.clone()
    }
}

impl Landings for GpuLandings {
    fn poll(&mut self, wait: Wait) -> Result<Option<Landing>, DeviceError> {
        if let Some(lost) = self.shared.lost() {
            return Err(lost);
        }
        if let Err(e) = self.shared.context.device.poll(wgpu::PollType::Poll) {
            return Err(DeviceError::Lost { why: e.to_string() });
        }
        match wait {
            _ if self.shared.owed.lock().contains(&wait) => Ok(None),
            Wait::Upload(staging) => Ok(self.shared.take_upload(staging)),
            Wait::Peek(s) | Wait::Land(s) | Wait::Read(s) => self.shared.take(s.0 as usize),
        }
    }

    fn wait(&mut self, wait: Wait, deadline: Option<Instant>) -> Result<Landing, DeviceError> {
        let begun = Instant::now();
        let mut pause = std::time::Duration::ZERO;
        loop {
            let mut landed = Ok(None);
            self.shared.spin.until(|| {
                landed = self.poll(wait);
                !matches!(landed, Ok(None))
            });
            if let Some(landing) = landed? {
                return Ok(landing);
            }
            let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                return Err(DeviceError::TimedOut { waited: begun.elapsed() });
            }
            // short waits, so that a lost device is seen even where its driver never returns
            let most = Duration::from_secs(1);
            let timeout = Some(left.map_or(most, |left| left.min(most)));
            let submission = self.shared.submission_of(wait);
            match self.shared.context.device.poll(wgpu::PollType::Wait { submission_index: submission, timeout }) {
                // Done, and still nothing has come: the driver owes a callback. Its turn comes again a little later.
                Ok(_) => std::thread::sleep(std::mem::replace(&mut pause, std::time::Duration::from_millis(1))),
                Err(wgpu::PollError::Timeout) => {}
                Err(e) => return Err(DeviceError::Lost { why: e.to_string() }),
            }
        }
    }
}
