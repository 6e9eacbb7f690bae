//! The actors: who owns what, and what crosses between them.
//!
//! ```text
//!                 samples                 rows              Token, Finished
//!   application ----------> audio encoder -----> session <--------------------+
//!        | open                                   | Open Feed Decode Cancel    |
//!        v                                        v                            |
//!     loader <--- Fetch --- admission <---- [ submitter ] ---------------------+
//!        |                   |  ^  routing   |    ^   ^
//!        +--- Fetched ------>|  +------------+    |   |  Completed / Failed
//!                            +---- Admit -------->|   +------------------ completer
//!     drafts <--- Landed ------------------------>|                          ^
//!        +--- Advice ---------------------------->|                          | Complete
//!     prefiller <--- Prefill ---------------------|                          |
//!        +--- Prefilled ------------------------->|                          |
//!                                            items|   Await                  |
//!                                                 v ------> readback --------+
//!                                              device ------->  |
//!                                                      staging  +-- facts --> submitter
//! ```
//!
//! Each actor owns its state alone, has one loop, and is one file here. Only
//! messages cross. Every channel is bounded where it is made; every send but
//! `Admit` and statistics is covered by a credit taken earlier, so no actor
//! ever waits for room and no cycle can wait for itself.
//!
//! Start order: completer, readback, admission manager, draft scheduler, prefiller (only where
//! the host prefills for a device), submitter (who knows the others), then sessions. Stop order: the submitter
//! first; it retires its sessions and tells the others; then they end, each
//! behind what it is doing.
//!
//! A graph is assembled without threads ([`Graph::assemble`]), so that a
//! simulation can step its actors; [`Graph::start`] gives each a thread.

pub mod admission;
pub mod alive;
pub mod clock;
pub mod completer;
pub mod drafts;
pub mod encoder;
pub mod loader;
pub mod meter;
pub mod payload;
pub mod prefiller;
pub mod readback;
pub mod session;
pub mod submitter;

use std::io;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crossbeam_channel::{Sender, bounded, never};

use clock::Clock;
use completer::ServeOptions;
use drafts::Drafter;
use meter::Meter;
use payload::Fetch;
use session::SESSIONS_MAX;
use submitter::Fallback;

use crate::device::{Companion, Device, DeviceKind, DraftAbility};
use crate::invariants::Broken;
use crate::knobs::{Knobs, Prefill};
use crate::policy::admission::AdmissionOptions;
use crate::policy::ahead::AheadOptions;
use crate::policy::serve::ServeCosts;

/// How the actors go about it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GraphOptions {
    /// The submitter's.
    pub submitter: submitter::Options,
    /// The admission manager's; without it the banks stay as they are.
    pub admission: Option<AdmissionOptions>,
    /// The completer's.
    pub serve: ServeOptions,
}

impl Default for GraphOptions {
    fn default() -> Self {
        let none = Duration::ZERO;
        Self {
            submitter: submitter::Options {
                ahead: AheadOptions::default(),
                batched_prefill: true,
                host_prefill: false,
                drafts: true,
                broken: Broken::No,
            },
            admission: Some(AdmissionOptions::default()),
            serve: ServeOptions {
                uploads_max: 0,
                costs: ServeCosts { host_expert: none, host_row: none, upload: Duration::MAX },
            },
        }
    }
}

impl From<&Knobs> for GraphOptions {
    fn from(knobs: &Knobs) -> Self {
        let mut options = Self::default();
        options.submitter.ahead.batches_max = knobs.steps;
        options.submitter.batched_prefill = knobs.batch;
        options.submitter.host_prefill = knobs.prefill == Prefill::Host;
        options.submitter.drafts = knobs.mtp;
        options.admission = Some(AdmissionOptions { positions_per_upload: knobs.admit, ..AdmissionOptions::default() });
        options
    }
}

/// What a graph is made of.
pub struct Setup {
    /// The device that decodes.
    pub device: Box<dyn Device>,
    /// The host's help, in the device's arithmetic.
    pub companion: Arc<dyn Companion>,
    /// What takes over if the device is lost; without it sessions end with an error then.
    pub fallback: Option<Fallback>,
    /// The loader's channel; without it nothing is admitted.
    pub fetches: Option<Sender<Fetch>>,
    /// For devices that verify but do not draft.
    pub drafter: Option<Box<dyn Drafter>>,
    /// How.
    pub options: GraphOptions,
    /// The time.
    pub clock: Clock,
}

/// All actors of one device, without threads.
pub struct Graph {
    /// Opens sessions.
    pub handle: session::Handle,
    /// See its file.
    pub submitter: submitter::Submitter,
    /// See its file.
    pub readback: readback::Readback,
    /// See its file.
    pub completer: completer::Completer,
    /// See its file; absent where the bank is full.
    pub admission: Option<admission::Admission>,
    /// See its file; absent where nothing drafts.
    pub drafts: Option<drafts::Drafts>,
    /// See its file; absent where the device prefills.
    pub prefiller: Option<prefiller::Prefiller>,
}

