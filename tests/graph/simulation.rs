//! One thread steps all actors; the seed picks whose turn it is.

use std::cell::RefCell;
use std::collections::HashMap;
use std::fmt::Write as _;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Once};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, bounded};
use riparian::actors::clock::Clock;
use riparian::actors::drafts::Drafter;
use riparian::actors::payload::{
    Event, FETCHES_MAX, Fetch, Fetched, FinishReason, SessionError, SessionOptions, Token,
};
use riparian::actors::session::SessionHandle;
use riparian::actors::submitter::Source;
use riparian::actors::{Graph, Setup};
use riparian::device::scripted::{ChainModel, Hand};
use riparian::device::{Companion, Device, DeviceError, Read};
use riparian::ids::{SessionId, TokenId};
use riparian::invariants::Broken;
use tokio::sync::oneshot;

use crate::random::Random;
use crate::scenario::{Scenario, User};

/// Moves after which a run counts as never ending: most take a few thousand.
const MOVES_MAX: usize = 400_000;

/// What sessions of a drafter were fed, by session.
pub(crate) type Prompts = Arc<Mutex<HashMap<SessionId, Vec<f32>>>>;

/// Guesses with the model itself, as wrong as the script says.
pub(crate) struct ModelDrafter {
    pub(crate) model: ChainModel,
    pub(crate) prompts: Prompts,
    pub(crate) ids: HashMap<SessionId, Vec<TokenId>>,
}

impl Drafter for ModelDrafter {
    fn guess(&mut self, session: SessionId, ids: &[TokenId], n: usize) -> Vec<TokenId> {
        let all = self.ids.entry(session).or_default();
        all.extend(ids);
        let prompts = self.prompts.lock().unwrap();
        prompts.get(&session).map_or_else(Vec::new, |prompt| self.model.guess(prompt, all, n))
    }

    fn forget(&mut self, session: SessionId) {
        self.ids.remove(&session);
    }
}

/// A user under way.
struct Seat {
    user: User,
    handle: Option<SessionHandle>,
    /// Feeds that were sent.
    fed: usize,
    answer: Option<oneshot::Receiver<Result<(), SessionError>>>,
    /// Rows that were taken.
    taken: usize,
    refused: bool,
    decoded: bool,
    moves: usize,
    ids: Vec<Token>,
    end: Option<FinishReason>,
    left: bool,
    closed: bool,
    read: Option<oneshot::Receiver<Result<riparian::actors::readback::ReadResult, SessionError>>>,
}

struct World {
    scenario: Scenario,
    random: Random,
    graph: Graph,
    hands: [Option<Hand>; 2],
    fetches: Receiver<Fetch>,
    seats: Vec<Seat>,
    prompts: Prompts,
    clock: Clock,
    losses: usize,
    hangs: usize,
    deaths: usize,
    /// Faults that did happen.
    lost: bool,
    died: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Action {
    Device(usize),
    Readback,
    Completer,
    Submitter(Source),
    Admission,
    Drafts,
    Loader,
    User(usize),
    Reader(usize),
}

fn world(scenario: Scenario) -> World {
    let clock = Clock::simulated();
    let (device, hand) = scenario.script.stepped();
    let model = scenario.script.model();
    let prompts = Prompts::default();
    let mut hands = [Some(hand), None];
    let mut fallback: Option<riparian::actors::submitter::Fallback> = None;
    if let Some(script) = &scenario.fallback {
        let (device, hand) = script.stepped();
        let fails = scenario.fallback_fails;
        hands[1] = Some(hand);
        fallback = Some(Box::new(move || {
            if fails {
                return Err(DeviceError::OutOfMemory { what: "a test".into(), bytes: 1 });
            }
            Ok(Box::new(device) as Box<dyn Device>)
        }));
    }
    let (fetch_sender, fetches) = bounded(FETCHES_MAX);
    let drafter = ModelDrafter { model: model.clone(), prompts: prompts.clone(), ids: HashMap::new() };
    let graph = Graph::assemble(Setup {
        device: Box::new(device),
        companion: Arc::new(model),
        fallback,
        fetches: scenario.loader.then_some(fetch_sender),
        drafter: Some(Box::new(drafter)),
        options: scenario.options,
        clock: clock.clone(),
    });
    let seat = |user: &User| Seat {
        user: user.clone(),
        handle: None,
        fed: 0,
        answer: None,
        taken: 0,
        refused: false,
        decoded: false,
        moves: 0,
        ids: Vec::new(),
        end: None,
        left: false,
        closed: false,
        read: None,
    };
    World {
        random: Random::new(scenario.seed ^ 0xABCD_EF01),
        graph,
        hands,
        fetches,
        seats: scenario.users.iter().map(seat).collect(),
        prompts,
        clock,
        losses: scenario.losses,
        hangs: scenario.hangs,
        deaths: scenario.deaths,
        lost: false,
        died: false,
        scenario,
    }
}

impl World {
    fn actions(&self) -> Vec<(Action, u32)> {
        let w = &self.scenario.weights;
        let mut all = vec![
            (Action::Device(0), w[0]),
            (Action::Device(1), w[0]),
            (Action::Readback, w[1]),
            (Action::Completer, w[2]),
            (Action::Admission, w[3]),
            (Action::Drafts, w[4]),
            (Action::Loader, w[5]),
        ];
        all.extend(Source::ALL.into_iter().enumerate().map(|(i, source)| (Action::Submitter(source), w[6 + i])));
        for seat in 0..self.seats.len() {
            all.push((Action::User(seat), w[13]));
            all.push((Action::Reader(seat), w[14]));
        }
        all
    }

