//! The wgpu device against every reference, on whatever adapter the environment names (lavapipe in CI).
//!
//! `RIPARIAN_TEST_ADAPTER` names it (default `llvmpipe`); a test fails where there is none, and says which adapter and
//! which kernel variant it ran on.

use std::sync::Arc;
use std::time::{Duration, Instant};

use riparian::device::kernels::Team;
use riparian::device::wgpu::faults::Faults;
use riparian::device::wgpu::slot::ROWS;
use riparian::device::wgpu::{Gpu, Setup, find};
use riparian::device::{
    Device, Item, Landing, Landings, Pass, Point, Queue, Read, Run, Seed, Staging, Stamp, Wait, Work,
};
use riparian::ids::{BlockIx, ExpertIx, FlightId, Position, SessionId, SlotIx, TokenId, Turn};
use riparian::knobs::{Activations, DeviceChoice};
use riparian::model::geometry::BlockKind;
use riparian::model::state::{BlockState, SequenceState};
use riparian::model::weights::Mixer;
use riparian::plan::record::Name;

use crate::case::Case;
use crate::guards::Guards;
use crate::harness::{Blocks, Decode, Engine, RouteTrace, check_blocks, check_decode};
use crate::reference::Reference;
use crate::tolerance::{F32, F32_OTHER_LADDER, INT8, INT8_BLOCK, Tolerance};

const SLOT: SlotIx = SlotIx(0);

/// The device with guard words behind every buffer, and how they are looked at.
fn open_guarded(
    case: &Case,
    activations: Activations,
    team: Option<Team>,
    batch: usize,
    positions: usize,
) -> (Gpu, Guards) {
    let name = std::env::var("RIPARIAN_TEST_ADAPTER").unwrap_or_else(|_| "llvmpipe".into());
    let found = find(&DeviceChoice::Adapter(name.clone())).expect("an adapter for the tests");
    assert!(found.info().name.to_lowercase().contains(&name.to_lowercase()), "{:?}", found.info());
    let faults = Faults::default();
    faults.guard_buffers();
    let context = found.open_with(team, true, faults).expect("a device");
    let guards = Guards::of(&context);
    if let Some(team) = team {
        assert_eq!(context.team, team);
    }
    let setup = Setup {
        activations,
        positions,
        slots: 1,
        pass_rows: batch,
        window_bytes: 64 << 20,
        keep_logits: false,
        skip: vec![],
        drafts: None,
    };
    let gpu =
        Gpu::open(context, &case.geometry, case.weights(), &setup, &mut |_, _| {}).expect("the model on the device");
    (gpu, guards)
}

#[test]
fn guard_words_tell_who_wrote_past_the_end() {
    let Some(case) = Case::fixture("kernel") else { return };
    let (gpu, guards) = open_guarded(&case, Activations::Int8, None, 8, 64);
    let word = u32::MAX.to_le_bytes();
    let (what, buffer, bytes) = guards.context().faults.last_guarded();
    guards.context().queue.write_buffer(&buffer, bytes + 8, &word);
    assert_eq!(guards.context().faults.broken_guards(&guards.context().device, &guards.context().queue), [what]);
    drop(gpu);
    std::mem::forget(guards);
}

/// The device behind its two halves, one session.
struct Whole {
    label: String,
    queue: Box<dyn Queue>,
    landings: Box<dyn Landings>,
    turn: u32,
    flights: u64,
    batch: usize,
    hidden: usize,
    _guards: Guards,
}

impl Whole {
    fn new(case: &Case, activations: Activations, team: Option<Team>, batch: usize) -> Self {
        Self::with_room(case, activations, team, batch, 256)
    }

    fn with_room(case: &Case, activations: Activations, team: Option<Team>, batch: usize, positions: usize) -> Self {
        let (gpu, guards) = open_guarded(case, activations, team, batch, positions);
        assert_eq!(gpu.facts().prefill_rows, batch, "passes as wide as they were asked for");
        let label = format!("{} {activations:?}, passes of {batch}", gpu.facts().name);
        let (queue, landings) = Box::new(gpu).split();
        Self { label, queue, landings, turn: 0, flights: 0, batch, hidden: case.geometry.hidden, _guards: guards }
    }

    fn begin(&mut self) {
        self.turn += 1;
        let (slot, turn) = (SLOT, Turn(self.turn));
        let start = Item::Start { slot, turn, session: SessionId(1), eos: Arc::new([]), seed: None };
        self.queue.append(vec![start]).expect("queued");
    }

