//! The prefiller: prompts prefilled on the host, for a device that is seeded with what came of it (`CMF_NEMO_PREFILL=host`).
//!
//! - **Owns** the sequences of sessions whose prompts it prefills.
//! - **Takes** their rows, from the submitter, a pass at a time.
//! - **Gives** how far it is, and with a prompt's last rows the state behind them.
//! - **May block on** its inbox; computes for as long as a pass takes.
//! - **Stops** on shutdown, when the submitter is gone, or where the host cannot prefill: then the device does.
//!
//! Never does: decode. A prompt's last row stays with the submitter, whose device makes the first id of it.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use crossbeam_channel::{Receiver, Sender, bounded};
use tracing::debug_span;

use crate::device::{Companion, Prefill, Seed};
use crate::ids::{BlockIx, SessionId};

/// Passes that are asked for and not yet answered; the submitter counts them, so that neither channel is ever full.
pub const PASSES_MAX: usize = 8;

/// What the submitter asks for.
#[derive(Debug)]
pub enum Message {
    /// Rows of a prompt; answered by [`Prefilled`].
    Prefill(Box<Rows>),
    /// Stop now.
    Shutdown,
}

/// Rows of a prompt, behind those before.
#[derive(Debug)]
pub struct Rows {
    /// Whose.
    pub session: SessionId,
    /// Gone once nobody wants the session any more.
    pub wanted: Weak<()>,
    /// What it begins with; looked at with its first rows.
    pub seed: Option<Arc<Seed>>,
    /// Whether its state is to serve drafts.
    pub drafts: bool,
    /// `[n, hidden]`, none where only the state is wanted.
    pub rows: Vec<f32>,
    /// Whether the state is wanted behind them, and the sequence no longer.
    pub last: bool,
}

/// Rows were prefilled.
#[derive(Debug)]
pub struct Prefilled {
    /// Whose.
    pub session: SessionId,
    /// How many.
    pub rows: usize,
    /// The state, if it was asked for; else the block that made a value that is not finite.
    pub made: Result<Option<Box<Seed>>, BlockIx>,
}

/// Sender to the prefiller. Only the submitter holds one.
#[derive(Clone)]
pub(crate) struct Handle(Sender<Message>);

impl Handle {
    /// Asks; false where the prefiller is gone.
    pub(crate) fn tell(&self, message: Message) -> bool {
        self.0.try_send(message).is_ok()
    }
}

/// The actor.
pub struct Prefiller {
    inbox: Receiver<Message>,
    answers: Sender<Prefilled>,
    companion: Arc<dyn Companion>,
    hidden: usize,
    sequences: HashMap<SessionId, (Weak<()>, Box<dyn Prefill>)>,
    ended: bool,
}

impl Prefiller {
    pub(crate) fn new(companion: Arc<dyn Companion>, hidden: usize) -> (Handle, Receiver<Prefilled>, Self) {
        // A shutdown beside them.
        let (sender, inbox) = bounded(PASSES_MAX + 1);
        let (answers, answered) = bounded(PASSES_MAX);
        let this = Self { inbox, answers, companion, hidden, sequences: HashMap::new(), ended: false };
        (Handle(sender), answered, this)
    }

    /// Runs until it is stopped.
    pub(crate) fn run(mut self) {
        while !self.ended {
            match self.inbox.recv() {
                Ok(message) => self.handle(message),
                Err(_) => self.ended = true,
            }
        }
    }

    fn handle(&mut self, message: Message) {
        self.sequences.retain(|_, (wanted, _)| wanted.strong_count() > 0);
        match message {
            Message::Prefill(rows) => self.prefill(*rows),
            Message::Shutdown => self.ended = true,
        }
    }

