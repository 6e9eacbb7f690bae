//! The device: what the actors ask of whatever computes.
//!
//! A device is opened by its own constructor and then split into two halves:
//!
//! - [`Queue`], owned by the submitter alone: an ordered list of [`Item`]s is
//!   appended and never waited for. The queue is FIFO, and one append is
//!   adjacent: nothing comes between its items.
//! - [`Landings`], owned by readback alone: waits for what [`Item::Land`],
//!   peeks, uploads and reads leave in staging buffers.
//!
//! Items are plain data. The protocol they obey is `protocol.md`; in short:
//! each slot holds one session's state, a turn and at most one [`Stop`]. What
//! carries another turn than the slot's, or finds a stop, does nothing. A stop
//! has one cure, which starts the next turn. `Land` and peeks copy whatever
//! lies there, whether or not the slot is stopped; stamps tell whose it is.
//!
//! Three implementations stand behind the trait: the host, a scripted one for
//! tests and, with the feature `gpu`, wgpu. None of them knows of an actor.

pub(crate) mod board;
pub mod host;
#[cfg(feature = "gpu")]
pub mod kernels;
pub(crate) mod machine;
#[cfg(feature = "gpu")]
pub mod params;
#[cfg(feature = "gpu")]
pub mod pass;
pub mod scripted;
pub mod times;
#[cfg(feature = "gpu")]
mod trusted;
#[cfg(feature = "gpu")]
pub mod wgpu;
pub(crate) mod worker;

pub(crate) use worker::panic_text;

use std::any::Any;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::ids::{BlockIx, ExpertIx, FlightId, LayerIx, PlaceIx, Position, SessionId, SlotIx, TokenId, Turn};
use crate::knobs::Activations;
use crate::model::state::SequenceState;

// ------------------------------------------------------------------ the trait

/// A device that is ready to decode, before its halves go to their actors.
pub trait Device: Send {
    /// What the actors need to know of it; does not change while it lives.
    fn facts(&self) -> &Facts;

    /// Lays experts out ahead of their upload, where that saves the queue time.
    fn stager(&self) -> Option<Arc<dyn Stager>> {
        None
    }

    /// The two halves.
    fn split(self: Box<Self>) -> Halves;
}

/// What a device is split into.
pub type Halves = (Box<dyn Queue>, Box<dyn Landings>);

/// The submitter's half.
pub trait Queue: Send {
    /// Appends `items`, in order and with nothing between them. Returns at
    /// once, never waits for the device. A staging buffer that an item names
    /// belongs to the device from here until its landing was taken.
    ///
    /// # Errors
    ///
    /// [`DeviceError::Lost`]: nothing more will land. Other errors are final for the device too.
    fn append(&mut self, items: Vec<Item>) -> Result<(), DeviceError>;

    /// `run` will probably be appended next for its slot, behind the [`Item::Resume`] of its stop alone and with this
    /// landing: what can be made ready of it may be made ready now. Nothing happens yet, whatever comes instead is none
    /// the worse for it, and the stamp does not count.
    fn prepare(&mut self, run: &Run, landing: Staging) {
        let _ = (run, landing);
    }
}

/// Lays experts out as a device keeps them, in memory that it copies from. Any thread may.
pub trait Stager: Send + Sync {
    /// The payload with what the device copies from ([`Payload::staged`]).
    ///
    /// # Errors
    ///
    /// [`DeviceError`]: changed bytes, no memory, a lost device.
    fn stage(&self, payload: Arc<Payload>) -> Result<Arc<Payload>, DeviceError>;
}

/// Readback's half.
pub trait Landings: Send {
    /// What landed in the buffer that `wait` names, or `None` while it has not.
    /// Taking it gives the buffer back.
    ///
    /// # Errors
    ///
    /// [`DeviceError::Lost`]: it never will.
    fn poll(&mut self, wait: Wait) -> Result<Option<Landing>, DeviceError>;

