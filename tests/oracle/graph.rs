//! The actor graph over the host device: every case through real actors, threads and messages.
//!
//! What the host decoder gives row by row has been held to the references before (`host`); here the ids of the graph
//! are held to the references too, and to those of the host decoder without actors. Where an expert is computed, what a
//! bank holds, what is drafted and who else is served must not show in them. The host sums in one order wherever an
//! expert is computed, so "the same" is bit-equal here (`runtime.md` §3a).

mod cancel;
mod drafts;
#[cfg(feature = "gpu")]
mod gpu;
mod trained;

use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use crossbeam_channel::{Sender, bounded};
use riparian::actors::clock::Clock;
use riparian::actors::drafts::Drafter;
use riparian::actors::loader;
use riparian::actors::payload::{Counters, Event, FETCHES_MAX, Fetch, Fetched, FinishReason, Finished, SessionOptions};
use riparian::actors::session::SessionHandle;
use riparian::actors::{Graph, GraphOptions, Running, Setup};
use riparian::device::host::{HostCompanion, HostDevice, HostOptions};
use riparian::device::{Companion, Device};
use riparian::host::{Decoder, HostSequence, Pool, physical_cores};
use riparian::ids::{ExpertIx, TokenId};
use riparian::knobs::Activations;
use riparian::model::Model;
use riparian::model::geometry::Geometry;
use riparian::model::mmap::Access;
use riparian::policy::admission::AdmissionOptions;

use crate::case::Case;
use crate::harness::{Decode, Engine, check_decode};
use crate::host::Host;
use crate::reference::Reference;
use crate::tolerance::{F32, F32_OTHER_LADDER, INT8, INT8_EXCUSED_MAX, Tolerance};

/// Whoever takes longer for one event hangs.
const PATIENCE: Duration = Duration::from_secs(60);

/// Sessions after which a graph that should admit something has done so: the admission manager takes its time.
const ADMISSION_PATIENCE: usize = 50;

/// A model and a loader of its experts; graphs are started over it.
pub(crate) struct Source {
    decoder: Arc<Decoder>,
    fetches: Sender<Fetch>,
    /// Kept alive with the loader; absent where the weights lie in no file.
    _loader: Option<loader::Handle>,
}

/// What of a graph is a choice.
#[derive(Clone, Default)]
pub(crate) struct Way {
    /// Experts a bank holds; all if absent.
    places: Option<usize>,
    /// Sessions at a time, 4 if absent.
    slots: Option<usize>,
    /// KV positions, the model's if absent.
    kv_positions: Option<usize>,
    /// Batches of a flight at most, the default if absent.
    batches: Option<u32>,
    /// Prompts are read row by row.
    row_by_row: bool,
    /// What is drafted instead of the draft layer's ids, by position.
    given_drafts: Option<Arc<[TokenId]>>,
    /// Whether drafts of the draft layer are made wrong at random.
    wrong_drafts: bool,
    /// Ids that a drafter beside the device guesses, by session's id number.
    drafter: Option<Arc<[TokenId]>>,
}

impl Way {
    pub(crate) fn bank(places: Option<usize>) -> Self {
        Self { places, ..Self::default() }
    }
}

/// How one session decodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Drafting {
    /// Plain steps.
    Off,
    /// As the draft scheduler says.
    Scheduled,
    /// So many drafts a round.
    Depth(usize),
}

impl Drafting {
    /// Every way a case can be decoded.
    pub(crate) fn all(geometry: &Geometry) -> &'static [Self] {
        const ALL: [Drafting; 6] = [
            Drafting::Off,
            Drafting::Scheduled,
            Drafting::Depth(1),
            Drafting::Depth(2),
            Drafting::Depth(3),
            Drafting::Depth(4),
        ];
        if geometry.draft { &ALL } else { &ALL[..1] }
    }

    fn options(self, eos: &[TokenId]) -> SessionOptions {
        let depth = match self {
            Self::Depth(depth) => Some(depth),
            _ => None,
        };
        SessionOptions { eos: eos.into(), seed: None, drafts: self != Self::Off, depth }
    }
}

/// What a session gave.
pub(crate) struct Got {
    pub(crate) ids: Vec<TokenId>,
    /// Which of them were drafted first.
    pub(crate) drafted: Vec<bool>,
    pub(crate) finished: Finished,
}

impl Got {
    /// Drafts kept by each round, for a session that does nothing but rounds; a last round that was cut is left out.
    fn kept(&self) -> Vec<usize> {
        // the prompt's id, then in each round the kept drafts and one more
        let rounds = self.drafted[1..].split_inclusive(|drafted| !drafted);
        rounds.filter(|round| !round[round.len() - 1]).map(|round| round.len() - 1).collect()
    }
}