    fn state(&mut self) -> Box<Seed> {
        let read = Item::Read { slot: SLOT, what: Read::State, staging: Staging(0) };
        self.queue.append(vec![read]).expect("queued");
        match self.landings.wait(Wait::Read(Staging(0)), None).expect("landed") {
            Landing::State(seed) => seed,
            other => panic!("{other:?}"),
        }
    }

    fn run(&mut self, from: u32, to: u32, work: Work) -> Vec<TokenId> {
        self.flights += 1;
        let stamp = Stamp { flight: FlightId(self.flights), slot: SLOT, turn: Turn(self.turn) };
        let run = Run {
            stamp,
            from: Point::start_of(from),
            to: Point::start_of(to),
            work,
            limit: Position(10_000),
            peeks: vec![],
        };
        self.queue.append(vec![Item::Run(run), Item::Land { stamp, staging: Staging(0) }]).expect("queued");
        let deadline = Instant::now() + Duration::from_secs(300);
        match self.landings.wait(Wait::Land(Staging(0)), Some(deadline)).expect("landed") {
            Landing::Record(record) => {
                assert_eq!(record.flight, stamp.flight);
                assert_eq!(record.stop, None);
                if record.out.flight == stamp.flight { record.out.ids } else { vec![] }
            }
            other => panic!("{other:?}"),
        }
    }
}

impl Engine for Whole {
    fn label(&self) -> String {
        self.label.clone()
    }
}

impl Decode for Whole {
    fn decode(&mut self, rows: &[f32], steps: usize) -> Vec<TokenId> {
        self.begin();
        let passes: Vec<&[f32]> = rows.chunks(self.batch * self.hidden).collect();
        let mut ids = Vec::new();
        for (i, pass) in passes.iter().enumerate() {
            let pass = Pass { rows: pass.to_vec(), accept: i + 1 == passes.len() };
            ids.extend(self.run(i as u32, i as u32 + 1, Work::Prefill(Arc::new(pass))));
        }
        let mut batch = passes.len() as u32;
        while ids.len() < steps {
            let n = (steps - ids.len()).min(16) as u32;
            let more = self.run(batch, batch + n, Work::Steps);
            assert_eq!(more.len(), n as usize);
            ids.extend(more);
            batch += n;
        }
        ids
    }
}

/// The device looked into: one block at a time.
struct Inside {
    label: String,
    gpu: Gpu,
    _guards: Guards,
    kinds: Vec<BlockKind>,
    empty: SequenceState,
    /// `[layers, experts]`
    biases: Vec<Vec<f32>>,
}

impl Inside {
    fn new(case: &Case, activations: Activations, team: Option<Team>) -> Self {
        let (gpu, guards) = open_guarded(case, activations, team, 1, 256);
        let label = format!("{} {activations:?}, block by block", gpu.facts().name);
        let biases = (case.weights().blocks.iter())
            .filter_map(|block| match &block.mixer {
                Mixer::Moe(moe) => Some(moe.bias.clone()),
                _ => None,
            })
            .collect();
        Self {
            label,
            gpu,
            _guards: guards,
            kinds: case.geometry.blocks.clone(),
            empty: SequenceState::new(&case.geometry),
            biases,
        }
    }

    fn state(&mut self) -> Box<Seed> {
        let read = Item::Read { slot: SLOT, what: Read::State, staging: Staging(0) };
        self.gpu.queue().append(vec![read]).expect("queued");
        match self.gpu.landings().wait(Wait::Read(Staging(0)), None).expect("landed") {
            Landing::State(seed) => seed,
            other => panic!("{other:?}"),
        }
    }
}

impl Engine for Inside {
    fn label(&self) -> String {
        self.label.clone()
    }
}