    fn prefill(&mut self, asked: Rows) {
        let Rows { session, wanted, seed, drafts, rows, last } = asked;
        let n = rows.len() / self.hidden;
        let _span = debug_span!(target: "riparian::prefiller", "prefill", session = session.0, rows = n).entered();
        // Where nobody wants it the answer is still owed.
        let made = if wanted.strong_count() == 0 {
            Ok(())
        } else {
            if !self.sequences.contains_key(&session) {
                let Some(begun) = self.companion.prefill(seed.as_deref(), drafts) else {
                    self.ended = true;
                    return;
                };
                self.sequences.insert(session, (wanted, begun));
            }
            let (_, sequence) = self.sequences.get_mut(&session).expect("it was begun");
            sequence.rows(&rows)
        };
        let made = made.map(|()| {
            let ended = if last { self.sequences.remove(&session) } else { None };
            ended.map(|(_, sequence)| Box::new(sequence.seed()))
        });
        let _ = self.answers.try_send(Prefilled { session, rows: n, made });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::{Completions, Missed, Payload};
    use crate::ids::{ExpertIx, LayerIx, Position, TokenId};
    use crate::model::state::{KvState, SequenceState};

    const HIDDEN: usize = 2;

    /// Remembers rows as a hidden row, if it can; refuses those that are not finite.
    struct Host {
        can: bool,
    }

    struct Seen(Vec<f32>);

    impl Companion for Host {
        fn embed(&self, _: TokenId) -> Vec<f32> {
            vec![0.0; HIDDEN]
        }

        fn complete(&self, _: &Missed, _: &[ExpertIx]) -> Completions {
            Completions::default()
        }

        fn payload(&self, layer: LayerIx, expert: ExpertIx) -> Payload {
            Payload::new(layer, expert, Vec::new())
        }

        fn first_not_finite(&self, _: Option<&Seed>, _: &[f32], _: &[TokenId]) -> Result<BlockIx, String> {
            Err("nobody asks".into())
        }

        fn prefill(&self, seed: Option<&Seed>, _: bool) -> Option<Box<dyn Prefill>> {
            let begun: Box<dyn Prefill> = Box::new(Seen(seed.map_or_else(Vec::new, |seed| seed.hidden.clone())));
            self.can.then_some(begun)
        }
    }

    impl Prefill for Seen {
        fn rows(&mut self, rows: &[f32]) -> Result<(), BlockIx> {
            self.0.extend_from_slice(rows);
            if rows.iter().all(|value| value.is_finite()) { Ok(()) } else { Err(BlockIx(3)) }
        }

        fn seed(self: Box<Self>) -> Seed {
            let position = Position::from(self.0.len() / HIDDEN);
            let state = SequenceState { position, blocks: Vec::new(), draft: KvState::default() };
            Seed { state, hidden: self.0 }
        }
    }

    fn ask(session: u64, wanted: &Arc<()>, rows: &[f32], last: bool) -> Message {
        let wanted = Arc::downgrade(wanted);
        let rows = Rows { session: SessionId(session), wanted, seed: None, drafts: false, rows: rows.to_vec(), last };
        Message::Prefill(Box::new(rows))
    }

    #[test]
    fn each_prompt_gets_its_own_state_and_every_pass_an_answer() {
        let (handle, answers, prefiller) = Prefiller::new(Arc::new(Host { can: true }), HIDDEN);
        let thread = std::thread::spawn(move || prefiller.run());
        let (a, b) = (Arc::new(()), Arc::new(()));
        for message in [
            ask(1, &a, &[1.0, 2.0], false),
            ask(2, &b, &[9.0, 9.0, 8.0, 8.0], false),
            ask(1, &a, &[3.0, 4.0], true),
            ask(2, &b, &[], true),
            ask(1, &a, &[f32::NAN, 0.0], false),
        ] {
            assert!(handle.tell(message));
        }
        let mut told = Vec::new();
        for _ in 0..5 {
            let Prefilled { session, rows, made } = answers.recv().unwrap();
            let made = made.map(|seed| seed.map(|seed| (seed.state.position.index(), seed.hidden)));
            told.push((session.0, rows, made));
        }
        let states = [(2, vec![1.0, 2.0, 3.0, 4.0]), (2, vec![9.0, 9.0, 8.0, 8.0])];
        let [first, second] = states.map(|state| Ok(Some(state)));
        let wanted = [(1, 1, Ok(None)), (2, 2, Ok(None)), (1, 1, first), (2, 0, second), (1, 1, Err(BlockIx(3)))];
        assert_eq!(told, wanted);
        // One that nobody wants any more is answered, and forgotten.
        drop(a);
        assert!(handle.tell(ask(1, &Arc::new(()), &[1.0, 1.0], true)));
        assert!(matches!(answers.recv().unwrap(), Prefilled { rows: 1, made: Ok(None), .. }));
        assert!(handle.tell(Message::Shutdown));
        thread.join().unwrap();
        assert!(answers.recv().is_err(), "whoever waits hears of the end");
    }

    /// No host, no prefill: the end is told by the channel.
    #[test]
    fn where_the_host_cannot_the_actor_ends() {
        let (handle, answers, prefiller) = Prefiller::new(Arc::new(Host { can: false }), HIDDEN);
        let wanted = Arc::new(());
        assert!(handle.tell(ask(1, &wanted, &[1.0, 2.0], true)));
        prefiller.run();
        assert!(answers.recv().is_err());
    }
}
