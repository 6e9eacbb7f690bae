//! The graph over the wgpu device with partial banks: ids equal the full bank's, whatever the banks hold.
//!
//! `RIPARIAN_TEST_ADAPTER` names the adapter (default `llvmpipe`); a test fails where there is none. A difference is
//! excused only where the host's logits leave no clear winner (`runtime.md` §3a), and excuses are counted.

use std::collections::HashSet;
use std::sync::Arc;

use riparian::actors::Running;
use riparian::device::host::HostCompanion;
use riparian::device::wgpu::{Gpu, Setup, find};
use riparian::device::{
    Companion, Device, DeviceKind, Item, Landing, Landings, Pass, Phase, Point, Queue, Record, Run, Stager, Staging,
    Stamp, StopKind, UploadStaging, Wait, Work,
};
use riparian::host::{Decoder, HostSequence};
use riparian::ids::{ExpertIx, FlightId, PlaceIx, Position, SessionId, SlotIx, TokenId, Turn};
use riparian::knobs::DeviceChoice;

use crate::host::{MODES, bank, budgets, counters, decode, decoders, prompt, start_with};

/// Rows of a pass: a prompt takes several, and the last may be short.
const PASS_ROWS: usize = 16;

/// Logits nearer than this leave no clear winner, as a share of the largest; the int8 mode's own error is larger.
pub(crate) const TIE: f32 = 2e-2;

fn open(decoder: &Decoder, places: usize) -> Gpu {
    let name = std::env::var("RIPARIAN_TEST_ADAPTER").unwrap_or_else(|_| "llvmpipe".into());
    let found = find(&DeviceChoice::Adapter(name.clone())).expect("an adapter for the tests");
    assert!(found.info().name.to_lowercase().contains(&name.to_lowercase()), "{:?}", found.info());
    let context = found.open(None, true).expect("a device");
    let setup = Setup {
        activations: decoder.activations(),
        positions: 256,
        slots: 2,
        pass_rows: PASS_ROWS,
        window_bytes: 64 << 20,
        keep_logits: false,
        skip: vec![],
        drafts: None,
    };
    let residents: Vec<Vec<ExpertIx>> =
        bank(decoder, places).into_iter().map(|l| l.into_iter().flatten().collect()).collect();
    let gpu =
        Gpu::open_partial(context, decoder.geometry(), decoder.weights(), &setup, Some(&residents), &mut |_, _| {})
            .expect("the model on the device");
    let facts = gpu.facts();
    assert_eq!((facts.kind, facts.activations), (DeviceKind::Gpu, decoder.activations()));
    assert!(facts.name.contains("subgroups"), "the kernel variant is named: {}", facts.name);
    assert_eq!(facts.is_full(), decoder.geometry().moe.is_none_or(|moe| places >= moe.experts));
    gpu
}

fn start(decoder: &Arc<Decoder>, places: usize) -> Running {
    start_with(Box::new(open(decoder, places)), decoder, None, true)
}

/// How clearly each id wins when the host goes along `ids`.
pub(crate) fn margins(decoder: &Arc<Decoder>, prompt: &[f32], ids: &[TokenId]) -> Vec<f32> {
    let mut sequence = HostSequence::new(decoder.clone());
    let mut pick = sequence.feed(prompt, &mut ()).unwrap();
    let mut margins = vec![];
    for id in ids {
        margins.push((pick.logit - pick.runner_up) / pick.logit.abs().max(1.0));
        pick = sequence.step(*id).unwrap();
    }
    margins
}

/// Models of the tests: quantised and exact, and one that was trained.
fn models() -> impl Iterator<Item = (String, Arc<Decoder>)> {
    MODES.into_iter().flat_map(|act| {
        decoders(act)
            .filter(|(name, _)| ["kernel-q4tp", "trained"].contains(name))
            .map(move |(name, decoder)| (format!("{name} {act:?}"), decoder))
    })
}