    /// Runs until nothing moves any more.
    fn run(&mut self) -> usize {
        let actions = self.actions();
        let mut idle = vec![false; actions.len()];
        let mut moves = 0;
        loop {
            let total: u32 = actions.iter().zip(&idle).filter(|(_, idle)| !**idle).map(|((_, w), _)| w).sum();
            if total == 0 {
                // Only time can still bring something: the deadline of a device that hangs.
                if self.hung() {
                    self.clock.advance(Duration::from_millis(100));
                    idle.fill(false);
                    self.hangs = usize::MAX;
                    continue;
                }
                return moves;
            }
            let mut draw = self.random.below(total as usize) as u32;
            let chosen = (actions.iter().zip(&idle).enumerate())
                .filter(|(_, (_, idle))| !**idle)
                .find_map(|(i, ((_, weight), _))| {
                    if draw < *weight {
                        return Some(i);
                    }
                    draw -= weight;
                    None
                })
                .expect("the draw is below the total");
            if self.act(actions[chosen].0) {
                idle.fill(false);
                moves += 1;
                assert!(moves < MOVES_MAX, "I6 End: no end after {moves} moves\n{}", self.graph.submitter.describe());
                self.clock.advance(Duration::from_micros(1 + self.random.next() % 50));
                self.fault();
            } else {
                idle[chosen] = true;
            }
        }
    }

    /// Whether a device hangs whose deadline may come.
    fn hung(&self) -> bool {
        self.hangs == 1 && self.scenario.hangs == 1 && self.lost
    }

    fn fault(&mut self) {
        if self.losses > 0 && self.random.one_in(60) {
            self.losses -= 1;
            self.lost = true;
            self.hands[0].as_ref().expect("the first device").lose();
        }
        if self.hangs == 1 && !self.lost && self.random.one_in(60) {
            self.lost = true;
            self.hands[0].as_ref().expect("the first device").hang();
        }
    }

    fn act(&mut self, action: Action) -> bool {
        match action {
            Action::Device(at) => {
                let fine = self.random.one_in(3);
                let Some(hand) = self.hands[at].as_ref().filter(|hand| hand.can_step()) else { return false };
                hand.step(fine);
                true
            }
            Action::Readback => self.graph.readback.step(),
            Action::Completer => {
                if self.deaths > 0 && self.graph.completer.waiting() > 0 && self.random.one_in(4) {
                    self.deaths -= 1;
                    self.died = true;
                    return self.graph.completer.step_and_die();
                }
                self.graph.completer.step()
            }
            Action::Submitter(source) => self.graph.submitter.step(source),
            Action::Admission => self.graph.admission.as_mut().is_some_and(|admission| admission.step()),
            Action::Drafts => self.graph.drafts.as_mut().is_some_and(|drafts| drafts.step()),
            Action::Loader => self.load(),
            Action::User(at) => self.user(at),
            Action::Reader(at) => self.take(at),
        }
    }

    fn load(&mut self) -> bool {
        let Ok(fetch) = self.fetches.try_recv() else { return false };
        let fails = self.scenario.fetch_fails_one_in;
        let payload = if fails > 0 && self.random.one_in(fails) {
            Err("a test kept it".into())
        } else {
            Ok(Arc::new(self.scenario.script.model().payload(fetch.layer, fetch.expert)))
        };
        let _ = fetch.reply.try_send(Fetched { layer: fetch.layer, expert: fetch.expert, payload });
        true
    }

