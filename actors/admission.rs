//! The admission manager: which experts move into the banks as decode goes on.
//!
//! - **Owns** expert scores and the table of who has which place (`policy::admission`).
//! - **Takes** routing counts and misses from the submitter, experts' bytes from the loader.
//! - **Gives** [`Fetch`] to the loader, [`Admit`] to the submitter. An `Admit` that finds the channel full is dropped,
//!   counted and undone in the table.
//! - **May block on** laying an expert out for the device, so that the submitter need not.
//! - **Stops** on shutdown, or when the submitter is gone.
//!
//! Never does: read weights from the file, queue anything, or hold up a flight.

use std::collections::HashMap;
use std::sync::Arc;

use crossbeam_channel::{Receiver, Sender, bounded, select};
use tracing::{Span, debug, debug_span};

use super::payload::{Admit, FETCHES_MAX, Fetch, Fetched};
use crate::device::Stager;
use crate::ids::{ExpertIx, LayerIx};
use crate::policy::admission::{Admission as Policy, AdmissionOptions, Move};

/// Room for observations. They are statistics: one that finds no room is lost without harm.
const OBSERVED_MAX: usize = 16;

/// Room for the submitter's answers to `Admit`s, which are never lost: one for each under way, and a shutdown.
const ANSWERED_MAX: usize = FETCHES_MAX + ADMITS_MAX + 2;

/// Room for `Admit`s on their way to the submitter (`protocol.md` §3).
pub const ADMITS_MAX: usize = 8;

/// What the submitter observed.
#[derive(Clone, Debug, Default)]
pub struct Observed {
    /// Positions decoded or prefilled.
    pub positions: u32,
    /// `[layers][experts]`
    pub routed: Vec<Vec<u32>>,
    /// Experts that missed.
    pub missed: Vec<(LayerIx, ExpertIx)>,
    /// Whether a prompt was prefilled.
    pub prefill: bool,
}

/// What the submitter did with an [`Admit`], and when to stop.
#[derive(Clone, Debug)]
pub enum Message {
    /// The upload was queued.
    Placed(Admit),
    /// It was not: no buffer was free, or the device is lost.
    Refused(Admit),
    /// There is no partial bank any more: admit nothing from here on.
    Stop,
}

/// Sender to the admission manager. Only the submitter holds one.
#[derive(Clone)]
pub struct Handle {
    observed: Sender<Observed>,
    answered: Sender<Message>,
}

impl Handle {
    /// Statistics; dropped where there is no room.
    pub fn observed(&self, observed: Observed) {
        let _ = self.observed.try_send(observed);
    }

    /// What came of an `Admit`, or the end.
    pub fn tell(&self, message: Message) {
        if let Err(error) = self.answered.try_send(message) {
            crate::check!(Bound, error.is_disconnected(), "the channel of admissions' answers is full");
        }
    }
}

/// The actor.
pub struct Admission {
    policy: Policy,
    observed: Receiver<Observed>,
    answered: Receiver<Message>,
    fetched: Receiver<Fetched>,
    fetched_sender: Sender<Fetched>,
    fetches: Sender<Fetch>,
    admits: Sender<Admit>,
    /// For devices that keep experts otherwise than the file.
    stager: Option<Arc<dyn Stager>>,
    /// Moves under way, by what moves; with who had the place.
    moving: HashMap<(LayerIx, ExpertIx), (Move, Option<ExpertIx>)>,
    /// `Admit`s that found the channel full, and bytes that could not be had.
    refused: u64,
    span: Span,
    ended: bool,
}

/// What the admission manager is made of.
pub(crate) struct Parts {
    pub(crate) options: AdmissionOptions,
    pub(crate) residents: Vec<Vec<Option<ExpertIx>>>,
    pub(crate) experts: usize,
    pub(crate) fetches: Sender<Fetch>,
    pub(crate) admits: Sender<Admit>,
    pub(crate) stager: Option<Arc<dyn Stager>>,
}

