//! A device in software: slots, turns, stops, banks and staging exactly as `protocol.md` §2 has them, over some maths.
//!
//! The host device and the scripted device are this machine with different
//! [`Maths`] and different drivers (a worker thread, a test's hand). It runs
//! one dispatch at a time, in queue order, and knows nothing of time.

use std::collections::VecDeque;
use std::mem;
use std::sync::Arc;
use std::time::Duration;

use super::{
    Facts, Item, Landing, Missed, Op, Out, Payload, Phase, Point, Read, Record, Round, Run, Seed, Stamp, Stop,
    StopKind, Wait, Work,
};
use crate::check;
use crate::ids::{BlockIx, ExpertIx, FlightId, LayerIx, PlaceIx, Position, TokenId, Turn};
use crate::invariants::Broken;

/// What a machine computes with. Rows are `[n, hidden]`, the residual between blocks.
pub(crate) trait Maths: Send {
    /// What a sequence leaves behind: rings, scan states, KV, the draft layer's KV.
    type State: Send;

    /// The state before the first row, or the seed's.
    fn start(&mut self, seed: Option<&Seed>) -> Self::State;

    /// The embedding `[hidden]` of an id.
    fn embed(&self, id: TokenId) -> Vec<f32>;

    /// All blocks between the sum before (or the batch's rows) and the layer's router, and the router. With `snapshots`,
    /// [`keep`](Self::keep) can go back to any row of the batch.
    ///
    /// # Errors
    ///
    /// The block that made a value that is not finite.
    fn route(
        &mut self,
        state: &mut Self::State,
        layer: LayerIx,
        rows: &mut [f32],
        snapshots: bool,
    ) -> Result<Routed, BlockIx>;

    /// Unweighted outputs `[sum of rows, expert_width]` of experts, in the order of `wanted`.
    fn experts(&mut self, layer: LayerIx, normed: &[f32], wanted: &[(ExpertIx, Vec<u32>)]) -> Vec<f32>;

    /// The shared expert `[n, hidden]`.
    fn shared(&mut self, layer: LayerIx, normed: &[f32]) -> Vec<f32>;

    /// [`experts`](Self::experts) and [`shared`](Self::shared) together.
    fn experts_and_shared(
        &mut self,
        layer: LayerIx,
        normed: &[f32],
        wanted: &[(ExpertIx, Vec<u32>)],
    ) -> (Vec<f32>, Vec<f32>) {
        let outputs = if wanted.is_empty() { Vec::new() } else { self.experts(layer, normed, wanted) };
        (outputs, self.shared(layer, normed))
    }

    /// The closing sum: `outputs [n, top_k, expert_width]` weighted, and the shared expert, added to the rows.
    ///
    /// # Errors
    ///
    /// As [`route`](Self::route).
    fn sum(
        &mut self,
        layer: LayerIx,
        rows: &mut [f32],
        routed: &Routed,
        outputs: &[f32],
        shared: &[f32],
    ) -> Result<(), BlockIx>;

    /// The blocks behind the last sum, the final norm, and the argmax of the rows from `first` on. Without layers it is
    /// the whole batch.
    ///
    /// # Errors
    ///
    /// As [`route`](Self::route).
    fn finish(
        &mut self,
        state: &mut Self::State,
        rows: &mut [f32],
        first: usize,
        snapshots: bool,
    ) -> Result<Vec<TokenId>, BlockIx>;

    /// The batch is over and its first `kept` rows stand: go back to the last of them, and remember what drafting needs
    /// of them. `inputs [n, hidden]` are the rows as they entered.
    fn keep(&mut self, state: &mut Self::State, inputs: &[f32], kept: usize);

    /// Drafts `depth` ids behind `next`.
    fn draft(&mut self, state: &mut Self::State, next: TokenId, depth: usize) -> Vec<TokenId>;

    /// A copy of the state.
    fn save(&self, state: &Self::State) -> Seed;

    /// Logits `[vocab]` of the last position.
    fn logits(&self, state: &Self::State) -> Vec<f32>;
}

/// What a router left: `normed [n, hidden]`, `picks [n, top_k]`, `weights [n, top_k]`.
#[derive(Clone, Debug, Default)]
pub(crate) struct Routed {
    pub(crate) normed: Vec<f32>,
    pub(crate) picks: Vec<ExpertIx>,
    pub(crate) weights: Vec<f32>,
}