    /// As [`poll`](Self::poll), but waits. Returns promptly when the device is lost.
    ///
    /// # Errors
    ///
    /// [`DeviceError::Lost`], or [`DeviceError::TimedOut`] when `deadline` has passed (`None` waits for ever).
    fn wait(&mut self, wait: Wait, deadline: Option<Instant>) -> Result<Landing, DeviceError>;
}

/// What kind of device it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DeviceKind {
    /// The CPU of this machine.
    Host,
    /// An adapter behind wgpu.
    Gpu,
    /// The scripted device of the tests.
    Scripted,
}

/// Who makes drafts, and who decides which of them stand.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DraftAbility {
    /// Neither: [`Work::Steps`] and [`Work::Prefill`] only.
    None,
    /// The device makes drafts, verifies them and rolls back by itself ([`Work::Rounds`]). Its draft
    /// layer's bank is full: drafting never misses.
    OnDevice,
    /// Drafts come with the work ([`Work::Verify`]); a shorter prefix than all sets [`StopKind::Short`].
    ByHost,
}

/// What the actors know of a device.
#[derive(Clone, Debug, PartialEq)]
pub struct Facts {
    /// For people: adapter and driver, or the host's CPU.
    pub name: String,
    /// What it is.
    pub kind: DeviceKind,
    /// Its arithmetic; the completer must use the same.
    pub activations: Activations,
    /// Sessions that may be on it at a time.
    pub slots: usize,
    /// KV positions a slot holds: rows a session may consume.
    pub kv_positions: usize,
    /// Floats of a row.
    pub hidden: usize,
    /// MoE layers of the decoder, the draft layer not counted. May be 0.
    pub layers: usize,
    /// Routed experts of a layer; 0 without layers.
    pub experts: usize,
    /// Experts a row picks; 0 without layers.
    pub top_k: usize,
    /// Floats an expert makes for a row: `hidden`, or the latent width.
    pub expert_width: usize,
    /// What each decoder layer's bank holds at the start: `residents[layer][place]`, `None` for an empty place. Its
    /// lengths are the places a layer.
    pub residents: Vec<Vec<Option<ExpertIx>>>,
    /// Whether each layer has one further place, numbered `residents[layer].len()`, that the map never names: a miss can
    /// be served through it by upload without evicting anything.
    pub spare_place: bool,
    /// Most rows of one prefill pass, at least 1.
    pub prefill_rows: usize,
    /// Rows, least and most, of prefill passes that bring whatever their bank lacks and never miss. Such a pass is one
    /// flight. All of at most `prefill_rows` otherwise.
    pub streamed_rows: Option<[usize; 2]>,
    /// Most rows of one verify batch (drafts + 1); 1 without drafts.
    pub verify_rows: usize,
    /// Who makes drafts.
    pub drafts: DraftAbility,
    /// Staging buffers for landings, peeks and reads. At least [`UNLANDED_MAX`].
    pub staging: usize,
    /// Staging buffers for uploads; an expert each.
    pub upload_staging: usize,
    /// Longest a landing may take before the device counts as lost; `None` where any time is right.
    pub landing_deadline: Option<Duration>,
    /// Device time by dispatch class, where it is measured.
    pub class_times: Option<std::sync::Arc<times::ClassTimes>>,
}

impl Facts {
    /// Whether every decoder layer's bank holds all its experts, so that nothing ever misses.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.residents.iter().all(|places| places.iter().flatten().count() >= self.experts)
    }
}

/// Flights that may still do work on one device (`runtime.md` §3.3).
pub const LIVE_MAX: usize = 2;

/// Flights whose landing was not handled yet, overtaken ones included (`runtime.md` §3.3).
pub const UNLANDED_MAX: usize = 4;

// ------------------------------------------------------------ places in a session's work

