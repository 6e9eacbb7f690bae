//! A device for tests: the protocol in full over maths that cost nothing, stepped by hand or run by a thread.
//!
//! Its model is a hash chain: every row's value depends on every value before
//! it, so a stale, missing or double effect changes every later id. Rows are
//! 24-bit numbers in floats, exact in every sum. Its [`Hand`] steps it one
//! visible action at a time, loses it, or lets it hang.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use super::board::{Board, BoardLandings};
use super::machine::{Machine, Maths, Micro, Routed, expand};
use super::{
    Companion, Completions, Device, DeviceError, DeviceKind, DraftAbility, Facts, Halves, Item, Missed, Payload, Queue,
    Seed, worker,
};
use crate::check;
use crate::ids::{BlockIx, ExpertIx, LayerIx, Position, TokenId};
use crate::invariants::Broken;
use crate::knobs::Activations;
use crate::model::state::{BlockState, KvState, MambaState, SequenceState};

/// Floats of a row: more than one, so that wrong strides show.
const HIDDEN: usize = 2;
/// Floats of an expert's output: another number than [`HIDDEN`].
const WIDTH: usize = 3;

/// Shape and habits of a scripted device and its model.
#[derive(Clone, Debug, PartialEq)]
pub struct Script {
    /// Decides every value.
    pub seed: u32,
    /// MoE layers; may be 0.
    pub layers: usize,
    /// Experts a layer.
    pub experts: usize,
    /// Experts a row picks.
    pub top_k: usize,
    /// Places a layer; the first experts are resident at the start.
    pub places: usize,
    /// Experts that rows like, the first ones.
    pub hot: usize,
    /// A row picks an expert beyond those at one route in so many; 0 never.
    pub miss_one_in: u32,
    /// Ids.
    pub vocab: u32,
    /// One draft in so many is wrong; 0 never, 1 always.
    pub wrong_one_in: u32,
    /// As in [`Facts`].
    pub slots: usize,
    /// As in [`Facts`].
    pub kv_positions: usize,
    /// As in [`Facts`].
    pub prefill_rows: usize,
    /// As in [`Facts`].
    pub verify_rows: usize,
    /// As in [`Facts`].
    pub drafts: DraftAbility,
    /// As in [`Facts`].
    pub spare_place: bool,
    /// As in [`Facts`].
    pub staging: usize,
    /// As in [`Facts`].
    pub upload_staging: usize,
    /// As in [`Facts`].
    pub landing_deadline: Option<Duration>,
    /// Whether it tells which block made a value that is not finite, as an adapter does not.
    pub names_blocks: bool,
    /// For tests of the tests.
    #[doc(hidden)]
    pub broken: Broken,
}

impl Default for Script {
    fn default() -> Self {
        Self {
            seed: 1,
            layers: 2,
            experts: 6,
            top_k: 2,
            places: 4,
            hot: 4,
            miss_one_in: 3,
            vocab: 61,
            wrong_one_in: 4,
            slots: 2,
            kv_positions: 64,
            prefill_rows: 4,
            verify_rows: 1,
            drafts: DraftAbility::None,
            spare_place: false,
            staging: 8,
            upload_staging: 2,
            landing_deadline: None,
            names_blocks: true,
            broken: Broken::No,
        }
    }
}

impl Script {
    /// What the device will say of itself.
    #[must_use]
    pub fn facts(&self) -> Facts {
        let places = (0..self.places).map(|p| (p < self.experts).then(|| ExpertIx::from(p))).collect();
        Facts {
            name: "scripted".into(),
            kind: DeviceKind::Scripted,
            activations: Activations::F32,
            slots: self.slots,
            kv_positions: self.kv_positions,
            hidden: HIDDEN,
            layers: self.layers,
            experts: self.experts,
            top_k: self.top_k,
            expert_width: WIDTH,
            residents: vec![places; self.layers],
            spare_place: self.spare_place,
            prefill_rows: self.prefill_rows,
            streamed_rows: None,
            verify_rows: self.verify_rows,
            drafts: self.drafts,
            staging: self.staging,
            upload_staging: self.upload_staging,
            landing_deadline: self.landing_deadline,
            class_times: None,
        }
    }

    /// The model alone.
    #[must_use]
    pub fn model(&self) -> ChainModel {
        ChainModel { script: self.clone() }
    }

