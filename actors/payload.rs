//! What travels over more than one hop, and what leaves the graph.

use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::Sender;

use super::meter::LapTimes;
use crate::device::{DeviceError, Payload, Seed};
use crate::ids::{BlockIx, ExpertIx, LayerIx, PlaceIx, Position, TokenId};

/// How a session is opened.
#[derive(Clone, Debug)]
pub struct SessionOptions {
    /// Ids that end the text; the one met is still delivered. Empty: nothing but the length ends it.
    pub eos: Arc<[TokenId]>,
    /// State to go on from, in place of the state before the first row.
    pub seed: Option<Arc<Seed>>,
    /// Whether drafts may be used where the device has them.
    pub drafts: bool,
    /// Drafts a round, whatever pays, cut to what the device verifies: for tests and measurements. `None` leaves it to
    /// the draft scheduler.
    pub depth: Option<usize>,
}

impl Default for SessionOptions {
    fn default() -> Self {
        Self { eos: Arc::new([]), seed: None, drafts: true, depth: None }
    }
}

/// What a session gives, in order; `Finished` once and last. A channel that closes without it means that the submitter
/// died.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// One id.
    Token(Token),
    /// The end.
    Finished(Box<Finished>),
}

/// One id of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Token {
    /// The id.
    pub id: TokenId,
    /// Its position: rows before it.
    pub position: Position,
    /// Whether it was drafted first.
    pub drafted: bool,
}

/// How a session ended, and what it took.
#[derive(Clone, Debug, PartialEq)]
pub struct Finished {
    /// Why.
    pub reason: FinishReason,
    /// What it took.
    pub stats: SessionStats,
}

/// Why a session ended.
#[derive(Clone, Debug, PartialEq)]
pub enum FinishReason {
    /// An end id was delivered.
    End,
    /// `max_new_tokens` or the context is used up.
    Length,
    /// The session was cancelled or its stream dropped.
    Cancelled,
    /// It could not go on; the ids before stand.
    Failed(SessionError),
}

/// Why a session could not go on, or a request was refused.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum SessionError {
    /// More rows than the context holds.
    #[error("the prompt has {wanted} positions, the context holds {limit}")]
    ContextFull {
        /// Positions the device holds.
        limit: usize,
        /// Positions that the prompt would have with this feed.
        wanted: usize,
    },
    /// Floats that are no whole rows.
    #[error("{floats} floats are no whole rows of {hidden}")]
    RowWidth {
        /// Floats fed.
        floats: usize,
        /// Floats of a row.
        hidden: usize,
    },
    /// Decoding was asked for before any row was fed.
    #[error("nothing was fed before decoding")]
    EmptyPrompt,
    /// Rows or a second decode came after decoding had begun.
    #[error("decoding has begun already")]
    Decoding,
    /// The session has ended.
    #[error("the session has ended")]
    Ended,
    /// A value was not finite.
    #[error("block {block} made a value that is not finite")]
    NotFinite {
        /// The first block that did.
        block: BlockIx,
    },
    /// A value was not finite on a device that cannot tell where, and the host did not find the block either.
    #[error("block {block} or one before it made a value that is not finite ({why})")]
    NotFiniteBy {
        /// The last block that may have.
        block: BlockIx,
        /// Why it is not known better.
        why: String,
    },
    /// The device failed and no host device could take over.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// Missing experts could not be computed.
    #[error("experts of {layer:?} could not be completed: {why}")]
    Completion {
        /// Their layer.
        layer: LayerIx,
        /// What happened.
        why: String,
    },
    /// More requests at once than the submitter's channel holds.
    #[error("more than {limit} requests at once")]
    Busy {
        /// The channel's bound.
        limit: usize,
    },
    /// An actor has ended; nothing answers any more.
    #[error("the {actor} has ended")]
    Gone {
        /// Which.
        actor: &'static str,
    },
}

