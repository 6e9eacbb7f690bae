//! The submitter: it alone queues work on the device, and it alone knows every session.
//!
//! - **Owns** the device's queue half, sessions, slots and their turns, flights, staging buffers, the prompt rows and ids
//!   from which a session goes on elsewhere when its device is lost.
//! - **Takes** sessions' [`Request`]s and [`Control`], readback's [`Fact`]s, the completer's [`Answer`]s, the admission
//!   manager's [`Admit`]s, the draft scheduler's [`Advice`], the prefiller's [`Prefilled`] where there is one.
//! - **Gives** queue items to the device, awaits to readback, [`Event`]s to sessions, observations to the admission
//!   manager and the draft scheduler.
//! - **May block on** its inbox alone. It never waits for the device or a full channel.
//! - **Stops** on [`Control::Shutdown`], or when every handle and session is gone.
//!
//! The rules are those of `protocol.md` §5, cited by number. What a session does next is decided in one place,
//! `Submitter::queue_flight`, after every message.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::{Receiver, never, select_biased};
use tokio::sync::{OwnedSemaphorePermit, mpsc, oneshot};
use tracing::{Span, debug, debug_span, field, info, info_span, trace, warn};

use super::admission::{self, Observed};
use super::clock::Clock;
use super::completer::{self, Answer, Spoiled};
use super::drafts::{self, Advice};
use super::meter::{Lap, Meter};
use super::payload::{
    Admit, Counters, Event, FinishReason, Finished, Queues, SessionError, SessionOptions, SessionStats, Token,
};
use super::prefiller::{self, PASSES_MAX, Prefilled};
use super::readback::{self, Fact, ReadResult};
use super::session::{Control, Ends, Request};
use crate::check;
use crate::device::{
    Companion, Completions, Device, DeviceError, DraftAbility, Facts, Item, LIVE_MAX, Pass, Payload, Phase, Point,
    Queue, Read, Run, Staging, Stamp, Stop, StopKind, UNLANDED_MAX, UploadStaging, Wait, Work,
};
use crate::host::Spin;
use crate::ids::{BlockIx, FlightId, LayerIx, PlaceIx, Position, SessionId, SlotIx, TokenId, Turn};
use crate::invariants::{Broken, violations};
use crate::policy::ahead::{Ahead, AheadOptions, Horizon};
use crate::policy::drafts::FlightOutcome;

/// Opens the device that takes over when the first is lost.
pub type Fallback = Box<dyn FnOnce() -> Result<Box<dyn Device>, DeviceError> + Send>;

/// A miss rate to start from where the bank is partial: high, because running too far ahead costs device time and
/// running too short only a little latency until the true rate is known.
const MISS_RATE_START: f32 = 0.5;

/// The submitter looks for so long for what is due before it sleeps.
const LOOK: Duration = Duration::from_millis(1);

/// Prompt rows of a session that are not queued yet, beyond which its feeds wait: two of the widest passes.
const FEED_PASSES: usize = 2;

/// Everything the submitter is told.
#[derive(Debug)]
pub(crate) enum Message {
    /// The graph's owner.
    Control(Control),
    /// Readback.
    Fact(Fact),
    /// The completer.
    Answer(Answer),
    /// The admission manager.
    Admit(Admit),
    /// The draft scheduler.
    Advice(Advice),
    /// The prefiller.
    Prefilled(Prefilled),
    /// A session.
    Request(Request),
    /// A session took an event.
    Nudge,
    /// The channel from this actor closed: it is dead.
    Died(&'static str),
}

/// Where messages come from, most urgent first.
pub(crate) struct Inbox {
    pub(crate) sessions: Ends,
    pub(crate) facts: Receiver<Fact>,
    pub(crate) answers: Receiver<Answer>,
    pub(crate) admits: Receiver<Admit>,
    pub(crate) advice: Receiver<Advice>,
    pub(crate) prefilled: Receiver<Prefilled>,
}

/// One of the submitter's channels, for a simulation that chooses between them; but for the prefiller's, which no
/// simulation has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "named like the messages")]
pub enum Source {
    Control,
    Facts,
    Answers,
    Admits,
    Advice,
    Requests,
    Nudges,
}

impl Source {
    /// All, most urgent first.
    pub const ALL: [Source; 7] = [
        Source::Control,
        Source::Answers,
        Source::Facts,
        Source::Admits,
        Source::Advice,
        Source::Requests,
        Source::Nudges,
    ];
}

impl Inbox {
    /// The next message. A channel whose sender died says so once.
    fn recv(&mut self, spin: Spin) -> Message {
        spin.until(|| Source::ALL.iter().any(|source| self.waiting(*source) > 0));
        select_biased! {
            recv(self.sessions.control) -> m => m.map_or(Message::Control(Control::Shutdown), Message::Control),
            // a device waits for each answer
            recv(self.answers) -> m => {
                m.map_or_else(|_| { self.answers = never(); Message::Died("completer") }, Message::Answer)
            }
            recv(self.facts) -> m => m.map_or_else(|_| { self.facts = never(); Message::Died("readback") }, Message::Fact),
            recv(self.admits) -> m => {
                m.map_or_else(|_| { self.admits = never(); Message::Died("admission manager") }, Message::Admit)
            }
            recv(self.advice) -> m => {
                m.map_or_else(|_| { self.advice = never(); Message::Died("draft scheduler") }, Message::Advice)
            }
            recv(self.prefilled) -> m => {
                m.map_or_else(|_| { self.prefilled = never(); Message::Died("prefiller") }, Message::Prefilled)
            }
            recv(self.sessions.requests) -> m => m.map_or(Message::Control(Control::Shutdown), Message::Request),
            recv(self.sessions.nudges) -> m => m.map_or(Message::Control(Control::Shutdown), |_| Message::Nudge),
        }
    }

    fn try_recv(&self, source: Source) -> Option<Message> {
        match source {
            Source::Control => self.sessions.control.try_recv().ok().map(Message::Control),
            Source::Facts => self.facts.try_recv().ok().map(Message::Fact),
            Source::Answers => self.answers.try_recv().ok().map(Message::Answer),
            Source::Admits => self.admits.try_recv().ok().map(Message::Admit),
            Source::Advice => self.advice.try_recv().ok().map(Message::Advice),
            Source::Requests => self.sessions.requests.try_recv().ok().map(Message::Request),
            Source::Nudges => self.sessions.nudges.try_recv().ok().map(|_| Message::Nudge),
        }
    }

    fn waiting(&self, source: Source) -> usize {
        match source {
            Source::Control => self.sessions.control.len(),
            Source::Facts => self.facts.len(),
            Source::Answers => self.answers.len(),
            Source::Admits => self.admits.len(),
            Source::Advice => self.advice.len(),
            Source::Requests => self.sessions.requests.len(),
            Source::Nudges => self.sessions.nudges.len(),
        }
    }
}

/// How the submitter goes about it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Options {
    /// How far flights run ahead; `batches_max` is `CMF_NEMO_STEPS`.
    pub ahead: AheadOptions,
    /// Whether prompts are prefilled in passes of many rows (`CMF_NEMO_BATCH`).
    pub batched_prefill: bool,
    /// Whether the host prefills for a device, which is seeded then (`CMF_NEMO_PREFILL`).
    pub host_prefill: bool,
    /// Whether drafts are used where the device has them (`CMF_NEMO_MTP`).
    pub drafts: bool,
    /// For tests of the tests.
    #[doc(hidden)]
    pub broken: Broken,
}

/// What a known stop is cured with.
enum Cure {
    Resume {
        made: Completions,
        uploads: Vec<Arc<Payload>>,
        /// When the miss was read, and when the answer was taken.
        times: [Duration; 2],
    },
    Rollback,
}

/// Where the flight behind a stop ends, and the buffers that are kept for it.
#[derive(Clone, Debug)]
struct Planned {
    stop: Stop,
    to: Point,
    peeks: Vec<(Point, Staging)>,
    landing: Staging,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// Opened, or its device was lost; has no slot.
    Waiting,
    /// Has a slot.
    Live(SlotIx),
    /// Finished; its slot still has flights to land or a job to be answered (rule 12).
    Closing(SlotIx),
}

/// A prompt that the host prefills; the session gets its slot when the state is there.
struct OnHost {
    /// Gone with the session, which tells the prefiller that nobody wants it any more.
    wanted: Arc<()>,
    /// Rows are under way, or the wish for the state.
    under_way: bool,
}

