//! The host expert completer: computes the experts that a bank did not hold.
//!
//! - **Owns** a thread (the host's kernels spread each job over the thread pool), and the costs it has measured.
//! - **Takes** misses, straight from readback; sessions whose values are not finite, from the submitter.
//! - **Gives** an [`Answer`] to the submitter for every job, also one that nobody wants any more or that it died on.
//! - **May block on** its own arithmetic and on page-in of the experts it reads.
//! - **Stops** when readback and the submitter are gone, or on shutdown.
//!
//! Never does: ask which session a miss belongs to, or whether it still matters.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, bounded};
use tracing::{Span, debug_span};

use super::clock::Clock;
use super::meter::{Lap, Meter};
use crate::check;
use crate::device::{Companion, Completions, Missed, Payload, Seed, Stop};
use crate::host::Spin;
use crate::ids::{BlockIx, TokenId};
use crate::invariants::Broken;
use crate::policy::serve::{ServeCosts, split};

/// What the completer is asked.
pub enum Message {
    /// Readback: a slot stopped here. Answered once.
    Complete {
        /// The miss.
        missed: Arc<Missed>,
        /// When it was read.
        read_at: Duration,
    },
    /// The submitter: a slot stopped for a value that is not finite, and its device cannot tell which block made it.
    /// Answered once.
    Name(Box<Spoiled>),
    /// The submitter: stop behind the present job.
    Shutdown,
}

/// A session one of whose values is not finite.
pub struct Spoiled {
    /// The stop.
    pub stop: Stop,
    /// What it began with.
    pub seed: Option<Arc<Seed>>,
    /// Its rows, `[n, hidden]`.
    pub rows: Vec<f32>,
    /// The ids that came of them.
    pub ids: Vec<TokenId>,
}

/// The answer to a job.
#[derive(Clone, Debug)]
pub enum Answer {
    /// The missing experts, computed here or to be computed from an upload.
    Completed {
        /// The stop it cures.
        stop: Stop,
        /// What was computed.
        made: Completions,
        /// Experts computed.
        computed: usize,
        /// Experts that the device shall compute from these bytes.
        uploads: Vec<Arc<Payload>>,
        /// When the miss was read, and when it was answered.
        times: [Duration; 2],
    },
    /// The block that made a value that is not finite, or why it is not known.
    Named {
        /// The stop it was for.
        stop: Stop,
        /// What was found.
        found: Result<BlockIx, String>,
    },
    /// The job died.
    Failed {
        /// The stop it was for.
        stop: Stop,
        /// What happened.
        why: String,
    },
}

impl Answer {
    /// The stop it is for.
    #[must_use]
    pub fn stop(&self) -> Stop {
        match self {
            Answer::Completed { stop, .. } | Answer::Named { stop, .. } | Answer::Failed { stop, .. } => *stop,
        }
    }
}

/// Room for jobs, and for answers: a slot has one stop at a time and is not freed before its answer. Twice, because a
/// second device may take over while the first one's jobs are still under way; and a shutdown.
#[must_use]
pub(crate) fn jobs_bound(slots: usize) -> usize {
    2 * slots + 1
}

/// The completer looks for so long for the next job before it sleeps.
const LOOK: Duration = Duration::from_millis(1);

/// Sender to the completer.
#[derive(Clone)]
pub struct Handle(Sender<Message>);

impl Handle {
    /// Hands a job over. A completer that is gone is noticed by the submitter, whose answers end.
    pub fn complete(&self, missed: Arc<Missed>, read_at: Duration) {
        if let Err(error) = self.0.try_send(Message::Complete { missed, read_at }) {
            check!(Bound, error.is_disconnected(), "the channel of jobs is full");
        }
    }

    /// Asks for a block's name; `false` where nobody is left to answer.
    #[must_use]
    pub fn name(&self, spoiled: Spoiled) -> bool {
        let sent = self.0.try_send(Message::Name(Box::new(spoiled)));
        if let Err(error) = &sent {
            check!(Bound, error.is_disconnected(), "the channel of jobs is full");
        }
        sent.is_ok()
    }

    /// Jobs that wait.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.0.len()
    }

    /// Stop behind the present job.
    pub fn shutdown(&self) {
        let _ = self.0.try_send(Message::Shutdown);
    }
}

/// When a miss may be served by upload.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ServeOptions {
    /// Uploads for one stop at most; 0 leaves all to the host.
    pub uploads_max: usize,
    /// Costs at the start; the host's are measured from then on.
    pub costs: ServeCosts,
}