/// What a session took.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SessionStats {
    /// Rows fed.
    pub rows: usize,
    /// Ids delivered.
    pub tokens: usize,
    /// Flights landed.
    pub flights: usize,
    /// Stops for missing experts.
    pub misses: usize,
    /// Missing experts computed by the host.
    pub completed: usize,
    /// Experts admitted while it was open, whichever session they were for.
    pub admitted: usize,
    /// Drafts verified.
    pub drafts_offered: usize,
    /// Drafts that stood.
    pub drafts_kept: usize,
    /// Verify batches.
    pub verifies: usize,
    /// From the first row's arrival to the first id.
    pub prefill: Duration,
    /// From the first id to the end.
    pub decode: Duration,
    /// Whether it went on on the host after its device was lost.
    pub recovered: bool,
}

/// All counters since the start (`runtime.md` §8).
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Counters {
    /// Ids delivered.
    pub tokens: u64,
    /// Flights queued.
    pub flights: u64,
    /// Flights that were overtaken: queued behind a stop, so that they did nothing or only a part.
    pub overtaken: u64,
    /// Stops for missing experts.
    pub misses: u64,
    /// Missing experts (an expert of one stop counts once).
    pub missed_experts: u64,
    /// Experts computed by the host.
    pub completed: u64,
    /// Experts served by upload.
    pub served_by_upload: u64,
    /// Experts routed to, with repeats; counted where the bank is partial.
    pub routed: u64,
    /// Experts admitted to a bank.
    pub admitted: u64,
    /// Admissions that could not be queued.
    pub admissions_refused: u64,
    /// Bytes uploaded.
    pub bytes_uploaded: u64,
    /// Drafts verified.
    pub drafts_offered: u64,
    /// Drafts that stood.
    pub drafts_kept: u64,
    /// Verify batches.
    pub verifies: u64,
    /// Rollbacks by the host.
    pub rollbacks: u64,
    /// Sessions opened.
    pub sessions: u64,
    /// Sessions open now.
    pub sessions_open: u64,
    /// Devices lost.
    pub losses: u64,
    /// Flights that are live now.
    pub flights_live: u64,
    /// Flights that have not landed.
    pub flights_unlanded: u64,
    /// Messages that wait now.
    pub queues: Queues,
    /// Time the device said it worked, where it can tell.
    pub device_busy: Duration,
    /// Promises of our own that were broken (`invariants.rs`); 0, or a bug.
    pub violations: u64,
    /// Where the time of flights and of missing experts went.
    pub laps: Vec<LapTimes>,
}

/// Messages that wait in the channels of a graph. Every channel is bounded where it is made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Queues {
    /// Sessions' requests to the submitter.
    pub requests: usize,
    /// Readback's facts to the submitter.
    pub facts: usize,
    /// The completer's answers to the submitter.
    pub answers: usize,
    /// Admissions whose upload the submitter has not queued.
    pub admits: usize,
    /// The draft scheduler's advice to the submitter.
    pub advice: usize,
    /// What readback is still to wait for, in order.
    pub awaits: usize,
    /// Layers whose missing experts the completer has not begun.
    pub completions: usize,
}

/// Admission manager to loader: read an expert's bytes. Page-in happens there.
#[derive(Debug)]
pub struct Fetch {
    /// The layer.
    pub layer: LayerIx,
    /// The expert.
    pub expert: ExpertIx,
    /// Where the answer goes; has room for every fetch under way.
    pub reply: Sender<Fetched>,
}

/// Loader to admission manager: the answer to every [`Fetch`], failed ones too.
#[derive(Clone, Debug)]
pub struct Fetched {
    /// The layer.
    pub layer: LayerIx,
    /// The expert.
    pub expert: ExpertIx,
    /// The bytes, or why there are none.
    pub payload: Result<Arc<Payload>, String>,
}

/// Fetches under way at most: as many as an admission round may move (`runtime.md` §5). The loader's channel needs no
/// more room than this.
pub const FETCHES_MAX: usize = 8;

/// Admission manager to submitter: upload the expert into the place.
#[derive(Clone, Debug)]
pub struct Admit {
    /// The place it takes.
    pub place: PlaceIx,
    /// Layer, expert and bytes.
    pub payload: Arc<Payload>,
}

impl Admit {
    /// A number for it in traces, which draw an arrow from the decision to the upload. No stop's number is as large.
    #[must_use]
    pub fn flow(&self) -> u64 {
        1 << 63 | u64::from(self.payload.layer.0) << 32 | u64::from(self.payload.expert.0)
    }
}