    fn user(&mut self, at: usize) -> bool {
        let seat = &mut self.seats[at];
        if seat.left || seat.closed {
            return false;
        }
        seat.moves += 1;
        if let Some((after, drops)) = seat.user.leaves
            && seat.moves > after
            && let Some(handle) = &mut seat.handle
        {
            seat.left = true;
            if drops {
                seat.closed = true;
                seat.handle = None;
            } else {
                handle.cancel();
            }
            return true;
        }
        let Some(handle) = &seat.handle else {
            let options =
                SessionOptions { eos: seat.user.eos.clone(), seed: None, drafts: seat.user.drafts, depth: None };
            let handle = self.graph.handle.try_open(options).expect("few sessions");
            self.prompts.lock().unwrap().insert(handle.id(), seat.user.prompt.clone());
            seat.handle = Some(handle);
            return true;
        };
        if let Some(answer) = &mut seat.answer {
            match answer.try_recv() {
                Ok(Ok(())) => seat.taken += seat.user.chunks[seat.fed - 1],
                Ok(Err(SessionError::ContextFull { limit, wanted })) => {
                    assert_eq!(limit, self.scenario.script.kv_positions);
                    assert!(wanted > limit);
                    seat.refused = true;
                }
                Ok(Err(_)) => {}
                // Waiting is a move only where the user may lose patience in it.
                Err(oneshot::error::TryRecvError::Empty) => return seat.user.leaves.is_some() && seat.moves < 60,
                Err(oneshot::error::TryRecvError::Closed) => panic!("I6 End: a feed was never answered"),
            }
            seat.answer = None;
            return true;
        }
        if seat.fed < seat.user.chunks.len() && !seat.refused {
            let before: usize = seat.user.chunks[..seat.fed].iter().sum();
            let rows = seat.user.chunks[seat.fed];
            let floats = seat.user.prompt[2 * before..2 * (before + rows)].to_vec();
            seat.answer = Some(handle.start_feed(floats).expect("room for a request"));
            seat.fed += 1;
            return true;
        }
        if seat.user.reads && seat.read.is_none() {
            seat.read = Some(handle.start_read(Read::State).expect("room for a request"));
            return true;
        }
        if !seat.decoded {
            seat.decoded = true;
            handle.decode(seat.user.max_new).expect("room for a request");
            return true;
        }
        seat.user.leaves.is_some() && seat.moves <= 60 && seat.end.is_none()
    }

    fn take(&mut self, at: usize) -> bool {
        let seat = &mut self.seats[at];
        let Some(handle) = seat.handle.as_mut().filter(|_| !seat.closed) else { return false };
        match handle.try_next() {
            Some(Event::Token(token)) => {
                assert!(seat.end.is_none(), "I4: an id behind the end");
                seat.ids.push(token);
            }
            Some(Event::Finished(finished)) => {
                assert!(seat.end.is_none(), "two ends");
                assert_eq!(finished.stats.tokens, seat.ids.len(), "I1 Ids: stats count what was taken");
                seat.end = Some(finished.reason);
            }
            None => return false,
        }
        true
    }