    /// A device that runs when its hand steps it.
    #[must_use]
    pub fn stepped(&self) -> (ScriptedDevice, Hand) {
        let mut machine = Machine::new(ChainMaths { model: self.model() }, self.facts());
        (machine.names_blocks, machine.broken) = (self.names_blocks, self.broken);
        let shared = Arc::new(Stepped {
            board: Arc::new(Board::default()),
            inner: Mutex::new(Inner { machine, queue: VecDeque::new(), hangs: false }),
            layers: self.layers,
            broken: self.broken,
        });
        (ScriptedDevice { facts: self.facts(), drive: Drive::Stepped(shared.clone()) }, Hand(shared))
    }

    /// A device on its own thread, which waits up to `delay` before each visible step, and dies before the step numbered
    /// `dies_at`.
    #[must_use]
    pub fn threaded(&self, delay: Duration, dies_at: Option<u32>) -> ScriptedDevice {
        ScriptedDevice { facts: self.facts(), drive: Drive::Threaded(Box::new(self.clone()), delay, dies_at) }
    }
}

// ------------------------------------------------------------------ the model

fn mix(a: u32, b: u32) -> u32 {
    let mut h = a.wrapping_mul(0x9E37_79B1) ^ b.wrapping_mul(0x85EB_CA77).rotate_left(13);
    h ^= h >> 15;
    h = h.wrapping_mul(0x2C1B_3C6D);
    h ^ (h >> 13)
}

/// 24 bits of a hash as a float.
fn float(hash: u32) -> f32 {
    (hash >> 8) as f32
}

fn number(value: f32) -> u32 {
    value as u32
}

/// A row's value.
fn value(row: &[f32]) -> u32 {
    row.iter().fold(7, |h, x| mix(h, number(*x)))
}

fn row_of(value: u32) -> [f32; HIDDEN] {
    std::array::from_fn(|c| float(mix(value, c as u32 + 41)))
}

/// The scripted device's model, without device or banks: what every id must be.
#[derive(Clone, Debug, PartialEq)]
pub struct ChainModel {
    script: Script,
}

/// State of a sequence: a chain for each layer, one for the tail, and what a batch needs to go back.
#[derive(Clone, Debug, Default)]
pub struct Chain {
    position: usize,
    scans: Vec<u32>,
    tail: u32,
    /// Scans and tail behind each row of the batch under way.
    snapshots: Vec<(Vec<u32>, u32)>,
    last: u32,
}

impl ChainModel {
    fn embed(&self, id: TokenId) -> [f32; HIDDEN] {
        row_of(mix(id.0, 77 ^ self.script.seed))
    }

    /// Any row that is no embedding: for prompts.
    #[must_use]
    pub fn prompt_row(&self, session: u64, position: usize) -> Vec<f32> {
        row_of(mix(mix(session as u32 ^ self.script.seed, position as u32), 99)).to_vec()
    }

    fn picks(&self, x: u32, layer: usize) -> Vec<ExpertIx> {
        let s = &self.script;
        let h = mix(x, layer as u32 + 31);
        let hot = s.hot.min(s.experts);
        let cold = hot < s.experts && s.miss_one_in > 0 && h.is_multiple_of(s.miss_one_in);
        let mut picks: Vec<usize> = Vec::new();
        for i in 0.. {
            if picks.len() == s.top_k {
                break;
            }
            let draw = mix(h, i) >> 8;
            let first = cold && picks.is_empty();
            let pick = if first {
                hot + draw as usize % (s.experts - hot)
            } else if cold || hot < s.top_k {
                draw as usize % s.experts
            } else {
                draw as usize % hot
            };
            if !picks.contains(&pick) {
                picks.push(pick);
            }
        }
        picks.into_iter().map(ExpertIx::from).collect()
    }

    fn expert(&self, normed: &[f32], layer: usize, expert: u32) -> [f32; WIDTH] {
        let h = mix(mix(value(normed), layer as u32 + 1), expert + 100);
        std::array::from_fn(|c| float(mix(h, c as u32)))
    }

    fn close(&self, x: u32, weights: &[f32], outputs: &[f32], shared: &[f32]) -> u32 {
        let folded = (outputs.chunks_exact(WIDTH).zip(weights)).fold(3, |h, (o, w)| mix(h, mix(value(o), number(*w))));
        mix(x, mix(folded, value(shared)))
    }

    /// One row through all blocks: the value behind the last.
    fn step(&self, chain: &mut Chain, row: &[f32]) -> u32 {
        let mut row: Vec<f32> = row.to_vec();
        for layer in 0..self.script.layers {
            let (normed, picks, weights) = self.route(&mut chain.scans[layer], layer, &mut row);
            let outputs: Vec<f32> = picks.iter().flat_map(|e| self.expert(&normed, layer, u32::from(e.0))).collect();
            let shared = self.expert(&normed, layer, 9999);
            row = row_of(self.close(value(&row), &weights, &outputs, &shared[..HIDDEN])).to_vec();
        }
        chain.tail = mix(chain.tail, value(&row));
        chain.position += 1;
        chain.last = chain.tail;
        chain.tail
    }