impl Admission {
    pub(crate) fn new(parts: Parts) -> (Handle, Self) {
        let (observed_sender, observed) = bounded(OBSERVED_MAX);
        let (answered_sender, answered) = bounded(ANSWERED_MAX);
        // One for each fetch under way, so that the loader never finds it full.
        let (fetched_sender, fetched) = bounded(FETCHES_MAX);
        let options = AdmissionOptions { at_a_time: parts.options.at_a_time.min(FETCHES_MAX), ..parts.options };
        let admission = Self {
            policy: Policy::new(options, &parts.residents, parts.experts),
            observed,
            answered,
            fetched,
            fetched_sender,
            fetches: parts.fetches,
            admits: parts.admits,
            stager: parts.stager,
            moving: HashMap::new(),
            refused: 0,
            span: Span::none(),
            ended: false,
        };
        (Handle { observed: observed_sender, answered: answered_sender }, admission)
    }

    /// Runs until it is stopped.
    pub(crate) fn run(mut self) {
        self.span = tracing::debug_span!(target: "riparian::admission", "admission");
        let _life = self.span.clone().entered();
        let (observed, answered, fetched) = (self.observed.clone(), self.answered.clone(), self.fetched.clone());
        while !self.ended {
            select! {
                recv(answered) -> message => match message {
                    Ok(message) => self.handle(message),
                    Err(_) => self.ended = true,
                },
                recv(fetched) -> message => if let Ok(message) = message { self.fetched(message) },
                recv(observed) -> message => match message {
                    Ok(message) => self.observe(&message),
                    Err(_) => self.ended = true,
                },
            }
        }
    }

    /// One move of a simulation: answers first, then bytes, then statistics.
    pub fn step(&mut self) -> bool {
        if self.ended {
            return false;
        }
        if let Ok(message) = self.answered.try_recv() {
            self.handle(message);
        } else if let Ok(message) = self.fetched.try_recv() {
            self.fetched(message);
        } else if let Ok(message) = self.observed.try_recv() {
            self.observe(&message);
        } else {
            return false;
        }
        true
    }