/// One entry of the machine's queue.
#[derive(Clone, Debug)]
pub(crate) enum Micro {
    /// An item that is one step.
    Item(Item),
    /// One dispatch of a run.
    Op(Arc<Run>, Op),
}

impl Micro {
    /// What it does, in a word: its name on the device's track of a trace.
    pub(crate) fn class(&self) -> &'static str {
        match self {
            Micro::Op(_, Op::Route(_)) => "route",
            Micro::Op(_, Op::Experts(_)) => "experts",
            Micro::Op(_, Op::Sum(_)) => "sum",
            Micro::Op(_, Op::Accept(_)) => "accept",
            Micro::Op(_, Op::Peek(_)) => "peek",
            Micro::Item(Item::Start { .. }) => "start",
            Micro::Item(Item::Retire { .. }) => "retire",
            Micro::Item(Item::Run(_)) => "run",
            Micro::Item(Item::Land { .. }) => "land",
            Micro::Item(Item::Upload { .. }) => "upload",
            Micro::Item(Item::Resume { .. }) => "resume",
            Micro::Item(Item::Fill { .. }) => "fill",
            Micro::Item(Item::Rollback { .. }) => "rollback",
            Micro::Item(Item::Read { .. }) => "read",
        }
    }

    /// Its flight, where it belongs to one.
    pub(crate) fn flight(&self) -> Option<FlightId> {
        match self {
            Micro::Op(run, _) => Some(run.stamp.flight),
            Micro::Item(Item::Land { stamp, .. } | Item::Fill { stamp, .. }) => Some(stamp.flight),
            Micro::Item(_) => None,
        }
    }

    /// Whether anybody outside can see that it ran.
    pub(crate) fn is_visible(&self) -> bool {
        matches!(
            self,
            Micro::Op(_, Op::Peek(_)) | Micro::Item(Item::Land { .. } | Item::Upload { .. } | Item::Read { .. })
        )
    }

    /// Whether a batch begins with it.
    pub(crate) fn begins_batch(&self) -> bool {
        match self {
            Micro::Op(_, Op::Route(point)) => point.is_batch_start(),
            // A model without routes has accepts alone.
            Micro::Op(_, Op::Accept(point)) => point.is_batch_start(),
            _ => false,
        }
    }

    /// The staging buffer it will write.
    pub(crate) fn staging(&self) -> Option<Wait> {
        match self {
            Micro::Op(_, Op::Peek(staging)) => Some(Wait::Peek(*staging)),
            Micro::Item(Item::Land { staging, .. }) => Some(Wait::Land(*staging)),
            Micro::Item(Item::Upload { staging, .. }) => Some(Wait::Upload(*staging)),
            Micro::Item(Item::Read { staging, .. }) => Some(Wait::Read(*staging)),
            _ => None,
        }
    }
}

/// Takes items apart, in order.
pub(crate) fn expand(items: Vec<Item>, layers: usize, queue: &mut VecDeque<Micro>) {
    for item in items {
        match item {
            Item::Run(run) => {
                let run = Arc::new(run);
                queue.extend(run.ops(layers).map(|op| Micro::Op(run.clone(), op)));
            }
            item => queue.push_back(Micro::Item(item)),
        }
    }
}

/// What must survive a stop; a slot's own.
#[derive(Clone, Debug, Default)]
struct Scratch {
    /// Rows of the batch.
    n: usize,
    /// The ids they embed, for decode batches: the next id and its drafts.
    ids: Vec<TokenId>,
    /// The rows as they entered.
    inputs: Vec<f32>,
    rows: Vec<f32>,
    routed: Routed,
    /// Place of each pick when its route ran, `None` for a missing one: `[n, top_k]`.
    places: Vec<Option<PlaceIx>>,
    /// `[n, top_k, expert_width]`, the partial sum's parts, so that the order of summation is fixed.
    outputs: Vec<f32>,
    have: Vec<bool>,
    shared: Vec<f32>,
}

