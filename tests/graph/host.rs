//! The graph over the host device and the oracle's small files: ids and states equal those of the plain host sequence,
//! whatever the bank holds, with drafts and without.

use std::sync::Arc;
use std::thread;

use crossbeam_channel::{Sender, bounded};
use riparian::actors::clock::Clock;
use riparian::actors::payload::{Counters, Event, FETCHES_MAX, Fetch, Fetched, FinishReason, Finished, SessionOptions};
use riparian::actors::readback::ReadResult;
use riparian::actors::submitter::Fallback;
use riparian::actors::{Graph, GraphOptions, Running, Setup};
use riparian::device::host::{HostCompanion, HostDevice, HostOptions};
use riparian::device::{
    Companion, Device, Item, Landing, Landings, Pass, Point, Queue, Read, Run, Staging, Stamp, Wait, Work,
};
use riparian::host::{Decoder, HostSequence, Pool};
use riparian::ids::{ExpertIx, FlightId, Position, SessionId, SlotIx, TokenId, Turn};
use riparian::knobs::Activations;
use riparian::model::{OpenOptions, open};
use riparian::policy::admission::AdmissionOptions;

#[path = "../common/mod.rs"]
mod common;

const FILES: [&str; 5] = ["tiny-f32", "kernel-q4tp", "nemo-q4tp", "nemo-exact-mtp", "trained"];
pub(crate) const MODES: [Activations; 2] = [Activations::F32, Activations::Int8];

/// A trained model, so that drafts are kept; it travels with the source.
pub(crate) const TRAINED: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/assets/tiny-transcribe.cmf");

/// Ids of one case.
const IDS: usize = 24;

pub(crate) fn decoders(act: Activations) -> impl Iterator<Item = (&'static str, Arc<Decoder>)> {
    FILES.into_iter().filter_map(move |name| {
        let path = if name == "trained" { TRAINED.into() } else { common::oracle(&format!("cmf/{name}.cmf"))? };
        let model = open(&path, &OpenOptions::default()).unwrap();
        Some((name, Arc::new(Decoder::new(model, act, Pool::new(1)))))
    })
}

/// Embeddings of a fixed text.
pub(crate) fn prompt(decoder: &Decoder, len: usize) -> Vec<f32> {
    let (hidden, vocab) = (decoder.geometry().hidden, decoder.geometry().vocab);
    let mut rows = vec![0.0; len * hidden];
    for (i, row) in rows.chunks_exact_mut(hidden).enumerate() {
        decoder.embed(TokenId::from((i * 131 + 7) % vocab), row);
    }
    rows
}

pub(crate) fn plain(decoder: &Arc<Decoder>, prompt: &[f32], n: usize) -> (Vec<TokenId>, HostSequence) {
    let mut sequence = HostSequence::new(decoder.clone());
    let mut ids = vec![sequence.feed(prompt, &mut ()).unwrap().id];
    while ids.len() < n {
        ids.push(sequence.step(*ids.last().unwrap()).unwrap().id);
    }
    (ids, sequence)
}

/// A loader that pages in with the companion.
fn loader(companion: Arc<HostCompanion>) -> Sender<Fetch> {
    let (sender, fetches) = bounded::<Fetch>(FETCHES_MAX);
    thread::spawn(move || {
        for Fetch { layer, expert, reply } in fetches {
            let _ = reply.try_send(Fetched { layer, expert, payload: Ok(Arc::new(companion.payload(layer, expert))) });
        }
    });
    sender
}

pub(crate) fn start(decoder: &Arc<Decoder>, host: HostOptions, fallback: Option<Fallback>, eager: bool) -> Running {
    start_with(Box::new(HostDevice::new(decoder.clone(), host).unwrap()), decoder, fallback, eager)
}

pub(crate) fn start_with(
    device: Box<dyn Device>,
    decoder: &Arc<Decoder>,
    fallback: Option<Fallback>,
    eager: bool,
) -> Running {
    let companion = Arc::new(HostCompanion::new(decoder.clone()));
    let mut options = GraphOptions::default();
    options.submitter.ahead.batches_max = 4;
    // Admission on every step.
    options.admission = eager.then(|| AdmissionOptions { positions_per_upload: 1, ..AdmissionOptions::default() });
    let setup = Setup {
        device,
        companion: companion.clone(),
        fallback,
        fetches: Some(loader(companion)),
        drafter: None,
        options,
        clock: Clock::machine(),
    };
    Graph::assemble(setup).start().unwrap()
}

