//! Readback: waits for what lands, in queue order, and tells who needs it.
//!
//! - **Owns** the device's landing half, and the last stop it sent on for each slot.
//! - **Takes** [`Message`]s from the submitter: what to await, in the order it was queued.
//! - **Gives** [`Fact`]s to the submitter; misses also straight to the completer, so that the host's work starts one hop
//!   earlier.
//! - **May block on** the device, up to a deadline. Its channels never block it: every send is covered by a credit that
//!   the submitter took before it queued the work.
//! - **Stops** on [`Message::Shutdown`], or when the submitter is gone.
//!
//! Never does: decide what follows from a landing, or touch the queue.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, bounded};
use tracing::{Span, debug_span, trace, trace_span};

use super::clock::Clock;
use super::completer;
use super::meter::{Lap, Meter};
use crate::check;
use crate::device::{DeviceError, Landing, Landings, Record, Seed, Stop, UNLANDED_MAX, UploadStaging, Wait};
use crate::host::Spin;
use crate::ids::FlightId;
use crate::invariants::Broken;

/// What the submitter asks of readback.
pub enum Message {
    /// Something was queued that will land.
    Await {
        /// Where it lands.
        wait: Wait,
        /// The flight whose landing or peek it is; the flight before an upload or a read.
        flight: FlightId,
        /// When it was queued.
        queued: Duration,
    },
    /// The device is lost and this is the next one's half. What is still awaited of the old one is given up; exactly one
    /// [`Fact::Lost`] was or is sent for it.
    Switch {
        /// The new half.
        landings: Box<dyn Landings>,
        /// As in its facts.
        deadline: Option<Duration>,
    },
    /// The device is lost and there is no other; a [`Fact::Lost`] was or is sent.
    GiveUp,
    /// Stop now.
    Shutdown,
}

/// What readback tells the submitter, in the order things landed.
#[derive(Debug)]
pub enum Fact {
    /// A slot stopped at a miss; the completer has the job.
    Missed {
        /// The stop.
        stop: Stop,
        /// Missing experts of the layer.
        experts: Vec<crate::ids::ExpertIx>,
    },
    /// A flight's end was read; its staging buffer is free.
    Landed {
        /// The flight.
        flight: FlightId,
        /// The buffer that is free.
        wait: Wait,
        /// What it brought.
        record: Box<Record>,
    },
    /// A peek was read; its staging buffer is free.
    Peeked {
        /// The buffer that is free.
        wait: Wait,
    },
    /// An upload is on the device; its buffer is free.
    Uploaded {
        /// The buffer.
        staging: UploadStaging,
    },
    /// A read of a slot's state or logits.
    Read {
        /// The buffer that is free.
        wait: Wait,
        /// What it brought.
        what: ReadResult,
    },
    /// The device is lost. What follows is the next device's.
    Lost {
        /// Why.
        error: DeviceError,
    },
}

/// What a read brought.
#[derive(Clone, Debug, PartialEq)]
pub enum ReadResult {
    /// A slot's state.
    State(Box<Seed>),
    /// `[vocab]`
    Logits(Vec<f32>),
}

/// Room for awaits: one for each staging buffer, owned before sending; a switch or a shutdown may come beside them.
#[must_use]
pub(crate) fn awaits_bound(staging: usize, upload_staging: usize) -> usize {
    staging + upload_staging + 2
}

/// Room for facts: a `Missed`, a `Landed` and the peeks of each unlanded flight, uploads, reads, and one `Lost`.
#[must_use]
pub(crate) fn facts_bound(staging: usize, upload_staging: usize) -> usize {
    2 * UNLANDED_MAX + staging + upload_staging + 2
}

/// Sender to readback. Only the submitter holds one.
#[derive(Clone)]
pub struct Handle(Sender<Message>);

impl Handle {
    /// Something was queued. The buffer's credit covers it.
    ///
    /// # Errors
    ///
    /// When readback has ended.
    pub fn awaits(&self, wait: Wait, flight: FlightId, queued: Duration) -> Result<(), Gone> {
        self.send(Message::Await { wait, flight, queued })
    }

    /// What it is still to wait for.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.0.len()
    }

    /// The next device's half.
    ///
    /// # Errors
    ///
    /// When readback has ended.
    pub fn switch(&self, landings: Box<dyn Landings>, deadline: Option<Duration>) -> Result<(), Gone> {
        self.send(Message::Switch { landings, deadline })
    }

    /// There is no next device.
    ///
    /// # Errors
    ///
    /// When readback has ended.
    pub fn give_up(&self) -> Result<(), Gone> {
        self.send(Message::GiveUp)
    }

    /// Stop now.
    pub fn shutdown(&self) {
        let _ = self.0.try_send(Message::Shutdown);
    }

    fn send(&self, message: Message) -> Result<(), Gone> {
        self.0.try_send(message).map_err(|error| {
            check!(Bound, error.is_disconnected(), "the channel to readback is full");
            Gone
        })
    }
}

