//! Faults by hand, beside those that the seeds draw: actors that die, prompts at the edge of the context, weights that
//! overflow, cancels at every stage.

use std::collections::HashMap;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use crossbeam_channel::{Sender, bounded};
use riparian::actors::clock::Clock;
use riparian::actors::drafts::Drafter;
use riparian::actors::payload::{Event, FETCHES_MAX, Fetch, Fetched, FinishReason, SessionError, SessionOptions};
use riparian::actors::session::SessionHandle;
use riparian::actors::submitter::{Fallback, Source};
use riparian::actors::{Graph, GraphOptions, Running, Setup};
use riparian::device::host::{HostCompanion, HostDevice, HostOptions};
use riparian::device::scripted::{ChainModel, Hand, Script};
use riparian::device::{
    Companion, Completions, Device, DeviceError, DraftAbility, Facts, Halves, Item, Landing, Landings, Missed, Payload,
    Queue, Seed, Stager, Wait,
};
use riparian::host::{Decoder, Pool};
use riparian::ids::{BlockIx, ExpertIx, LayerIx, SessionId, TokenId};
use riparian::knobs::Activations;
use riparian::model::state::SequenceState;
use riparian::model::{Model, OpenOptions, open};
use riparian::policy::admission::AdmissionOptions;

use crate::host::{MODES, TRAINED, bank, counters, decode, decoders, plain, prompt, start, start_with};
use crate::simulation::{ModelDrafter, Prompts};

/// What takes longer hangs.
const PATIENCE: Duration = Duration::from_secs(60);

/// Runs `work` on a thread and fails when it does not end.
pub(crate) fn in_time<T: Send + 'static>(what: &str, work: impl FnOnce() -> T + Send + 'static) -> T {
    let (done, result) = channel();
    let worker = thread::spawn(move || done.send(work()));
    match result.recv_timeout(PATIENCE) {
        Ok(result) => result,
        Err(RecvTimeoutError::Timeout) => panic!("{what} hangs"),
        Err(RecvTimeoutError::Disconnected) => {
            std::panic::resume_unwind(worker.join().expect_err("nothing was sent, so it panicked"))
        }
    }
}

// ------------------------------------------------------------------ spoiled parts

/// What a test does before a call goes through: sleep, say no, or panic.
pub(crate) type Before = Box<dyn FnMut() -> Result<(), DeviceError> + Send>;

/// A device whose halves a test spoils.
pub(crate) struct Spoiled {
    pub(crate) device: Box<dyn Device>,
    pub(crate) facts: Facts,
    pub(crate) append: Before,
    pub(crate) wait: Before,
    /// Dropping the landings panics, as nothing of ours does.
    pub(crate) dies_dropped: bool,
    pub(crate) stager: Option<Arc<dyn Stager>>,
}

impl Spoiled {
    pub(crate) fn new(device: Box<dyn Device>) -> Self {
        let facts = device.facts().clone();
        Self {
            device,
            facts,
            append: Box::new(|| Ok(())),
            wait: Box::new(|| Ok(())),
            dies_dropped: false,
            stager: None,
        }
    }
}

impl Device for Spoiled {
    fn facts(&self) -> &Facts {
        &self.facts
    }

    fn stager(&self) -> Option<Arc<dyn Stager>> {
        self.stager.clone().or_else(|| self.device.stager())
    }

    fn split(self: Box<Self>) -> Halves {
        let (queue, landings) = self.device.split();
        let landings = SpoiledLandings { landings, before: self.wait, dies_dropped: self.dies_dropped };
        (Box::new(SpoiledQueue { queue, before: self.append }), Box::new(landings))
    }
}

struct SpoiledQueue {
    queue: Box<dyn Queue>,
    before: Before,
}

impl Queue for SpoiledQueue {
    fn append(&mut self, items: Vec<Item>) -> Result<(), DeviceError> {
        (self.before)()?;
        self.queue.append(items)
    }
}

struct SpoiledLandings {
    landings: Box<dyn Landings>,
    before: Before,
    dies_dropped: bool,
}

impl Landings for SpoiledLandings {
    fn poll(&mut self, wait: Wait) -> Result<Option<Landing>, DeviceError> {
        (self.before)()?;
        self.landings.poll(wait)
    }

    fn wait(&mut self, wait: Wait, deadline: Option<Instant>) -> Result<Landing, DeviceError> {
        (self.before)()?;
        self.landings.wait(wait, deadline)
    }
}

impl Drop for SpoiledLandings {
    fn drop(&mut self) {
        assert!(!self.dies_dropped || thread::panicking(), "a test kills readback");
    }
}

/// The script's model beside the device, until a test wants no more of it.
struct Spoiler {
    model: ChainModel,
    /// What a job does first.
    job: fn(),
    embeds: bool,
}

impl Companion for Spoiler {
    fn embed(&self, id: TokenId) -> Vec<f32> {
        assert!(self.embeds, "a test kills the submitter");
        Companion::embed(&self.model, id)
    }

    fn complete(&self, missed: &Missed, leave: &[ExpertIx]) -> Completions {
        (self.job)();
        Companion::complete(&self.model, missed, leave)
    }

    fn payload(&self, layer: LayerIx, expert: ExpertIx) -> Payload {
        self.model.payload(layer, expert)
    }