/// Half of an MoE layer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Phase {
    /// From the sum before (or the batch's rows) up to and with the layer's route and its resident and shared experts.
    #[default]
    Route,
    /// The closing sum of the layer. The last layer's sum is followed by the rest of the batch: the blocks behind it, the
    /// head and the accept.
    Sum,
}

/// A place in a slot's work, ordered as the work is. A batch is one step, one verify pass or one prefill pass, counted
/// from the slot's start. A model without MoE layers has the points `(batch, 0, Route)` alone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Point {
    /// The batch.
    pub batch: u32,
    /// The MoE layer.
    pub layer: LayerIx,
    /// Its half.
    pub phase: Phase,
}

impl Point {
    /// Where a batch begins.
    #[must_use]
    pub const fn start_of(batch: u32) -> Self {
        Self { batch, layer: LayerIx(0), phase: Phase::Route }
    }

    /// The next point in a model with `layers` MoE layers.
    #[must_use]
    pub fn next(self, layers: usize) -> Self {
        match self.phase {
            Phase::Route if layers > 0 => Self { phase: Phase::Sum, ..self },
            _ if self.layer.index() + 1 < layers => {
                Self { batch: self.batch, layer: LayerIx(self.layer.0 + 1), phase: Phase::Route }
            }
            _ => Self::start_of(self.batch + 1),
        }
    }

    /// Whether this is a batch's first point.
    #[must_use]
    pub fn is_batch_start(self) -> bool {
        self == Self::start_of(self.batch)
    }
}

/// What every dispatch carries: it does nothing unless the slot has this turn and no stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Stamp {
    /// The flight it belongs to, for records.
    pub flight: FlightId,
    /// The slot.
    pub slot: SlotIx,
    /// The turn it was made for.
    pub turn: Turn,
}

/// Why a slot halts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum StopKind {
    /// A route picked an expert that the map does not name. Cure: [`Item::Resume`].
    Miss,
    /// A host-made draft was refused. Cure: [`Item::Rollback`].
    Short,
    /// An end id, or the run's position limit. Cure: [`Item::Retire`].
    End,
    /// A value of this block's output was not finite: no token comes of it. Cure: [`Item::Retire`].
    NotFinite(BlockIx),
    /// As [`NotFinite`](Self::NotFinite), of a device that cannot tell which block it was: this one, or one before it.
    /// [`Companion::first_not_finite`] finds it.
    NotFiniteBy(BlockIx),
}

/// What halted a slot. `(slot, turn)` names it: a turn has at most one stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Stop {
    /// Why.
    pub kind: StopKind,
    /// The slot that halted.
    pub slot: SlotIx,
    /// In which of its turns.
    pub turn: Turn,
    /// The flight that met it.
    pub flight: FlightId,
    /// Where: for a miss the layer's `Route`, else the batch's last point.
    pub point: Point,
}

impl Stop {
    /// A number for it in traces, which draw an arrow from the miss over its completion to the cure.
    #[must_use]
    pub fn flow(&self) -> u64 {
        u64::from(self.slot.0) << 32 | u64::from(self.turn.0)
    }
}

// ------------------------------------------------------------------ queue items

/// A staging buffer for landings, peeks and reads, numbered below [`Facts::staging`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Staging(pub u16);

/// A staging buffer for one expert's upload, numbered below [`Facts::upload_staging`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct UploadStaging(pub u16);