impl Blocks for Inside {
    fn block(&mut self, block: BlockIx, rows: &mut [f32], state: &mut BlockState) -> Option<RouteTrace> {
        let mut seed = Seed { state: self.empty.clone(), hidden: vec![] };
        let width = rows.len() / self.rows_of(rows.len());
        let begun = match &*state {
            BlockState::Attention(kv) => kv.k.len() / self.kv_width(),
            // any position past the ring's reach: what came before lies in the state
            _ => 8,
        };
        seed.state.blocks[block.index()] = state.clone();
        seed.state.position = Position(begun as u32);
        let start = Item::Start {
            slot: SLOT,
            turn: Turn(0),
            session: SessionId(1),
            eos: Arc::new([]),
            seed: Some(Arc::new(seed)),
        };
        self.gpu.queue().append(vec![start]).expect("queued");
        let mut routes = RouteTrace { logits: Some(vec![]), picks: vec![], weights: vec![] };
        for (i, row) in rows.chunks_exact_mut(width).enumerate() {
            let out = self.gpu.queue().run_block(SLOT, block, Position((begun + i) as u32), row).expect("ran");
            row.copy_from_slice(&out);
            if self.kinds[block.index()] == BlockKind::Moe {
                self.route(block, &mut routes);
            }
        }
        if self.kinds[block.index()] != BlockKind::Moe {
            // the position after the last row decides what of rings and KV is read
            let n = rows.len() / width;
            self.gpu.queue().set_position(SLOT, Position((begun + n) as u32));
            *state = self.state().state.blocks.swap_remove(block.index());
            return None;
        }
        Some(routes)
    }
}

impl Inside {
    fn rows_of(&mut self, floats: usize) -> usize {
        floats / self.gpu.facts().hidden
    }

    /// What the block's route left: experts ascending on the device, best first in the reference.
    fn route(&mut self, block: BlockIx, routes: &mut RouteTrace) {
        let geometry = self.gpu.queue().core().geometry.clone();
        let moe = geometry.moe.expect("experts");
        let layer = geometry.layer_of(block);
        let hidden = geometry.hidden.next_multiple_of(32);
        let floats = |words: Vec<u32>| words.into_iter().map(f32::from_bits).collect::<Vec<f32>>();
        let at = ROWS * hidden;
        let routing = floats(self.gpu.queue().words(SLOT, Name::Routing, at + moe.experts).expect("read"));
        let logits = &routing[at..];
        let (k, entry) = (moe.top_k, 4);
        let words = self.gpu.queue().words(SLOT, Name::Routes(layer), 1 + k * entry + k).expect("read");
        assert_eq!(words[0] as usize, k, "experts chosen");
        let weights = floats(words[1 + k * entry..].to_vec());
        let score = |e: u32| 1.0 / (1.0 + (-logits[e as usize]).exp()) + self.biases[layer.index()][e as usize];
        let mut picks: Vec<(u32, f32)> = words[1..].chunks(entry).map(|entry| entry[0]).zip(weights).take(k).collect();
        picks.sort_by(|a, b| score(b.0).total_cmp(&score(a.0)));
        routes.logits.get_or_insert_default().extend_from_slice(logits);
        routes.picks.extend(picks.iter().map(|(e, _)| ExpertIx(*e as u16)));
        routes.weights.extend(picks.iter().map(|(_, w)| *w));
    }

    fn kv_width(&mut self) -> usize {
        self.gpu.queue().core().geometry.attention.expect("attention").kv_width()
    }
}

fn tolerance(activations: Activations, blocks: bool) -> &'static Tolerance {
    match (activations, blocks) {
        (Activations::F32, _) => &F32_OTHER_LADDER,
        (Activations::Int8, true) => &INT8_BLOCK,
        (Activations::Int8, false) => &INT8,
    }
}

const ARITHMETICS: [Activations; 2] = [Activations::F32, Activations::Int8];

fn decode(case: &Case, team: Option<Team>) {
    for activations in ARITHMETICS {
        let mut engine = Whole::new(case, activations, team, 16);
        check_decode(case, &mut engine, tolerance(activations, false));
    }
}

macro_rules! decodes {
    ($($test:ident $load:ident $name:literal $team:expr;)*) => {
        $(#[test]
        fn $test() {
            if let Some(case) = Case::$load($name) {
                decode(&case, $team);
            }
        })*
    };
}

decodes! {
    tiny fixture "tiny" None;
    tiny_without_subgroups fixture "tiny" Some(Team::None);
    kernel fixture "kernel" None;
    tiny_groups fixture "tiny-groups" None;
    tiny_mlp fixture "tiny-mlp" None;
    tiny_clamp fixture "tiny-clamp" None;
    tiny_nemo fixture "tiny-nemo" None;
    wide fixture "wide" None;
    peer_tiny_f32 peer "tiny-f32" None;
    peer_nemo_exact peer "nemo-exact-mtp" None;
}