    fn first_not_finite(&self, seed: Option<&Seed>, rows: &[f32], ids: &[TokenId]) -> Result<BlockIx, String> {
        (self.job)();
        self.model.first_not_finite(seed, rows, ids)
    }
}

fn spoiler(script: &Script) -> Spoiler {
    Spoiler { model: script.model(), job: || (), embeds: true }
}

fn graph(
    device: Box<dyn Device>,
    companion: Spoiler,
    fallback: Option<Fallback>,
    drafter: Option<Box<dyn Drafter>>,
) -> Running {
    graph_with(device, companion, fallback, drafter, None)
}

fn graph_with(
    device: Box<dyn Device>,
    companion: Spoiler,
    fallback: Option<Fallback>,
    drafter: Option<Box<dyn Drafter>>,
    fetches: Option<Sender<Fetch>>,
) -> Running {
    let mut options = GraphOptions::default();
    options.submitter.ahead.batches_max = 3;
    options.admission = Some(AdmissionOptions { positions_per_upload: 1, ..AdmissionOptions::default() });
    let clock = Clock::machine();
    let companion = Arc::new(companion);
    Graph::assemble(Setup { device, companion, fallback, fetches, drafter, options, clock }).start().unwrap()
}

fn script(drafts: DraftAbility) -> Script {
    let verify_rows = if drafts == DraftAbility::None { 1 } else { 4 };
    Script { drafts, verify_rows, slots: 2, kv_positions: 48, ..Script::default() }
}

fn rows(script: &Script, user: u64, n: usize) -> Vec<f32> {
    let model = script.model();
    (0..n).flat_map(|at| model.prompt_row(user, at)).collect()
}

fn panics_at(n: u32) -> Before {
    let mut left = n;
    Box::new(move || {
        assert!(left > 0, "a test kills the actor");
        left -= 1;
        Ok(())
    })
}

/// Takes what comes until the end; `None` where the stream closed without one.
fn drain(handle: &mut SessionHandle) -> (Vec<TokenId>, Option<FinishReason>) {
    let mut ids = Vec::new();
    loop {
        match handle.blocking_next() {
            Some(Event::Token(token)) => ids.push(token.id),
            Some(Event::Finished(finished)) => return (ids, Some(finished.reason)),
            None => return (ids, None),
        }
    }
}

// ------------------------------------------------------------------ actors that die

/// `runtime.md` §2: a panic becomes an error at every session that waits, whatever it waits for.
#[test]
fn a_submitter_that_dies_is_noticed_by_everybody() {
    for dies_at in [0, 1, 2, 4, 7] {
        in_time("a dead submitter", move || {
            let script = script(DraftAbility::None);
            let mut device = Spoiled::new(Box::new(script.threaded(Duration::ZERO, None)));
            device.append = panics_at(dies_at);
            let running = graph(Box::new(device), spoiler(&script), None, None);
            let mut handles: Vec<SessionHandle> = Vec::new();
            let mut answers = Vec::new();
            for user in 0..4 {
                // Two get a slot, two wait for one; one is never asked to decode. It may be dead by then.
                let Ok(handle) = running.handle().try_open(SessionOptions::default()) else { continue };
                answers.extend(handle.start_feed(rows(&script, user, 9)).ok());
                if user > 0 {
                    let _ = handle.decode(None);
                }
                handles.push(handle);
            }
            for mut handle in handles {
                let (ids, end) = drain(&mut handle);
                let plain = (0..4).map(|user| script.model().plain(&rows(&script, user, 9), &[], usize::MAX, 48));
                assert!(end.is_none(), "{end:?}: nobody is left to say how it ended");
                assert!(plain.into_iter().any(|plain| plain.starts_with(&ids)));
                assert!(matches!(handle.decode(None), Err(SessionError::Gone { .. })));
            }
            for answer in answers {
                // Taken before the death, or told of it: not waiting.
                let _ = answer.blocking_recv();
            }
            let opened = running.handle().try_open(SessionOptions::default());
            assert!(matches!(opened, Err(SessionError::Gone { actor: "submitter" })));
            assert!(running.handle().start_counters().is_err());
            running.stop();
        });
    }
}

#[test]
fn a_submitter_that_dies_of_a_loss_is_noticed_too() {
    in_time("a submitter that dies while it recovers", || {
        let script = script(DraftAbility::None);
        let other = script.clone();
        let fallback: Fallback = Box::new(move || Ok(Box::new(other.threaded(Duration::ZERO, None)) as _));
        let companion = Spoiler { embeds: false, ..spoiler(&script) };
        let running = graph(Box::new(script.threaded(Duration::ZERO, Some(150))), companion, Some(fallback), None);
        let mut handle = running.handle().try_open(SessionOptions::default()).unwrap();
        let prompt = rows(&script, 1, 5);
        handle.start_feed(prompt.clone()).unwrap().blocking_recv().unwrap().unwrap();
        handle.decode(None).unwrap();
        let (ids, end) = drain(&mut handle);
        assert!(script.model().plain(&prompt, &[], usize::MAX, 48).starts_with(&ids) && !ids.is_empty());
        assert!(end.is_none());
        running.stop();
    });
}