/// One thing for the device to do.
#[derive(Clone, Debug)]
pub enum Item {
    /// Gives a slot to a session and begins its turn; clears everything the slot held.
    Start {
        /// The slot.
        slot: SlotIx,
        /// Its new turn.
        turn: Turn,
        /// For traces.
        session: SessionId,
        /// Ids that end a text.
        eos: Arc<[TokenId]>,
        /// State to begin with; `None` is the state before the first row.
        seed: Option<Arc<Seed>>,
    },
    /// Ends a slot's session; unconditional. Everything queued for it before is inert from here on.
    Retire {
        /// The slot.
        slot: SlotIx,
        /// Its new turn, in which nothing runs.
        turn: Turn,
    },
    /// Work of a flight. Always followed by its `Land` in the same append.
    Run(Run),
    /// Copies the slot's records to staging; unconditional.
    Land {
        /// The flight this landing belongs to.
        stamp: Stamp,
        /// Where to.
        staging: Staging,
    },
    /// Copies an expert's weights into a place; the layer's map then names it there (but for the spare place, which
    /// the map never names), and no longer what the place held. Lands as [`Landing::Uploaded`].
    Upload {
        /// The layer.
        layer: LayerIx,
        /// The place.
        place: PlaceIx,
        /// The weights.
        payload: Arc<Payload>,
        /// The upload buffer that the bytes travel through.
        staging: UploadStaging,
    },
    /// Cures a miss, if `stop` is the slot's present stop: takes over the completions, clears the stop, begins `turn`.
    /// The flight behind it runs from the layer's `Sum`.
    Resume {
        /// The stop it is for.
        stop: Stop,
        /// The turn it begins.
        turn: Turn,
        /// What the host made of the missing experts; the rest is made by [`Item::Fill`]s.
        made: Completions,
    },
    /// Serves a missing expert from the bank, after its upload and the `Resume`: computes it for every row that misses it.
    Fill {
        /// The slot and the turn that `Resume` began.
        stamp: Stamp,
        /// The layer.
        layer: LayerIx,
        /// The place that holds it now.
        place: PlaceIx,
        /// The expert.
        expert: ExpertIx,
    },
    /// Cures a short prefix, if `stop` is the slot's present stop: state back to the last kept row, begins `turn`.
    Rollback {
        /// The stop it is for.
        stop: Stop,
        /// The turn it begins.
        turn: Turn,
    },
    /// Copies something of a slot to staging, as it is when the queue gets here; unconditional.
    Read {
        /// The slot.
        slot: SlotIx,
        /// What.
        what: Read,
        /// Where to.
        staging: Staging,
    },
}

/// What [`Item::Read`] copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Read {
    /// The whole state, as [`Landing::State`].
    State,
    /// Logits of the last position that an accept saw, as [`Landing::Logits`].
    Logits,
}

/// State a slot starts from.
#[derive(Clone, Debug, PartialEq)]
pub struct Seed {
    /// Rings, scan states, KV, position, the draft layer's KV.
    pub state: SequenceState,
    /// The final-normed hidden row `[hidden]` of the last position, whose draft row waits for the next embedding
    /// (`model.md` §2.2); empty at position 0 or without drafts.
    pub hidden: Vec<f32>,
}

/// Work of a flight: from one point of its session up to another.
#[derive(Clone, Debug)]
pub struct Run {
    /// Flight, slot and turn.
    pub stamp: Stamp,
    /// Where it begins. With a `Sum` point the batch's rows and the layer's records are those lying in the slot.
    pub from: Point,
    /// Where it ends, exclusive.
    pub to: Point,
    /// What its batches are.
    pub work: Work,
    /// An accept that has consumed this many rows ends the session ([`StopKind::End`]); batches are cut at it.
    pub limit: Position,
    /// Early copies of the miss record: each right behind the route at its point, in ascending order. The device makes
    /// each readable as soon as the route has run (a GPU ends a submission there).
    pub peeks: Vec<(Point, Staging)>,
}

/// What the batches of a run are.
#[derive(Clone, Debug)]
pub enum Work {
    /// One batch over given rows.
    Prefill(Arc<Pass>),
    /// A batch is one greedy step from the slot's next id.
    Steps,
    /// One batch: the slot's next id and these drafts. A refused one sets [`StopKind::Short`] ([`DraftAbility::ByHost`]).
    Verify(Arc<[TokenId]>),
    /// A batch drafts `depth` ids, verifies them and rolls back to what stands ([`DraftAbility::OnDevice`]).
    Rounds {
        /// Drafts a batch, from 1 to `verify_rows - 1`.
        depth: usize,
    },
}