/// Readback has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gone;

/// Readback looks for so long for the next thing to await before it sleeps.
const LOOK: Duration = Duration::from_millis(1);

/// The actor.
pub struct Readback {
    inbox: Receiver<Message>,
    /// What it waits for now; later ones are still in the inbox.
    awaited: Option<Awaited>,
    /// `None` after a loss, until the next device's half comes.
    landings: Option<Box<dyn Landings>>,
    deadline: Option<Duration>,
    facts: Sender<Fact>,
    completer: completer::Handle,
    /// By slot: early and late report are one stop.
    sent: Vec<Option<Stop>>,
    clock: Clock,
    meter: Meter,
    span: Span,
    broken: Broken,
    ended: bool,
}

#[derive(Clone, Copy)]
struct Awaited {
    wait: Wait,
    flight: FlightId,
    queued: Duration,
    since: Duration,
}

/// What readback is made of.
pub(crate) struct Parts {
    pub(crate) landings: Box<dyn Landings>,
    pub(crate) deadline: Option<Duration>,
    pub(crate) slots: usize,
    pub(crate) awaits: usize,
    pub(crate) facts: Sender<Fact>,
    pub(crate) completer: completer::Handle,
    pub(crate) clock: Clock,
    pub(crate) meter: Meter,
    pub(crate) broken: Broken,
}

impl Readback {
    pub(crate) fn new(parts: Parts) -> (Handle, Self) {
        let (sender, inbox) = bounded(parts.awaits);
        let readback = Self {
            inbox,
            awaited: None,
            landings: Some(parts.landings),
            deadline: parts.deadline,
            facts: parts.facts,
            completer: parts.completer,
            sent: vec![None; parts.slots],
            clock: parts.clock,
            meter: parts.meter,
            span: Span::none(),
            broken: parts.broken,
            ended: false,
        };
        (Handle(sender), readback)
    }

    /// Runs until it is stopped.
    pub(crate) fn run(mut self) {
        self.span = tracing::debug_span!(target: "riparian::readback", "readback");
        let _life = self.span.clone().entered();
        let spin = Spin::up_to(LOOK);
        while !self.ended {
            if let Some(awaited) = self.awaited {
                let deadline = self.deadline.map(|longest| Instant::now() + longest);
                let landings = self.landings.as_mut().expect("awaits of a lost device are dropped");
                let waited = catch_unwind(AssertUnwindSafe(|| landings.wait(awaited.wait, deadline)));
                self.waited(awaited, waited.unwrap_or_else(|panic| Err(panicked(panic.as_ref()))));
            } else {
                spin.until(|| !self.inbox.is_empty());
                match self.inbox.recv() {
                    Ok(message) => self.handle(message),
                    Err(_) => self.ended = true,
                }
            }
        }
    }

    /// One move of a simulation: takes a message if it awaits nothing, else looks whether that has landed. Tells whether
    /// anything happened.
    pub fn step(&mut self) -> bool {
        let Some(awaited) = self.awaited else {
            return match self.inbox.try_recv() {
                Ok(message) => {
                    self.handle(message);
                    true
                }
                Err(_) => false,
            };
        };
        let landings = self.landings.as_mut().expect("awaits of a lost device are dropped");
        match landings.poll(awaited.wait) {
            Ok(Some(landing)) => self.waited(awaited, Ok(landing)),
            Err(error) => self.waited(awaited, Err(error)),
            Ok(None) => {
                let waited = self.clock.now() - awaited.since;
                if self.deadline.is_none_or(|longest| waited < longest) {
                    return false;
                }
                self.waited(awaited, Err(DeviceError::TimedOut { waited }));
            }
        }
        true
    }