#[test]
fn a_readback_that_dies_fails_the_sessions_with_its_name() {
    in_time("a dead readback", || {
        let script = script(DraftAbility::None);
        let mut device = Spoiled::new(Box::new(script.threaded(Duration::ZERO, Some(40))));
        device.dies_dropped = true;
        let other = script.clone();
        let fallback: Fallback = Box::new(move || Ok(Box::new(other.threaded(Duration::ZERO, None)) as _));
        let running = graph(Box::new(device), spoiler(&script), Some(fallback), None);
        let mut handles: Vec<_> = (0..3)
            .map(|user| {
                let handle = running.handle().try_open(SessionOptions::default()).unwrap();
                drop(handle.start_feed(rows(&script, user, 9)).unwrap());
                handle.decode(None).unwrap();
                handle
            })
            .collect();
        for handle in &mut handles {
            let (_, end) = drain(handle);
            assert_eq!(end, Some(FinishReason::Failed(SessionError::Gone { actor: "readback" })));
        }
        let mut late = running.handle().try_open(SessionOptions::default()).unwrap();
        assert!(matches!(drain(&mut late).1, Some(FinishReason::Failed(SessionError::Gone { actor: "readback" }))));
        running.stop();
    });
}

/// A panic while waiting for the device is the device's: sessions go on elsewhere, or say what it was.
#[test]
fn a_wait_that_panics_is_a_loss() {
    for falls_back in [true, false] {
        for dies_at in [0, 1, 3, 8] {
            in_time("a wait that panics", move || {
                let script = script(DraftAbility::None);
                let mut device = Spoiled::new(Box::new(script.threaded(Duration::ZERO, None)));
                device.wait = panics_at(dies_at);
                let other = script.clone();
                let fallback: Fallback = Box::new(move || Ok(Box::new(other.threaded(Duration::ZERO, None)) as _));
                let running = graph(Box::new(device), spoiler(&script), falls_back.then_some(fallback), None);
                let mut handle = running.handle().try_open(SessionOptions::default()).unwrap();
                let prompt = rows(&script, 1, 9);
                // A feed may be answered by the end of the session.
                drop(handle.start_feed(prompt.clone()).unwrap().blocking_recv().unwrap());
                handle.decode(None).unwrap();
                let (ids, end) = drain(&mut handle);
                let plain = script.model().plain(&prompt, &[], usize::MAX, 48);
                if falls_back {
                    assert_eq!((ids, end), (plain, Some(FinishReason::Length)), "dies at {dies_at}");
                    assert_eq!(counters(&running).losses, 1);
                } else {
                    assert!(plain.starts_with(&ids));
                    let Some(FinishReason::Failed(SessionError::Device(DeviceError::Lost { why }))) = end else {
                        panic!("{end:?}")
                    };
                    assert!(why.contains("a test kills the actor"), "{why}");
                }
                running.stop();
            });
        }
    }
}

#[test]
fn a_job_that_panics_fails_its_session_and_no_other() {
    in_time("a job that panics", || {
        // The first experts are resident: a session whose rows like them never misses.
        let misses = Script { miss_one_in: 1, ..script(DraftAbility::None) };
        let running = graph(
            Box::new(misses.threaded(Duration::ZERO, None)),
            Spoiler { job: || panic!("a test kills the job"), ..spoiler(&misses) },
            None,
            None,
        );
        for user in 0..3 {
            let mut handle = running.handle().try_open(SessionOptions::default()).unwrap();
            drop(handle.start_feed(rows(&misses, user, 9)).unwrap());
            handle.decode(None).unwrap();
            let (_, end) = drain(&mut handle);
            let Some(FinishReason::Failed(SessionError::Completion { why, .. })) = end else { panic!("{end:?}") };
            assert!(why.contains("a test kills the job"), "{why}");
        }
        // Those that need no job are served as before.
        let seen = counters(&running);
        assert_eq!((seen.sessions_open, seen.flights_live, seen.violations), (0, 0, 0));
        running.stop();
    });
}

/// What the completer's thread does not survive: a panic whose payload panics when it is let go.
fn kills_the_completer() {
    struct Bomb;
    impl Drop for Bomb {
        fn drop(&mut self) {
            assert!(thread::panicking(), "a test kills the completer");
        }
    }
    std::panic::panic_any(Bomb);
}

#[test]
fn a_completer_that_dies_fails_the_sessions_with_its_name() {
    in_time("a dead completer", || {
        let misses = Script { miss_one_in: 2, ..script(DraftAbility::None) };
        let device = Box::new(misses.threaded(Duration::ZERO, None));
        let companion = Spoiler { job: kills_the_completer, ..spoiler(&misses) };
        let running = graph(device, companion, None, None);
        let handles: Vec<_> = (0..3)
            .map(|user| {
                let handle = running.handle().try_open(SessionOptions::default()).unwrap();
                drop(handle.start_feed(rows(&misses, user, 9)).unwrap());
                handle.decode(None).unwrap();
                handle
            })
            .collect();
        let late = running.handle().try_open(SessionOptions::default()).unwrap();
        for mut handle in handles.into_iter().chain([late]) {
            let gone = SessionError::Gone { actor: "completer" };
            assert_eq!(drain(&mut handle).1, Some(FinishReason::Failed(gone)));
        }
        running.stop();
    });
}