impl Work {
    /// Ids that one batch brings at most.
    #[must_use]
    pub fn ids_max(&self) -> usize {
        match self {
            Work::Prefill(pass) => usize::from(pass.accept),
            Work::Steps => 1,
            Work::Verify(drafts) => drafts.len() + 1,
            Work::Rounds { depth } => depth + 1,
        }
    }

    /// Ids that one batch brings at least, if nothing stops it.
    #[must_use]
    pub fn ids_min(&self) -> usize {
        match self {
            Work::Prefill(pass) => usize::from(pass.accept),
            _ => 1,
        }
    }
}

/// Rows of one prefill pass. Where drafts are on, the device builds the draft layer's KV from them in the same pass; the
/// last row's waits for the row or id that follows.
#[derive(Debug, PartialEq)]
pub struct Pass {
    /// `[n, hidden]`, n from 1 to `prefill_rows`
    pub rows: Vec<f32>,
    /// Whether the last row's argmax is wanted: the prompt ends here and decoding begins.
    pub accept: bool,
}

/// One expert on its way to the device.
#[derive(Clone)]
pub struct Payload {
    /// The layer.
    pub layer: LayerIx,
    /// The expert.
    pub expert: ExpertIx,
    /// The payloads of its up and down matrices, one behind the other, as the file holds them.
    pub bytes: Vec<u8>,
    /// [`Payload::sum_of`] of the bytes when they were read: what arrives must be what left.
    pub sum: u64,
    /// What a [`Stager`] made of it; the bytes were compared with the sum before.
    pub staged: Option<Arc<dyn Any + Send + Sync>>,
}

impl Payload {
    /// A payload with its sum.
    #[must_use]
    pub fn new(layer: LayerIx, expert: ExpertIx, bytes: Vec<u8>) -> Self {
        let sum = Self::sum_of(&bytes);
        Self { layer, expert, bytes, sum, staged: None }
    }

    /// A quick sum over 64-bit words that sees swapped and changed bytes. Not cryptographic.
    #[must_use]
    pub fn sum_of(bytes: &[u8]) -> u64 {
        const K: u64 = 0x9E37_79B9_7F4A_7C15;
        let mut words = bytes.chunks_exact(8);
        let mut sum = bytes.len() as u64;
        for word in &mut words {
            let word = u64::from_le_bytes(word.try_into().expect("chunks of eight"));
            sum = (sum.rotate_left(5) ^ word).wrapping_mul(K);
        }
        for &byte in words.remainder() {
            sum = (sum.rotate_left(5) ^ u64::from(byte)).wrapping_mul(K);
        }
        sum
    }

    /// Whether the bytes are those that were read.
    #[must_use]
    pub fn is_intact(&self) -> bool {
        Self::sum_of(&self.bytes) == self.sum
    }
}

impl fmt::Debug for Payload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} of {:?}, {} bytes", self.expert, self.layer, self.bytes.len())
    }
}

/// What the host made of a layer's missing experts.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Completions {
    /// Which pick each output belongs to: `row * top_k + pick`.
    pub at: Vec<u32>,
    /// `[at.len(), expert_width]`, unweighted.
    pub outputs: Vec<f32>,
}

/// One dispatch of a run, as [`Run::ops`] lists them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// Everything up to and with the layer's route; sets [`StopKind::Miss`].
    Route(Point),
    /// Copies the miss record to staging; unconditional.
    Peek(Staging),
    /// The layer's resident and shared experts; also runs when the stop is this flight's own at this point.
    Experts(Point),
    /// The layer's closing sum.
    Sum(Point),
    /// The rest of the batch, and what it decides; carries the batch's last point.
    Accept(Point),
}