impl Graph {
    /// Makes the channels and the actors.
    #[must_use]
    pub fn assemble(setup: Setup) -> Self {
        let Setup { device, companion, fallback, fetches, drafter, options, clock } = setup;
        let facts = device.facts().clone();
        let stager = device.stager();
        let (queue, landings) = device.split();
        let broken = options.submitter.broken;
        let meter = Meter::default();
        let serve = ServeOptions {
            uploads_max: if facts.spare_place { options.serve.uploads_max.min(facts.upload_staging) } else { 0 },
            ..options.serve
        };
        // Slots, staging: by what any device of this graph may have; a fallback is made for fewer or as many.
        let (answers_sender, answers) = bounded(completer::jobs_bound(facts.slots.max(SESSIONS_MAX)));
        let (completer_handle, completer) = completer::Completer::new(completer::Parts {
            slots: facts.slots.max(SESSIONS_MAX),
            answers: answers_sender,
            companion: companion.clone(),
            serve,
            clock: clock.clone(),
            meter: meter.clone(),
            broken,
        });
        let (facts_sender, facts_inbox) = bounded(readback::facts_bound(STAGING_MAX, STAGING_MAX));
        let (readback_handle, readback) = readback::Readback::new(readback::Parts {
            landings,
            deadline: facts.landing_deadline,
            slots: facts.slots.max(SESSIONS_MAX),
            awaits: readback::awaits_bound(STAGING_MAX, STAGING_MAX),
            facts: facts_sender,
            completer: completer_handle.clone(),
            clock: clock.clone(),
            meter: meter.clone(),
            broken,
        });
        let (mut admits, mut admission_handle, mut admission) = (never(), None, None);
        if let (Some(admit), Some(fetches), false) = (options.admission, fetches, facts.is_full()) {
            let (sender, inbox) = bounded(admission::ADMITS_MAX);
            let (handle, actor) = admission::Admission::new(admission::Parts {
                options: admit,
                residents: facts.residents.clone(),
                experts: facts.experts,
                fetches,
                admits: sender,
                stager,
            });
            (admits, admission_handle, admission) = (inbox, Some(handle), Some(actor));
        }
        let (mut advice, mut drafts_handle, mut drafts_actor) = (never(), None, None);
        if options.submitter.drafts && facts.drafts != DraftAbility::None {
            // The newest of each session; late ones are dropped.
            let (sender, inbox) = bounded(SESSIONS_MAX);
            let parts = drafts::Parts { depth_max: facts.verify_rows.saturating_sub(1), advice: sender, drafter };
            let (handle, actor) = drafts::Drafts::new(parts);
            (advice, drafts_handle, drafts_actor) = (inbox, Some(handle), Some(actor));
        }
        let (mut prefilled, mut prefiller_handle, mut prefiller) = (never(), None, None);
        // On the host it is the host that prefills anyway.
        if options.submitter.host_prefill && facts.kind != DeviceKind::Host {
            let (handle, answers, actor) = prefiller::Prefiller::new(companion.clone(), facts.hidden);
            (prefilled, prefiller_handle, prefiller) = (answers, Some(handle), Some(actor));
        }
        let (handle, ends) = session::Handle::new(options.submitter.ahead.batches_max);
        let submitter = submitter::Submitter::new(submitter::Parts {
            inbox: submitter::Inbox { sessions: ends, facts: facts_inbox, answers, admits, advice, prefilled },
            options: options.submitter,
            queue,
            facts,
            companion,
            fallback,
            readback: readback_handle,
            completer: completer_handle,
            admission: admission_handle,
            drafts: drafts_handle,
            prefiller: prefiller_handle,
            clock,
            meter,
        });
        Self { handle, submitter, readback, completer, admission, drafts: drafts_actor, prefiller }
    }

    /// Gives each actor a thread.
    ///
    /// # Errors
    ///
    /// When the system refuses a thread; those that run already stop again.
    pub fn start(self) -> io::Result<Running> {
        fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
            thread::Builder::new().name(name.into()).spawn(run)
        }
        let Self { handle, submitter, readback, completer, admission, drafts, prefiller } = self;
        let mut threads = vec![spawn("completer", move || completer.run())?];
        threads.push(spawn("readback", move || readback.run())?);
        if let Some(admission) = admission {
            threads.push(spawn("admission", move || admission.run())?);
        }
        if let Some(drafts) = drafts {
            threads.push(spawn("drafts", move || drafts.run())?);
        }
        if let Some(prefiller) = prefiller {
            threads.push(spawn("prefiller", move || prefiller.run())?);
        }
        threads.push(spawn("submitter", move || submitter.run())?);
        Ok(Running { handle, threads })
    }
}

/// Most staging buffers a device of a graph may have, of each kind: channels are sized by it.
pub const STAGING_MAX: usize = 64;

/// A graph on its threads. Dropping it stops them.
#[derive(Debug)]
pub struct Running {
    handle: session::Handle,
    threads: Vec<JoinHandle<()>>,
}

impl Running {
    /// Opens sessions.
    #[must_use]
    pub fn handle(&self) -> &session::Handle {
        &self.handle
    }

    /// Ends all sessions, then the actors, and waits for them.
    pub fn stop(mut self) {
        self.halt();
    }

    fn halt(&mut self) {
        self.handle.shutdown();
        for thread in self.threads.drain(..) {
            // A panic was told to every session already.
            let _ = thread.join();
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.halt();
    }
}