/// Nobody waits for admissions: without them sessions are slower, and whole.
#[test]
fn an_admission_manager_or_loader_that_dies_costs_nothing_but_admissions() {
    struct Dies;
    impl Stager for Dies {
        fn stage(&self, _: Arc<Payload>) -> Result<Arc<Payload>, DeviceError> {
            panic!("a test kills the admission manager");
        }
    }
    for loader_dies in [false, true] {
        in_time("a dead admission manager", move || {
            let script = Script { miss_one_in: 2, ..script(DraftAbility::None) };
            let (fetches, fetched) = bounded::<Fetch>(FETCHES_MAX);
            let model = script.model();
            let (asked, was_asked) = channel();
            let loader = thread::spawn(move || {
                for Fetch { layer, expert, reply } in fetched {
                    let _ = asked.send(());
                    assert!(!loader_dies, "a test kills the loader");
                    let payload = Ok(Arc::new(Companion::payload(&model, layer, expert)));
                    let _ = reply.try_send(Fetched { layer, expert, payload });
                }
            });
            let mut device = Spoiled::new(Box::new(script.threaded(Duration::ZERO, None)));
            device.stager = Some(Arc::new(Dies));
            let running = graph_with(Box::new(device), spoiler(&script), None, None, Some(fetches));
            for user in 0..4 {
                let mut handle = running.handle().try_open(SessionOptions::default()).unwrap();
                let prompt = rows(&script, user, 9);
                handle.start_feed(prompt.clone()).unwrap().blocking_recv().unwrap().unwrap();
                handle.decode(None).unwrap();
                let plain = script.model().plain(&prompt, &[], usize::MAX, 48);
                assert_eq!(drain(&mut handle), (plain, Some(FinishReason::Length)), "loader dies: {loader_dies}");
            }
            // It has been asked by now, or is about to be: and that ends it.
            was_asked.recv().expect("something was to be admitted");
            let seen = counters(&running);
            assert_eq!((seen.admitted, seen.sessions_open, seen.violations), (0, 0, 0));
            running.stop();
            assert_eq!(loader.join().is_err(), loader_dies, "the loader ends with whoever asks it");
        });
    }
}

#[test]
fn a_draft_scheduler_that_dies_costs_nothing_but_drafts() {
    struct Dies(u32);
    impl Drafter for Dies {
        fn guess(&mut self, _: SessionId, _: &[TokenId], n: usize) -> Vec<TokenId> {
            assert!(self.0 > 0, "a test kills the draft scheduler");
            self.0 -= 1;
            vec![TokenId(1); n]
        }

        fn forget(&mut self, _: SessionId) {}
    }
    for dies_at in [0, 2, 5] {
        in_time("a dead draft scheduler", move || {
            let script = script(DraftAbility::ByHost);
            let device = Box::new(script.threaded(Duration::ZERO, None));
            let running = graph(device, spoiler(&script), None, Some(Box::new(Dies(dies_at))));
            for user in 0..3 {
                let mut handle = running.handle().try_open(SessionOptions::default()).unwrap();
                let prompt = rows(&script, user, 6);
                handle.start_feed(prompt.clone()).unwrap().blocking_recv().unwrap().unwrap();
                handle.decode(None).unwrap();
                let plain = script.model().plain(&prompt, &[], usize::MAX, 48);
                assert_eq!(drain(&mut handle), (plain, Some(FinishReason::Length)), "dies at {dies_at}");
            }
            running.stop();
        });
    }
}

/// Who asks while the graph stops is answered or told, never left waiting.
#[test]
fn requests_at_the_very_end_are_answered() {
    in_time("a request at the end", || {
        for round in 0..200 {
            let script = script(DraftAbility::None);
            let device = Box::new(script.threaded(Duration::ZERO, None));
            let running = graph(device, spoiler(&script), None, None);
            thread::scope(|scope| {
                for user in 0..2 {
                    let (handle, script) = (running.handle().clone(), &script);
                    scope.spawn(move || {
                        loop {
                            let Ok(mut session) = handle.try_open(SessionOptions::default()) else { return };
                            let Ok(answer) = session.start_feed(rows(script, user, 4)) else { return };
                            let _ = answer.blocking_recv();
                            let _ = session.decode(Some(3));
                            if drain(&mut session).1.is_none() {
                                return;
                            }
                            if handle.start_counters().is_ok_and(|answer| answer.blocking_recv().is_err()) {
                                return;
                            }
                        }
                    });
                }
                thread::sleep(Duration::from_micros(50 * (round % 20)));
                running.handle().shutdown();
            });
            running.stop();
        }
    });
}

// ------------------------------------------------------------------ capacity