    /// Whether it has nothing to do.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.ended || self.observed.is_empty() && self.answered.is_empty() && self.fetched.is_empty()
    }

    fn handle(&mut self, message: Message) {
        match message {
            Message::Placed(admit) => {
                if let Some((found, _)) = self.moving.remove(&(admit.payload.layer, admit.payload.expert)) {
                    self.policy.placed(found);
                }
            }
            Message::Refused(admit) => self.undo(admit.payload.layer, admit.payload.expert),
            Message::Stop => self.ended = true,
        }
    }

    fn observe(&mut self, observed: &Observed) {
        self.policy.routed(observed.positions, &observed.routed, observed.prefill);
        for (layer, expert) in &observed.missed {
            self.policy.missed(*layer, [*expert]);
        }
        for (found, before) in self.policy.decide() {
            self.moving.insert((found.layer, found.expert), (found, before));
            let fetch = Fetch { layer: found.layer, expert: found.expert, reply: self.fetched_sender.clone() };
            if self.fetches.try_send(fetch).is_err() {
                self.undo(found.layer, found.expert);
            }
        }
    }

    fn fetched(&mut self, fetched: Fetched) {
        let Some((found, before)) = self.moving.get(&(fetched.layer, fetched.expert)).copied() else { return };
        let span = debug_span!(
            target: "riparian::admission", parent: &self.span, "admit", flow_start = tracing::field::Empty,
            layer = %found.layer, expert = %found.expert, place = %found.place
        );
        let _span = span.clone().entered();
        let payload = fetched.payload.and_then(|payload| match &self.stager {
            Some(stager) => stager.stage(payload).map_err(|error| error.to_string()),
            None => Ok(payload),
        });
        let sent = match payload {
            Ok(payload) => {
                let admit = Admit { place: found.place, payload };
                span.record("flow_start", admit.flow());
                self.admits.try_send(admit).is_ok()
            }
            Err(why) => {
                tracing::warn!(target: "riparian::admission", layer = %found.layer, expert = %found.expert, %why,
                    "no bytes to admit");
                false
            }
        };
        if !sent {
            debug!(target: "riparian::admission", before = ?before, "refused");
            self.undo(fetched.layer, fetched.expert);
        }
    }

    fn undo(&mut self, layer: LayerIx, expert: ExpertIx) {
        if let Some((found, before)) = self.moving.remove(&(layer, expert)) {
            self.refused += 1;
            self.policy.refused(found, before);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::Payload;
    use crate::policy::admission::Policy as Rule;

    fn alone() -> (Handle, Admission, Receiver<Fetch>, Receiver<Admit>) {
        let (fetches, fetched) = bounded(FETCHES_MAX);
        let (admits, admitted) = bounded(1);
        let options =
            AdmissionOptions { policy: Rule::Baseline, positions_per_upload: 1, ..AdmissionOptions::default() };
        let residents = vec![vec![Some(ExpertIx(0)), Some(ExpertIx(1))]];
        let (handle, admission) =
            Admission::new(Parts { options, residents, experts: 6, fetches, admits, stager: None });
        (handle, admission, fetched, admitted)
    }

    fn want(handle: &Handle, admission: &mut Admission, expert: usize) {
        let mut routed = vec![0; 6];
        routed[expert] = 9;
        handle.observed(Observed { positions: 1, routed: vec![routed], ..Observed::default() });
        while admission.step() {}
    }

    fn payload(fetch: &Fetch) -> Fetched {
        let payload = Payload::new(fetch.layer, fetch.expert, vec![1, 2, 3]);
        Fetched { layer: fetch.layer, expert: fetch.expert, payload: Ok(Arc::new(payload)) }
    }

    #[test]
    fn an_expert_is_fetched_and_then_admitted() {
        let (handle, mut admission, fetches, admits) = alone();
        want(&handle, &mut admission, 4);
        let fetch = fetches.try_recv().unwrap();
        assert_eq!(fetch.expert, ExpertIx(4));
        assert!(admits.is_empty(), "not before its bytes are there");
        fetch.reply.try_send(payload(&fetch)).unwrap();
        while admission.step() {}
        let admit = admits.try_recv().unwrap();
        assert_eq!(admit.payload.expert, ExpertIx(4));
        handle.tell(Message::Placed(admit.clone()));
        while admission.step() {}
        assert_eq!(admission.policy.owner(LayerIx(0), admit.place), Some(ExpertIx(4)));
        assert_eq!(admission.refused, 0);
    }

    #[test]
    fn what_finds_no_room_or_no_bytes_is_undone() {
        let (handle, mut admission, fetches, admits) = alone();
        want(&handle, &mut admission, 4);
        want(&handle, &mut admission, 5);
        let [first, second] = [fetches.try_recv().unwrap(), fetches.try_recv().unwrap()];
        for fetch in [&first, &second] {
            fetch.reply.try_send(payload(fetch)).unwrap();
            while admission.step() {}
        }
        assert_eq!((admits.len(), admission.refused), (1, 1), "the channel holds one");
        assert!(!admission.policy.is_resident(LayerIx(0), second.expert));

        handle.tell(Message::Refused(admits.try_recv().unwrap()));
        while admission.step() {}
        assert_eq!(admission.refused, 2);
        assert!(admission.policy.is_resident(LayerIx(0), ExpertIx(0)));

        want(&handle, &mut admission, 3);
        let fetch = fetches.try_recv().unwrap();
        let why = Err("a read error".into());
        fetch.reply.try_send(Fetched { layer: fetch.layer, expert: fetch.expert, payload: why }).unwrap();
        while admission.step() {}
        assert_eq!((admits.len(), admission.refused), (0, 3));
    }

    #[test]
    fn without_a_partial_bank_nothing_is_admitted() {
        let (handle, mut admission, fetches, _admits) = alone();
        handle.tell(Message::Stop);
        want(&handle, &mut admission, 4);
        assert!(fetches.is_empty() && admission.is_idle());
    }
}