    fn route(&self, scan: &mut u32, layer: usize, row: &mut [f32]) -> (Vec<f32>, Vec<ExpertIx>, Vec<f32>) {
        *scan = mix(*scan, value(row));
        row.copy_from_slice(&row_of(mix(value(row), *scan)));
        let normed = row_of(mix(value(row), 5)).to_vec();
        let picks = self.picks(value(&normed), layer);
        let weights = picks.iter().map(|e| float(mix(value(&normed), u32::from(e.0)))).collect();
        (normed, picks, weights)
    }

    fn argmax(&self, x: u32) -> TokenId {
        TokenId((x >> 4) % self.script.vocab)
    }

    fn fresh(&self) -> Chain {
        Chain { scans: vec![self.script.seed; self.script.layers], ..Chain::default() }
    }

    /// Plain decode: the ids behind a prompt `[n, hidden]`, up to an end id or `max_new`, and never past `capacity` rows.
    #[must_use]
    pub fn plain(&self, prompt: &[f32], eos: &[TokenId], max_new: usize, capacity: usize) -> Vec<TokenId> {
        let (mut chain, mut ids, mut x) = (self.fresh(), Vec::new(), 0);
        prompt.chunks_exact(HIDDEN).for_each(|row| x = self.step(&mut chain, row));
        while ids.len() < max_new {
            let id = self.argmax(x);
            ids.push(id);
            if eos.contains(&id) || chain.position == capacity {
                break;
            }
            x = self.step(&mut chain, &self.embed(id));
        }
        ids
    }

    /// A guess of the ids behind `ids`, wrong as often as the script says: for drafts made on the host.
    #[must_use]
    pub fn guess(&self, prompt: &[f32], ids: &[TokenId], n: usize) -> Vec<TokenId> {
        let mut all = self.plain(prompt, &[], ids.len() + n, usize::MAX).split_off(ids.len());
        for (i, id) in all.iter_mut().enumerate() {
            if self.is_wrong((ids.len() + i) as u32) {
                id.0 ^= 1;
            }
        }
        all
    }

    fn is_wrong(&self, position: u32) -> bool {
        let one_in = self.script.wrong_one_in;
        one_in > 0 && (mix(position, self.script.seed ^ 0xD4AF) >> 8).is_multiple_of(one_in)
    }
}

impl Companion for ChainModel {
    fn embed(&self, id: TokenId) -> Vec<f32> {
        ChainModel::embed(self, id).to_vec()
    }

    fn complete(&self, missed: &Missed, leave: &[ExpertIx]) -> Completions {
        let mut made = Completions::default();
        for (expert, wanted) in missed.by_expert().into_iter().filter(|(expert, _)| !leave.contains(expert)) {
            for (n, pick) in wanted {
                made.at.push(missed.at(n, pick));
                let normed = missed.normed_row(n as usize);
                made.outputs.extend(self.expert(normed, missed.layer.index(), u32::from(expert.0)));
            }
        }
        made
    }

    fn payload(&self, layer: LayerIx, expert: ExpertIx) -> Payload {
        Payload::new(layer, expert, vec![layer.0 as u8 ^ 0x5A, expert.0 as u8, 3, 4, 5])
    }

    fn first_not_finite(&self, _: Option<&Seed>, rows: &[f32], _: &[TokenId]) -> Result<BlockIx, String> {
        // Its own values are always finite, so the rows were not.
        if rows.iter().any(|x| !x.is_finite()) { Ok(BlockIx(0)) } else { Err("all rows are finite".into()) }
    }
}

// ------------------------------------------------------------------ the model on the machine

struct ChainMaths {
    model: ChainModel,
}

impl Maths for ChainMaths {
    type State = Chain;

    fn start(&mut self, seed: Option<&Seed>) -> Chain {
        let mut chain = self.model.fresh();
        if let Some(seed) = seed {
            chain.position = seed.state.position.index();
            let BlockState::Mamba(state) = &seed.state.blocks[0] else { unreachable!("its own kind of state") };
            chain.scans = state.ssm.iter().map(|x| x.to_bits()).collect();
            chain.tail = state.conv[0].to_bits();
            chain.last = chain.tail;
        }
        chain
    }

    fn embed(&self, id: TokenId) -> Vec<f32> {
        self.model.embed(id).to_vec()
    }