/// Prompts at, one under and one over the context, with two flights and every kind of drafts.
#[test]
fn prompts_at_the_edge_of_the_context() {
    let kinds = [DraftAbility::None, DraftAbility::OnDevice, DraftAbility::ByHost];
    for (drafts, miss_one_in) in kinds.into_iter().flat_map(|kind| [(kind, 0), (kind, 1)]) {
        in_time("a prompt at the edge", move || {
            let script = Script { miss_one_in, kv_positions: 21, ..script(drafts) };
            let (model, prompts) = (script.model(), Prompts::default());
            let drafter = ModelDrafter { model: model.clone(), prompts: prompts.clone(), ids: HashMap::new() };
            let device = Box::new(script.threaded(Duration::ZERO, None));
            let running = graph(device, spoiler(&script), None, Some(Box::new(drafter)));
            let ask = |n: usize, chunk: usize| {
                let prompt = rows(&script, n as u64, n);
                let mut handle = running.handle().try_open(SessionOptions::default()).unwrap();
                prompts.lock().unwrap().insert(handle.id(), prompt.clone());
                let mut fed = 0;
                for some in prompt.chunks(2 * chunk) {
                    match handle.start_feed(some.to_vec()).unwrap().blocking_recv().unwrap() {
                        Ok(()) => fed += some.len() / 2,
                        Err(error) => {
                            assert_eq!(error, SessionError::ContextFull { limit: 21, wanted: fed + some.len() / 2 });
                            break;
                        }
                    }
                }
                assert_eq!(fed == n, n <= 21, "refused up front, and only what does not fit");
                handle.decode(None).unwrap();
                let end = drain(&mut handle);
                if fed == 0 {
                    assert_eq!(end, (vec![], Some(FinishReason::Failed(SessionError::EmptyPrompt))));
                    return;
                }
                let plain = model.plain(&prompt[..2 * fed], &[], usize::MAX, 21);
                assert_eq!(plain.len(), 22 - fed, "the last id needs no place");
                assert_eq!(end, (plain, Some(FinishReason::Length)), "{drafts:?}, {n} rows by {chunk}");
            };
            for n in [20, 21, 22] {
                for chunk in [1, 4, n] {
                    ask(n, chunk);
                    // The next session is as any other.
                    ask(3, 3);
                }
            }
            let seen = counters(&running);
            assert_eq!((seen.sessions_open, seen.violations), (0, 0));
            running.stop();
        });
    }
}

#[test]
fn prompts_at_the_edge_of_the_hosts_context() {
    let limit = 24;
    for (name, decoder) in decoders(Activations::Int8) {
        let places = decoder.geometry().moe.map_or(0, |moe| moe.top_k);
        for drafts in [false, true] {
            let host = HostOptions {
                kv_positions: limit,
                slots: 1,
                drafts,
                residents: bank(&decoder, places),
                ..HostOptions::for_decoder(&decoder)
            };
            let running = start(&decoder, host, None, true);
            for n in [limit - 1, limit, 5] {
                let rows = prompt(&decoder, n);
                let (ids, finished) = decode(&running, &rows, rows.len(), 1000);
                assert_eq!(ids, plain(&decoder, &rows, limit + 1 - n).0, "{name}, {n} rows, drafts {drafts}");
                assert_eq!(finished.reason, FinishReason::Length);
            }
            let session = running.handle().try_open(SessionOptions::default()).unwrap();
            let fed = session.start_feed(prompt(&decoder, limit + 1)).unwrap().blocking_recv().unwrap();
            assert_eq!(fed, Err(SessionError::ContextFull { limit, wanted: limit + 1 }), "{name}");
            drop(session);
            assert_eq!(counters(&running).violations, 0);
            running.stop();
        }
    }
}

// ------------------------------------------------------------------ numbers

/// The trained model with one block's input norm scaled.
pub(crate) fn scaled(act: Activations, block: usize, by: f32) -> Arc<Decoder> {
    let model = open(TRAINED.as_ref(), &OpenOptions::default()).unwrap();
    let Model { geometry, mut decoder, .. } = Arc::into_inner(model).expect("opened just now");
    decoder.blocks[block].norm.iter_mut().for_each(|weight| *weight *= by);
    Arc::new(Decoder::from_parts(geometry, decoder, act, Pool::new(1)))
}

pub(crate) fn blocks() -> usize {
    open(TRAINED.as_ref(), &OpenOptions::default()).unwrap().geometry.blocks.len()
}

/// Activations that overflow f32 end in an error that names the block, and no id comes of them.
#[test]
fn an_overflow_names_its_block() {
    for act in MODES {
        for block in 0..blocks() {
            let decoder = scaled(act, block, 1e38);
            let places = decoder.geometry().moe.map_or(0, |moe| moe.top_k);
            for residents in [vec![], bank(&decoder, places)] {
                let host = HostOptions { residents, ..HostOptions::for_decoder(&decoder) };
                let running = start(&decoder, host, None, false);
                for rows in [1, 7] {
                    let rows = prompt(&decoder, rows);
                    let (ids, finished) = decode(&running, &rows, rows.len(), 8);
                    let named = SessionError::NotFinite { block: BlockIx::from(block) };
                    assert_eq!((ids, finished.reason), (vec![], FinishReason::Failed(named)), "{act:?}, block {block}");
                }
                running.stop();
            }
        }
    }
}