struct Session {
    stage: Stage,
    /// `None` where the device prefills, or nothing is left to prefill.
    on_host: Option<OnHost>,
    options: SessionOptions,
    /// `None` once it is finished.
    events: Option<mpsc::Sender<Event>>,
    /// Says, or closes, when its user wants no more.
    cancelled: oneshot::Receiver<()>,
    /// Given back with the session.
    _place: OwnedSemaphorePermit,
    /// All rows it starts from: the prompt, and after a loss the ids delivered before.
    rows: Vec<f32>,
    /// Rows of the prompt among them.
    prompt: usize,
    /// Ids whose embeddings are among the rows.
    replayed: usize,
    /// Rows that are queued, of `rows`.
    cursor: usize,
    /// End, in rows, of each prefill pass that was queued, by batch.
    passes: Vec<usize>,
    /// The batch whose accept gives the first id.
    accepting: Option<u32>,
    /// Set by `Decode`: ids at most, if anything bounds them beside the context.
    decoding: Option<Option<usize>>,
    /// Where the next flight begins.
    next: Point,
    /// The work of the batch in which `next` lies, if it lies within one.
    current: Option<Work>,
    /// The stop of the present turn. Nothing is queued between knowing it and its cure (rule 7).
    known: Option<Stop>,
    cure: Option<(Stop, Cure)>,
    /// The flight behind the known stop, as far as it is planned before its cure.
    planned: Option<Planned>,
    ids: Vec<TokenId>,
    depth: usize,
    /// Guessed ids from number `guess_after` on.
    guess: Vec<TokenId>,
    guess_after: usize,
    feeds: Vec<oneshot::Sender<Result<(), SessionError>>>,
    reads: VecDeque<(Read, oneshot::Sender<Result<ReadResult, SessionError>>)>,
    reading: bool,
    stats: SessionStats,
    first_feed: Option<Duration>,
    first_id: Option<Duration>,
    /// Never entered: open from the first pass that was queued until the first id.
    prefill: Option<Span>,
    /// Never entered: open as long as the session is known here.
    span: Span,
}

impl Session {
    fn slot(&self) -> Option<SlotIx> {
        match self.stage {
            Stage::Live(slot) => Some(slot),
            _ => None,
        }
    }

    /// Whether all that is queued ends with a whole batch, as far as is known.
    fn is_between_batches(&self) -> bool {
        self.known.is_none() && self.next.is_batch_start()
    }

    fn is_open(&self) -> bool {
        self.events.is_some()
    }

    /// Positions before the first row.
    fn base(&self) -> usize {
        self.options.seed.as_ref().map_or(0, |seed| seed.state.position.index())
    }

    /// Rows consumed at which it ends.
    fn limit(&self, kv_positions: usize) -> usize {
        let wanted = self.decoding.flatten().map(|ids| (self.base() + self.prompt + ids).saturating_sub(1));
        wanted.unwrap_or(usize::MAX).min(kv_positions)
    }

    /// Rows that stand, as far as is known.
    fn position(&self) -> usize {
        if self.ids.is_empty() { self.base() + self.cursor } else { self.base() + self.prompt + self.ids.len() - 1 }
    }

    /// Ids it may have in all.
    fn ids_max(&self, kv_positions: usize) -> usize {
        (self.limit(kv_positions) + 1).saturating_sub(self.base() + self.prompt)
    }
}

#[derive(Clone, Debug)]
struct Flight {
    id: FlightId,
    session: SessionId,
    slot: SlotIx,
    turn: Turn,
    /// Behind a known stop (rule 7): does nothing any more, but its landing is owed.
    overtaken: bool,
    from: Point,
    to: Point,
    work: Work,
    queued: Duration,
    /// Never entered: open from here until the landing was handled.
    span: Span,
}

impl Flight {
    fn accepts(&self) -> usize {
        (self.to.batch - self.from.batch) as usize
    }

    fn ids_max(&self) -> usize {
        self.accepts() * self.work.ids_max()
    }
}

struct Slot {
    owner: Option<SessionId>,
    turn: Turn,
    /// `Missed` minus answers; signed, because an answer may overtake its fact.
    jobs: i32,
}

/// Numbers of free buffers.
struct Pool {
    free: Vec<u16>,
}

impl Pool {
    fn new(n: usize) -> Self {
        Self { free: (0..n).rev().map(|i| u16::try_from(i).expect("few buffers")).collect() }
    }

    fn take(&mut self) -> Option<u16> {
        self.free.pop()
    }

    fn give(&mut self, number: u16) {
        check!(Flights, !self.free.contains(&number), "buffer {number} was given back twice");
        self.free.push(number);
    }
}

#[derive(Clone, Debug, PartialEq)]
enum Health {
    Well,
    /// The device is lost and the next one stands ready; facts up to `Lost` are the old one's.
    Draining,
    /// Lost, and there is no other.
    Dead(SessionError),
}

/// The actor.
pub struct Submitter {
    inbox: Inbox,
    options: Options,
    queue: Box<dyn Queue>,
    facts: Facts,
    companion: Arc<dyn Companion>,
    fallback: Option<Fallback>,
    readback: readback::Handle,
    completer: completer::Handle,
    admission: Option<admission::Handle>,
    drafts: Option<drafts::Handle>,
    prefiller: Option<prefiller::Handle>,
    /// Passes the prefiller owes an answer for.
    prefills: usize,
    health: Health,
    sessions: BTreeMap<SessionId, Session>,
    /// Whose turn it is, first first.
    turns: VecDeque<SessionId>,
    slots: Vec<Slot>,
    flights: Vec<Flight>,
    next_flight: FlightId,
    /// Flights and stops before this one are a lost device's.
    epoch: FlightId,
    staging: Pool,
    upload_staging: Pool,
    decode_ahead: Ahead,
    prefill_ahead: Ahead,
    last_landed: Duration,
    /// Drafts a batch as advised last: what the next session begins with.
    depth: usize,
    counters: Counters,
    clock: Clock,
    meter: Meter,
    ended: bool,
}

/// What the submitter is made of.
pub(crate) struct Parts {
    pub(crate) inbox: Inbox,
    pub(crate) options: Options,
    pub(crate) queue: Box<dyn Queue>,
    pub(crate) facts: Facts,
    pub(crate) companion: Arc<dyn Companion>,
    pub(crate) fallback: Option<Fallback>,
    pub(crate) readback: readback::Handle,
    pub(crate) completer: completer::Handle,
    pub(crate) admission: Option<admission::Handle>,
    pub(crate) drafts: Option<drafts::Handle>,
    pub(crate) prefiller: Option<prefiller::Handle>,
    pub(crate) clock: Clock,
    pub(crate) meter: Meter,
}

fn slots_from(facts: &Facts, turn: Turn) -> Vec<Slot> {
    (0..facts.slots).map(|_| Slot { owner: None, turn, jobs: 0 }).collect()
}

fn aheads(options: &Options, facts: &Facts) -> (Ahead, Ahead) {
    let start = if facts.is_full() { 0.0 } else { MISS_RATE_START };
    let decode = Ahead::new(options.ahead, facts.layers, start);
    // A pass of many rows misses where one row does not.
    let prefill = Ahead::new(AheadOptions { batches_max: 1, ..options.ahead }, facts.layers, start);
    (decode, prefill)
}

impl Submitter {
    pub(crate) fn new(parts: Parts) -> Self {
        let (decode_ahead, prefill_ahead) = aheads(&parts.options, &parts.facts);
        Self {
            slots: slots_from(&parts.facts, Turn(0)),
            staging: Pool::new(parts.facts.staging),
            upload_staging: Pool::new(parts.facts.upload_staging),
            decode_ahead,
            prefill_ahead,
            inbox: parts.inbox,
            options: parts.options,
            queue: parts.queue,
            facts: parts.facts,
            companion: parts.companion,
            fallback: parts.fallback,
            readback: parts.readback,
            completer: parts.completer,
            admission: parts.admission,
            drafts: parts.drafts,
            prefiller: parts.prefiller,
            prefills: 0,
            health: Health::Well,
            sessions: BTreeMap::new(),
            turns: VecDeque::new(),
            flights: Vec::new(),
            next_flight: FlightId(1),
            epoch: FlightId(1),
            last_landed: Duration::ZERO,
            depth: 1,
            counters: Counters::default(),
            clock: parts.clock,
            meter: parts.meter,
            ended: false,
        }
    }

    /// Runs until it is stopped.
    pub(crate) fn run(mut self) {
        let _span = debug_span!(target: "riparian::submitter", "submitter").entered();
        let spin = Spin::up_to(LOOK);
        while !self.ended {
            // where an answer or a landing is due and a stop may hang on it
            let due = !self.flights.is_empty() && !self.facts.is_full();
            let message = self.inbox.recv(if due { spin } else { Spin::NONE });
            self.handle(message);
        }
    }

    /// One move of a simulation: takes a message from one channel. Tells whether there was one.
    pub fn step(&mut self, source: Source) -> bool {
        self.inbox.try_recv(source).map(|message| self.handle(message)).is_some()
    }

    /// Messages that wait in a channel.
    #[must_use]
    pub fn waiting(&self, source: Source) -> usize {
        self.inbox.waiting(source)
    }