/// The actor.
pub struct Completer {
    inbox: Receiver<Message>,
    answers: Sender<Answer>,
    companion: Arc<dyn Companion>,
    serve: ServeOptions,
    clock: Clock,
    meter: Meter,
    span: Span,
    broken: Broken,
    ended: bool,
}

/// What the completer is made of.
pub(crate) struct Parts {
    pub(crate) slots: usize,
    pub(crate) answers: Sender<Answer>,
    pub(crate) companion: Arc<dyn Companion>,
    pub(crate) serve: ServeOptions,
    pub(crate) clock: Clock,
    pub(crate) meter: Meter,
    pub(crate) broken: Broken,
}

impl Completer {
    pub(crate) fn new(parts: Parts) -> (Handle, Self) {
        let (sender, inbox) = bounded(jobs_bound(parts.slots));
        let completer = Self {
            inbox,
            answers: parts.answers,
            companion: parts.companion,
            serve: parts.serve,
            clock: parts.clock,
            meter: parts.meter,
            span: Span::none(),
            broken: parts.broken,
            ended: false,
        };
        (Handle(sender), completer)
    }

    /// Runs until it is stopped.
    pub(crate) fn run(mut self) {
        self.span = tracing::debug_span!(target: "riparian::completer", "completer");
        let _life = self.span.clone().entered();
        // the next stop is not far: a woken thread would come tens of microseconds late
        let spin = Spin::up_to(LOOK);
        while !self.ended {
            spin.until(|| !self.inbox.is_empty());
            match self.inbox.recv() {
                Ok(message) => self.handle(message),
                Err(_) => self.ended = true,
            }
        }
    }

    /// One move of a simulation.
    pub fn step(&mut self) -> bool {
        self.inbox.try_recv().map(|message| self.handle(message)).is_ok()
    }

    /// One move of a simulation in which the job dies half-way.
    pub fn step_and_die(&mut self) -> bool {
        match self.inbox.try_recv() {
            Ok(Message::Complete { missed, .. }) => {
                self.answer(missed.stop, || panic!("a test killed the job"));
                true
            }
            Ok(Message::Name(spoiled)) => {
                self.answer(spoiled.stop, || panic!("a test killed the job"));
                true
            }
            Ok(Message::Shutdown) => {
                self.handle(Message::Shutdown);
                true
            }
            Err(_) => false,
        }
    }