struct Slot<S> {
    turn: Turn,
    /// Set between `Start` and `Retire`.
    state: Option<S>,
    eos: Arc<[TokenId]>,
    stop: Option<Stop>,
    /// Where its session is.
    cursor: Point,
    position: usize,
    next_id: TokenId,
    scratch: Scratch,
    missed: Option<Arc<Missed>>,
    out: Out,
    /// Rows of the last verify that stand.
    kept: usize,
}

/// The device's side of everything.
pub(crate) struct Machine<M: Maths> {
    pub(crate) maths: M,
    facts: Facts,
    /// Whether routes are counted and can miss.
    partial: bool,
    slots: Vec<Slot<M::State>>,
    /// `[layer][expert]`: what the router looks up.
    map: Vec<Vec<Option<PlaceIx>>>,
    /// `[layer][place]`, the spare one last: what really lies there.
    bank: Vec<Vec<Option<ExpertIx>>>,
    /// Time that flights took since the last landing; the driver adds to it.
    pub(crate) busy: Option<Duration>,
    /// Whether it tells which block made a value that is not finite, as an adapter does not.
    pub(crate) names_blocks: bool,
    pub(crate) broken: Broken,
}

impl<M: Maths> Machine<M> {
    pub(crate) fn new(maths: M, facts: Facts) -> Self {
        let slot = || Slot {
            turn: Turn(0),
            state: None,
            eos: Arc::new([]),
            stop: None,
            cursor: Point::default(),
            position: 0,
            next_id: TokenId(0),
            scratch: Scratch::default(),
            missed: None,
            out: Out::default(),
            kept: 0,
        };
        let mut map = vec![vec![None; facts.experts]; facts.layers];
        let mut bank = facts.residents.clone();
        for (map, bank) in map.iter_mut().zip(&mut bank) {
            for (place, expert) in bank.iter().enumerate() {
                if let Some(expert) = expert {
                    map[expert.index()] = Some(PlaceIx::from(place));
                }
            }
            bank.extend(facts.spare_place.then_some(None));
        }
        let slots = (0..facts.slots).map(|_| slot()).collect();
        let partial = !facts.is_full();
        Self { maths, facts, partial, slots, map, bank, busy: None, names_blocks: true, broken: Broken::No }
    }

    /// Runs one entry. What it leaves in a staging buffer is returned.
    pub(crate) fn execute(&mut self, micro: Micro) -> Option<(Wait, Landing)> {
        match micro {
            Micro::Item(item) => self.item(item),
            Micro::Op(run, op) => match op {
                Op::Route(point) => {
                    self.route(&run, point);
                    None
                }
                Op::Experts(point) => {
                    self.experts(run.stamp, point);
                    None
                }
                Op::Sum(point) => {
                    self.sum(run.stamp, point);
                    None
                }
                Op::Accept(point) => {
                    self.accept(&run, point);
                    None
                }
                Op::Peek(staging) => Some((Wait::Peek(staging), self.record(run.stamp, None))),
            },
        }
    }

    fn item(&mut self, item: Item) -> Option<(Wait, Landing)> {
        match item {
            Item::Start { slot, turn, session: _, eos, seed } => {
                let state = self.maths.start(seed.as_deref());
                let slot = &mut self.slots[slot.index()];
                check!(Reuse, slot.state.is_none(), "a slot was started that is not free");
                slot.turn = turn;
                slot.state = Some(state);
                slot.eos = eos;
                slot.stop = None;
                slot.cursor = Point::default();
                slot.position = seed.map_or(0, |seed| seed.state.position.index());
                slot.scratch = Scratch::default();
                slot.missed = None;
                slot.out = Out::default();
                None
            }
            Item::Retire { slot, turn } => {
                let slot = &mut self.slots[slot.index()];
                slot.turn = turn;
                slot.state = None;
                slot.stop = None;
                None
            }
            Item::Run(_) => unreachable!("runs are taken apart when they are appended"),
            Item::Land { stamp, staging } => {
                let busy = self.busy.as_mut().map(mem::take);
                Some((Wait::Land(staging), self.record(stamp, busy)))
            }
            Item::Upload { layer, place, payload, staging } => {
                self.upload(layer, place, &payload);
                Some((Wait::Upload(staging), Landing::Uploaded))
            }
            Item::Resume { stop, turn, made } => {
                self.resume(stop, turn, &made.at, &made.outputs);
                None
            }
            Item::Fill { stamp, layer, place, expert } => {
                self.fill(stamp, layer, place, expert);
                None
            }
            Item::Rollback { stop, turn } => {
                self.rollback(stop, turn);
                None
            }
            Item::Read { slot, what, staging } => {
                let state = self.slots[slot.index()].state.as_ref();
                let landing = match (what, state) {
                    (Read::State, Some(state)) => Landing::State(Box::new(self.maths.save(state))),
                    (Read::Logits, Some(state)) => Landing::Logits(self.maths.logits(state)),
                    // A copy is unconditional; of a retired slot there is nothing.
                    (_, None) => Landing::Logits(Vec::new()),
                };
                Some((Wait::Read(staging), landing))
            }
        }
    }