    /// Whether no session is left and nothing is under way: for tests.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        let buffers = self.staging.free.len() == self.facts.staging
            && self.upload_staging.free.len() == self.facts.upload_staging;
        let dead = matches!(self.health, Health::Dead(_));
        self.sessions.is_empty()
            && self.flights.is_empty()
            && self.slots.iter().all(|slot| slot.owner.is_none() && slot.jobs == 0)
            && (buffers || dead)
    }

    /// What stands in the way of being idle: for tests.
    #[must_use]
    pub fn describe(&self) -> String {
        let sessions = self.sessions.iter().map(|(id, s)| {
            format!(
                "{id:?}: {:?} open {} ids {} cursor {}/{} next {:?} known {:?} cure {}",
                s.stage,
                s.is_open(),
                s.ids.len(),
                s.cursor,
                s.rows.len() / self.facts.hidden,
                s.next,
                s.known,
                s.cure.is_some()
            )
        });
        let flights = self.flights.iter().map(|f| format!("{:?} of {:?} overtaken {}", f.id, f.session, f.overtaken));
        let slots = self.slots.iter().map(|s| format!("{:?} jobs {}", s.owner, s.jobs));
        let lines: Vec<String> = sessions.chain(flights).chain(slots).collect();
        format!("{:?}\n{}", self.health, lines.join("\n"))
    }

    /// The counters now.
    #[must_use]
    pub fn counters(&self) -> Counters {
        Counters {
            sessions_open: self.sessions.values().filter(|s| s.is_open()).count() as u64,
            flights_live: self.live() as u64,
            flights_unlanded: self.flights.len() as u64,
            queues: self.queues(),
            violations: violations(),
            laps: self.meter.times(),
            ..self.counters.clone()
        }
    }

    fn queues(&self) -> Queues {
        Queues {
            requests: self.inbox.sessions.requests.len(),
            facts: self.inbox.facts.len(),
            answers: self.inbox.answers.len(),
            admits: self.inbox.admits.len(),
            advice: self.inbox.advice.len(),
            awaits: self.readback.waiting(),
            completions: self.completer.waiting(),
        }
    }

    /// Tells whoever draws counters; nothing is computed where nobody listens.
    fn count(&self) {
        let (c, q) = (&self.counters, || self.queues());
        trace!(
            target: "riparian::counter",
            tokens = c.tokens, flights = c.flights, misses = c.misses, completions = c.completed,
            admissions = c.admitted, drafts_offered = c.drafts_offered, drafts_kept = c.drafts_kept,
            bytes_uploaded = c.bytes_uploaded, flights_live = self.live(), flights_unlanded = self.flights.len(),
            queue_requests = q().requests, queue_facts = q().facts, queue_answers = q().answers,
            queue_admits = q().admits, queue_advice = q().advice, queue_awaits = q().awaits,
            queue_completions = q().completions
        );
    }

    fn handle(&mut self, message: Message) {
        match message {
            Message::Control(Control::Shutdown) => self.shutdown(),
            Message::Fact(fact) => self.fact(fact),
            Message::Answer(answer) => self.answer(answer),
            Message::Admit(admit) => self.admit(admit),
            Message::Advice(advice) => self.advice(advice),
            Message::Prefilled(prefilled) => self.prefilled(prefilled),
            Message::Request(request) => self.request(request),
            Message::Nudge => {}
            Message::Died(actor) => self.died(actor),
        }
        self.pump();
    }

    // ------------------------------------------------------------------ sessions

    fn request(&mut self, request: Request) {
        match request {
            Request::Open { session, options, events, cancel, place } => {
                self.open(session, options, (events, cancel), place);
            }
            Request::Feed { session, rows, reply } => self.feed(session, &rows, reply),
            Request::Decode { session, max_new } => self.decode(session, max_new),
            Request::Read { session, what, reply } => match self.sessions.get_mut(&session).filter(|s| s.is_open()) {
                Some(found) => found.reads.push_back((what, reply)),
                None => drop(reply.send(Err(SessionError::Ended))),
            },
            Request::Counters { reply } => drop(reply.send(self.counters())),
        }
    }

    fn open(
        &mut self,
        id: SessionId,
        options: SessionOptions,
        (events, cancelled): (mpsc::Sender<Event>, oneshot::Receiver<()>),
        place: OwnedSemaphorePermit,
    ) {
        self.counters.sessions += 1;
        let drafts = self.options.drafts && options.drafts && self.facts.drafts != DraftAbility::None;
        let on_host = self.prefiller.as_ref().map(|_| OnHost { wanted: Arc::default(), under_way: false });
        let session = Session {
            stage: Stage::Waiting,
            on_host,
            depth: if drafts { options.depth.unwrap_or(self.depth) } else { 0 },
            options,
            events: Some(events),
            cancelled,
            _place: place,
            rows: Vec::new(),
            prompt: 0,
            replayed: 0,
            cursor: 0,
            passes: Vec::new(),
            accepting: None,
            decoding: None,
            next: Point::default(),
            current: None,
            known: None,
            cure: None,
            planned: None,
            ids: Vec::new(),
            guess: Vec::new(),
            guess_after: 0,
            feeds: Vec::new(),
            reads: VecDeque::new(),
            reading: false,
            stats: SessionStats::default(),
            first_feed: None,
            first_id: None,
            prefill: None,
            span: info_span!(target: "riparian::session", "session", session = id.0),
        };
        self.sessions.insert(id, session);
        self.turns.push_back(id);
        if let Health::Dead(error) = &self.health {
            let error = error.clone();
            self.finish(id, FinishReason::Failed(error));
        }
    }

    fn feed(&mut self, id: SessionId, rows: &[f32], reply: oneshot::Sender<Result<(), SessionError>>) {
        let (hidden, limit, now) = (self.facts.hidden, self.facts.kv_positions, self.clock.now());
        let Some(session) = self.sessions.get_mut(&id).filter(|s| s.is_open()) else {
            return drop(reply.send(Err(SessionError::Ended)));
        };
        let wanted = session.base() + session.prompt + rows.len() / hidden;
        let refused = if session.decoding.is_some() {
            Some(SessionError::Decoding)
        } else if !rows.len().is_multiple_of(hidden) {
            Some(SessionError::RowWidth { floats: rows.len(), hidden })
        } else if wanted > limit {
            Some(SessionError::ContextFull { limit, wanted })
        } else {
            None
        };
        if let Some(error) = refused {
            return drop(reply.send(Err(error)));
        }
        session.first_feed.get_or_insert(now);
        session.rows.extend_from_slice(rows);
        session.prompt += rows.len() / hidden;
        session.stats.rows = session.prompt;
        // Answered from `pump`, when there is room for more.
        session.feeds.push(reply);
    }

    fn decode(&mut self, id: SessionId, max_new: Option<usize>) {
        let Some(session) = self.sessions.get_mut(&id).filter(|s| s.is_open()) else { return };
        let end = if session.decoding.is_some() {
            FinishReason::Failed(SessionError::Decoding)
        } else if session.prompt == 0 {
            FinishReason::Failed(SessionError::EmptyPrompt)
        } else if max_new == Some(0) {
            FinishReason::Length
        } else {
            session.decoding = Some(max_new);
            return;
        };
        self.finish(id, end);
    }

    fn cancel(&mut self, id: SessionId) {
        if self.sessions.get(&id).is_some_and(Session::is_open) {
            self.finish(id, FinishReason::Cancelled);
        }
    }

    /// Ends a session now: its last event, and its slot retired (rule 12).
    fn finish(&mut self, id: SessionId, reason: FinishReason) {
        let now = self.clock.now();
        let session = self.sessions.get_mut(&id).expect("an open session");
        let events = session.events.take().expect("an open session");
        session.stats.tokens = session.ids.len();
        if let Some(first) = session.first_id {
            session.stats.prefill = first.saturating_sub(session.first_feed.unwrap_or(first));
            session.stats.decode = now.saturating_sub(first);
        }
        session.prefill = None;
        info!(
            target: "riparian::session", parent: &session.span, session = id.0, ?reason, tokens = session.ids.len(),
            "finished"
        );
        let last = Event::Finished(Box::new(Finished { reason, stats: session.stats.clone() }));
        if let Err(error) = events.try_send(last) {
            // Rule 10 keeps a place for it.
            let closed = matches!(error, mpsc::error::TrySendError::Closed(_));
            check!(Bound, closed || self.options.broken.is(Broken::NoTokenCredit), "no room for a session's end");
        }
        session.feeds.drain(..).for_each(|reply| drop(reply.send(Err(SessionError::Ended))));
        session.reads.drain(..).for_each(|(_, reply)| drop(reply.send(Err(SessionError::Ended))));
        (session.known, session.cure) = (None, None);
        session.rows = Vec::new();
        let planned = session.planned.take();
        self.unplan(planned);
        let session = self.sessions.get_mut(&id).expect("an open session");
        if let Some(drafts) = &self.drafts {
            drafts.tell(drafts::Message::Ended { session: id });
        }
        let slot = match session.stage {
            Stage::Live(slot) => slot,
            Stage::Waiting | Stage::Closing(_) => return self.forget(id),
        };
        session.stage = Stage::Closing(slot);
        self.flights.iter_mut().filter(|f| f.session == id).for_each(|f| f.overtaken = true);
        let turn = self.next_turn(slot);
        self.append(vec![Item::Retire { slot, turn }], &[]);
        self.free_slots();
    }

    /// Frees slots of finished sessions whose flights have landed and whose job is answered (rule 12).
    fn free_slots(&mut self) {
        let early = self.reuses_at_once();
        let ready: Vec<(SessionId, SlotIx)> = (self.sessions.iter())
            .filter_map(|(id, session)| match session.stage {
                Stage::Closing(slot) => Some((*id, slot)),
                _ => None,
            })
            .filter(|(id, slot)| {
                let owed = self.flights.iter().any(|f| f.session == *id) || self.slots[slot.index()].jobs != 0;
                early || !owed && !self.sessions[id].reading
            })
            .collect();
        for (id, slot) in ready {
            self.slots[slot.index()].owner = None;
            self.forget(id);
        }
    }

    fn forget(&mut self, id: SessionId) {
        self.sessions.remove(&id);
        self.turns.retain(|other| *other != id);
    }

    fn next_turn(&mut self, slot: SlotIx) -> Turn {
        let turn = &mut self.slots[slot.index()].turn;
        *turn = Turn(turn.0 + 1);
        *turn
    }

    // ------------------------------------------------------------------ facts and answers

    fn fact(&mut self, fact: Fact) {
        if matches!(self.health, Health::Dead(_)) {
            return;
        }
        if self.health == Health::Draining {
            match fact {
                Fact::Lost { .. } => self.health = Health::Well,
                Fact::Landed { flight, record, .. } if self.options.broken.is(Broken::LandedAfterLoss) => {
                    if let Some(id) = self.sessions.keys().next().copied().filter(|_| record.out.flight == flight) {
                        record.out.ids.iter().for_each(|token| self.deliver(id, *token, false));
                    }
                }
                // What landed on the lost device is made again on the next one (rule 13).
                _ => {}
            }
            return;
        }
        match fact {
            Fact::Missed { stop, experts } => self.missed(stop, &experts),
            Fact::Landed { flight, wait, record } => self.landed(flight, wait, *record),
            Fact::Peeked { wait } => self.give_staging(wait),
            Fact::Uploaded { staging } => {
                if !self.options.broken.is(Broken::UploadStagingEarly) {
                    self.upload_staging.give(staging.0);
                }
            }
            Fact::Read { wait, what } => {
                self.give_staging(wait);
                let reading = self.sessions.values_mut().find(|session| session.reading);
                if let Some(session) = reading {
                    session.reading = false;
                    if let Some((_, reply)) = session.reads.pop_front() {
                        let _ = reply.send(Ok(what));
                    }
                }
                self.free_slots();
            }
            Fact::Lost { error } => self.lost(error, true),
        }
    }

    fn give_staging(&mut self, wait: Wait) {
        if let Wait::Peek(staging) | Wait::Land(staging) | Wait::Read(staging) = wait
            && !self.options.broken.is(Broken::StagingRoundRobin)
        {
            self.staging.give(staging.0);
        }
    }

    fn missed(&mut self, stop: Stop, experts: &[crate::ids::ExpertIx]) {
        self.slots[stop.slot.index()].jobs += 1;
        // A slot has one stop at a time, and is not given away before its job is answered.
        let jobs = self.slots[stop.slot.index()].jobs;
        check!(Bound, jobs <= 1 || self.reuses_at_once(), "{stop:?} makes {jobs} jobs of one slot");
        self.counters.misses += 1;
        self.counters.missed_experts += experts.len() as u64;
        self.count();
        if let Some(id) = self.slots[stop.slot.index()].owner {
            self.sessions.get_mut(&id).expect("owners exist").stats.misses += 1;
        }
        if let Some(admission) = &self.admission {
            let missed = experts.iter().map(|expert| (stop.point.layer, *expert)).collect();
            admission.observed(Observed { missed, ..Observed::default() });
        }
        if let Some(id) = self.current(stop) {
            self.know(id, stop);
            if self.options.broken.is(Broken::ClearOnMissed) {
                let times = [self.clock.now(); 2];
                let cure = Cure::Resume { made: Completions::default(), uploads: Vec::new(), times };
                self.sessions.get_mut(&id).expect("current").cure = Some((stop, cure));
            }
            self.plan_ahead(id, stop);
        }
        self.free_slots();
    }

    /// Plans the flight behind a stop while the host completes, and lets the queue make it ready.
    fn plan_ahead(&mut self, id: SessionId, stop: Stop) {
        let session = &self.sessions[&id];
        let unlanded = self.flights.len();
        let spare = self.staging.free.len().saturating_sub(UNLANDED_MAX.saturating_sub(unlanded));
        let waits = session.known == Some(stop) && session.cure.is_none() && session.planned.is_none();
        // an answer that is here already would wait for it
        if !waits || !self.inbox.answers.is_empty() || spare == 0 || self.options.broken != Broken::No {
            return;
        }
        let (Some(slot), from) = (session.slot(), session.next) else { return };
        let Some((work @ (Work::Steps | Work::Rounds { .. }), batches)) = self.next_work(id) else { return };
        let (to, peeks) = self.horizon(from, &work, batches, spare - 1);
        let limit = Position::from(session.limit(self.facts.kv_positions));
        let peeks: Vec<(Point, Staging)> =
            peeks.into_iter().map_while(|point| Some((point, Staging(self.staging.take()?)))).collect();
        let Some(landing) = self.staging.take().map(Staging) else { return };
        let stamp = Stamp { flight: self.next_flight, slot, turn: stop.turn };
        self.queue.prepare(&Run { stamp, from, to, work, limit, peeks: peeks.clone() }, landing);
        self.sessions.get_mut(&id).expect("listed").planned = Some(Planned { stop, to, peeks, landing });
    }

    /// Gives back what was kept for a flight that is not flown.
    fn unplan(&mut self, planned: Option<Planned>) {
        for planned in planned.into_iter() {
            planned.peeks.iter().for_each(|(_, staging)| self.staging.give(staging.0));
            self.staging.give(planned.landing.0);
        }
    }

    /// Where a flight from `from` ends, and its routes to peek at.
    fn horizon(&self, from: Point, work: &Work, batches: u32, spare: usize) -> (Point, Vec<Point>) {
        let horizon = if self.streams(work) && from.is_batch_start() {
            // nothing will miss
            Horizon { batches: 1, layer: LayerIx(0), at_sum: false, peeks: Vec::new() }
        } else {
            let ahead = if matches!(work, Work::Prefill(_)) { &self.prefill_ahead } else { &self.decode_ahead };
            ahead.plan(from.layer, from.phase == Phase::Sum, batches, spare)
        };
        let phase = if horizon.at_sum { Phase::Sum } else { Phase::Route };
        let to = Point { batch: from.batch + horizon.batches, layer: horizon.layer, phase };
        let point =
            |(batches, layer): (u32, LayerIx)| Point { batch: from.batch + batches, layer, phase: Phase::Route };
        (to, horizon.peeks.into_iter().map(point).collect())
    }

    /// The session to whose present turn this stop belongs.
    fn current(&self, stop: Stop) -> Option<SessionId> {
        let slot = &self.slots[stop.slot.index()];
        let id = slot.owner.filter(|_| slot.turn == stop.turn && stop.flight >= self.epoch)?;
        (self.sessions[&id].stage == Stage::Live(stop.slot)).then_some(id)
    }

    /// From here on nothing that is queued for this turn does anything: it is overtaken (rule 7), and what was planned
    /// behind the stop is planned anew from there (rule 6).
    fn know(&mut self, id: SessionId, stop: Stop) {
        let session = self.sessions.get_mut(&id).expect("current");
        if session.known.is_some() {
            return;
        }
        session.known = Some(stop);
        let work = self.flights.iter().find(|f| f.id == stop.flight).map(|f| f.work.clone());
        check!(Flights, work.is_some(), "{stop:?} is of a flight that has landed already");
        for flight in self.flights.iter_mut().filter(|f| f.session == id && f.turn == stop.turn) {
            flight.overtaken = true;
        }
        let batch = stop.point.batch;
        session.passes.truncate(batch as usize + 1);
        if let Some(end) = session.passes.last().copied() {
            session.cursor = end;
        }
        session.accepting = session.accepting.filter(|accepting| *accepting <= batch);
        match stop.kind {
            StopKind::Miss if !self.options.broken.is(Broken::RequeueForgotten) => {
                session.next = Point { phase: Phase::Sum, ..stop.point };
                session.current = work;
            }
            StopKind::Miss => {}
            StopKind::Short | StopKind::End | StopKind::NotFinite(_) | StopKind::NotFiniteBy(_) => {
                session.next = Point::start_of(batch + 1);
                session.current = None;
            }
        }
    }

    fn answer(&mut self, answer: Answer) {
        let stop = answer.stop();
        if stop.flight < self.epoch {
            return;
        }
        self.slots[stop.slot.index()].jobs -= 1;
        let taken = self.clock.now();
        if let Answer::Completed { computed, uploads, times: [_, done], .. } = &answer {
            self.meter.note(Lap::Answer, taken.saturating_sub(*done));
            self.counters.completed += *computed as u64;
            self.counters.served_by_upload += uploads.len() as u64;
            self.count();
        }
        let owner = self.slots[stop.slot.index()].owner;
        match (self.current(stop), answer) {
            (Some(id), Answer::Completed { made, computed, uploads, times: [read_at, _], .. }) => {
                self.know(id, stop);
                let session = self.sessions.get_mut(&id).expect("current");
                session.stats.completed += computed;
                session.cure = Some((stop, Cure::Resume { made, uploads, times: [read_at, taken] }));
            }
            (Some(id), Answer::Named { found, .. }) => self.named(id, stop, found),
            (Some(id), Answer::Failed { why, .. }) if matches!(stop.kind, StopKind::NotFiniteBy(_)) => {
                self.named(id, stop, Err(why));
            }
            (Some(id), Answer::Failed { why, .. }) => {
                let error = SessionError::Completion { layer: stop.point.layer, why };
                self.finish(id, FinishReason::Failed(error));
            }
            (None, Answer::Completed { made, .. }) if owner.is_some() && self.ignores_stamps() => {
                let turn = self.slots[stop.slot.index()].turn;
                self.append(vec![Item::Resume { stop, turn, made }], &[]);
            }
            // A job that nobody wants any more (rule 12).
            (None, _) => trace!(target: "riparian::submitter", ?stop, "late answer"),
        }
        self.free_slots();
    }

    /// The session's end waits for the name of the block, as a miss waits for its completions.
    fn ask_for_the_block(&mut self, id: SessionId, stop: Stop, block: BlockIx) {
        self.know(id, stop);
        let session = &self.sessions[&id];
        let (seed, rows) = (session.options.seed.clone(), session.rows.clone());
        let spoiled = Spoiled { stop, seed, rows, ids: session.ids[session.replayed..].to_vec() };
        warn!(target: "riparian::submitter", session = id.0, %block, "a value is not finite");
        if self.completer.name(spoiled) {
            self.slots[stop.slot.index()].jobs += 1;
        } else {
            self.named(id, stop, Err("the completer has ended".into()));
        }
    }

    fn named(&mut self, id: SessionId, stop: Stop, found: Result<BlockIx, String>) {
        let StopKind::NotFiniteBy(by) = stop.kind else { return };
        let error = found
            .map_or_else(|why| SessionError::NotFiniteBy { block: by, why }, |block| SessionError::NotFinite { block });
        self.finish(id, FinishReason::Failed(error));
    }

    fn reuses_at_once(&self) -> bool {
        self.options.broken.is(Broken::FreeBeforeLanded) || self.options.broken.is(Broken::StampWithoutTurn)
    }

    fn ignores_stamps(&self) -> bool {
        let loose = [Broken::ResumeAfterCancel, Broken::DropStamp, Broken::StampWithoutTurn, Broken::NoHostCheck];
        loose.into_iter().any(|way| self.options.broken.is(way))
    }

    fn landed(&mut self, id: FlightId, wait: Wait, record: crate::device::Record) {
        self.give_staging(wait);
        let Some(at) = self.flights.iter().position(|f| f.id == id) else {
            check!(Flights, false, "{id:?} landed, but was never queued");
            return;
        };
        // Listed until all is done: what follows may look for it.
        let flight = self.flights[at].clone();
        let now = self.clock.now();
        let busy = record.busy.unwrap_or_else(|| now.saturating_sub(self.last_landed.max(flight.queued)));
        self.last_landed = now;
        self.counters.device_busy += record.busy.unwrap_or_default();
        let own_stop = record.stop.filter(|stop| stop.flight == id);
        let whole = !flight.overtaken && own_stop.is_none();
        flight.span.record("ids", record.out.ids.len()).record("overtaken", !whole && own_stop.is_none());
        self.observe(&flight, own_stop, whole, &record.out);
        if whole && flight.from.is_batch_start() && flight.to.is_batch_start() && record.busy.is_some() {
            match flight.work {
                Work::Prefill(_) => {}
                _ => self.decode_ahead.took(flight.accepts() as u32, busy),
            }
        }

        // Rule 9: ids with the flight's own stamp are facts, even if its turn is over.
        let stamped = record.out.flight == id || self.options.broken.is(Broken::UnstampedIds);
        let old_turn = self.slots[flight.slot.index()].turn != flight.turn;
        let dropped = old_turn && self.options.broken.is(Broken::DropIdsOfOldTurn);
        let open = self.sessions.get(&flight.session).is_some_and(Session::is_open);
        if open && stamped && !dropped {
            self.out(&flight, &record.out, busy, own_stop);
        }
        if let Some(stop) = own_stop
            && let Some(session) = self.current(stop)
        {
            match stop.kind {
                StopKind::Miss => self.know(session, stop),
                StopKind::Short => {
                    self.know(session, stop);
                    self.sessions.get_mut(&session).expect("current").cure = Some((stop, Cure::Rollback));
                    self.counters.rollbacks += 1;
                }
                StopKind::End => {
                    let found = &self.sessions[&session];
                    let by_id = found.ids.last().is_some_and(|last| found.options.eos.contains(last));
                    self.finish(session, if by_id { FinishReason::End } else { FinishReason::Length });
                }
                StopKind::NotFinite(block) => {
                    self.finish(session, FinishReason::Failed(SessionError::NotFinite { block }));
                }
                StopKind::NotFiniteBy(block) => self.ask_for_the_block(session, stop, block),
            }
        }
        if self.options.broken.is(Broken::NoEndStop)
            && let Some(found) = self.sessions.get(&flight.session).filter(|s| s.is_open())
            && found.decoding.is_some()
            && found.ids.len() >= found.ids_max(self.facts.kv_positions)
        {
            self.finish(flight.session, FinishReason::Length);
        }
        // A device that goes on without bringing ids would be asked for ever.
        let brought = if record.out.flight == id { record.out.ids.len() } else { 0 };
        let owed = flight.accepts() * flight.work.ids_min();
        let stalled = whole && open && !old_turn && record.stop.is_none() && brought < owed;
        self.flights.retain(|f| f.id != id);
        self.count();
        self.free_slots();
        if stalled {
            let why = format!("a flight of {owed} ids at least brought {brought} and names no stop");
            self.lost(DeviceError::Lost { why }, false);
        }
    }

    /// Remembers how often routes missed, and tells the admission manager what was routed.
    fn observe(&mut self, flight: &Flight, own_stop: Option<Stop>, whole: bool, out: &crate::device::Out) {
        let prefill = matches!(flight.work, Work::Prefill(_));
        if own_stop.is_none() && !whole {
            self.counters.overtaken += 1;
        }
        let ran_to = match own_stop {
            Some(stop) if stop.kind == StopKind::Miss => stop.point.next(self.facts.layers),
            Some(stop) => Point::start_of(stop.point.batch + 1),
            None if whole => flight.to,
            None => flight.from,
        };
        let streamed = self.streams(&flight.work);
        let ahead = if prefill { &mut self.prefill_ahead } else { &mut self.decode_ahead };
        let mut at = flight.from;
        // of passes that cannot miss nothing follows for those that can
        while at < ran_to && self.facts.layers > 0 && !streamed {
            if at.phase == Phase::Route {
                ahead.routed(at.layer, own_stop.is_some_and(|s| s.kind == StopKind::Miss && s.point == at));
            }
            at = at.next(self.facts.layers);
        }
        if out.flight == flight.id && !out.routed.is_empty() {
            self.counters.routed += out.routed.iter().flatten().map(|n| u64::from(*n)).sum::<u64>();
            if let Some(admission) = &self.admission {
                let positions = match &flight.work {
                    Work::Prefill(pass) => (pass.rows.len() / self.facts.hidden) as u32,
                    _ => out.ids.len() as u32,
                };
                // Of a pass that went in several flights, its last one is the prefill's end.
                let prefill = prefill && flight.to.is_batch_start();
                admission.observed(Observed { positions, routed: out.routed.clone(), missed: Vec::new(), prefill });
            }
        }
    }

    /// What the accepts of a flight brought.
    fn out(&mut self, flight: &Flight, out: &crate::device::Out, busy: Duration, own_stop: Option<Stop>) {
        let offered: u32 = out.rounds.iter().map(|round| round.offered).sum();
        let kept: u32 = out.rounds.iter().map(|round| round.kept).sum();
        let verifies = out.rounds.len();
        self.counters.drafts_offered += u64::from(offered);
        self.counters.drafts_kept += u64::from(kept);
        self.counters.verifies += verifies as u64;
        let session = self.sessions.get_mut(&flight.session).expect("open");
        session.stats.flights += 1;
        session.stats.drafts_offered += offered as usize;
        session.stats.drafts_kept += kept as usize;
        session.stats.verifies += verifies;
        if verifies > 0 {
            let _verify = debug_span!(
                target: "riparian::submitter", parent: &session.span, "verify",
                flight = flight.id.0, rounds = verifies, offered, kept, busy_us = busy.as_micros() as u64
            )
            .entered();
            let refused = out.rounds.iter().filter(|round| round.kept < round.offered).count();
            // What the device took back by itself; a rollback that the host asks for has its own span in `cure`.
            if refused > 0 && self.facts.drafts == DraftAbility::OnDevice {
                let _rollback = debug_span!(
                    target: "riparian::submitter", "rollback", flight = flight.id.0, rounds = refused, on_device = true
                )
                .entered();
            }
        }
        // Of a round, the kept drafts come first and the model's own id last.
        let mut drafted = out.rounds.iter().flat_map(|round| (0..=round.kept).map(move |i| i < round.kept));
        for id in &out.ids {
            let drafted = drafted.next().unwrap_or(false);
            self.deliver(flight.session, *id, drafted);
        }
        if let Some(drafts) = &self.drafts
            && !matches!(flight.work, Work::Prefill(_)) | (self.facts.drafts == DraftAbility::ByHost)
        {
            let depth = match &flight.work {
                Work::Verify(drafts) => drafts.len(),
                Work::Rounds { depth } => *depth,
                _ => 0,
            };
            // Time tells something of a flight that was nothing but whole batches.
            let timed = flight.from.is_batch_start()
                && flight.to.is_batch_start()
                && own_stop.is_none_or(|stop| stop.kind == StopKind::Short)
                && !matches!(flight.work, Work::Prefill(_));
            let refused = out.rounds.iter().filter(|round| round.kept < round.offered).count() as u32;
            let batches = flight.accepts() as u32;
            let outcome = timed.then_some(FlightOutcome { depth, batches, offered, kept, refused, busy });
            let total = self.sessions[&flight.session].ids.len();
            drafts.tell(drafts::Message::Landed { session: flight.session, outcome, ids: out.ids.clone(), total });
        }
    }

    fn deliver(&mut self, id: SessionId, token: TokenId, drafted: bool) {
        let now = self.clock.now();
        let session = self.sessions.get_mut(&id).expect("open");
        let Some(events) = &session.events else { return };
        session.first_id.get_or_insert(now);
        if let Some(prefill) = session.prefill.take() {
            prefill.record("rows", session.stats.rows).record("passes", session.passes.len());
        }
        let position = Position::from(session.base() + session.prompt + session.ids.len());
        session.ids.push(token);
        self.counters.tokens += 1;
        if let Err(mpsc::error::TrySendError::Full(_)) =
            events.try_send(Event::Token(Token { id: token, position, drafted }))
        {
            check!(Bound, false, "the token channel of {id:?} is full");
        }
    }

    fn advice(&mut self, advice: Advice) {
        if let Some(session) = self.sessions.get_mut(&advice.session) {
            if self.options.drafts && session.options.drafts && session.options.depth.is_none() {
                session.depth = advice.depth;
                self.depth = advice.depth;
            }
            (session.guess, session.guess_after) = (advice.guess, advice.after);
        }
    }

    fn admit(&mut self, admit: Admit) {
        let Some(admission) = self.admission.clone() else { return };
        let begun = self.clock.now();
        let well = self.health == Health::Well;
        let Some(staging) = (if well { self.upload_staging.take() } else { None }) else {
            self.counters.admissions_refused += 1;
            return admission.tell(admission::Message::Refused(admit));
        };
        if self.options.broken.is(Broken::UploadStagingEarly) {
            self.upload_staging.give(staging);
        }
        let staging = UploadStaging(staging);
        self.counters.admitted += 1;
        self.sessions.values_mut().filter(|s| s.is_open()).for_each(|s| s.stats.admitted += 1);
        self.counters.bytes_uploaded += admit.payload.bytes.len() as u64;
        let (layer, place) = (admit.payload.layer, admit.place);
        debug!(
            target: "riparian::submitter", flow_end = admit.flow(), %layer, %place, expert = %admit.payload.expert,
            "admitted"
        );
        self.count();
        let item = Item::Upload { layer, place, payload: admit.payload.clone(), staging };
        admission.tell(admission::Message::Placed(admit));
        self.append(vec![item], &[Wait::Upload(staging)]);
        self.meter.note(Lap::Admit, self.clock.now().saturating_sub(begun));
    }

    // ------------------------------------------------------------------ loss

    fn died(&mut self, actor: &'static str) {
        match actor {
            "readback" => {
                // Nothing can be waited for any more, on any device.
                self.fallback = None;
                self.health = Health::Dead(SessionError::Gone { actor });
                self.fail_all();
            }
            "completer" => {
                if self.facts.is_full() {
                    self.nobody_names();
                } else {
                    self.health = Health::Dead(SessionError::Gone { actor });
                    self.fail_all();
                }
            }
            "admission manager" => self.admission = None,
            "prefiller" => self.prefill_on_device(),
            _ => self.drafts = None,
        }
        warn!(target: "riparian::submitter", actor, "an actor has ended");
    }

    /// Nothing misses, so that sessions go on without the completer, but for those that wait for a block's name.
    fn nobody_names(&mut self) {
        self.slots.iter_mut().for_each(|slot| slot.jobs = 0);
        let waiting = self.sessions.iter().filter_map(|(id, session)| {
            let stop = session.known.filter(|stop| matches!(stop.kind, StopKind::NotFiniteBy(_)))?;
            session.is_open().then_some((*id, stop))
        });
        for (id, stop) in waiting.collect::<Vec<_>>() {
            self.named(id, stop, Err("the completer has ended".into()));
        }
        self.free_slots();
    }

    fn fail_all(&mut self) {
        let Health::Dead(error) = self.health.clone() else { return };
        self.epoch = self.next_flight;
        self.flights.clear();
        self.slots.iter_mut().for_each(|slot| (slot.jobs, slot.owner) = (0, None));
        for id in self.sessions.keys().copied().collect::<Vec<_>>() {
            let session = self.sessions.get_mut(&id).expect("listed");
            session.stage = Stage::Waiting;
            if session.is_open() {
                self.finish(id, FinishReason::Failed(error.clone()));
            } else {
                self.forget(id);
            }
        }
    }

    /// The device is lost (rule 13): sessions go on from their rows and ids on the next one, if there is one.
    fn lost(&mut self, error: DeviceError, told: bool) {
        if self.health != Health::Well {
            return;
        }
        self.counters.losses += 1;
        warn!(target: "riparian::submitter", %error, sessions = self.sessions.len(), "device lost");
        if let Some(admission) = self.admission.take() {
            admission.tell(admission::Message::Stop);
        }
        // What is still under way at the completer is answered with an older flight than this.
        self.epoch = self.next_flight;
        let opened = self.fallback.take().map(|open| open());
        let device = match opened {
            Some(Ok(device)) => device,
            other => {
                let error = other.and_then(Result::err).unwrap_or(error);
                self.health = Health::Dead(error.into());
                let _ = self.readback.give_up();
                return self.fail_all();
            }
        };
        self.flights.clear();
        // What takes over is the host.
        self.prefill_on_device();
        self.facts = device.facts().clone();
        let (queue, landings) = device.split();
        self.queue = queue;
        if self.readback.switch(landings, self.facts.landing_deadline).is_err() {
            return self.died("readback");
        }
        info!(target: "riparian::submitter", device = %self.facts.name, "sessions go on");
        self.health = if told { Health::Well } else { Health::Draining };
        let turn = self.slots.iter().map(|slot| slot.turn).max().unwrap_or_default();
        self.slots = slots_from(&self.facts, turn);
        self.staging = Pool::new(self.facts.staging);
        self.upload_staging = Pool::new(self.facts.upload_staging);
        (self.decode_ahead, self.prefill_ahead) = aheads(&self.options, &self.facts);
        let limit = self.facts.kv_positions;
        for id in self.sessions.keys().copied().collect::<Vec<_>>() {
            let session = self.sessions.get_mut(&id).expect("listed");
            session.stage = Stage::Waiting;
            if !session.is_open() {
                self.forget(id);
                continue;
            }
            for token in &session.ids[session.replayed..] {
                session.rows.extend(self.companion.embed(*token));
            }
            session.replayed = session.ids.len();
            session.cursor = 0;
            session.passes.clear();
            (session.accepting, session.next, session.current) = (None, Point::default(), None);
            (session.known, session.cure, session.reading) = (None, None, false);
            // its buffers were the lost device's
            session.planned = None;
            session.stats.recovered = true;
            let wanted = session.base() + session.rows.len() / self.facts.hidden;
            if self.facts.drafts == DraftAbility::None {
                session.depth = 0;
            }
            if wanted > limit {
                self.finish(id, FinishReason::Failed(SessionError::ContextFull { limit, wanted }));
            }
        }
    }

    fn shutdown(&mut self) {
        for id in self.sessions.keys().copied().collect::<Vec<_>>() {
            self.cancel(id);
        }
        self.readback.shutdown();
        self.completer.shutdown();
        if let Some(admission) = &self.admission {
            admission.tell(admission::Message::Stop);
        }
        if let Some(drafts) = &self.drafts {
            drafts.tell(drafts::Message::Shutdown);
        }
        if let Some(prefiller) = &self.prefiller {
            prefiller.tell(prefiller::Message::Shutdown);
        }
        self.ended = true;
    }

    // ------------------------------------------------------------------ queueing

    fn live(&self) -> usize {
        self.flights.iter().filter(|f| !f.overtaken).count()
    }

    /// Queues whatever may be queued now.
    fn pump(&mut self) {
        if self.ended {
            return;
        }
        let goes = |s: &mut Session| s.cancelled.try_recv() != Err(oneshot::error::TryRecvError::Empty);
        let gone: Vec<SessionId> =
            self.sessions.iter_mut().filter_map(|(id, s)| (s.is_open() && goes(s)).then_some(*id)).collect();
        gone.into_iter().for_each(|id| self.cancel(id));
        if self.health == Health::Well {
            self.prefill_on_host();
            self.seat();
            self.read();
            // Sessions take turns by flight: whoever got one goes to the end.
            let mut refused = 0;
            while refused < self.turns.len() && self.health == Health::Well {
                let id = self.turns.pop_front().expect("somebody is left");
                self.turns.push_back(id);
                refused = if self.queue_flight(id) { 0 } else { refused + 1 };
            }
        }
        let room = FEED_PASSES * self.pass_rows();
        for session in self.sessions.values_mut().filter(|s| !s.feeds.is_empty()) {
            if (session.rows.len() / self.facts.hidden).saturating_sub(session.cursor) <= room {
                session.feeds.drain(..).for_each(|reply| drop(reply.send(Ok(()))));
            }
        }
    }

    /// Rows of the widest pass.
    fn pass_rows(&self) -> usize {
        let most = self.facts.streamed_rows.map_or(0, |[_, most]| most);
        if self.options.batched_prefill { self.facts.prefill_rows.max(most) } else { 1 }
    }

    /// Rows of a pass where so many are there.
    fn rows_of(&self, ready: usize) -> usize {
        match self.facts.streamed_rows.filter(|_| self.options.batched_prefill) {
            Some([least, most]) if ready >= least => ready.min(most),
            Some(_) => ready.min(self.facts.prefill_rows),
            None => ready.min(self.pass_rows()),
        }
    }

    /// Whether this is a pass that brings what the bank lacks.
    fn streams(&self, work: &Work) -> bool {
        let Work::Prefill(pass) = work else { return false };
        let rows = pass.rows.len() / self.facts.hidden;
        self.facts.streamed_rows.is_some_and(|[least, most]| (least..=most).contains(&rows))
    }

    /// Gives free slots to waiting sessions, in the order they came.
    fn seat(&mut self) {
        while self.health == Health::Well
            && let Some(slot) = self.slots.iter().position(|slot| slot.owner.is_none())
        {
            let waits = |session: &Session| session.stage == Stage::Waiting && session.on_host.is_none();
            let waiting = self.sessions.iter_mut().find(|(_, session)| waits(session));
            let Some((id, session)) = waiting else { return };
            let (id, slot) = (*id, SlotIx::from(slot));
            session.stage = Stage::Live(slot);
            let (eos, seed) = (session.options.eos.clone(), session.options.seed.clone());
            self.slots[slot.index()].owner = Some(id);
            let turn = self.next_turn(slot);
            self.append(vec![Item::Start { slot, turn, session: id, eos, seed }], &[]);
        }
    }

    /// Hands the prefiller the rows that are there, but for each prompt's last: the device makes the first id of that one.
    fn prefill_on_host(&mut self) {
        let Some(prefiller) = self.prefiller.clone() else { return };
        let (hidden, rows_max) = (self.facts.hidden, self.pass_rows());
        let drafts = self.options.drafts && self.facts.drafts != DraftAbility::None;
        for (id, session) in &mut self.sessions {
            let Some(on_host) = session.on_host.as_mut().filter(|on_host| !on_host.under_way) else { continue };
            // Decoding begins from the state, and it can be read only where it is on the device.
            let wanted = session.decoding.is_some() || !session.reads.is_empty();
            let all = (session.rows.len() / hidden).saturating_sub(1);
            if wanted && all == 0 {
                session.on_host = None;
                continue;
            }
            let end = all.min(session.cursor + rows_max);
            let last = wanted && end == all;
            if end == session.cursor && !last || self.prefills == PASSES_MAX {
                continue;
            }
            on_host.under_way = true;
            let rows = prefiller::Rows {
                session: *id,
                wanted: Arc::downgrade(&on_host.wanted),
                seed: session.options.seed.clone(),
                drafts: drafts && session.options.drafts,
                rows: session.rows[session.cursor * hidden..end * hidden].to_vec(),
                last,
            };
            let parent = &session.span;
            session.prefill.get_or_insert_with(|| {
                debug_span!(
                    target: "riparian::prefill", parent: parent, "prefill", session = id.0, rows = field::Empty,
                    passes = field::Empty
                )
            });
            // One that is gone is told of by its channel.
            if prefiller.tell(prefiller::Message::Prefill(Box::new(rows))) {
                self.prefills += 1;
            }
        }
    }

    /// The host has prefilled rows. With the state of all but the last one, that one is the prompt.
    fn prefilled(&mut self, prefilled: Prefilled) {
        let Prefilled { session: id, rows, made } = prefilled;
        self.prefills -= 1;
        let Some(session) = self.sessions.get_mut(&id).filter(|session| session.is_open()) else { return };
        let Some(on_host) = &mut session.on_host else { return };
        on_host.under_way = false;
        session.cursor += rows;
        match made {
            Ok(None) => {}
            Ok(Some(seed)) => {
                session.rows.drain(..session.cursor * self.facts.hidden);
                session.prompt -= session.cursor;
                session.cursor = 0;
                session.options.seed = Some(Arc::from(seed));
                session.on_host = None;
            }
            Err(block) => self.finish(id, FinishReason::Failed(SessionError::NotFinite { block })),
        }
    }

    /// No session waits for the prefiller any more.
    fn prefill_on_device(&mut self) {
        if let Some(prefiller) = self.prefiller.take() {
            prefiller.tell(prefiller::Message::Shutdown);
        }
        (self.inbox.prefilled, self.prefills) = (never(), 0);
        for session in self.sessions.values_mut().filter(|session| session.on_host.is_some()) {
            (session.on_host, session.cursor) = (None, 0);
        }
    }

    /// Queues reads of sessions that have nothing under way.
    fn read(&mut self) {
        let next = self.next_flight;
        let idle = |id: &SessionId, s: &Session| {
            !s.reads.is_empty() && s.is_between_batches() && !self.flights.iter().any(|f| f.session == *id)
        };
        let one_reads = self.sessions.values().any(|s| s.reading);
        let found = self.sessions.iter().find(|(id, s)| s.slot().is_some() && idle(id, s)).map(|(id, _)| *id);
        let Some(id) = found.filter(|_| !one_reads) else { return };
        let Some(staging) = self.staging.take().map(Staging) else { return };
        let session = self.sessions.get_mut(&id).expect("found");
        session.reading = true;
        let (slot, what) = (session.slot().expect("seated"), session.reads[0].0);
        self.next_flight = FlightId(next.0 + 1);
        self.append(vec![Item::Read { slot, what, staging }], &[Wait::Read(staging)]);
    }

    /// Queues one flight of a session, if its work, the credits and the bounds allow it.
    fn queue_flight(&mut self, id: SessionId) -> bool {
        let unlanded = self.flights.len();
        if self.live() >= LIVE_MAX || unlanded >= UNLANDED_MAX {
            return false;
        }
        // what was read already may make a second one vain
        if self.live() > 0 && !self.facts.is_full() && !self.inbox.facts.is_empty() {
            return false;
        }
        let session = &self.sessions[&id];
        let Some(slot) = session.slot() else { return false };
        let reads = session.reading || !session.reads.is_empty();
        if session.known.is_some() && session.cure.is_none() || reads && session.is_between_batches() {
            return false;
        }
        let round_robin = self.options.broken.is(Broken::StagingRoundRobin);
        let cured_by = session.cure.as_ref().map(|(stop, _)| *stop);
        let planned = session.planned.as_ref().filter(|planned| Some(planned.stop) == cured_by).cloned();
        if self.staging.free.is_empty() && planned.is_none() && !round_robin {
            return false;
        }
        let uploads = match &session.cure {
            Some((_, Cure::Resume { uploads, .. })) => uploads.len(),
            _ => 0,
        };
        if uploads > self.upload_staging.free.len() {
            return false;
        }
        let Some((work, batches)) = self.next_work(id) else { return false };
        // A read waits for the batch's end.
        let batches = if reads { 1 } else { batches };

        // From here on it will be queued.
        let spare = self.staging.free.len().saturating_sub(UNLANDED_MAX - unlanded);
        let from = session.next;
        let (to, peeked) = match &planned {
            Some(planned) => (planned.to, Vec::new()),
            None => self.horizon(from, &work, batches, spare),
        };
        let session = self.sessions.get_mut(&id).expect("listed");
        let left = session.planned.take();
        if planned.is_none() {
            self.unplan(left);
        }
        let session = self.sessions.get_mut(&id).expect("listed");
        let (mut items, mut waits) = (Vec::new(), Vec::new());
        let cure = session.cure.take();
        let cured = match &cure {
            Some((_, Cure::Resume { times, .. })) => Some(*times),
            _ => None,
        };
        if cure.is_some() {
            session.known = None;
        }
        if let Work::Prefill(pass) = &work
            && from.is_batch_start()
        {
            session.cursor += pass.rows.len() / self.facts.hidden;
            session.passes.push(session.cursor);
            let parent = &session.span;
            session.prefill.get_or_insert_with(|| {
                debug_span!(
                    target: "riparian::prefill", parent: parent, "prefill", session = id.0, rows = field::Empty,
                    passes = field::Empty
                )
            });
            session.accepting = pass.accept.then_some(from.batch).or(session.accepting);
        }
        session.next = to;
        session.current = (!to.is_batch_start()).then(|| work.clone());
        let limit = Position::from(session.limit(self.facts.kv_positions));

        let flight = self.next_flight;
        self.next_flight = FlightId(flight.0 + 1);
        if let Some((stop, cure)) = cure {
            self.flights.iter_mut().filter(|f| f.session == id && f.turn == stop.turn).for_each(|f| f.overtaken = true);
            let turn = self.next_turn(slot);
            self.cure(stop, cure, Stamp { flight, slot, turn }, &mut items, &mut waits);
        }
        let turn = self.slots[slot.index()].turn;
        let stamp = Stamp { flight, slot, turn };
        let (peeks, landing) = match planned {
            Some(planned) => (planned.peeks, planned.landing),
            None => {
                let staged = |point| Some((point, Staging(self.staging.take()?)));
                let peeks: Vec<_> = peeked.into_iter().map_while(staged).collect();
                let landing = if round_robin { Some((flight.0 % 2) as u16) } else { self.staging.take() };
                (peeks, Staging(landing.expect("peeks leave one")))
            }
        };
        waits.extend(peeks.iter().map(|(_, staging)| Wait::Peek(*staging)));
        waits.push(Wait::Land(landing));
        let session = &self.sessions[&id];
        let span = debug_span!(
            target: "riparian::flight", parent: &session.span, "flight", flight = flight.0, session = id.0,
            kind = kind_of(&work), steps = to.batch - from.batch, layer = %to.layer, position = session.position(),
            peeks = peeks.len(), ids = field::Empty, overtaken = field::Empty
        );
        self.counters.flights += 1;
        let queued = self.clock.now();
        self.flights.push(Flight {
            id: flight,
            session: id,
            slot,
            turn,
            overtaken: false,
            from,
            to,
            work: work.clone(),
            queued,
            span,
        });
        self.count();
        check!(Flights, self.live() <= LIVE_MAX, "{} live flights", self.live());
        check!(Flights, self.flights.len() <= UNLANDED_MAX, "{} unlanded flights", self.flights.len());
        items.push(Item::Run(Run { stamp, from, to, work, limit, peeks }));
        items.push(Item::Land { stamp, staging: landing });
        self.append(items, &waits);
        if let Some([read_at, taken]) = cured {
            let now = self.clock.now();
            self.meter.note(Lap::Cure, now.saturating_sub(taken));
            self.meter.note(Lap::Stop, now.saturating_sub(read_at));
        }
        true
    }

    /// What the session's next flight does, and how many accepts it may hold.
    fn next_work(&self, id: SessionId) -> Option<(Work, u32)> {
        let session = &self.sessions[&id];
        // Rule 10: room for its own ids, those of all its unlanded flights, and the end.
        let mine = || self.flights.iter().filter(|f| f.session == id);
        let owed: usize = mine().map(Flight::ids_max).sum();
        let room = session.events.as_ref()?.capacity().saturating_sub(owed + 1);
        let room = if self.options.broken.is(Broken::NoTokenCredit) { usize::MAX } else { room };
        let affordable = |work: &Work| match work.ids_max() {
            0 => Some(u32::MAX),
            ids => u32::try_from(room / ids).ok().or(Some(u32::MAX)).filter(|batches| *batches > 0),
        };
        // What is planned already of the ids that are left; a cure takes the place of its turn's flights.
        let planned: usize = (mine().filter(|f| !f.overtaken)).map(|f| f.accepts() * f.work.ids_min()).sum();
        let left = session.ids_max(self.facts.kv_positions).saturating_sub(session.ids.len() + planned);
        if let Some(current) = &session.current {
            let batches = match current {
                Work::Prefill(_) | Work::Verify(_) => 1,
                _ => u32::try_from(left).unwrap_or(u32::MAX).max(1),
            };
            return Some((current.clone(), batches.min(affordable(current)?)));
        }
        if session.accepting.is_none() {
            let work = Work::Prefill(Arc::new(self.next_pass(session)?));
            return affordable(&work).map(|_| (work, 1));
        }
        if left == 0 {
            return None;
        }
        let work = self.decode_work(session, mine().filter(|f| !f.overtaken).map(Flight::ids_max).sum());
        let batches = if matches!(work, Work::Verify(_)) { 1 } else { u32::try_from(left).unwrap_or(u32::MAX) };
        Some((work.clone(), batches.min(affordable(&work)?)))
    }

    /// The next rows of the prompt. Until decoding is asked for the last one stays back: its accept gives the first id.
    fn next_pass(&self, session: &Session) -> Option<Pass> {
        let hidden = self.facts.hidden;
        let total = session.rows.len() / hidden;
        let ready = (total - session.cursor).saturating_sub(usize::from(session.decoding.is_none()));
        let n = self.rows_of(ready);
        let end = session.cursor + n;
        let rows = session.rows[session.cursor * hidden..end * hidden].to_vec();
        (n > 0).then(|| Pass { rows, accept: session.decoding.is_some() && end == total })
    }

    /// Steps or drafts, behind `assumed` ids that flights under way may bring.
    fn decode_work(&self, session: &Session, assumed: usize) -> Work {
        let depth = session.depth.min(self.facts.verify_rows.saturating_sub(1));
        match self.facts.drafts {
            DraftAbility::OnDevice if depth > 0 => Work::Rounds { depth },
            DraftAbility::ByHost if depth > 0 => {
                // The next id is number `start - 1`, which the device knows; drafts come behind it.
                let start = session.ids.len() + assumed;
                let known = session.guess.get(start.saturating_sub(session.guess_after)..).unwrap_or_default();
                match &known[..known.len().min(depth)] {
                    [] => Work::Steps,
                    drafts => Work::Verify(drafts.into()),
                }
            }
            _ => Work::Steps,
        }
    }

    /// Rule 3: the cure and its continuation are one append; `stamp` carries the turn it begins.
    fn cure(&mut self, stop: Stop, cure: Cure, stamp: Stamp, items: &mut Vec<Item>, waits: &mut Vec<Wait>) {
        let turn = stamp.turn;
        let Cure::Resume { made, uploads, .. } = cure else {
            let _span = debug_span!(
                target: "riparian::submitter", "rollback", flight = stamp.flight.0, rounds = 1_u64, on_device = false
            )
            .entered();
            return items.push(Item::Rollback { stop, turn });
        };
        let _span = debug_span!(
            target: "riparian::submitter", "resume", flow_end = stop.flow(), flight = stamp.flight.0,
            uploads = uploads.len()
        )
        .entered();
        items.push(Item::Resume { stop, turn, made });
        let layer = stop.point.layer;
        let mut fills = Vec::new();
        for payload in uploads {
            let staging = UploadStaging(self.upload_staging.take().expect("checked before"));
            let (place, expert) = (self.spare_place(layer), payload.expert);
            self.counters.bytes_uploaded += payload.bytes.len() as u64;
            items.push(Item::Upload { layer, place, payload, staging });
            waits.push(Wait::Upload(staging));
            let fill = Item::Fill { stamp, layer, place, expert };
            // Computed before another upload takes the place.
            if self.options.broken.is(Broken::EvictBeforeFill) { fills.push(fill) } else { items.push(fill) }
        }
        items.append(&mut fills);
    }

    fn spare_place(&self, layer: LayerIx) -> PlaceIx {
        PlaceIx::from(self.facts.residents[layer.index()].len())
    }

    fn append(&mut self, items: Vec<Item>, waits: &[Wait]) {
        if self.health != Health::Well {
            return;
        }
        let begun = self.clock.now();
        let appended = debug_span!(target: "riparian::submitter", "append", items = items.len())
            .in_scope(|| self.queue.append(items));
        if let Err(error) = appended {
            return self.lost(error, false);
        }
        let queued = self.clock.now();
        self.meter.note(Lap::Append, queued.saturating_sub(begun));
        let flight = FlightId(self.next_flight.0 - 1);
        for wait in waits {
            if self.readback.awaits(*wait, flight, queued).is_err() {
                return self.died("readback");
            }
        }
    }
}

fn kind_of(work: &Work) -> &'static str {
    match work {
        Work::Prefill(_) => "prefill",
        Work::Steps => "steps",
        Work::Verify(_) => "verify",
        Work::Rounds { .. } => "rounds",
    }
}