impl Source {
    /// A case, its experts read by the companion where they lie in no file.
    pub(crate) fn of_case(case: &Case, act: Activations) -> Self {
        let decoder = Arc::new(Host::decoder(case, act, Pool::new(physical_cores())));
        let companion = HostCompanion::new(Arc::clone(&decoder));
        let (fetches, inbox) = bounded::<Fetch>(FETCHES_MAX);
        let body = move || {
            for Fetch { layer, expert, reply } in inbox {
                let payload = Ok(Arc::new(companion.payload(layer, expert)));
                // whoever is gone needs no bytes
                let _ = reply.try_send(Fetched { layer, expert, payload });
            }
        };
        thread::spawn(body);
        Self { decoder, fetches, _loader: None }
    }

    /// A file, opened and its experts read by the loader.
    pub(crate) fn of_file(path: &Path, act: Activations) -> (Self, Arc<Model>) {
        let (loader, _) = loader::spawn().expect("a thread");
        let opened = wait(loader.open(path.to_owned(), Access::Mapped)).expect("a loader");
        let model = opened.unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let decoder = Arc::new(Decoder::new(Arc::clone(&model), act, Pool::new(physical_cores())));
        (Self { decoder, fetches: loader.fetches(), _loader: Some(loader) }, model)
    }

    pub(crate) fn geometry(&self) -> &Geometry {
        self.decoder.geometry()
    }

    /// A graph on its threads. It admits as often as it can: at every step.
    pub(crate) fn start(&self, way: &Way) -> Through {
        let defaults = HostOptions::for_decoder(&self.decoder);
        let bank = |places: usize| (0..places).map(|e| Some(ExpertIx::from(e))).collect();
        let residents = way.places.map(|places| vec![bank(places); self.geometry().decoder_layers()]);
        let host = HostOptions {
            slots: way.slots.unwrap_or(defaults.slots),
            kv_positions: way.kv_positions.unwrap_or(defaults.kv_positions),
            residents: residents.unwrap_or_default(),
            given_drafts: way.given_drafts.clone(),
            wrong_drafts: way.wrong_drafts.then_some(0x5EED),
            drafts_by_host: way.drafter.is_some(),
            ..defaults
        };
        self.start_on(Box::new(HostDevice::new(Arc::clone(&self.decoder), host).expect("a thread")), way)
    }

    /// The same over another device.
    fn start_on(&self, device: Box<dyn Device>, way: &Way) -> Through {
        let name = device.facts().name.clone();
        let mut options = GraphOptions {
            admission: Some(AdmissionOptions { positions_per_upload: 1, ..AdmissionOptions::default() }),
            ..GraphOptions::default()
        };
        options.submitter.batched_prefill = !way.row_by_row;
        let ahead = &mut options.submitter.ahead;
        ahead.batches_max = way.batches.unwrap_or(ahead.batches_max);
        let running = Graph::assemble(Setup {
            device,
            companion: Arc::new(HostCompanion::new(Arc::clone(&self.decoder))),
            fallback: None,
            fetches: Some(self.fetches.clone()),
            drafter: way.drafter.clone().map(|ids| Box::new(drafts::Guesser::new(ids)) as Box<dyn Drafter>),
            options,
            clock: Clock::machine(),
        });
        let running = running.start().expect("threads");
        let label = format!("graph over {name}, {:?}", self.decoder.activations());
        Through { running, hidden: self.geometry().hidden, label }
    }

    /// Ids of the host decoder, without actors, banks or drafts.
    pub(crate) fn plain(&self, rows: &[f32], steps: usize) -> Vec<TokenId> {
        let mut sequence = HostSequence::new(Arc::clone(&self.decoder)).without_drafts();
        let mut ids = vec![sequence.feed(rows, &mut ()).expect("finite rows").id];
        while ids.len() < steps {
            ids.push(sequence.step(ids[ids.len() - 1]).expect("finite rows").id);
        }
        ids
    }
}

fn wait<T>(future: impl Future<Output = T>) -> T {
    let executor = tokio::runtime::Builder::new_current_thread().enable_time().build().expect("an executor");
    let patient = async { tokio::time::timeout(PATIENCE, future).await };
    executor.block_on(patient).unwrap_or_else(|_| panic!("nothing came for {PATIENCE:?}"))
}

/// A graph that runs.
pub(crate) struct Through {
    running: Running,
    hidden: usize,
    label: String,
}