pub(crate) fn decode(running: &Running, rows: &[f32], chunk: usize, n: usize) -> (Vec<TokenId>, Finished) {
    let mut session = running.handle().try_open(SessionOptions::default()).unwrap();
    for rows in rows.chunks(chunk) {
        session.start_feed(rows.to_vec()).unwrap().blocking_recv().unwrap().unwrap();
    }
    session.decode(Some(n)).unwrap();
    let mut ids = Vec::new();
    loop {
        match session.blocking_next().expect("a stream ends with its end") {
            Event::Token(token) => ids.push(token.id),
            Event::Finished(finished) => return (ids, *finished),
        }
    }
}

pub(crate) fn counters(running: &Running) -> Counters {
    running.handle().start_counters().unwrap().blocking_recv().unwrap()
}

/// The first `places` experts of each layer.
pub(crate) fn bank(decoder: &Decoder, places: usize) -> Vec<Vec<Option<ExpertIx>>> {
    vec![(0..places).map(|e| Some(ExpertIx::from(e))).collect(); decoder.geometry().decoder_layers()]
}

/// Budgets of an issue: `top_k`, a quarter (at least `top_k`), half, three quarters, all.
pub(crate) fn budgets(decoder: &Decoder) -> Vec<usize> {
    let Some(moe) = decoder.geometry().moe else { return vec![0] };
    let share = |quarters: usize| (moe.experts * quarters).div_ceil(4).max(moe.top_k);
    let mut all = vec![moe.top_k, share(1), share(2), share(3), moe.experts];
    all.dedup();
    all
}

#[test]
fn ids_do_not_depend_on_the_bank_or_on_drafts() {
    let (mut misses, mut completed, mut admitted, mut kept) = (0, 0, 0, 0);
    for act in MODES {
        for (name, decoder) in decoders(act) {
            let rows = prompt(&decoder, 9);
            let (wanted, _) = plain(&decoder, &rows, IDS);
            for places in budgets(&decoder) {
                for drafts in [false, true] {
                    for wrong in [None, Some(7)] {
                        if !drafts && wrong.is_some() {
                            continue;
                        }
                        let host = HostOptions {
                            residents: bank(&decoder, places),
                            drafts,
                            wrong_drafts: wrong,
                            ..HostOptions::for_decoder(&decoder)
                        };
                        let running = start(&decoder, host, None, true);
                        let chunk = 4 * decoder.geometry().hidden;
                        let (ids, finished) = decode(&running, &rows, chunk, IDS);
                        let what = format!("{name} {act:?}, {places} places, drafts {drafts}, wrong {wrong:?}");
                        assert_eq!(ids, wanted, "{what}");
                        assert_eq!(finished.reason, FinishReason::Length, "{what}");
                        let seen = counters(&running);
                        assert_eq!(seen.missed_experts, seen.completed, "{what}");
                        let full = decoder.geometry().moe.is_none_or(|moe| places >= moe.experts);
                        assert!(!full || seen.misses == 0, "{what}");
                        misses += seen.misses;
                        completed += seen.completed;
                        admitted += seen.admitted;
                        kept += seen.drafts_kept;
                        running.stop();
                    }
                }
            }
        }
    }
    println!("{misses} misses, {completed} experts completed, {admitted} admitted, {kept} drafts kept");
    assert!(misses > 100 && completed > misses && admitted > 100 && kept > 50, "the protocol ran");
}