/// A device that notices, and cannot tell where: the completer looks for the block, and whatever becomes of that, there
/// is an error that says what is known.
#[test]
fn a_block_that_nobody_names_is_an_error_all_the_same() {
    let full = Script { places: 6, miss_one_in: 0, names_blocks: false, ..script(DraftAbility::None) };
    let jobs: [(fn(), &str); 3] = [
        (|| (), ""),
        (|| panic!("a test kills the job"), "a test kills the job"),
        (kills_the_completer, "the completer has ended"),
    ];
    for (job, says) in jobs {
        let full = full.clone();
        in_time("a block without a name", move || {
            let running =
                graph(Box::new(full.threaded(Duration::ZERO, None)), Spoiler { job, ..spoiler(&full) }, None, None);
            for user in 0..4 {
                let mut handle = running.handle().try_open(SessionOptions::default()).unwrap();
                let mut prompt = rows(&full, user, 9);
                // Every other session is as it should be.
                if user % 2 == 0 {
                    prompt[7] = f32::NAN;
                }
                drop(handle.start_feed(prompt.clone()).unwrap());
                handle.decode(None).unwrap();
                let got = drain(&mut handle);
                match (user % 2, &got.1) {
                    (1, end) => {
                        assert_eq!(*end, Some(FinishReason::Length));
                        assert_eq!(got.0, full.model().plain(&prompt, &[], usize::MAX, 48));
                    }
                    (_, Some(FinishReason::Failed(SessionError::NotFinite { block }))) => {
                        assert_eq!((*block, says), (BlockIx(0), ""));
                    }
                    (_, Some(FinishReason::Failed(SessionError::NotFiniteBy { why, .. }))) => {
                        assert!(!says.is_empty() && why.contains(says), "{why}");
                    }
                    (_, end) => panic!("{end:?}"),
                }
                assert!(user % 2 == 1 || got.0.is_empty());
            }
            assert_eq!(counters(&running).violations, 0);
            running.stop();
        });
    }
}

/// What the host says of a session whose device noticed: of its rows, of its ids, and of what it began with.
#[test]
fn the_host_names_the_block_of_rows_ids_and_seeds() {
    let sound = scaled(Activations::Int8, 0, 1.0);
    let rows = prompt(&sound, 20);
    let mut state = SequenceState::new(sound.geometry());
    sound.forward(&mut rows.clone(), &mut state, &mut ()).unwrap();
    let seed = Seed { state, hidden: Vec::new() };
    let whole = HostCompanion::new(sound.clone()).first_not_finite(Some(&seed), &rows, &[TokenId(3)]);
    assert!(whole.unwrap_err().contains("finite"));
    for block in 0..blocks() {
        let companion = HostCompanion::new(scaled(Activations::Int8, block, 1e30));
        let named = Ok(BlockIx::from(block));
        assert_eq!(companion.first_not_finite(None, &rows, &[]), named);
        assert_eq!(companion.first_not_finite(Some(&seed), &[], &[TokenId(3)]), named);
    }
    let mut large = rows.clone();
    large[17 * sound.geometry().hidden] = f32::INFINITY;
    assert_eq!(HostCompanion::new(sound).first_not_finite(None, &large, &[]), Ok(BlockIx(0)));
}

// ------------------------------------------------------------------ cancel

/// All actors on this thread, over a device that a test moves.
struct Stage {
    graph: Graph,
    hand: Hand,
    prompts: Prompts,
    script: Script,
}

/// Who may move.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Movers {
    All,
    /// The device stands still.
    NoDevice,
    /// Misses are not served.
    NoCompleter,
}

impl Stage {
    fn new(script: Script) -> Self {
        let (device, hand) = script.stepped();
        let (model, prompts) = (script.model(), Prompts::default());
        let drafter = ModelDrafter { model: model.clone(), prompts: prompts.clone(), ids: HashMap::new() };
        let mut options = GraphOptions::default();
        options.submitter.ahead.batches_max = 3;
        let graph = Graph::assemble(Setup {
            device: Box::new(device),
            companion: Arc::new(model),
            fallback: None,
            fetches: None,
            drafter: Some(Box::new(drafter)),
            options,
            clock: Clock::simulated(),
        });
        Self { graph, hand, prompts, script }
    }

    fn open(&mut self, user: u64) -> SessionHandle {
        let handle = self.graph.handle.try_open(SessionOptions::default()).unwrap();
        self.prompts.lock().unwrap().insert(handle.id(), rows(&self.script, user, 10));
        self.settle(Movers::NoDevice);
        handle
    }

    fn begin(&mut self, user: u64) -> SessionHandle {
        let handle = self.open(user);
        drop(handle.start_feed(rows(&self.script, user, 10)).unwrap());
        handle.decode(None).unwrap();
        handle
    }

    /// One move of each, as long as any moves; stops early when `until` says so.
    fn settle_until(&mut self, movers: Movers, mut until: impl FnMut(&mut Self) -> bool) {
        loop {
            if until(self) {
                return;
            }
            let mut moved = movers != Movers::NoCompleter && self.graph.completer.step();
            moved |= Source::ALL.into_iter().any(|source| self.graph.submitter.step(source));
            moved |= self.graph.readback.step();
            moved |= self.graph.drafts.as_mut().is_some_and(|drafts| drafts.step());
            if movers != Movers::NoDevice && self.hand.can_step() {
                self.hand.step(false);
                moved = true;
            }
            if !moved {
                return;
            }
        }
    }

    fn settle(&mut self, movers: Movers) {
        self.settle_until(movers, |_| false);
    }

    fn plain(&self, user: u64) -> Vec<TokenId> {
        self.script.model().plain(&rows(&self.script, user, 10), &[], usize::MAX, self.script.kv_positions)
    }

    /// What lies in a session's channel.
    fn take(handle: &mut SessionHandle) -> (Vec<TokenId>, Option<FinishReason>) {
        let (mut ids, mut end) = (Vec::new(), None);
        while let Some(event) = handle.try_next() {
            match event {
                Event::Token(token) => ids.push(token.id),
                Event::Finished(finished) => end = Some(finished.reason),
            }
        }
        (ids, end)
    }
}