/// A quantised file in both arithmetics, each against the plain decoder's recordings of that arithmetic: ids, and block
/// by block.
fn quantized(name: &str, team: Option<Team>) {
    let Some(case) = Case::peer(name) else { return };
    for activations in ARITHMETICS {
        let recorded = Reference::record(&case, activations, 24);
        let Some(case) = Case::peer(name) else { return };
        let case = case.with_reference(recorded);
        check_blocks(&case, &mut Inside::new(&case, activations, team), &[], tolerance(activations, true));
        check_decode(&case, &mut Whole::new(&case, activations, team, 16), tolerance(activations, false));
    }
}

#[test]
fn peer_nemo_q4tp() {
    quantized("nemo-q4tp", None);
}

#[test]
fn peer_kernel_q4tp() {
    quantized("kernel-q4tp", None);
}

#[test]
fn peer_kernel_q4tp_without_subgroups() {
    quantized("kernel-q4tp", Some(Team::None));
}

#[test]
fn blocks_of_kernel() {
    let Some(case) = Case::fixture("kernel") else { return };
    check_blocks(&case, &mut Inside::new(&case, Activations::F32, None), &[], &F32);
}

/// The whole prompt in one pass, experts sorted over all its rows.
#[test]
fn prompts_in_one_pass() {
    for name in ["kernel-q4tp", "nemo-q4tp"] {
        let Some(case) = Case::peer(name) else { continue };
        for activations in ARITHMETICS {
            let recorded = Reference::record(&case, activations, 24);
            let Some(case) = Case::peer(name) else { continue };
            let case = case.with_reference(recorded);
            check_decode(&case, &mut Whole::new(&case, activations, None, 128), tolerance(activations, false));
        }
    }
}

/// However a prompt is cut, it leaves the same state: row by row, in one pass of many chunks, in passes that do not
/// divide anything, and with a tail whose keys are split.
#[test]
fn passes_of_any_width_leave_the_same_state() {
    const ROWS_ALL: usize = 2200;
    // without experts, so that no near-tie of a router can make a difference
    let Some(case) = Case::fixture("tiny-mlp") else { return };
    let hidden = case.geometry.hidden;
    let wave = |i: usize| ((i * i % 1009) as f32 * 0.37 + i as f32 * 1.7).sin();
    let rows: Vec<f32> = (0..ROWS_ALL * hidden).map(wave).collect();
    let states = [&[8usize][..], &[1100, 300, 700, 100], &[2200]].map(|passes| {
        let mut engine = Whole::with_room(&case, Activations::F32, None, *passes.iter().max().expect("one"), ROWS_ALL);
        engine.begin();
        let (mut at, mut batch) = (0, 0);
        for n in passes.iter().cycle() {
            let to = (at + n * hidden).min(rows.len());
            let pass = Pass { rows: rows[at..to].to_vec(), accept: to == rows.len() };
            let ids = engine.run(batch, batch + 1, Work::Prefill(Arc::new(pass)));
            (at, batch) = (to, batch + 1);
            if at == rows.len() {
                assert_eq!(ids.len(), 1);
                return (ids, engine.state());
            }
        }
        unreachable!("passes have rows")
    });
    let (ids, want) = &states[0];
    for (others, got) in &states[1..] {
        assert_eq!((others, got.state.position), (ids, Position(ROWS_ALL as u32)));
        for (block, (got, want)) in got.state.blocks.iter().zip(&want.state.blocks).enumerate() {
            let parts: Vec<(&[f32], &[f32])> = match (got, want) {
                (BlockState::Mamba(g), BlockState::Mamba(w)) => vec![(&g.conv, &w.conv), (&g.ssm, &w.ssm)],
                (BlockState::Attention(g), BlockState::Attention(w)) => vec![(&g.k, &w.k), (&g.v, &w.v)],
                (BlockState::None, BlockState::None) => vec![],
                other => panic!("{other:?}"),
            };
            for (got, want) in parts {
                assert_eq!(got.len(), want.len());
                let error: f64 = got.iter().zip(want).map(|(g, w)| f64::from(g - w).powi(2)).sum();
                let power: f64 = want.iter().map(|w| f64::from(*w).powi(2)).sum();
                assert!(error <= 1e-9 * power, "block {block}: {:e}", error / power);
            }
        }
    }
}