#[test]
fn a_session_goes_on_with_the_same_ids_when_its_device_dies() {
    for act in MODES {
        for (name, decoder) in decoders(act) {
            let rows = prompt(&decoder, 9);
            let (wanted, _) = plain(&decoder, &rows, IDS);
            let places = decoder.geometry().moe.map_or(0, |moe| moe.top_k);
            for dies_at in [0, 3, 20, 61, 150] {
                let host = HostOptions {
                    residents: bank(&decoder, places),
                    dies_at: Some(dies_at),
                    ..HostOptions::for_decoder(&decoder)
                };
                let other = decoder.clone();
                let fallback: Fallback = Box::new(move || {
                    let options = HostOptions::for_decoder(&other);
                    Ok(Box::new(HostDevice::new(other, options)?) as Box<dyn Device>)
                });
                let running = start(&decoder, host, Some(fallback), false);
                let (ids, finished) = decode(&running, &rows, rows.len(), IDS);
                assert_eq!(ids, wanted, "{name} {act:?}, dies at {dies_at}");
                let seen = counters(&running);
                assert_eq!(finished.stats.recovered, seen.losses == 1, "{name} {act:?}, dies at {dies_at}");
                running.stop();
            }
        }
    }
}

#[test]
fn several_sessions_take_turns() {
    for (name, decoder) in decoders(Activations::Int8) {
        let places = decoder.geometry().moe.map_or(0, |moe| moe.top_k);
        let host = HostOptions { slots: 2, residents: bank(&decoder, places), ..HostOptions::for_decoder(&decoder) };
        let running = start(&decoder, host, None, true);
        thread::scope(|scope| {
            for length in 3..8 {
                let (decoder, running) = (&decoder, &running);
                scope.spawn(move || {
                    let rows = prompt(decoder, length);
                    let (ids, _) = decode(running, &rows, rows.len(), IDS);
                    assert_eq!(ids, plain(decoder, &rows, IDS).0, "{name}, {length} rows");
                });
            }
        });
    }
}

/// The device alone, without actors.
struct Bare {
    queue: Box<dyn Queue>,
    landings: Box<dyn Landings>,
    flight: u64,
}

impl Bare {
    const SLOT: SlotIx = SlotIx(0);
    const TURN: Turn = Turn(1);

    fn new(decoder: &Arc<Decoder>, wrong_drafts: Option<u32>) -> Self {
        let options = HostOptions { wrong_drafts, ..HostOptions::for_decoder(decoder) };
        let (mut queue, landings) = Box::new(HostDevice::new(decoder.clone(), options).unwrap()).split();
        let start =
            Item::Start { slot: Self::SLOT, turn: Self::TURN, session: SessionId(1), eos: Arc::new([]), seed: None };
        queue.append(vec![start]).unwrap();
        Self { queue, landings, flight: 0 }
    }

    fn run(&mut self, from: u32, to: u32, work: Work) -> riparian::device::Record {
        self.flight += 1;
        let stamp = Stamp { flight: FlightId(self.flight), slot: Self::SLOT, turn: Self::TURN };
        let (from, to) = (Point::start_of(from), Point::start_of(to));
        let run = Run { stamp, from, to, work, limit: Position(1000), peeks: vec![] };
        let staging = Staging(0);
        self.queue.append(vec![Item::Run(run), Item::Land { stamp, staging }]).unwrap();
        match self.landings.wait(Wait::Land(staging), None).unwrap() {
            Landing::Record(record) => *record,
            other => panic!("{other:?}"),
        }
    }

    fn read(&mut self, what: Read) -> Landing {
        let staging = Staging(1);
        self.queue.append(vec![Item::Read { slot: Self::SLOT, what, staging }]).unwrap();
        self.landings.wait(Wait::Read(staging), None).unwrap()
    }
}

/// `runtime.md` §6: the state after a rollback is plain decode's, bit for bit.
#[test]
fn a_rollback_leaves_plain_decodes_state() {
    let mut refused = 0;
    for act in MODES {
        for (name, decoder) in decoders(act).filter(|(_, decoder)| decoder.geometry().draft) {
            for (depth, wrong) in [(1, None), (2, Some(3)), (4, Some(11))] {
                let rows = prompt(&decoder, 7);
                let mut bare = Bare::new(&decoder, wrong);
                let pass = Pass { rows: rows.clone(), accept: true };
                let mut ids = bare.run(0, 1, Work::Prefill(Arc::new(pass))).out.ids;
                for round in 1..12 {
                    let out = bare.run(round, round + 1, Work::Rounds { depth }).out;
                    assert_eq!(out.ids.len(), out.rounds[0].kept as usize + 1);
                    refused += usize::from(out.rounds[0].kept < out.rounds[0].offered);
                    ids.extend(out.ids);
                    let (wanted, plain) = plain(&decoder, &rows, ids.len());
                    assert_eq!(ids, wanted, "{name} {act:?} depth {depth}");
                    let Landing::State(seed) = bare.read(Read::State) else { panic!("a state") };
                    let (seen, wanted) = (&seed.state, plain.state());
                    assert_eq!(seen.position, wanted.position);
                    assert!(seen.blocks == wanted.blocks, "{name} {act:?} depth {depth}, round {round}");
                    assert!(seen.draft == wanted.draft, "{name} {act:?} depth {depth}, round {round}: draft KV");
                }
            }
        }
    }
    assert!(refused > 20, "{refused} rounds with a refused draft");
}