    fn is_live(&self, stamp: Stamp) -> bool {
        let slot = &self.slots[stamp.slot.index()];
        slot.state.is_some() && slot.turn == stamp.turn && slot.stop.is_none()
    }

    fn not_finite(&self, block: BlockIx) -> StopKind {
        if self.names_blocks { StopKind::NotFinite(block) } else { StopKind::NotFiniteBy(block) }
    }

    /// Where a slot's scratch lies: its own place, but for one broken way.
    fn scratch_of(&self, stamp: Stamp) -> usize {
        if self.broken.is(Broken::SharedScratch) { 0 } else { stamp.slot.index() }
    }

    fn route(&mut self, run: &Run, point: Point) {
        let stamp = run.stamp;
        if !self.is_live(stamp) {
            return;
        }
        let at = stamp.slot.index();
        check!(State, self.slots[at].cursor == point, "{:?} ran a route at {point:?}", self.slots[at].cursor);
        let home = self.scratch_of(stamp);
        let mut scratch = mem::take(&mut self.slots[home].scratch);
        if point.is_batch_start() {
            self.enter(run, &mut scratch);
        }
        let slot = &mut self.slots[at];
        let state = slot.state.as_mut().expect("live");
        let snapshots = scratch.n > 1 && !matches!(run.work, Work::Prefill(_));
        match self.maths.route(state, point.layer, &mut scratch.rows, snapshots) {
            Err(block) => {
                let kind = self.not_finite(block);
                self.slots[at].stop = Some(stop_of(kind, stamp, point));
            }
            Ok(routed) => {
                let map = &self.map[point.layer.index()];
                scratch.places = routed.picks.iter().map(|expert| map[expert.index()]).collect();
                scratch.have = vec![false; routed.picks.len()];
                scratch.outputs = vec![0.0; routed.picks.len() * self.facts.expert_width];
                if self.partial {
                    let out = out_of(&mut slot.out, stamp.flight);
                    out.routed.resize(self.facts.layers, Vec::new());
                    let counts = &mut out.routed[point.layer.index()];
                    counts.resize(self.facts.experts, 0);
                    routed.picks.iter().for_each(|expert| counts[expert.index()] += 1);
                }
                if scratch.places.contains(&None) {
                    let stop = stop_of(StopKind::Miss, stamp, point);
                    if !self.broken.is(Broken::StopAtSum) {
                        slot.stop = Some(stop);
                    }
                    slot.missed = Some(Arc::new(missed_of(stop, &routed, &scratch.places, self.facts.top_k)));
                }
                slot.cursor = point.next(self.facts.layers);
                scratch.routed = routed;
            }
        }
        self.slots[home].scratch = scratch;
    }

    /// The rows of a batch that begins.
    fn enter(&mut self, run: &Run, scratch: &mut Scratch) {
        let slot = &mut self.slots[run.stamp.slot.index()];
        let state = slot.state.as_mut().expect("live");
        let room = run.limit.index().saturating_sub(slot.position).max(1);
        scratch.ids.clear();
        match &run.work {
            Work::Prefill(pass) => scratch.inputs.clone_from(&pass.rows),
            work => {
                scratch.ids.push(slot.next_id);
                match work {
                    Work::Verify(drafts) => scratch.ids.extend(drafts.iter().take(room - 1)),
                    Work::Rounds { depth } => {
                        let depth = (*depth).min(room - 1);
                        scratch.ids.extend(self.maths.draft(state, slot.next_id, depth));
                    }
                    _ => {}
                }
                scratch.inputs = scratch.ids.iter().flat_map(|id| self.maths.embed(*id)).collect();
            }
        }
        scratch.n = scratch.inputs.len() / self.facts.hidden;
        scratch.rows.clone_from(&scratch.inputs);
        let end = slot.position + scratch.n;
        check!(Bound, end <= self.facts.kv_positions, "{end} positions in a KV of {}", self.facts.kv_positions);
    }