impl Through {
    /// A session that was fed its prompt, in pieces of so many rows (the last piece size again and again), and was told
    /// to decode.
    pub(crate) fn open(
        &self,
        rows: &[f32],
        pieces: &[usize],
        steps: Option<usize>,
        options: SessionOptions,
    ) -> SessionHandle {
        let session = self.running.handle().try_open(options).expect("few sessions");
        let (mut rest, mut pieces, mut last) = (rows, pieces.iter(), rows.len() / self.hidden);
        while !rest.is_empty() {
            last = pieces.next().copied().unwrap_or(last);
            let (piece, behind) = rest.split_at(rest.len().min(last * self.hidden));
            wait(session.feed(piece.to_vec())).expect("rows are taken");
            rest = behind;
        }
        session.decode(steps).expect("room for a request");
        session
    }

    /// What a session gives until it ends.
    pub(crate) fn take(session: &mut SessionHandle) -> Got {
        let (mut ids, mut drafted) = (Vec::new(), Vec::new());
        loop {
            match wait(session.next()) {
                Some(Event::Token(token)) => {
                    ids.push(token.id);
                    drafted.push(token.drafted);
                }
                Some(Event::Finished(finished)) => return Got { ids, drafted, finished: *finished },
                None => panic!("a stream closed without an end"),
            }
        }
    }

    /// A session from its first row to its end.
    pub(crate) fn run(&self, rows: &[f32], steps: usize, drafting: Drafting) -> Got {
        let got = Self::take(&mut self.open(rows, &[], Some(steps), drafting.options(&[])));
        assert_eq!(got.finished.reason, FinishReason::Length, "{}", self.label);
        got
    }

    pub(crate) fn counters(&self) -> Counters {
        wait(self.running.handle().counters()).expect("a submitter")
    }

    /// What happened is what a bank of this size makes happen: a test that never misses proves nothing.
    fn check_bank(&self, places: Option<usize>, what: &str) {
        let seen = self.counters();
        assert_eq!(seen.missed_experts, seen.completed, "{what}: every miss is completed once");
        match places {
            None => assert_eq!((seen.misses, seen.admitted), (0, 0), "{what}: a full bank"),
            Some(_) => assert!(seen.misses > 0 && seen.completed > 0, "{what}: a partial bank has to miss"),
        }
        assert_eq!(seen.violations, 0, "{what}");
    }
}

impl Engine for Through {
    fn label(&self) -> String {
        self.label.clone()
    }
}

impl Decode for Through {
    fn decode(&mut self, rows: &[f32], steps: usize) -> Vec<TokenId> {
        self.run(rows, steps, Drafting::Off).ids
    }
}

/// Bank sizes of a model: `top_k`, a quarter (at least `top_k`), half, three quarters; none where nothing can miss.
pub(crate) fn partial_banks(geometry: &Geometry) -> Vec<usize> {
    let Some(moe) = geometry.moe.filter(|_| geometry.decoder_layers() > 0) else { return Vec::new() };
    let quarters = (1..4).map(|n| (moe.experts * n).div_ceil(4).max(moe.top_k));
    let mut all: Vec<usize> = [moe.top_k].into_iter().chain(quarters).filter(|n| *n < moe.experts).collect();
    all.dedup();
    all
}

/// Sum over some sessions.
#[derive(Debug, Default)]
struct Sums {
    sessions: u64,
    misses: u64,
    completed: u64,
    admitted: u64,
    offered: u64,
    kept: u64,
}

impl Sums {
    fn add(&mut self, seen: &Counters) {
        self.sessions += seen.sessions;
        self.misses += seen.misses;
        self.completed += seen.completed;
        self.admitted += seen.admitted;
        self.offered += seen.drafts_offered;
        self.kept += seen.drafts_kept;
    }
}

/// The prompt in one go, row by row and in odd pieces, read in passes and row by row.
fn check_prompts(case: &Case, source: &Source, want: &[TokenId]) {
    for row_by_row in [false, true] {
        let graph = source.start(&Way { row_by_row, ..Way::bank(partial_banks(source.geometry()).first().copied()) });
        for pieces in [&[][..], &[1], &[3], &[1, 5, 2], &[2, 1, 7]] {
            let options = Drafting::Scheduled.options(&[]);
            let got = Through::take(&mut graph.open(&case.reference.rows, pieces, Some(want.len()), options));
            assert_eq!(got.ids, want, "{}: fed in pieces of {pieces:?}", case.reference.name);
        }
    }
}