    /// Jobs that wait.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.inbox.len()
    }

    fn handle(&mut self, message: Message) {
        match message {
            Message::Complete { missed, read_at } => {
                let (companion, uploads_max) = (self.companion.clone(), self.serve.uploads_max);
                let costs = self.serve.costs;
                let begun = self.clock.now();
                self.meter.note(Lap::Handover, begun.saturating_sub(read_at));
                let wanted = missed.by_expert();
                let rows: Vec<usize> = wanted.iter().map(|(_, at)| at.len()).collect();
                let uploads: Vec<_> = split(&rows, uploads_max, costs).into_iter().map(|i| wanted[i].0).collect();
                let computed = wanted.len() - uploads.len();
                let _span = debug_span!(
                    target: "riparian::completer", parent: &self.span, "complete", flow_step = missed.stop.flow(),
                    flight = missed.stop.flight.0, layer = %missed.layer, experts = computed,
                    uploads = uploads.len(), rows = missed.rows.len()
                )
                .entered();
                let (clock, meter) = (self.clock.clone(), self.meter.clone());
                self.answer(missed.stop, || {
                    if let Err(why) = companion.still_readable() {
                        return Answer::Failed { stop: missed.stop, why };
                    }
                    let made = companion.complete(&missed, &uploads);
                    let uploads = uploads.iter().map(|e| Arc::new(companion.payload(missed.layer, *e))).collect();
                    let done = clock.now();
                    meter.note(Lap::Complete, done.saturating_sub(begun));
                    Answer::Completed { stop: missed.stop, made, computed, uploads, times: [read_at, done] }
                });
                self.learn(computed, rows.iter().sum(), self.clock.now() - begun, uploads_max > 0);
            }
            Message::Name(spoiled) => {
                let companion = self.companion.clone();
                let Spoiled { stop, seed, rows, ids } = *spoiled;
                let _span = debug_span!(
                    target: "riparian::completer", parent: &self.span, "name", flight = stop.flight.0, ids = ids.len()
                )
                .entered();
                self.answer(stop, || {
                    let found = companion.first_not_finite(seed.as_deref(), &rows, &ids);
                    Answer::Named { stop, found }
                });
            }
            Message::Shutdown => self.ended = true,
        }
    }

    /// Remembers what an expert costs here, where that decides anything.
    fn learn(&mut self, experts: usize, rows: usize, took: Duration, matters: bool) {
        if !matters || experts == 0 {
            return;
        }
        let costs = &mut self.serve.costs;
        let row_time = costs.host_row * u32::try_from(rows).unwrap_or(u32::MAX);
        let seen = took.saturating_sub(row_time) / experts as u32;
        costs.host_expert = costs.host_expert * 7 / 8 + seen / 8;
    }

    /// Answers with what `work` gives, or with its death.
    fn answer(&mut self, stop: Stop, work: impl FnOnce() -> Answer) {
        let answer = catch_unwind(AssertUnwindSafe(work))
            .unwrap_or_else(|panic| Answer::Failed { stop, why: crate::device::panic_text(panic.as_ref()) });
        if matches!(answer, Answer::Failed { .. }) && self.broken.is(Broken::PanicWithoutAnswer) {
            return;
        }
        if let Err(error) = self.answers.try_send(answer) {
            check!(Bound, error.is_disconnected(), "the channel of answers is full");
            self.ended = true;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::scripted::Script;
    use crate::device::{Point, StopKind};
    use crate::ids::{ExpertIx, FlightId, LayerIx, SlotIx, Turn};

    fn missed(turn: u32) -> Arc<Missed> {
        let point = Point::start_of(0);
        let stop = Stop { kind: StopKind::Miss, slot: SlotIx(0), turn: Turn(turn), flight: FlightId(1), point };
        Arc::new(Missed {
            stop,
            layer: LayerIx(0),
            top_k: 2,
            normed: vec![1.0, 2.0, 3.0, 4.0],
            rows: vec![0, 1],
            picks: [4, 5, 5, 0].map(ExpertIx).to_vec(),
            missing: vec![true, true, true, false],
        })
    }

    fn alone(uploads_max: usize) -> (Handle, Completer, Receiver<Answer>) {
        let (sender, answers) = bounded(jobs_bound(1));
        let us = Duration::from_micros;
        let costs = ServeCosts { host_expert: us(10), host_row: us(1), upload: us(1) };
        let (handle, completer) = Completer::new(Parts {
            slots: 1,
            answers: sender,
            companion: Arc::new(Script::default().model()),
            serve: ServeOptions { uploads_max, costs },
            clock: Clock::simulated(),
            meter: Meter::default(),
            broken: Broken::No,
        });
        (handle, completer, answers)
    }

    #[test]
    fn every_missing_pick_gets_its_output() {
        let (handle, mut completer, answers) = alone(0);
        handle.complete(missed(1), Duration::ZERO);
        assert!(completer.step());
        let Ok(Answer::Completed { made, computed, uploads, .. }) = answers.try_recv() else { panic!() };
        assert_eq!((made.at, computed, uploads.len()), (vec![0, 1, 2], 2, 0));
    }

    #[test]
    fn what_is_cheaper_to_upload_is_left_to_the_device() {
        let (handle, mut completer, answers) = alone(1);
        handle.complete(missed(1), Duration::ZERO);
        assert!(completer.step());
        let Ok(Answer::Completed { made, computed, uploads, .. }) = answers.try_recv() else { panic!() };
        assert_eq!((made.at, computed), (vec![0], 1));
        assert_eq!((uploads.len(), uploads[0].expert), (1, ExpertIx(5)), "two rows want it");
    }

    #[test]
    fn a_job_that_dies_is_answered_and_the_next_one_works() {
        let (handle, mut completer, answers) = alone(0);
        handle.complete(missed(1), Duration::ZERO);
        handle.complete(missed(2), Duration::ZERO);
        let quiet = std::panic::take_hook();
        std::panic::set_hook(Box::new(|_| {}));
        assert!(completer.step_and_die());
        std::panic::set_hook(quiet);
        assert!(completer.step());
        let Ok(Answer::Failed { stop, why }) = answers.try_recv() else { panic!() };
        assert_eq!((stop.turn, why.as_str()), (Turn(1), "it panicked: a test killed the job"));
        assert!(matches!(answers.try_recv(), Ok(Answer::Completed { stop, .. }) if stop.turn == Turn(2)));
    }
}