    fn experts(&mut self, stamp: Stamp, point: Point) {
        let slot = &self.slots[stamp.slot.index()];
        // Also behind its own miss: that is the overlap with the host.
        let own = slot.stop == Some(stop_of(StopKind::Miss, stamp, point));
        if slot.state.is_none() || slot.turn != stamp.turn || !(slot.stop.is_none() || own) {
            return;
        }
        let home = self.scratch_of(stamp);
        let mut scratch = mem::take(&mut self.slots[home].scratch);
        let layer = point.layer;
        let resident: Vec<(usize, ExpertIx)> = (scratch.routed.picks.iter().zip(&scratch.places).enumerate())
            .filter_map(|(i, (expert, place))| {
                let held = self.bank[layer.index()][(*place)?.index()];
                check!(Place, held == Some(*expert), "{expert:?} was routed to {place:?}, which holds {held:?}");
                Some((i, held.unwrap_or(*expert)))
            })
            .collect();
        self.compute(layer, &mut scratch, resident, true);
        self.slots[home].scratch = scratch;
    }

    /// Experts for the given picks, into their outputs; the shared expert too if asked for.
    fn compute(&mut self, layer: LayerIx, scratch: &mut Scratch, mut picks: Vec<(usize, ExpertIx)>, shared: bool) {
        let (k, width) = (self.facts.top_k, self.facts.expert_width);
        picks.sort_unstable_by_key(|(at, expert)| (*expert, *at));
        let wanted: Vec<(ExpertIx, Vec<u32>)> = (picks.chunk_by(|a, b| a.1 == b.1))
            .map(|same| (same[0].1, same.iter().map(|(at, _)| (at / k) as u32).collect()))
            .collect();
        let made = if shared {
            let (made, shared) = self.maths.experts_and_shared(layer, &scratch.routed.normed, &wanted);
            scratch.shared = shared;
            made
        } else if wanted.is_empty() {
            return;
        } else {
            self.maths.experts(layer, &scratch.routed.normed, &wanted)
        };
        for ((at, _), made) in picks.iter().zip(made.chunks_exact(width)) {
            scratch.outputs[at * width..(at + 1) * width].copy_from_slice(made);
            scratch.have[*at] = true;
        }
    }

    fn sum(&mut self, stamp: Stamp, point: Point) {
        if !self.is_live(stamp) {
            return;
        }
        let (at, home) = (stamp.slot.index(), self.scratch_of(stamp));
        check!(State, self.slots[at].cursor == point, "{:?} ran a sum at {point:?}", self.slots[at].cursor);
        let scratch = &mut self.slots[home].scratch;
        if self.broken.is(Broken::StopAtSum) && scratch.have.contains(&false) {
            let route = Point { phase: Phase::Route, ..point };
            self.slots[at].stop = Some(stop_of(StopKind::Miss, stamp, route));
            return;
        }
        if self.broken.is(Broken::SumReadsMap) {
            // Believes that what is in the map now was computed by the bank's kernel.
            for (i, expert) in scratch.routed.picks.iter().enumerate() {
                let width = self.facts.expert_width;
                if scratch.places[i].is_none() && self.map[point.layer.index()][expert.index()].is_some() {
                    scratch.outputs[i * width..(i + 1) * width].fill(0.0);
                }
            }
        }
        check!(Cure, !scratch.have.contains(&false), "a closing sum ran without its completions");
        let mut rows = mem::take(&mut scratch.rows);
        let done = self.maths.sum(point.layer, &mut rows, &scratch.routed, &scratch.outputs, &scratch.shared);
        scratch.rows = rows;
        let slot = &mut self.slots[at];
        match done {
            Err(block) => {
                let kind = self.not_finite(block);
                self.slots[at].stop = Some(stop_of(kind, stamp, point));
            }
            // The last layer's sum leaves the cursor to the accept behind it.
            Ok(()) if point.next(self.facts.layers).is_batch_start() => {}
            Ok(()) => slot.cursor = point.next(self.facts.layers),
        }
    }