    fn route(
        &mut self,
        chain: &mut Chain,
        layer: LayerIx,
        rows: &mut [f32],
        _snapshots: bool,
    ) -> Result<Routed, BlockIx> {
        let n = rows.len() / HIDDEN;
        if layer.0 == 0 {
            chain.snapshots = vec![(chain.scans.clone(), chain.tail); n];
        }
        if rows.iter().any(|x| !x.is_finite()) {
            return Err(BlockIx(layer.0));
        }
        let mut routed = Routed::default();
        for (i, row) in rows.chunks_exact_mut(HIDDEN).enumerate() {
            let (normed, picks, weights) = self.model.route(&mut chain.scans[layer.index()], layer.index(), row);
            chain.snapshots[i].0[layer.index()] = chain.scans[layer.index()];
            routed.normed.extend(normed);
            routed.picks.extend(picks);
            routed.weights.extend(weights);
        }
        Ok(routed)
    }

    fn experts(&mut self, layer: LayerIx, normed: &[f32], wanted: &[(ExpertIx, Vec<u32>)]) -> Vec<f32> {
        let all = wanted.iter().flat_map(|(expert, rows)| rows.iter().map(move |row| (expert, *row as usize)));
        all.flat_map(|(expert, row)| {
            self.model.expert(&normed[row * HIDDEN..][..HIDDEN], layer.index(), u32::from(expert.0))
        })
        .collect()
    }

    fn shared(&mut self, layer: LayerIx, normed: &[f32]) -> Vec<f32> {
        let rows = normed.chunks_exact(HIDDEN);
        rows.flat_map(|row| self.model.expert(row, layer.index(), 9999).into_iter().take(HIDDEN)).collect()
    }

    fn sum(
        &mut self,
        _layer: LayerIx,
        rows: &mut [f32],
        routed: &Routed,
        outputs: &[f32],
        shared: &[f32],
    ) -> Result<(), BlockIx> {
        let k = self.model.script.top_k;
        for (i, row) in rows.chunks_exact_mut(HIDDEN).enumerate() {
            let x = self.model.close(
                value(row),
                &routed.weights[i * k..][..k],
                &outputs[i * k * WIDTH..][..k * WIDTH],
                &shared[i * HIDDEN..][..HIDDEN],
            );
            row.copy_from_slice(&row_of(x));
        }
        Ok(())
    }

    fn finish(
        &mut self,
        chain: &mut Chain,
        rows: &mut [f32],
        first: usize,
        _snapshots: bool,
    ) -> Result<Vec<TokenId>, BlockIx> {
        let n = rows.len() / HIDDEN;
        if self.model.script.layers == 0 {
            chain.snapshots = vec![(Vec::new(), 0); n];
            if rows.iter().any(|x| !x.is_finite()) {
                return Err(BlockIx(0));
            }
        }
        for (i, row) in rows.chunks_exact(HIDDEN).enumerate() {
            chain.tail = mix(chain.tail, value(row));
            chain.snapshots[i].1 = chain.tail;
        }
        Ok(chain.snapshots[first..].iter().map(|(_, tail)| self.model.argmax(*tail)).collect())
    }

    fn keep(&mut self, chain: &mut Chain, _inputs: &[f32], kept: usize) {
        let (scans, tail) = chain.snapshots[kept - 1].clone();
        (chain.scans, chain.tail, chain.last) = (scans, tail, tail);
        chain.position += kept;
    }

    fn draft(&mut self, chain: &mut Chain, next: TokenId, depth: usize) -> Vec<TokenId> {
        let (mut chain, mut id, mut drafts) = (chain.clone(), next, Vec::new());
        for i in 0..depth {
            let x = self.model.step(&mut chain, &self.model.embed(id));
            id = self.model.argmax(x);
            let wrong = self.model.is_wrong((chain.position + i) as u32);
            drafts.push(if wrong { TokenId(id.0 ^ 1) } else { id });
        }
        drafts
    }

    fn save(&self, chain: &Chain) -> Seed {
        let ssm = chain.scans.iter().map(|x| f32::from_bits(*x)).collect();
        let state = SequenceState {
            position: Position::from(chain.position),
            blocks: vec![BlockState::Mamba(MambaState { conv: vec![f32::from_bits(chain.tail)], ssm })],
            draft: KvState::default(),
        };
        Seed { state, hidden: Vec::new() }
    }

    fn logits(&self, chain: &Chain) -> Vec<f32> {
        let best = self.model.argmax(chain.last);
        (0..self.model.script.vocab).map(|id| f32::from(u8::from(id == best.0))).collect()
    }
}