/// Cancels a session that `to` has brought somewhere, having taken so many ids; a second one waits for its slot (there is
/// one).
fn cancelled_in(stage: &str, script: Script, to: impl FnOnce(&mut Stage, &mut SessionHandle) -> usize) {
    let mut world = Stage::new(Script { slots: 1, ..script });
    let mut handle = world.open(1);
    let taken = to(&mut world, &mut handle);
    let mut waiting = world.begin(2);
    world.settle(Movers::NoDevice);
    let before = world.graph.submitter.counters();
    handle.cancel();
    // The submitter hears of it: the end is there at once, whatever the device does.
    world.settle(Movers::NoDevice);
    let (ids, end) = Stage::take(&mut handle);
    assert_eq!(end, Some(FinishReason::Cancelled), "{stage}");
    assert!(world.plain(1)[taken..].starts_with(&ids), "{stage}: what was made before stands");
    // What was under way lands, and the next session has the slot: nothing more was queued for the first.
    let owed = before.flights_unlanded;
    assert!(owed <= 4, "{stage}: {owed} flights");
    let mut landings = 0;
    let mut unlanded = world.graph.submitter.counters().flights_unlanded;
    world.settle_until(Movers::All, |world| {
        let seen = world.graph.submitter.counters();
        landings += unlanded.saturating_sub(seen.flights_unlanded);
        unlanded = seen.flights_unlanded;
        seen.flights > before.flights
    });
    assert!(landings <= owed, "{stage}: the slot came free after {landings} landings, {owed} were owed");
    let mut got = (Vec::new(), None);
    while got.1.is_none() {
        world.settle(Movers::All);
        let (ids, end) = Stage::take(&mut waiting);
        assert!(!ids.is_empty() || end.is_some(), "{stage}: the next session stands still");
        got.0.extend(ids);
        got.1 = end;
    }
    assert_eq!(got, (world.plain(2), Some(FinishReason::Length)), "{stage}: the next session");
    drop((handle, waiting));
    world.settle(Movers::All);
    assert!(world.graph.submitter.is_idle(), "{stage}: {}", world.graph.submitter.describe());
    assert!(world.hand.is_idle() && world.graph.completer.waiting() == 0, "{stage}");
}

#[test]
fn a_session_can_be_cancelled_at_every_stage() {
    for drafts in [DraftAbility::None, DraftAbility::OnDevice, DraftAbility::ByHost] {
        let script = Script { miss_one_in: 0, prefill_rows: 2, ..script(drafts) };
        cancelled_in("before the first row", script.clone(), |_, _| 0);
        let feed = |world: &mut Stage, handle: &mut SessionHandle| {
            drop(handle.start_feed(rows(&world.script, 1, 10)).unwrap());
            handle.decode(None).unwrap();
            world.settle(Movers::NoDevice);
        };
        cancelled_in("in prefill", script.clone(), |world, handle| {
            feed(world, handle);
            world.hand.step(false);
            assert!(world.hand.queued() > 0 && world.graph.submitter.counters().flights_live > 0);
            0
        });
        let misses = Script { miss_one_in: 1, ..script.clone() };
        for ids in [0, 3] {
            cancelled_in("in a miss", misses.clone(), |world, handle| {
                feed(world, handle);
                let mut got = 0;
                world.settle_until(Movers::All, |world| {
                    while let Some(Event::Token(_)) = handle.try_next() {
                        got += 1;
                    }
                    got >= ids && world.graph.completer.waiting() > 0
                });
                assert!(world.graph.completer.waiting() > 0, "a miss is under way");
                got
            });
            cancelled_in("in a miss that nobody serves yet", misses.clone(), |world, handle| {
                feed(world, handle);
                world.settle(Movers::NoCompleter);
                assert!(world.graph.completer.waiting() > 0, "a miss is under way");
                0
            });
        }
        cancelled_in("in decode, with a verify under way where there are drafts", script.clone(), |world, handle| {
            feed(world, handle);
            let mut got = 0;
            world.settle_until(Movers::All, |world| {
                while let Some(Event::Token(_)) = handle.try_next() {
                    got += 1;
                }
                let seen = world.graph.submitter.counters();
                got >= 3 && seen.flights_live == 2 && (seen.verifies > 0 || drafts == DraftAbility::None)
            });
            assert_eq!(world.graph.submitter.counters().flights_live, 2, "two flights are under way");
            got
        });
    }
}

#[test]
fn a_cancel_in_the_queue_or_after_the_end_disturbs_nobody() {
    let script = Script { slots: 1, ..script(DraftAbility::None) };
    let mut world = Stage::new(script);
    let mut first = world.begin(1);
    let mut second = world.begin(2);
    world.settle(Movers::NoDevice);
    second.cancel();
    world.settle(Movers::NoDevice);
    assert_eq!(Stage::take(&mut second), (vec![], Some(FinishReason::Cancelled)));
    let mut ids = Vec::new();
    loop {
        world.settle(Movers::All);
        let (some, end) = Stage::take(&mut first);
        ids.extend(some);
        if end.is_some() {
            assert_eq!((ids, end), (world.plain(1), Some(FinishReason::Length)));
            break;
        }
    }
    first.cancel();
    second.cancel();
    world.settle(Movers::All);
    assert_eq!(Stage::take(&mut first), (vec![], None), "the end stays the end");
    assert!(world.graph.submitter.is_idle());
}