    fn accept(&mut self, run: &Run, point: Point) {
        let stamp = run.stamp;
        if !self.is_live(stamp) {
            return;
        }
        let (at, home) = (stamp.slot.index(), self.scratch_of(stamp));
        let mut scratch = mem::take(&mut self.slots[home].scratch);
        if self.facts.layers == 0 {
            self.enter(run, &mut scratch);
        }
        let slot = &mut self.slots[at];
        check!(State, slot.cursor == point, "{:?} ran an accept at {point:?}", slot.cursor);
        let state = slot.state.as_mut().expect("live");
        let (first, decode) = match &run.work {
            Work::Prefill(pass) => (scratch.n - usize::from(pass.accept), false),
            _ => (0, true),
        };
        match self.maths.finish(state, &mut scratch.rows, first, decode && scratch.n > 1) {
            Err(block) => {
                let kind = self.not_finite(block);
                self.slots[at].stop = Some(stop_of(kind, stamp, point));
            }
            Ok(ids) => {
                slot.cursor = Point::start_of(point.batch + 1);
                let out = out_of(&mut slot.out, stamp.flight);
                let (mut kept, mut end) = (if decode { 0 } else { scratch.n }, false);
                for id in ids {
                    // A row that stands: the first, and each whose id the row before it gave.
                    if decode {
                        if kept > 0 && scratch.ids[kept] != slot.next_id {
                            break;
                        }
                        kept += 1;
                    }
                    out.ids.push(id);
                    slot.next_id = id;
                    end |= slot.eos.contains(&id);
                    if decode && end {
                        break;
                    }
                }
                let by_id = decode && end;
                slot.position += kept;
                end |= slot.position >= run.limit.index() && (decode || first < scratch.n);
                let short = decode && kept < scratch.n && !end;
                if decode && scratch.n > 1 {
                    // An end id that was drafted is a draft that stands; nothing is said of those behind it.
                    let drafts = &scratch.ids[1..];
                    let offered = if by_id { kept.min(drafts.len()) } else { drafts.len() };
                    let agreed = kept - 1 + usize::from(by_id && drafts.get(kept - 1) == Some(&slot.next_id));
                    out.rounds.push(Round { offered: offered as u32, kept: agreed as u32 });
                }
                slot.kept = kept;
                let by_host = matches!(run.work, Work::Verify(_));
                if short && by_host {
                    if !self.broken.is(Broken::NoShortStop) {
                        slot.stop = Some(stop_of(StopKind::Short, stamp, point));
                    }
                } else {
                    let stand = if self.broken.is(Broken::AcceptWithoutRollback) { scratch.n } else { kept };
                    self.maths.keep(state, &scratch.inputs, stand);
                }
                if end && !self.broken.is(Broken::NoEndStop) {
                    slot.stop = Some(stop_of(StopKind::End, stamp, point));
                }
            }
        }
        self.slots[home].scratch = scratch;
    }

    fn upload(&mut self, layer: LayerIx, place: PlaceIx, payload: &Payload) {
        check!(Place, payload.is_intact() && payload.layer == layer, "{payload:?} arrived changed or in {layer:?}");
        let (map, bank) = (&mut self.map[layer.index()], &mut self.bank[layer.index()]);
        let spare = self.facts.residents[layer.index()].len();
        if place.index() < spare {
            if let Some(out) = bank[place.index()].filter(|out| map[out.index()] == Some(place)) {
                map[out.index()] = None;
            }
            map[payload.expert.index()] = Some(place);
        }
        bank[place.index()] = Some(payload.expert);
    }