/// Every bank with every way of drafting; for a large model each bank with plain steps and another way of the rest.
fn check_banks(case: &Case, source: &Source, want: &[TokenId], large: bool) {
    let (name, rows) = (&case.reference.name, &case.reference.rows);
    let mut sums = Sums::default();
    let (all, banks) = (Drafting::all(source.geometry()), partial_banks(source.geometry()));
    for (i, places) in [None].into_iter().chain(banks.into_iter().map(Some)).enumerate() {
        let one = 1 + i % (all.len() - 1).max(1);
        for drafting in all.iter().enumerate().filter(|(j, _)| !large || *j == 0 || *j == one).map(|(_, way)| way) {
            let what = format!("{name}, {places:?} places, drafting {drafting:?}");
            let graph = source.start(&Way::bank(places));
            let got = graph.run(rows, want.len(), *drafting);
            assert_eq!(got.ids, want, "{what}");
            assert_eq!(got.finished.stats.drafts_offered > 0, *drafting != Drafting::Off, "{what}");
            graph.check_bank(places, &what);
            // Banks change under the ids, and the ids stay.
            for again in 0.. {
                if places.is_none() || graph.counters().admitted > 0 {
                    break;
                }
                assert!(again < ADMISSION_PATIENCE, "{what}: nothing was admitted");
                assert_eq!(graph.run(rows, want.len(), *drafting).ids, want, "{what}");
            }
            sums.add(&graph.counters());
        }
    }
    println!("{name}, {:?}: {sums:?}", source.decoder.activations());
}

/// What the reference's own speculation kept, round by round.
fn check_kept(case: &Case, source: &Source, depths: &[usize]) {
    let Some(draft) = &case.reference.draft else { return };
    for want in draft.speculation.iter().filter(|want| depths.contains(&want.depth)) {
        for places in [None, partial_banks(source.geometry()).first().copied()] {
            let graph = source.start(&Way::bank(places));
            // far enough that no round of the reference's meets the end
            let steps = 2 + want.depth + want.accepted.iter().map(|kept| kept + 1).sum::<usize>();
            let kept = graph.run(&case.reference.rows, steps, Drafting::Depth(want.depth)).kept();
            assert_eq!(
                kept[..want.accepted.len()],
                want.accepted,
                "{}: drafts kept at depth {}",
                case.reference.name,
                want.depth
            );
        }
    }
}

/// Everything there is to check of one case in f32. No reference comes near a tie, so nothing may be excused.
fn f32_everywhere(case: &Case, tolerance: &Tolerance, large: bool) {
    let started = Instant::now();
    let source = Source::of_case(case, Activations::F32);
    assert_eq!(check_decode(case, &mut source.start(&Way::default()), tolerance), 0, "{}", case.reference.name);
    let want = &case.reference.greedy.ids;
    if !large {
        check_prompts(case, &source, want);
    }
    check_banks(case, &source, want, large);
    // nothing is kept in the large one, so deeper rounds begin with the drafts of shallower ones
    check_kept(case, &source, if large { &[3] } else { &[1, 2, 3] });
    println!("{}, f32: {:.1} s", case.reference.name, started.elapsed().as_secs_f32());
}

/// int8 against the plain decoder's, which no other implementation has, and against the host decoder's to the bit.
fn int8_everywhere(case: Case) {
    let started = Instant::now();
    let int8 = Reference::record(&case, Activations::Int8, 24);
    let case = case.with_reference(int8);
    let source = Source::of_case(&case, Activations::Int8);
    let excused = check_decode(&case, &mut source.start(&Way::default()), &INT8);
    assert!(excused as f32 <= INT8_EXCUSED_MAX * 24.0, "{}: {excused} of 24 ids excused", case.reference.name);
    let want = source.plain(&case.reference.rows, 24);
    check_prompts(&case, &source, &want);
    check_banks(&case, &source, &want, false);
    println!("{}, int8: {:.1} s", case.reference.name, started.elapsed().as_secs_f32());
}

macro_rules! fixtures {
    ($($test:ident $name:literal $large:literal;)*) => {$(
        #[test]
        fn $test() {
            if let Some(case) = Case::fixture($name) {
                f32_everywhere(&case, &F32, $large);
            }
        }
    )*};
}

fixtures! {
    tiny "tiny" false;
    tiny_groups "tiny-groups" false;
    tiny_mlp "tiny-mlp" false;
    tiny_latent "tiny-latent" false;
    tiny_clamp "tiny-clamp" false;
    tiny_nemo "tiny-nemo" false;
    transcribe_tiny "transcribe-tiny" false;
    kernel "kernel" false;
    wide "wide" true;
}

macro_rules! peer_files {
    ($($test:ident $name:literal;)*) => {$(
        #[test]
        fn $test() {
            if let Some(case) = Case::peer($name) {
                f32_everywhere(&case, &F32_OTHER_LADDER, false);
                int8_everywhere(case);
            }
        }
    )*};
}

peer_files! {
    peer_tiny_f32 "tiny-f32";
    peer_nemo_exact_mtp "nemo-exact-mtp";
    peer_nemo_q4tp "nemo-q4tp";
    peer_kernel_q4tp "kernel-q4tp";
}