// ------------------------------------------------------------------ the device

struct Stepped {
    board: Arc<Board>,
    inner: Mutex<Inner>,
    layers: usize,
    broken: Broken,
}

struct Inner {
    machine: Machine<ChainMaths>,
    queue: VecDeque<Micro>,
    hangs: bool,
}

enum Drive {
    Stepped(Arc<Stepped>),
    Threaded(Box<Script>, Duration, Option<u32>),
}

/// See the module.
pub struct ScriptedDevice {
    facts: Facts,
    drive: Drive,
}

impl Device for ScriptedDevice {
    fn facts(&self) -> &Facts {
        &self.facts
    }

    fn split(self: Box<Self>) -> Halves {
        match self.drive {
            Drive::Stepped(shared) => {
                let landings = BoardLandings(shared.board.clone());
                (Box::new(SteppedQueue(shared)), Box::new(landings))
            }
            Drive::Threaded(script, delay, dies_at) => {
                let mut machine = Machine::new(ChainMaths { model: script.model() }, self.facts);
                (machine.names_blocks, machine.broken) = (script.names_blocks, script.broken);
                let (mut draw, mut steps) = (script.seed, 0);
                let pace = move |micro: &Micro| {
                    // A panic, as a driver's or a kernel's would be.
                    assert!(dies_at != Some(steps), "a test took it away");
                    steps += 1;
                    draw = mix(draw, 11);
                    if micro.is_visible() && !delay.is_zero() {
                        std::thread::sleep(delay * (draw >> 24) / 255);
                    }
                    Ok(())
                };
                let started = worker::start(machine, script.layers, "scripted-device", pace);
                started.expect("a test machine gives a thread")
            }
        }
    }
}

struct SteppedQueue(Arc<Stepped>);

impl Queue for SteppedQueue {
    fn append(&mut self, items: Vec<Item>) -> Result<(), DeviceError> {
        let shared = &self.0;
        if let Some(lost) = shared.board.lost() {
            return Err(lost);
        }
        let queue = &mut shared.inner.lock().queue;
        for item in &items {
            if let Item::Start { slot, .. } = item {
                let named = |micro: &Micro| matches!(micro, Micro::Op(run, _) if run.stamp.slot == *slot);
                let at_once = shared.broken.is(Broken::StampWithoutTurn);
                check!(
                    Reuse,
                    at_once || !queue.iter().any(named),
                    "{slot:?} was given away while queued work names it"
                );
            }
        }
        let mut fresh = VecDeque::new();
        expand(items, shared.layers, &mut fresh);
        fresh.iter().filter_map(Micro::staging).for_each(|wait| shared.board.own(wait));
        if shared.broken.is(Broken::AdmitInsideLayer)
            && matches!(fresh.front(), Some(Micro::Item(Item::Upload { .. })))
            && let Some(at) = queue.iter().rposition(|micro| matches!(micro, Micro::Op(_, super::Op::Route(_))))
        {
            queue.insert(at + 1, fresh.pop_front().expect("an upload"));
        }
        queue.extend(fresh);
        Ok(())
    }
}

/// Moves a stepped device.
#[derive(Clone)]
pub struct Hand(Arc<Stepped>);

impl Hand {
    /// Whether a step would do something.
    #[must_use]
    pub fn can_step(&self) -> bool {
        let inner = self.0.inner.lock();
        !inner.hangs && !inner.queue.is_empty() && self.0.board.lost().is_none()
    }

    /// Runs up to and with the next thing that somebody outside can see, or to the queue's end; `fine` runs one entry.
    pub fn step(&self, fine: bool) {
        let mut inner = self.0.inner.lock();
        while let Some(micro) = inner.queue.pop_front() {
            let stop = fine || micro.is_visible();
            if let Some((wait, landing)) = inner.machine.execute(micro) {
                self.0.board.land(wait, landing);
            }
            if stop {
                break;
            }
        }
    }

    /// The device is gone.
    pub fn lose(&self) {
        self.0.board.lose("a test took it away");
    }

    /// Nothing runs any more, and nobody is told.
    pub fn hang(&self) {
        self.0.inner.lock().hangs = true;
    }

    /// Whether all that was queued has run and been read.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.0.inner.lock().queue.is_empty() && self.0.board.is_idle()
    }

    /// Queued entries.
    #[must_use]
    pub fn queued(&self) -> usize {
        self.0.inner.lock().queue.len()
    }

    /// Rows that a slot's session has consumed.
    #[must_use]
    pub fn position(&self, slot: usize) -> Position {
        self.0.inner.lock().machine.position(slot)
    }
}