impl Run {
    /// The run as dispatches, in order, for a model with `layers` MoE layers.
    pub fn ops(&self, layers: usize) -> impl Iterator<Item = Op> + '_ {
        let (mut at, mut pending) = (self.from, Vec::<Op>::new());
        let mut peeks = self.peeks.iter().peekable();
        std::iter::from_fn(move || {
            if pending.is_empty() {
                if at >= self.to {
                    return None;
                }
                let next = at.next(layers);
                // filled back to front
                if layers > 0 && at.phase == Phase::Route {
                    pending.push(Op::Experts(at));
                    if let Some((_, staging)) = peeks.next_if(|(point, _)| *point == at) {
                        pending.push(Op::Peek(*staging));
                    }
                    pending.push(Op::Route(at));
                } else {
                    if next.is_batch_start() {
                        pending.push(Op::Accept(at));
                    }
                    if layers > 0 {
                        pending.push(Op::Sum(at));
                    }
                }
                at = next;
            }
            pending.pop()
        })
    }

    /// Batches whose accept lies in the run.
    #[must_use]
    pub fn accepts(&self) -> u32 {
        self.to.batch - self.from.batch
    }
}

// ------------------------------------------------------------------ landings

/// What readback waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Wait {
    /// A peek of a run.
    Peek(Staging),
    /// An [`Item::Land`].
    Land(Staging),
    /// An [`Item::Upload`].
    Upload(UploadStaging),
    /// An [`Item::Read`].
    Read(Staging),
}

/// What landed.
#[derive(Clone, Debug)]
pub enum Landing {
    /// For [`Wait::Land`] and [`Wait::Peek`].
    Record(Box<Record>),
    /// For [`Wait::Upload`]: the bytes are on the device, the buffer is free.
    Uploaded,
    /// For [`Wait::Read`] of [`Read::State`].
    State(Box<Seed>),
    /// For [`Wait::Read`] of [`Read::Logits`]: `[vocab]`.
    Logits(Vec<f32>),
}

/// A slot's records as they lay there when they were copied: each part carries the flight that wrote it.
#[derive(Clone, Debug, Default)]
pub struct Record {
    /// The flight whose `Land` or peek made the copy.
    pub flight: FlightId,
    /// What accepts wrote. A peek may leave it empty.
    pub out: Out,
    /// The slot's stop.
    pub stop: Option<Stop>,
    /// The slot's last miss. Whether it is news, `missed.stop.flight` tells.
    pub missed: Option<Arc<Missed>>,
    /// Time the device worked on the flight, where it can tell.
    pub busy: Option<Duration>,
}

/// What the accepts of one flight wrote.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Out {
    /// The flight that wrote it; the first accept or route of another flight clears the rest.
    pub flight: FlightId,
    /// Ids in order.
    pub ids: Vec<TokenId>,
    /// One for each verify batch, in order.
    pub rounds: Vec<Round>,
    /// How often each expert was routed to by the flight: `[layers][experts]`; empty where the bank is full.
    pub routed: Vec<Vec<u32>>,
}

/// Outcome of one verify batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Round {
    /// Drafts that were verified; those behind an end id are not.
    pub offered: u32,
    /// Those that agreed, with one that is the end id. The batch gave `kept + 1` ids, fewer where the session ended in it.
    pub kept: u32,
}

/// What a route left of a miss: per slot, and frozen until the layer's sum.
#[derive(Clone, Debug, PartialEq)]
pub struct Missed {
    /// The stop it set.
    pub stop: Stop,
    /// The layer.
    pub layer: LayerIx,
    /// Experts a row picks.
    pub top_k: usize,
    /// The rows of the batch that miss something: `[n, hidden]` after the block's norm, as the experts read them.
    pub normed: Vec<f32>,
    /// Which row of the batch each of those is: `[n]`, ascending.
    pub rows: Vec<u32>,
    /// `[n, top_k]`
    pub picks: Vec<ExpertIx>,
    /// `[n, top_k]`: whether the map named no place for the pick
    pub missing: Vec<bool>,
}