    /// Whether it has anything left to do.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.awaited.is_none() && self.inbox.is_empty()
    }

    fn handle(&mut self, message: Message) {
        match message {
            Message::Await { wait, flight, queued } => {
                if self.landings.is_some() {
                    self.awaited = Some(Awaited { wait, flight, queued, since: self.clock.now() });
                }
            }
            Message::Switch { landings, deadline } => {
                self.leave(DeviceError::Lost { why: "the submitter noticed it first".into() });
                self.landings = Some(landings);
                self.deadline = deadline;
            }
            Message::GiveUp => self.leave(DeviceError::Lost { why: "the submitter noticed it first".into() }),
            Message::Shutdown => self.ended = true,
        }
    }

    /// Tells of the loss, once.
    fn leave(&mut self, error: DeviceError) {
        self.awaited = None;
        if self.landings.take().is_some() {
            self.sent.fill(None);
            self.tell(Fact::Lost { error });
        }
    }

    fn waited(&mut self, awaited: Awaited, result: Result<Landing, DeviceError>) {
        let Awaited { wait, flight, queued, since } = awaited;
        self.awaited = None;
        let landing = match result {
            Ok(landing) => landing,
            Err(error) => return self.leave(error),
        };
        match (wait, landing) {
            (Wait::Upload(staging), _) => self.tell(Fact::Uploaded { staging }),
            (wait, Landing::State(state)) => self.tell(Fact::Read { wait, what: ReadResult::State(state) }),
            (wait, Landing::Logits(logits)) => self.tell(Fact::Read { wait, what: ReadResult::Logits(logits) }),
            (wait, Landing::Record(record)) => {
                let read_at = self.clock.now();
                let lap = if matches!(wait, Wait::Peek(_)) { Lap::Peek } else { Lap::Flight };
                self.meter.note(lap, read_at.saturating_sub(queued));
                let _span = trace_span!(
                    target: "riparian::readback", parent: &self.span, "land", flight = flight.0,
                    waited_us = (read_at - since).as_micros() as u64
                )
                .entered();
                self.landed(wait, flight, record, read_at);
            }
            (wait, Landing::Uploaded) => check!(Flights, false, "an upload landed at {wait:?}"),
        }
    }

    fn landed(&mut self, wait: Wait, flight: FlightId, record: Box<Record>, read_at: Duration) {
        check!(Flights, record.flight == flight, "{:?} lay where {flight:?} was to land", record.flight);
        if let Some(missed) = &record.missed {
            let stop = missed.stop;
            // Copies copy what lies there, so an older flight's miss is no news; and what a peek reported is none at the
            // landing.
            let own = stop.flight == flight || self.broken.is(Broken::UnstampedRecords);
            let news = self.sent[stop.slot.index()] != Some(stop)
                || self.broken.is(Broken::NoDedupe)
                || self.broken.is(Broken::UnstampedRecords);
            if own && news {
                self.sent[stop.slot.index()] = Some(stop);
                let experts = missed.by_expert().into_iter().map(|(expert, _)| expert).collect();
                let _span = debug_span!(
                    target: "riparian::readback", "miss", flow_start = stop.flow(), flight = flight.0,
                    layer = %missed.layer, rows = missed.rows.len()
                )
                .entered();
                self.completer.complete(missed.clone(), read_at);
                self.tell(Fact::Missed { stop, experts });
            }
        }
        trace!(target: "riparian::readback", flight = flight.0, ids = record.out.ids.len(), "landed");
        self.tell(match wait {
            Wait::Peek(_) => Fact::Peeked { wait },
            _ => Fact::Landed { flight, wait, record },
        });
    }

    fn tell(&mut self, fact: Fact) {
        if let Err(error) = self.facts.try_send(fact) {
            check!(Bound, error.is_disconnected(), "the channel of facts is full");
            self.ended = true;
        }
    }
}