#[test]
fn ids_on_a_gpu_do_not_depend_on_the_bank() {
    let (mut misses, mut completed, mut admitted, mut excused) = (0, 0, 0, 0);
    for (name, decoder) in models() {
        // two whole passes and a row
        let rows = prompt(&decoder, 2 * PASS_ROWS + 1);
        let experts = decoder.geometry().moe.expect("experts").experts;
        let running = start(&decoder, experts);
        let (wanted, _) = decode(&running, &rows, rows.len(), 24);
        assert_eq!(counters(&running).misses, 0, "{name}: a full bank misses nothing");
        running.stop();
        let clear = margins(&decoder, &rows, &wanted);
        for places in budgets(&decoder) {
            let running = start(&decoder, places);
            let (ids, _) = decode(&running, &rows, rows.len(), 24);
            let seen = counters(&running);
            running.stop();
            assert_eq!(ids.len(), wanted.len());
            if let Some(at) = (0..ids.len()).find(|at| ids[*at] != wanted[*at]) {
                assert!(clear[at] < TIE, "{name}, {places} places, id {at}: margin {}\n{ids:?}\n{wanted:?}", clear[at]);
                excused += 1;
            }
            assert_eq!(seen.missed_experts, seen.completed, "{name}, {places} places");
            assert!(places == experts || seen.misses > 0, "{name}, {places} places: nothing was missed");
            assert!(places == experts || seen.admitted > 0, "{name}, {places} places: nothing was admitted");
            assert_eq!(seen.violations, 0);
            misses += seen.misses;
            completed += seen.completed;
            admitted += seen.admitted;
        }
    }
    println!("{misses} misses, {completed} experts completed, {admitted} admitted, {excused} ids excused");
    assert!(misses > 100 && completed > misses && admitted > 50, "the protocol ran");
    assert!(excused <= 2, "{excused} near ties");
}

#[test]
fn sessions_that_wait_for_experts_do_not_disturb_each_other() {
    for (name, decoder) in models() {
        let k = decoder.geometry().moe.expect("experts").top_k;
        let lengths = [3, 17, 20, 33];
        let alone = start(&decoder, decoder.geometry().moe.expect("experts").experts);
        let wanted: Vec<_> = (lengths.iter())
            .map(|length| {
                let rows = prompt(&decoder, *length);
                decode(&alone, &rows, rows.len(), 12).0
            })
            .collect();
        alone.stop();
        let running = start(&decoder, k);
        std::thread::scope(|scope| {
            for (length, wanted) in lengths.into_iter().zip(&wanted) {
                let (name, decoder, running) = (&name, &decoder, &running);
                scope.spawn(move || {
                    let rows = prompt(decoder, length);
                    let (ids, _) = decode(running, &rows, rows.len(), 12);
                    if let Some(at) = (0..ids.len()).find(|at| ids[*at] != wanted[*at]) {
                        let clear = margins(decoder, &rows, wanted)[at];
                        assert!(clear < TIE, "{name}, {length} rows, id {at}: margin {clear}");
                    }
                });
            }
        });
        assert!(counters(&running).misses > 0, "{name}");
        running.stop();
    }
}

/// The device alone, its misses served by hand.
struct Bare {
    queue: Box<dyn Queue>,
    landings: Box<dyn Landings>,
    companion: HostCompanion,
    /// Absent where nothing can miss.
    stager: Option<Arc<dyn Stager>>,
    flight: u64,
    turn: u32,
    missed: usize,
    /// Whether runs peek: nobody peeks where nothing can be missed.
    peeks: bool,
    /// Misses of every pick of a row.
    whole: usize,
}

impl Bare {
    const SLOT: SlotIx = SlotIx(0);

    fn new(decoder: &Arc<Decoder>, places: usize) -> Self {
        let device = Box::new(open(decoder, places));
        let stager = device.stager();
        let (mut queue, landings) = device.split();
        let start =
            Item::Start { slot: Self::SLOT, turn: Turn(1), session: SessionId(1), eos: Arc::new([]), seed: None };
        queue.append(vec![start]).unwrap();
        let companion = HostCompanion::new(decoder.clone());
        let peeks = decoder.geometry().moe.is_some_and(|moe| places < moe.experts);
        Self { queue, landings, companion, stager, flight: 0, turn: 1, missed: 0, peeks, whole: 0 }
    }

    fn stamp(&mut self) -> Stamp {
        self.flight += 1;
        Stamp { flight: FlightId(self.flight), slot: Self::SLOT, turn: Turn(self.turn) }
    }

    fn record(&mut self, wait: Wait) -> Record {
        match self.landings.wait(wait, None).unwrap() {
            Landing::Record(record) => *record,
            other => panic!("{other:?}"),
        }
    }