impl Missed {
    /// The missing experts, ascending, each with its `(n, pick)` pairs, ascending.
    #[must_use]
    pub fn by_expert(&self) -> Vec<(ExpertIx, Vec<(u32, u32)>)> {
        let mut all: Vec<_> = (self.picks.iter().zip(&self.missing).enumerate())
            .filter(|(_, (_, missing))| **missing)
            .map(|(i, (expert, _))| (*expert, ((i / self.top_k) as u32, (i % self.top_k) as u32)))
            .collect();
        all.sort_unstable();
        (all.chunk_by(|a, b| a.0 == b.0)).map(|same| (same[0].0, same.iter().map(|(_, at)| *at).collect())).collect()
    }

    /// Where a pick's output goes: what [`Completions::at`] wants for row `n` of this record.
    #[must_use]
    pub fn at(&self, n: u32, pick: u32) -> u32 {
        self.rows[n as usize] * self.top_k as u32 + pick
    }

    /// The floats of row `n`.
    #[must_use]
    pub fn normed_row(&self, n: usize) -> &[f32] {
        let width = self.normed.len() / self.rows.len();
        let range: Range<usize> = n * width..(n + 1) * width;
        &self.normed[range]
    }
}

/// What the host does beside a device, in the device's own arithmetic. Shared by the completer (many threads inside one
/// call), the submitter (rows of ids, when a session moves to another device) and whoever pages experts in.
pub trait Companion: Send + Sync {
    /// The embedding `[hidden]` of an id.
    fn embed(&self, id: TokenId) -> Vec<f32>;

    /// The missing experts' outputs for every row that misses them, but for the experts in `leave`, which are served
    /// another way. Each expert's weights are read once, all experts in one parallel region.
    fn complete(&self, missed: &Missed, leave: &[ExpertIx]) -> Completions;

    /// Whether what it reads is still what was opened; asked before it reads much.
    ///
    /// # Errors
    ///
    /// How the file changed.
    fn still_readable(&self) -> Result<(), String> {
        Ok(())
    }

    /// The bytes of an expert, read through.
    fn payload(&self, layer: LayerIx, expert: ExpertIx) -> Payload;

    /// The block that first makes a value that is not finite of a session's rows `[n, hidden]` and the embeddings of its
    /// ids, from its seed on. Bounded in time.
    ///
    /// # Errors
    ///
    /// Why none can be named.
    fn first_not_finite(&self, seed: Option<&Seed>, rows: &[f32], ids: &[TokenId]) -> Result<BlockIx, String>;

    /// Begins to prefill a prompt in the device's place, behind `seed`; `drafts` says whether the state is to serve them.
    /// `None` where it cannot.
    fn prefill(&self, seed: Option<&Seed>, drafts: bool) -> Option<Box<dyn Prefill>> {
        let _ = (seed, drafts);
        None
    }
}

/// A prompt that is prefilled beside the device.
pub trait Prefill: Send {
    /// Takes rows `[n, hidden]`.
    ///
    /// # Errors
    ///
    /// The block that made a value that is not finite.
    fn rows(&mut self, rows: &[f32]) -> Result<(), BlockIx>;

    /// The state behind all rows.
    fn seed(self: Box<Self>) -> Seed;
}

