//! The draft scheduler: how deep to draft, and what to draft where the device does not.
//!
//! - **Owns** each session's depth (`policy::drafts`), and the drafter where drafts are made on the host.
//! - **Takes** what verify batches and plain flights brought, from the submitter.
//! - **Gives** depths and guesses to the submitter.
//! - **May block on** nothing but its inbox and its drafter.
//! - **Stops** on shutdown, or when the submitter is gone.
//!
//! Never does: decide what stands. The device's accept does, and its ids are facts.

use std::collections::HashMap;

use crossbeam_channel::{Receiver, Sender, bounded};
use tracing::{Span, debug_span};

use super::session::SESSIONS_MAX;
use crate::ids::{SessionId, TokenId};
use crate::policy::drafts::{Drafts as Policy, FlightOutcome};

/// Makes drafts on the host, for devices that verify but do not draft.
pub trait Drafter: Send {
    /// A guess of the `n` ids that follow all ids of the session, `ids` being those since the last call.
    fn guess(&mut self, session: SessionId, ids: &[TokenId], n: usize) -> Vec<TokenId>;

    /// The session is over.
    fn forget(&mut self, session: SessionId);
}

/// Room for outcomes: the flights of a few moments. Where there is no room an outcome is lost, and a guess comes late.
const OUTCOMES_MAX: usize = 4 * SESSIONS_MAX;

/// What the submitter tells.
#[derive(Clone, Debug)]
pub enum Message {
    /// A session's flight has landed.
    Landed {
        /// The session.
        session: SessionId,
        /// What it brought; `None` where it was cut by a miss, so that its time tells nothing.
        outcome: Option<FlightOutcome>,
        /// Its ids, in order and each once.
        ids: Vec<TokenId>,
        /// Ids of the session so far, with these.
        total: usize,
    },
    /// A session is over.
    Ended {
        /// The session.
        session: SessionId,
    },
    /// Stop now.
    Shutdown,
}

/// What the draft scheduler tells the submitter.
#[derive(Clone, Debug, PartialEq)]
pub struct Advice {
    /// The session.
    pub session: SessionId,
    /// Drafts a batch from now on; 0 is plain decode.
    pub depth: usize,
    /// Guessed ids, from the session's id number `after` on. Empty where the device drafts.
    pub guess: Vec<TokenId>,
    /// Ids of the session that were known when it was guessed.
    pub after: usize,
}

/// Sender to the draft scheduler. Only the submitter holds one.
#[derive(Clone)]
pub struct Handle(Sender<Message>);

impl Handle {
    /// Tells what landed; lost where there is no room.
    pub fn tell(&self, message: Message) {
        let _ = self.0.try_send(message);
    }
}

/// The actor.
pub struct Drafts {
    inbox: Receiver<Message>,
    advice: Sender<Advice>,
    depth_max: usize,
    sessions: HashMap<SessionId, Session>,
    /// Of the session that was heard of last: what rounds and steps cost is the device's, and the next one begins with it.
    last: Option<Policy>,
    drafter: Option<Box<dyn Drafter>>,
    span: Span,
    ended: bool,
}

struct Session {
    policy: Policy,
    /// The depth the submitter was told; `None` before the first time.
    told: Option<usize>,
    /// Ids the drafter has seen.
    seen: usize,
}

/// What the draft scheduler is made of.
pub(crate) struct Parts {
    pub(crate) depth_max: usize,
    pub(crate) advice: Sender<Advice>,
    pub(crate) drafter: Option<Box<dyn Drafter>>,
}

impl Drafts {
    pub(crate) fn new(parts: Parts) -> (Handle, Self) {
        let (sender, inbox) = bounded(OUTCOMES_MAX);
        let drafts = Self {
            inbox,
            advice: parts.advice,
            depth_max: parts.depth_max,
            sessions: HashMap::new(),
            last: None,
            drafter: parts.drafter,
            span: Span::none(),
            ended: false,
        };
        (Handle(sender), drafts)
    }