fn panicked(panic: &(dyn std::any::Any + Send)) -> DeviceError {
    DeviceError::Lost { why: crate::device::panic_text(panic) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::board::{Board, BoardLandings};
    use crate::device::{Completions, Missed, Out, Payload, Phase, Point, Staging, StopKind};
    use crate::ids::{ExpertIx, LayerIx, SlotIx, TokenId, Turn};
    use crate::policy::serve::ServeCosts;
    use std::sync::Arc;

    struct Helper;

    impl crate::device::Companion for Helper {
        fn embed(&self, _: TokenId) -> Vec<f32> {
            unreachable!("readback asks for no rows")
        }

        fn complete(&self, _: &Missed, _: &[ExpertIx]) -> Completions {
            Completions::default()
        }

        fn payload(&self, _: LayerIx, _: ExpertIx) -> Payload {
            unreachable!("readback asks for no bytes")
        }

        fn first_not_finite(
            &self,
            _: Option<&crate::device::Seed>,
            _: &[f32],
            _: &[TokenId],
        ) -> Result<crate::ids::BlockIx, String> {
            unreachable!("readback asks for no block")
        }
    }

    /// Readback alone: a board in place of the device.
    struct Alone {
        board: Arc<Board>,
        handle: Handle,
        readback: Readback,
        facts: Receiver<Fact>,
        completer: completer::Completer,
        clock: Clock,
    }

    fn alone(deadline: Option<Duration>) -> Alone {
        let (board, clock) = (Arc::new(Board::default()), Clock::simulated());
        let (answers, _) = bounded(1);
        let costs = ServeCosts { host_expert: Duration::ZERO, host_row: Duration::ZERO, upload: Duration::MAX };
        let (completer_handle, completer) = completer::Completer::new(completer::Parts {
            slots: 1,
            answers,
            companion: Arc::new(Helper),
            serve: completer::ServeOptions { uploads_max: 0, costs },
            clock: clock.clone(),
            meter: Meter::default(),
            broken: Broken::No,
        });
        let (sender, facts) = bounded(facts_bound(4, 1));
        let (handle, readback) = Readback::new(Parts {
            landings: Box::new(BoardLandings(board.clone())),
            deadline,
            slots: 1,
            awaits: awaits_bound(4, 1),
            facts: sender,
            completer: completer_handle,
            clock: clock.clone(),
            meter: Meter::default(),
            broken: Broken::No,
        });
        Alone { board, handle, readback, facts, completer, clock }
    }

    fn missed(flight: u64) -> Arc<Missed> {
        let point = Point { batch: 0, layer: LayerIx(1), phase: Phase::Route };
        let stop =
            Stop { kind: StopKind::Miss, slot: SlotIx(0), turn: Turn(flight as u32), flight: FlightId(flight), point };
        Arc::new(Missed {
            stop,
            layer: LayerIx(1),
            top_k: 1,
            normed: vec![0.5],
            rows: vec![0],
            picks: vec![ExpertIx(3)],
            missing: vec![true],
        })
    }

    impl Alone {
        fn land(&mut self, wait: Wait, flight: u64, missed: Option<Arc<Missed>>) {
            self.board.own(wait);
            self.handle.awaits(wait, FlightId(flight), Duration::ZERO).unwrap();
            while self.readback.step() {}
            let stop = missed.as_ref().map(|missed| missed.stop);
            let out = Out { flight: FlightId(flight), ..Out::default() };
            let record = Record { flight: FlightId(flight), out, stop, missed, busy: None };
            self.board.land(wait, Landing::Record(Box::new(record)));
            while self.readback.step() {}
        }

        fn facts(&self) -> Vec<&'static str> {
            let name = |fact| match fact {
                Fact::Missed { .. } => "missed",
                Fact::Landed { .. } => "landed",
                Fact::Peeked { .. } => "peeked",
                Fact::Uploaded { .. } => "uploaded",
                Fact::Read { .. } => "read",
                Fact::Lost { .. } => "lost",
            };
            self.facts.try_iter().map(name).collect()
        }
    }

    #[test]
    fn early_and_late_report_are_one_miss() {
        let mut alone = alone(None);
        alone.land(Wait::Peek(Staging(0)), 1, Some(missed(1)));
        alone.land(Wait::Land(Staging(1)), 1, Some(missed(1)));
        assert_eq!(alone.facts(), ["missed", "peeked", "landed"]);
        assert_eq!(alone.completer.waiting(), 1);
    }

    #[test]
    fn an_older_flights_record_is_no_news() {
        let mut alone = alone(None);
        alone.land(Wait::Land(Staging(0)), 2, Some(missed(1)));
        assert_eq!(alone.facts(), ["landed"]);
        assert_eq!(alone.completer.waiting(), 0);
    }

    #[test]
    fn a_loss_is_told_once_and_what_was_awaited_is_given_up() {
        let mut alone = alone(None);
        for staging in 0..3 {
            alone.board.own(Wait::Land(Staging(staging)));
            alone.handle.awaits(Wait::Land(Staging(staging)), FlightId(1), Duration::ZERO).unwrap();
        }
        alone.board.lose("gone");
        while alone.readback.step() {}
        let next = Arc::new(Board::default());
        alone.handle.switch(Box::new(BoardLandings(next.clone())), None).unwrap();
        while alone.readback.step() {}
        assert_eq!(alone.facts(), ["lost"]);
        alone.board = next;
        alone.land(Wait::Land(Staging(0)), 9, None);
        assert_eq!(alone.facts(), ["landed"], "the next device's");
    }

    #[test]
    fn a_switch_that_comes_first_tells_of_the_loss_too() {
        let mut alone = alone(None);
        alone.handle.switch(Box::new(BoardLandings(Arc::new(Board::default()))), None).unwrap();
        while alone.readback.step() {}
        assert_eq!(alone.facts(), ["lost"]);
    }

    #[test]
    fn what_never_lands_is_a_loss_at_its_deadline() {
        let mut alone = alone(Some(Duration::from_secs(1)));
        alone.board.own(Wait::Land(Staging(0)));
        alone.handle.awaits(Wait::Land(Staging(0)), FlightId(1), Duration::ZERO).unwrap();
        while alone.readback.step() {}
        assert!(alone.facts().is_empty());
        alone.clock.advance(Duration::from_secs(2));
        assert!(alone.readback.step());
        let Ok(Fact::Lost { error: DeviceError::TimedOut { waited } }) = alone.facts.try_recv() else { panic!() };
        assert!(waited >= Duration::from_secs(1));
    }
}