/// What can go wrong with a device.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum DeviceError {
    /// It is gone, and all it held.
    #[error("the device was lost: {why}")]
    Lost {
        /// The driver's words.
        why: String,
    },
    /// A landing did not come in time.
    #[error("nothing landed in {waited:?}")]
    TimedOut {
        /// How long it was waited for.
        waited: Duration,
    },
    /// An allocation was refused.
    #[error("the device has no {bytes} bytes for {what}")]
    OutOfMemory {
        /// What for.
        what: String,
        /// How much.
        bytes: u64,
    },
    /// The model's shape is not one its kernels can do.
    #[error("the model does not fit the device: {why}")]
    Unfit {
        /// Which number, and what it may be.
        why: String,
    },
    /// A self-test found a kernel that is not its twin.
    #[error("kernel {kernel} differs from its twin by {seen}, allowed is {allowed}")]
    Untrue {
        /// The kernel.
        kernel: String,
        /// What was measured.
        seen: f32,
        /// What is allowed.
        allowed: f32,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(from: Point, to: Point, peeks: Vec<(Point, Staging)>) -> Run {
        let stamp = Stamp { flight: FlightId(1), slot: SlotIx(0), turn: Turn(1) };
        Run { stamp, from, to, work: Work::Steps, limit: Position(9), peeks }
    }

    fn point(batch: u32, layer: u16, phase: Phase) -> Point {
        Point { batch, layer: LayerIx(layer), phase }
    }

    #[test]
    fn a_run_lists_its_dispatches() {
        use Phase::{Route, Sum};
        let (r0, s0, r1, s1) = (point(0, 0, Route), point(0, 0, Sum), point(0, 1, Route), point(0, 1, Sum));
        let whole = run(Point::start_of(0), Point::start_of(1), vec![(r1, Staging(3))]);
        let want = [
            Op::Route(r0),
            Op::Experts(r0),
            Op::Sum(s0),
            Op::Route(r1),
            Op::Peek(Staging(3)),
            Op::Experts(r1),
            Op::Sum(s1),
            Op::Accept(s1),
        ];
        assert_eq!(whole.ops(2).collect::<Vec<_>>(), want);
        assert_eq!(whole.accepts(), 1);

        let resumed = run(s0, s1, vec![]);
        assert_eq!(resumed.ops(2).collect::<Vec<_>>(), [Op::Sum(s0), Op::Route(r1), Op::Experts(r1)]);
        assert_eq!(resumed.accepts(), 0);
    }

    #[test]
    fn a_model_without_experts_has_accepts_alone() {
        let two = run(Point::start_of(4), Point::start_of(6), vec![]);
        let want = [Op::Accept(Point::start_of(4)), Op::Accept(Point::start_of(5))];
        assert_eq!(two.ops(0).collect::<Vec<_>>(), want);
    }

    #[test]
    fn points_follow_each_other_in_their_own_order() {
        let mut at = Point::start_of(0);
        for _ in 0..20 {
            assert!(at < at.next(3), "{at:?}");
            at = at.next(3);
        }
        assert_eq!(at, point(3, 1, Phase::Route));
    }

    #[test]
    fn misses_are_grouped_by_expert() {
        let stop = Stop {
            kind: StopKind::Miss,
            slot: SlotIx(0),
            turn: Turn(1),
            flight: FlightId(1),
            point: Point::start_of(0),
        };
        let missed = Missed {
            stop,
            layer: LayerIx(0),
            top_k: 2,
            normed: vec![0.0, 1.0, 2.0, 3.0],
            rows: vec![3, 7],
            picks: [5, 2, 9, 5].map(ExpertIx).to_vec(),
            missing: vec![true, false, true, true],
        };
        assert_eq!(missed.by_expert(), [(ExpertIx(5), vec![(0, 0), (1, 1)]), (ExpertIx(9), vec![(1, 0)])]);
        assert_eq!(missed.at(1, 1), 15);
        assert_eq!(missed.normed_row(1), [2.0, 3.0]);
    }

    #[test]
    fn a_payload_knows_when_it_was_changed() {
        for len in [0, 1, 7, 8, 9, 40] {
            let mut payload = Payload::new(LayerIx(0), ExpertIx(1), (0..len).map(|i| i as u8).collect());
            assert!(payload.is_intact());
            for i in 0..len {
                payload.bytes[i] ^= 0x10;
                assert!(!payload.is_intact(), "byte {i} of {len}");
                payload.bytes[i] ^= 0x10;
            }
        }
    }
}