    /// What must hold when nothing moves any more.
    fn check(&self) {
        for (at, seat) in self.seats.iter().enumerate() {
            let got: Vec<TokenId> = seat.ids.iter().map(|token| token.id).collect();
            let prompt = &seat.user.prompt[..2 * seat.taken.min(seat.user.prompt.len() / 2)];
            let mut user = seat.user.clone();
            user.prompt = prompt.to_vec();
            let whole = seat.taken == seat.user.prompt.len() / 2;
            let plain = if whole || seat.refused || seat.decoded { self.scenario.plain(&user) } else { Vec::new() };
            // A feed that was refused was refused whole.
            let sent: usize = seat.user.chunks[..seat.fed - usize::from(seat.refused)].iter().sum();
            let poisoned = seat.user.prompt[..2 * sent].iter().any(|x| !x.is_finite());
            for (i, token) in seat.ids.iter().enumerate() {
                assert_eq!(token.position.index(), seat.taken + i, "I1 Ids: positions follow each other");
            }
            if !poisoned {
                assert!(plain.starts_with(&got), "I1 Ids: session {at} got {got:?}, plain decode gives {plain:?}");
            }
            if !self.scenario.fits(&seat.user) && seat.fed == seat.user.chunks.len() && !seat.left {
                assert!(seat.refused || seat.end.is_some(), "a prompt over the context was taken");
            }
            if seat.closed {
                continue;
            }
            let end = seat.end.as_ref();
            let failed = matches!(end, Some(FinishReason::Failed(_)));
            match end {
                None => panic!("I6 End: session {at} never ends\n{}", self.graph.submitter.describe()),
                Some(FinishReason::End | FinishReason::Length) => {
                    assert_eq!(got, plain, "I1 Ids: session {at} ended whole");
                    let by_id = got.last().is_some_and(|last| seat.user.eos.contains(last));
                    assert_eq!(end == Some(&FinishReason::End), by_id, "the reason is the last id's");
                    assert!(!poisoned || got.is_empty(), "ids came of rows that are not finite");
                }
                Some(FinishReason::Cancelled) => assert!(seat.left, "session {at} was cancelled by nobody"),
                Some(FinishReason::Failed(error)) => {
                    let excused = match error {
                        SessionError::NotFinite { .. } => poisoned,
                        SessionError::NotFiniteBy { .. } => poisoned && self.died,

                        SessionError::Completion { .. } => self.died,
                        SessionError::Device(_) => {
                            self.lost && (self.scenario.fallback.is_none() || self.scenario.fallback_fails)
                        }
                        SessionError::EmptyPrompt => seat.taken == 0,
                        _ => false,
                    };
                    assert!(excused, "session {at} failed: {error}");
                }
            }
            let excused = seat.left || seat.refused || !seat.decoded || seat.user.max_new == Some(0);
            assert!(!poisoned || failed || excused, "{end:?} of rows that are not finite");
        }
        assert!(
            self.graph.submitter.is_idle(),
            "I6 End: a slot or buffer is never freed\n{}",
            self.graph.submitter.describe()
        );
        assert!(self.graph.readback.is_idle(), "readback still waits");
        let counters = self.graph.submitter.counters();
        assert!(counters.completed + counters.served_by_upload <= counters.missed_experts || self.lost);
    }
}

/// What a run did, for the summary.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Seen {
    pub(crate) moves: u64,
    pub(crate) tokens: u64,
    pub(crate) misses: u64,
    pub(crate) served_by_upload: u64,
    pub(crate) admitted: u64,
    pub(crate) rollbacks: u64,
    pub(crate) kept: u64,
    pub(crate) losses: u64,
    pub(crate) overtaken: u64,
    pub(crate) cancelled: u64,
    pub(crate) failed: u64,
}

impl Seen {
    fn add(&mut self, other: &Seen) {
        self.moves += other.moves;
        self.tokens += other.tokens;
        self.misses += other.misses;
        self.served_by_upload += other.served_by_upload;
        self.admitted += other.admitted;
        self.rollbacks += other.rollbacks;
        self.kept += other.kept;
        self.losses += other.losses;
        self.overtaken += other.overtaken;
        self.cancelled += other.cancelled;
        self.failed += other.failed;
    }
}

thread_local! {
    static PANIC: RefCell<String> = const { RefCell::new(String::new()) };
}

/// Runs one seed; an error is what was caught.
pub(crate) fn run_seed(seed: u64, broken: Broken) -> Result<Seen, String> {
    static QUIET: Once = Once::new();
    QUIET.call_once(|| {
        let loud = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            // Seeds' panics are caught and reported with their seed; the test's own are shown as ever.
            if std::thread::current().name().is_some_and(|name| name.starts_with("seeds")) {
                let text = info.payload().downcast_ref::<String>().cloned();
                let text = text.or_else(|| info.payload().downcast_ref::<&str>().map(|s| (*s).into()));
                let place = info.location().map(ToString::to_string).unwrap_or_default();
                PANIC.with(|p| *p.borrow_mut() = format!("{} ({place})", text.unwrap_or_default()));
            } else {
                loud(info);
            }
        }));
    });
    let run = || {
        let mut world = world(Scenario::new(seed, broken));
        let moves = world.run();
        world.check();
        let counters = world.graph.submitter.counters();
        let ends = |which: fn(&FinishReason) -> bool| {
            world.seats.iter().filter(|s| s.end.as_ref().is_some_and(which)).count() as u64
        };
        Seen {
            moves: moves as u64,
            tokens: counters.tokens,
            misses: counters.misses,
            served_by_upload: counters.served_by_upload,
            admitted: counters.admitted,
            rollbacks: counters.rollbacks,
            kept: counters.drafts_kept,
            losses: counters.losses,
            overtaken: counters.overtaken,
            cancelled: ends(|end| *end == FinishReason::Cancelled),
            failed: ends(|end| matches!(end, FinishReason::Failed(_))),
        }
    };
    let shown = std::env::var_os("RIPARIAN_SHOW").map(|_| format!("\n{:#?}", Scenario::new(seed, broken)));
    catch_unwind(AssertUnwindSafe(run))
        .map_err(|_| PANIC.with(|p| p.borrow().clone()) + shown.as_deref().unwrap_or_default())
}