/// `VmRSS` in kB and the number of threads.
fn footprint() -> (u64, u64) {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let number = |key: &str| {
        let line = status.lines().find(|line| line.starts_with(key)).unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    };
    (number("VmRSS:"), number("Threads:"))
}

/// Alone in a process of its own, where nobody else's memory and threads are counted.
#[cfg(target_os = "linux")]
#[test]
fn cancels_leave_no_memory_and_no_threads_behind() {
    const CHILD: &str = "RIPARIAN_TEST_ALONE";
    if std::env::var_os(CHILD).is_none() {
        let name = "faults::cancels_leave_no_memory_and_no_threads_behind";
        let mut alone = std::process::Command::new(std::env::current_exe().unwrap());
        let ran = alone.args([name, "--exact", "--nocapture", "--test-threads=1"]).env(CHILD, "1").output().unwrap();
        let said = String::from_utf8_lossy(&ran.stdout);
        assert!(ran.status.success() && said.contains("1 passed"), "{said}{}", String::from_utf8_lossy(&ran.stderr));
        print!("{said}");
        return;
    }
    let (_, decoder) = decoders(Activations::Int8).last().expect("the trained model");
    let places = decoder.geometry().moe.map_or(0, |moe| moe.top_k);
    let host = HostOptions { slots: 1, residents: bank(&decoder, places), ..HostOptions::for_decoder(&decoder) };
    let running = start(&decoder, host, None, true);
    let rows = prompt(&decoder, 9);
    let mut before = (0, 0);
    for i in 0..1300 {
        let mut session = running.handle().try_open(SessionOptions::default()).unwrap();
        if i % 6 > 0 {
            let answer = session.start_feed(rows.clone()).unwrap();
            if i % 6 > 1 {
                answer.blocking_recv().unwrap().unwrap();
                session.decode(None).unwrap();
            }
            for _ in 2..i % 6 {
                assert!(matches!(session.blocking_next(), Some(Event::Token(_))));
            }
        }
        if i % 2 == 0 {
            session.cancel();
        }
        drop(session);
        if i == 299 {
            before = footprint();
        }
    }
    let (ids, _) = decode(&running, &rows, rows.len(), 8);
    assert_eq!(ids, plain(&decoder, &rows, 8).0);
    let after = footprint();
    let seen = counters(&running);
    assert_eq!((seen.sessions, seen.sessions_open, seen.flights_live, seen.violations), (1301, 0, 0, 0));
    println!("after 300 and after 1300 cancels: {} and {} kB, {} and {} threads", before.0, after.0, before.1, after.1);
    assert_eq!(after.1, before.1, "threads");
    assert!(after.0 < before.0 + 4096, "memory: {} kB, then {} kB", before.0, after.0);
    running.stop();
}

// ------------------------------------------------------------------ the host

/// A model whose file is cut while a session decodes: an error, and never a touch of what is gone.
#[cfg(unix)]
#[test]
fn a_file_that_is_cut_ends_in_an_error() {
    let folder = tempfile::tempdir().unwrap();
    for replaced in [false, true] {
        let path = folder.path().join(format!("model-{replaced}.cmf"));
        std::fs::copy(TRAINED, &path).unwrap();
        let model = open(&path, &OpenOptions::default()).unwrap();
        let decoder = Arc::new(Decoder::new(model, Activations::Int8, Pool::new(1)));
        let device = HostDevice::new(decoder.clone(), HostOptions::for_decoder(&decoder)).unwrap();
        let changed = Arc::new(Mutex::new(0));
        let mut device = Spoiled::new(Box::new(device));
        // Before its sixth append, when nothing is being read.
        let (count, at) = (changed.clone(), path.clone());
        let other = folder.path().join("other.cmf");
        std::fs::copy(TRAINED, &other).unwrap();
        device.append = Box::new(move || {
            let mut count = count.lock().unwrap();
            *count += 1;
            if *count == 6 && replaced {
                std::fs::rename(&other, &at).unwrap();
            } else if *count == 6 {
                let file = std::fs::File::options().write(true).open(&at).unwrap();
                // A byte longer instead of shorter: the length differs too, and a batch under way is not torn.
                file.set_len(file.metadata().unwrap().len() + 1).unwrap();
            }
            Ok(())
        });
        let running = start_with(Box::new(device), &decoder, None, false);
        let rows = prompt(&decoder, 9);
        let (ids, finished) = decode(&running, &rows, rows.len(), 60);
        let wanted = {
            let model = open(TRAINED.as_ref(), &OpenOptions::default()).unwrap();
            plain(&Arc::new(Decoder::new(model, Activations::Int8, Pool::new(1))), &rows, 60).0
        };
        if replaced {
            assert_eq!((ids, finished.reason), (wanted, FinishReason::Length), "the old file is still mapped");
        } else {
            assert!(wanted.starts_with(&ids) && ids.len() < 60);
            let FinishReason::Failed(SessionError::Device(DeviceError::Lost { why })) = finished.reason else {
                panic!("{:?}", finished.reason)
            };
            assert!(why.contains("bytes, it had") && why.contains("model-false.cmf"), "{why}");
        }
        running.stop();
    }
}