    /// Runs until it is stopped.
    pub(crate) fn run(mut self) {
        self.span = tracing::debug_span!(target: "riparian::drafts", "drafts");
        let _life = self.span.clone().entered();
        while !self.ended {
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

    /// Whether it has nothing to do.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.inbox.is_empty()
    }

    fn handle(&mut self, message: Message) {
        match message {
            Message::Landed { session, outcome, ids, total } => self.landed(session, outcome, &ids, total),
            Message::Ended { session } => {
                self.sessions.remove(&session);
                if let Some(drafter) = &mut self.drafter {
                    drafter.forget(session);
                }
            }
            Message::Shutdown => self.ended = true,
        }
    }

    fn landed(&mut self, id: SessionId, outcome: Option<FlightOutcome>, ids: &[TokenId], total: usize) {
        let (depth_max, last) = (self.depth_max, &self.last);
        let fresh = || {
            let policy = last.clone().unwrap_or_else(|| Policy::new(depth_max));
            Session { policy, told: None, seen: 0 }
        };
        let session = self.sessions.entry(id).or_insert_with(fresh);
        // Of a session whose drafts are off there is nothing to draw.
        let _span = (session.told.is_none_or(|depth| depth > 0) || self.drafter.is_some()).then(|| {
            debug_span!(
                target: "riparian::drafts", parent: &self.span, "draft", session = id.0, ids = ids.len(),
                depth = session.told.unwrap_or(1), offered = outcome.map(|outcome| outcome.offered),
                kept = outcome.map(|outcome| outcome.kept)
            )
            .entered()
        });
        if let Some(outcome) = outcome {
            session.policy.landed(outcome);
            self.last = Some(session.policy.clone());
        }
        let depth = session.policy.depth();
        let mut guess = Vec::new();
        // A message that was lost leaves a gap, and a drafter with a gap guesses nothing any more.
        if let Some(drafter) = self.drafter.as_mut().filter(|_| session.seen + ids.len() == total) {
            session.seen = total;
            // Two rounds, and the id between them.
            guess = drafter.guess(id, ids, 2 * (depth + 1));
        }
        if session.told != Some(depth) || !guess.is_empty() {
            session.told = Some(depth);
            // Late advice is replaced by the next.
            let _ = self.advice.try_send(Advice { session: id, depth, guess, after: total });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    /// Guesses the numbers that follow.
    struct Counting;

    impl Drafter for Counting {
        fn guess(&mut self, _: SessionId, ids: &[TokenId], n: usize) -> Vec<TokenId> {
            let last = ids.last().map_or(0, |id| id.0);
            (1..=n as u32).map(|i| TokenId(last + i)).collect()
        }

        fn forget(&mut self, _: SessionId) {}
    }

    fn alone(drafter: Option<Box<dyn Drafter>>) -> (Handle, Drafts, Receiver<Advice>) {
        let (sender, advice) = bounded(8);
        let (handle, drafts) = Drafts::new(Parts { depth_max: 2, advice: sender, drafter });
        (handle, drafts, advice)
    }

    fn landed(depth: usize, kept: u32) -> Message {
        let outcome = FlightOutcome {
            depth,
            batches: 8,
            offered: 8 * depth as u32,
            kept,
            refused: (8 * depth as u32 - kept).min(8),
            busy: Duration::from_millis(8 + 4 * depth as u64),
        };
        Message::Landed { session: SessionId(1), outcome: Some(outcome), ids: Vec::new(), total: 0 }
    }

    #[test]
    fn drafts_that_never_stand_are_advised_against() {
        let (handle, mut drafts, advice) = alone(None);
        let mut depth = 1;
        for _ in 0..30 {
            handle.tell(landed(depth, 0));
            while drafts.step() {}
            depth = advice.try_iter().last().map_or(depth, |advice| advice.depth);
        }
        assert_eq!(depth, 0);
    }

    /// What rounds and steps cost is the device's: whoever comes next need not find it out again.
    #[test]
    fn the_next_session_begins_with_what_is_known() {
        let (handle, mut drafts, advice) = alone(None);
        let mut depth = 1;
        for _ in 0..12 {
            handle.tell(landed(depth, 0));
            while drafts.step() {}
            depth = advice.try_iter().last().map_or(depth, |advice| advice.depth);
        }
        assert_eq!(depth, 0);
        handle.tell(Message::Ended { session: SessionId(1) });
        handle.tell(Message::Landed { session: SessionId(2), outcome: None, ids: Vec::new(), total: 1 });
        while drafts.step() {}
        let told = advice.try_recv().expect("a new session is told its depth");
        assert_eq!((told.session, told.depth), (SessionId(2), 0));
    }

    #[test]
    fn a_drafter_guesses_behind_what_it_knows_and_stops_at_a_gap() {
        let (handle, mut drafts, advice) = alone(Some(Box::new(Counting)));
        let tell = |ids: &[u32], total| {
            let ids = ids.iter().map(|id| TokenId(*id)).collect();
            handle.tell(Message::Landed { session: SessionId(7), outcome: None, ids, total });
        };
        tell(&[5], 1);
        while drafts.step() {}
        let first = advice.try_recv().unwrap();
        assert_eq!((first.after, first.guess), (1, [6, 7, 8, 9].map(TokenId).to_vec()));
        tell(&[6, 7], 4);
        while drafts.step() {}
        assert!(advice.is_empty(), "one id was lost on the way");
    }
}