    /// Runs `work` over its batches. Each miss is served half by the host and half by upload, experts in turn.
    fn run(&mut self, from: u32, to: u32, work: &Work) -> Vec<TokenId> {
        let (mut at, to) = (Point::start_of(from), Point::start_of(to));
        let (mut before, mut ids) = (vec![], vec![]);
        loop {
            let stamp = self.stamp();
            // a peek at the first route, where there is one
            let peeks: Vec<_> =
                (self.peeks && at.phase == Phase::Route).then_some((at, Staging(1))).into_iter().collect();
            let peeked = !peeks.is_empty();
            let run = Run { stamp, from: at, to, work: work.clone(), limit: Position(1000), peeks };
            let mut items = std::mem::take(&mut before);
            items.extend([Item::Run(run), Item::Land { stamp, staging: Staging(0) }]);
            self.queue.append(items).unwrap();
            let mut early = None;
            if peeked {
                early = self.record(Wait::Peek(Staging(1))).missed;
                let at_the_route = early.as_ref().is_none_or(|missed| missed.stop.point == at);
                assert!(at_the_route, "a peek shows the route before it");
            }
            let record = self.record(Wait::Land(Staging(0)));
            if record.out.flight == stamp.flight {
                ids.extend(record.out.ids);
            }
            let Some(stop) = record.stop else {
                assert!(record.missed.is_none());
                return ids;
            };
            assert_eq!(stop.kind, StopKind::Miss);
            assert!(early.is_none() || record.missed.is_none(), "a miss is read once");
            let missed = record.missed.or(early).expect("a miss has its record");
            assert_eq!((stop.flight, stop.turn, missed.stop), (stamp.flight, stamp.turn, stop));
            let experts: Vec<ExpertIx> = missed.by_expert().into_iter().map(|(expert, _)| expert).collect();
            self.whole += usize::from(missed.missing.chunks(missed.top_k).any(|row| row.iter().all(|m| *m)));
            self.missed += experts.len();
            let picked: HashSet<ExpertIx> = missed.picks.iter().copied().collect();
            assert!(experts.iter().all(|expert| picked.contains(expert)));
            // every second expert comes by upload, all through the same place
            let leave: Vec<ExpertIx> = experts.iter().copied().skip(1).step_by(2).collect();
            let made = self.companion.complete(&missed, &leave);
            // A cure for another turn changes nothing.
            let stale = riparian::device::Stop { turn: Turn(stop.turn.0 + 7), ..stop };
            before.push(Item::Resume { stop: stale, turn: Turn(stop.turn.0 + 9), made: made.clone() });
            self.turn += 1;
            let turn = Turn(self.turn);
            before.push(Item::Resume { stop, turn, made });
            for (i, expert) in leave.into_iter().enumerate() {
                let (layer, place) = (missed.layer, PlaceIx(0));
                let staging = UploadStaging((i % 8) as u16);
                let mut payload = Arc::new(self.companion.payload(layer, expert));
                // laid out ahead of its upload or within it
                if i % 2 == 0 {
                    payload = self.stager.as_ref().expect("a partial bank").stage(payload).unwrap();
                }
                before.push(Item::Upload { layer, place, payload, staging });
                let stamp = Stamp { turn, ..stamp };
                before.push(Item::Fill { stamp, layer, place, expert });
            }
            at = Point { phase: Phase::Sum, ..stop.point };
        }
    }
}

/// Both ways to serve a miss, in steps and in passes, without actors: every miss is split between the host and uploads.
#[test]
fn misses_are_served_by_the_host_and_by_upload() {
    let mut whole = 0;
    for (name, decoder) in models() {
        let rows = prompt(&decoder, PASS_ROWS + 5);
        let width = decoder.geometry().hidden;
        let moe = decoder.geometry().moe.expect("experts");
        let mut all = vec![];
        for places in [moe.experts, moe.top_k] {
            let mut bare = Bare::new(&decoder, places);
            let passes: Vec<&[f32]> = rows.chunks(PASS_ROWS * width).collect();
            let mut ids = vec![];
            for (i, pass) in passes.iter().enumerate() {
                let accept = i + 1 == passes.len();
                let pass = Work::Prefill(Arc::new(Pass { rows: pass.to_vec(), accept }));
                ids.extend(bare.run(i as u32, i as u32 + 1, &pass));
            }
            let first = passes.len() as u32;
            ids.extend(bare.run(first, first + 15, &Work::Steps));
            assert_eq!(ids.len(), 16, "{name}");
            assert_eq!(bare.missed == 0, places == moe.experts, "{name}");
            whole += bare.whole;
            all.push(ids);
        }
        if let Some(at) = (0..16).find(|at| all[0][*at] != all[1][*at]) {
            let clear = margins(&decoder, &rows, &all[0])[at];
            assert!(clear < TIE, "{name}, id {at}: margin {clear}\n{all:?}");
        }
    }
    assert!(whole > 0, "no row missed all it picked");
}