/// Runs seeds on all cores; what was seen, and the first failures.
pub(crate) fn run_seeds(
    seeds: std::ops::Range<u64>,
    broken: Broken,
    failures_max: usize,
) -> (Seen, Vec<(u64, String)>) {
    let next = AtomicU64::new(seeds.start);
    let all = Mutex::new((Seen::default(), Vec::new()));
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for core in 0..cores {
            let body = || {
                let mut seen = Seen::default();
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= seeds.end {
                        break;
                    }
                    match run_seed(seed, broken) {
                        Ok(one) => seen.add(&one),
                        Err(why) => {
                            let failures = &mut all.lock().unwrap().1;
                            failures.push((seed, why));
                            if failures.len() >= failures_max {
                                next.store(seeds.end, Ordering::Relaxed);
                            }
                        }
                    }
                }
                all.lock().unwrap().0.add(&seen);
            };
            std::thread::Builder::new().name(format!("seeds {core}")).spawn_scoped(scope, body).unwrap();
        }
    });
    let mut all = all.into_inner().unwrap();
    all.1.sort();
    all
}

/// Seeds in CI; `RIPARIAN_SEEDS` sets another number, or a range `from..to`.
fn seeds() -> std::ops::Range<u64> {
    let text = std::env::var("RIPARIAN_SEEDS").unwrap_or_else(|_| "10000".into());
    match text.split_once("..") {
        Some((from, to)) => from.parse().unwrap()..to.parse().unwrap(),
        None => 0..text.parse().unwrap(),
    }
}

/// Seeds that failed once.
const KEPT: &str = include_str!("../seeds/graph.txt");

#[test]
fn kept_seeds_pass() {
    let kept = KEPT.lines().filter_map(|line| line.split('#').next()?.trim().parse().ok());
    for seed in kept {
        let (_, failures) = run_seeds(seed..seed + 1, Broken::No, 1);
        assert!(failures.is_empty(), "{failures:?}");
    }
}

#[test]
fn sessions_get_plain_decodes_ids_and_end() {
    let begun = Instant::now();
    let seeds = seeds();
    let count = seeds.end - seeds.start;
    let (seen, failures) = run_seeds(seeds, Broken::No, 10);
    let mut text = String::new();
    for (seed, why) in &failures {
        writeln!(text, "seed {seed}: {why}").unwrap();
    }
    assert!(failures.is_empty(), "keep these in tests/seeds/graph.txt:\n{text}");
    let rate = count as f64 / begun.elapsed().as_secs_f64();
    println!("{count} seeds, {rate:.0} a second, {seen:?}");
    // A simulation in which nothing happens shows nothing.
    if count >= 1000 {
        let all = [
            seen.misses,
            seen.served_by_upload,
            seen.admitted,
            seen.rollbacks,
            seen.kept,
            seen.losses,
            seen.overtaken,
            seen.cancelled,
            seen.failed,
        ];
        assert!(all.iter().all(|n| *n > count / 50), "{seen:?}");
    }
}

/// Each broken way must be caught within so many seeds.
const CAUGHT_WITHIN: u64 = 3000;

#[test]
fn every_broken_way_is_caught() {
    use Broken::*;
    let ways = [
        DropStamp,
        StampWithoutTurn,
        StopAtSum,
        SumReadsMap,
        SharedScratch,
        AcceptWithoutRollback,
        NoEndStop,
        NoShortStop,
        AdmitInsideLayer,
        UploadStagingEarly,
        UnstampedRecords,
        NoDedupe,
        PanicWithoutAnswer,
        UnstampedIds,
        DropIdsOfOldTurn,
        NoTokenCredit,
        StagingRoundRobin,
        ClearOnMissed,
        ResumeAfterCancel,
        RequeueForgotten,
        FreeBeforeLanded,
        LandedAfterLoss,
        EvictBeforeFill,
    ];
    let mut missed = Vec::new();
    for way in ways {
        let (_, failures) = run_seeds(0..CAUGHT_WITHIN, way, 1);
        match failures.first() {
            Some((seed, why)) => println!("{way:?}: seed {seed}: {}", why.lines().next().unwrap_or_default()),
            None => missed.push(way),
        }
    }
    assert!(missed.is_empty(), "not caught: {missed:?}");
}

/// Either of the two stamp checks suffices (`protocol.md` §4).
#[test]
fn one_stamp_check_of_two_suffices() {
    for way in [Broken::NoHostCheck, Broken::NoDeviceCheck] {
        let (_, failures) = run_seeds(0..1000, way, 3);
        assert!(failures.is_empty(), "{way:?}: {failures:?}");
    }
}