/// A state that was read back seeds another slot, which goes on with the same ids; logits agree with the argmax.
#[test]
fn a_state_that_was_read_back_seeds_another_session() {
    for (name, decoder) in decoders(Activations::F32) {
        let rows = prompt(&decoder, 8);
        let hidden = decoder.geometry().hidden;
        let (wanted, _) = plain(&decoder, &rows, IDS);
        let running = start(&decoder, HostOptions::for_decoder(&decoder), None, false);
        let first = running.handle().try_open(SessionOptions::default()).unwrap();
        first.start_feed(rows.clone()).unwrap().blocking_recv().unwrap().unwrap();
        let read = first.start_read(Read::State).unwrap().blocking_recv().unwrap().unwrap();
        let ReadResult::State(seed) = read else { panic!("a state") };
        assert_eq!(seed.state.position, Position(7), "the last row stays back until decoding is asked for");
        drop(first);

        let options = SessionOptions { seed: Some(Arc::new(*seed)), ..SessionOptions::default() };
        let mut second = running.handle().try_open(options).unwrap();
        second.start_feed(rows[7 * hidden..].to_vec()).unwrap().blocking_recv().unwrap().unwrap();
        second.decode(Some(IDS)).unwrap();
        let mut ids = Vec::new();
        while let Some(event) = second.blocking_next() {
            if let Event::Token(token) = event {
                assert_eq!(token.position.index(), 8 + ids.len());
                ids.push(token.id);
            }
        }
        assert_eq!(ids, wanted, "{name}");

        let mut bare = Bare::new(&decoder, None);
        let id = bare.run(0, 1, Work::Prefill(Arc::new(Pass { rows, accept: true }))).out.ids[0];
        let Landing::Logits(logits) = bare.read(Read::Logits) else { panic!("logits") };
        assert_eq!(logits.len(), decoder.geometry().vocab);
        assert!(logits.iter().all(|x| *x <= logits[id.index()]), "{name}");
    }
}

#[test]
fn a_thousand_cancels_leave_nothing_behind() {
    let Some((_, decoder)) = decoders(Activations::Int8).nth(1) else { return };
    let places = decoder.geometry().moe.map_or(0, |moe| moe.top_k);
    let host = HostOptions { slots: 1, residents: bank(&decoder, places), ..HostOptions::for_decoder(&decoder) };
    let running = start(&decoder, host, None, false);
    let rows = prompt(&decoder, 5);
    for i in 0..1000 {
        let mut session = running.handle().try_open(SessionOptions::default()).unwrap();
        if i % 5 > 0 {
            let answer = session.start_feed(rows.clone()).unwrap();
            if i % 5 > 1 {
                answer.blocking_recv().unwrap().unwrap();
                session.decode(None).unwrap();
            }
            for _ in 2..i % 5 {
                assert!(matches!(session.blocking_next(), Some(Event::Token(_))));
            }
        }
        if i % 2 == 0 {
            session.cancel();
        }
    }
    // The slot is free: the next session decodes, and what was cancelled is gone.
    let (ids, finished) = decode(&running, &rows, rows.len(), IDS);
    assert_eq!(ids, plain(&decoder, &rows, IDS).0);
    assert_eq!(finished.reason, FinishReason::Length);
    let seen = counters(&running);
    assert_eq!((seen.sessions, seen.sessions_open, seen.flights_live, seen.violations), (1001, 0, 0, 0));
}