    fn resume(&mut self, stop: Stop, turn: Turn, at: &[u32], outputs: &[f32]) {
        let slot = &mut self.slots[stop.slot.index()];
        let fits = match self.broken {
            Broken::DropStamp | Broken::ResumeAfterCancel | Broken::NoDeviceCheck if cfg!(debug_assertions) => true,
            Broken::StampWithoutTurn if cfg!(debug_assertions) => slot.stop.is_some_and(|s| s.point == stop.point),
            _ => slot.turn == stop.turn && slot.stop.is_some_and(|present| present.kind == StopKind::Miss),
        };
        if !fits {
            return;
        }
        check!(Cure, slot.stop == Some(stop), "{stop:?} was cured, present is {:?}", slot.stop);
        slot.stop = None;
        slot.turn = turn;
        let home = if self.broken.is(Broken::SharedScratch) { 0 } else { stop.slot.index() };
        let (scratch, width) = (&mut self.slots[home].scratch, self.facts.expert_width);
        for (at, made) in at.iter().map(|at| *at as usize).zip(outputs.chunks_exact(width)) {
            if at < scratch.have.len() {
                scratch.outputs[at * width..(at + 1) * width].copy_from_slice(made);
                scratch.have[at] = true;
            }
        }
    }

    fn fill(&mut self, stamp: Stamp, layer: LayerIx, place: PlaceIx, expert: ExpertIx) {
        if !self.is_live(stamp) {
            return;
        }
        let held = self.bank[layer.index()][place.index()];
        check!(Place, held == Some(expert), "{expert:?} was uploaded to {place:?} for a miss, which holds {held:?}");
        let home = self.scratch_of(stamp);
        let mut scratch = mem::take(&mut self.slots[home].scratch);
        let picks = (scratch.routed.picks.iter().enumerate())
            .filter(|(i, pick)| **pick == expert && scratch.places[*i].is_none() && !scratch.have[*i])
            .map(|(i, pick)| (i, *pick))
            .collect();
        self.compute(layer, &mut scratch, picks, false);
        self.slots[home].scratch = scratch;
    }

    fn rollback(&mut self, stop: Stop, turn: Turn) {
        let slot = &mut self.slots[stop.slot.index()];
        if slot.turn != stop.turn || !slot.stop.is_some_and(|present| present.kind == StopKind::Short) {
            return;
        }
        check!(Cure, slot.stop == Some(stop), "{stop:?} was cured, present is {:?}", slot.stop);
        slot.stop = None;
        slot.turn = turn;
        let kept = if self.broken.is(Broken::AcceptWithoutRollback) { slot.scratch.n } else { slot.kept };
        let state = slot.state.as_mut().expect("a stopped slot has a session");
        self.maths.keep(state, &slot.scratch.inputs, kept);
    }

    fn record(&self, stamp: Stamp, busy: Option<Duration>) -> Landing {
        let slot = &self.slots[stamp.slot.index()];
        Landing::Record(Box::new(Record {
            flight: stamp.flight,
            out: slot.out.clone(),
            stop: slot.stop,
            missed: slot.missed.clone(),
            busy,
        }))
    }

    /// Position of a slot's session, for tests.
    pub(crate) fn position(&self, slot: usize) -> Position {
        Position::from(self.slots[slot].position)
    }
}

fn stop_of(kind: StopKind, stamp: Stamp, point: Point) -> Stop {
    Stop { kind, slot: stamp.slot, turn: stamp.turn, flight: stamp.flight, point }
}

/// The slot's out record for this flight: what another flight wrote is cleared first.
fn out_of(out: &mut Out, flight: FlightId) -> &mut Out {
    if out.flight != flight {
        *out = Out { flight, ..Out::default() };
    }
    out
}

/// What a route publishes of its misses: the rows that miss something.
fn missed_of(stop: Stop, routed: &Routed, places: &[Option<PlaceIx>], top_k: usize) -> Missed {
    let n = places.len() / top_k;
    let width = routed.normed.len() / n;
    let rows: Vec<usize> = (0..n).filter(|row| places[row * top_k..][..top_k].contains(&None)).collect();
    Missed {
        stop,
        layer: stop.point.layer,
        top_k,
        normed: rows.iter().flat_map(|row| &routed.normed[row * width..][..width]).copied().collect(),
        picks: rows.iter().flat_map(|row| &routed.picks[row * top_k..][..top_k]).copied().collect(),
        missing: rows.iter().flat_map(|row| &places[row * top_k..][..top_k]).map(Option::is_none).collect(),
        rows: rows.into_iter().map(|row| row as u32).collect(),
    }
}
