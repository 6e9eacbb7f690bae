//! The host as a device: every block on the CPU, behind the same queue and the same protocol as a GPU.
//!
//! It is the default where no adapter fits, what a session goes on with when
//! its device is lost, and the reference for tests. A thread runs the queue in
//! order over the host decoder. Its bank is partial if its residents say so:
//! then misses, completions and admissions really happen and are counted, as
//! on a small card. What lies in a place is only a name here, since all
//! weights are read from the mapped file; uploads carry and check their bytes
//! all the same. Drafts are made, verified and rolled back within its queue.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::machine::{Machine, Maths, Micro, Routed};
use super::{
    Companion, Completions, Device, DeviceError, DeviceKind, DraftAbility, Facts, Halves, Landings, Missed, Payload,
    Prefill, Queue, Seed, UNLANDED_MAX, worker,
};
use crate::host::{Decoder, ExpertRows, HostSequence, NotFinite, Place, Routes};
use crate::ids::{BlockIx, ExpertIx, LayerIx, Position, TokenId};
use crate::model::geometry::BlockKind;
use crate::model::state::{BlockState, MambaState, SequenceState};
use crate::model::weights::Mixer;
use crate::policy::drafts::DEPTH_MAX;

/// Rows of a prefill pass: the host's kernels read the weights once for all of them.
const PREFILL_ROWS: usize = 512;

/// Buffers beyond those that landings need: for peeks and reads. They cost nothing here.
const STAGING: usize = UNLANDED_MAX + 8;

/// Uploads under way: as many as an admission round moves.
const UPLOAD_STAGING: usize = 8;

/// Rows between two looks at the clock while a block is searched for.
const REPLAY_ROWS: usize = 16;

/// How long a block is searched for: misses of other sessions wait as long.
const REPLAY_WITHIN: Duration = Duration::from_secs(5);

/// What of the host's shape is a choice.
#[derive(Clone, Debug, PartialEq)]
pub struct HostOptions {
    /// Sessions at a time. A slot takes memory only while it is used.
    pub slots: usize,
    /// KV positions of a slot.
    pub kv_positions: usize,
    /// Residents of the decoder layers' banks, by layer and place; empty is full banks.
    pub residents: Vec<Vec<Option<ExpertIx>>>,
    /// Whether the draft layer's state is kept up and drafts may be asked for.
    pub drafts: bool,
    /// Makes drafts wrong where a draw from this seed says so: for tests.
    #[doc(hidden)]
    pub wrong_drafts: Option<u32>,
    /// Drafts are these ids, by position, in place of the draft layer's: for tests.
    #[doc(hidden)]
    pub given_drafts: Option<Arc<[TokenId]>>,
    /// Leaves drafting to a drafter, and only verifies, as some devices do: for tests.
    #[doc(hidden)]
    pub drafts_by_host: bool,
    /// The device dies before this dispatch: for tests.
    #[doc(hidden)]
    pub dies_at: Option<u32>,
}

impl HostOptions {
    /// Four slots, the model's own positions up to 65 536 (`runtime.md` §4), full banks, drafts where the model has them.
    #[must_use]
    pub fn for_decoder(decoder: &Decoder) -> Self {
        Self {
            slots: 4,
            kv_positions: decoder.geometry().max_positions.min(65_536),
            residents: Vec::new(),
            drafts: decoder.geometry().draft,
            wrong_drafts: None,
            given_drafts: None,
            drafts_by_host: false,
            dies_at: None,
        }
    }
}

/// See the module.
pub struct HostDevice {
    facts: Facts,
    queue: Box<dyn Queue>,
    landings: Box<dyn Landings>,
}

impl HostDevice {
    /// A device over the decoder, with its thread.
    ///
    /// # Errors
    ///
    /// [`DeviceError::Lost`] where the system gives no thread.
    pub fn new(decoder: Arc<Decoder>, options: HostOptions) -> Result<Self, DeviceError> {
        let geometry = decoder.geometry();
        let layers = geometry.decoder_layers();
        let moe = geometry.moe.as_ref().filter(|_| layers > 0);
        let experts = moe.map_or(0, |moe| moe.experts);
        let all = || (0..experts).map(|e| Some(ExpertIx::from(e))).collect();
        let mut residents = options.residents.clone();
        residents.truncate(layers);
        residents.resize_with(layers, all);
        let drafts = options.drafts && geometry.draft;
        let ability = match (drafts, options.drafts_by_host) {
            (false, _) => DraftAbility::None,
            (true, false) => DraftAbility::OnDevice,
            (true, true) => DraftAbility::ByHost,
        };
        let facts = Facts {
            name: format!("host ({} threads, {:?})", decoder.pool().threads(), decoder.pool().isa()),
            kind: DeviceKind::Host,
            activations: decoder.activations(),
            slots: options.slots,
            kv_positions: options.kv_positions,
            hidden: geometry.hidden,
            layers,
            experts,
            top_k: moe.map_or(0, |moe| moe.top_k),
            expert_width: moe.and_then(|moe| moe.latent).unwrap_or(geometry.hidden),
            residents,
            spare_place: false,
            prefill_rows: PREFILL_ROWS,
            streamed_rows: None,
            verify_rows: if drafts { DEPTH_MAX + 1 } else { 1 },
            drafts: ability,
            staging: STAGING,
            upload_staging: UPLOAD_STAGING,
            landing_deadline: None,
            class_times: None,
        };
        let maths = HostMaths::new(decoder.clone(), &options);
        let (dies_at, mut steps) = (options.dies_at, 0);
        let pace = move |micro: &Micro| {
            if dies_at == Some(steps) {
                return Err("a test took the host device away".into());
            }
            steps += 1;
            // Touching what a file has lost would end the process, so each batch asks before it reads.
            if micro.begins_batch() { decoder.still_readable() } else { Ok(()) }
        };
        let (queue, landings) = worker::start(Machine::new(maths, facts.clone()), layers, "host-device", pace)?;
        Ok(Self { facts, queue, landings })
    }
}

impl Device for HostDevice {
    fn facts(&self) -> &Facts {
        &self.facts
    }

    fn split(self: Box<Self>) -> Halves {
        (self.queue, self.landings)
    }
}

// ------------------------------------------------------------------ help for other devices

/// The host beside any device: missing experts, embeddings, experts' bytes.
pub struct HostCompanion {
    decoder: Arc<Decoder>,
}

impl HostCompanion {
    /// Over a decoder with the device's arithmetic.
    #[must_use]
    pub fn new(decoder: Arc<Decoder>) -> Self {
        Self { decoder }
    }
}

impl Companion for HostCompanion {
    fn embed(&self, id: TokenId) -> Vec<f32> {
        embed(&self.decoder, id)
    }

    fn complete(&self, missed: &Missed, leave: &[ExpertIx]) -> Completions {
        let mut at = Vec::new();
        let wanted: Vec<ExpertRows> = (missed.by_expert().into_iter())
            .filter(|(expert, _)| !leave.contains(expert))
            .map(|(expert, wanted)| {
                at.extend(wanted.iter().map(|(n, pick)| missed.at(*n, *pick)));
                ExpertRows { expert, rows: wanted.into_iter().map(|(n, _)| n).collect() }
            })
            .collect();
        let outputs =
            if wanted.is_empty() { Vec::new() } else { self.decoder.experts(missed.layer, &missed.normed, &wanted) };
        Completions { at, outputs }
    }

    fn still_readable(&self) -> Result<(), String> {
        self.decoder.still_readable()
    }

    fn payload(&self, layer: LayerIx, expert: ExpertIx) -> Payload {
        let weights = self.decoder.weights();
        let geometry = self.decoder.geometry();
        let moe = if Some(layer) == geometry.draft_layer() {
            &weights.draft.as_ref().expect("checked on open").moe
        } else {
            let block = geometry.blocks_of(BlockKind::Moe).nth(layer.index()).expect("a layer of the model");
            let Mixer::Moe(moe) = &weights.blocks[block.index()].mixer else { unreachable!("an MoE block") };
            moe
        };
        let expert_weights = &moe.experts[expert.index()];
        Payload::new(layer, expert, [expert_weights.up.payload(), expert_weights.down.payload()].concat())
    }

    fn first_not_finite(&self, seed: Option<&Seed>, rows: &[f32], ids: &[TokenId]) -> Result<BlockIx, String> {
        let (decoder, hidden, begun) = (&self.decoder, self.decoder.geometry().hidden, Instant::now());
        let mut state =
            seed.map_or_else(|| SequenceState::new(decoder.geometry()), |seed| SequenceState::clone(&seed.state));
        let ids: Vec<f32> = ids.iter().flat_map(|id| embed(decoder, *id)).collect();
        let mut last = Vec::new();
        for some in rows.chunks(REPLAY_ROWS * hidden).chain(ids.chunks(REPLAY_ROWS * hidden)) {
            if begun.elapsed() > REPLAY_WITHIN {
                let (at, of) = (state.position, rows.len().div_ceil(hidden) + ids.len() / hidden);
                return Err(format!("the host got to {at} of {of} rows in {} s", REPLAY_WITHIN.as_secs()));
            }
            decoder.still_readable()?;
            last = some.to_vec();
            if let Err(error) = decoder.forward(&mut last, &mut state, &mut ()) {
                return Ok(block_of(decoder, error));
            }
        }
        let head = decoder.final_norm(&last[last.len().saturating_sub(hidden)..]).and_then(|row| decoder.head(&row));
        match head {
            Err(error) => Ok(block_of(decoder, error)),
            Ok(_) => Err("on the host all of them are finite".into()),
        }
    }

    fn prefill(&self, seed: Option<&Seed>, drafts: bool) -> Option<Box<dyn Prefill>> {
        let decoder = Arc::clone(&self.decoder);
        let sequence = match seed {
            Some(seed) => HostSequence::behind(decoder, seed.state.clone(), seed.hidden.clone()),
            None => HostSequence::new(decoder),
        };
        let sequence = if drafts { sequence } else { sequence.without_drafts() };
        Some(Box::new(HostPrefill { decoder: Arc::clone(&self.decoder), sequence }))
    }
}

/// A prompt on the host.
struct HostPrefill {
    decoder: Arc<Decoder>,
    sequence: HostSequence,
}

impl Prefill for HostPrefill {
    fn rows(&mut self, rows: &[f32]) -> Result<(), BlockIx> {
        self.sequence.prefill(rows).map_err(|error| block_of(&self.decoder, error))
    }

    fn seed(self: Box<Self>) -> Seed {
        let (state, hidden) = self.sequence.into_parts();
        Seed { state, hidden }
    }
}

fn rows_of(wanted: &[(ExpertIx, Vec<u32>)]) -> Vec<ExpertRows> {
    wanted.iter().map(|(expert, rows)| ExpertRows { expert: *expert, rows: rows.clone() }).collect()
}

/// The block to name. The input counts as the first one's, the head as the last one's.
fn block_of(decoder: &Decoder, error: NotFinite) -> BlockIx {
    match error.place {
        Place::Input => BlockIx(0),
        Place::Block(block) => block,
        Place::Draft | Place::Head => BlockIx::from(decoder.geometry().blocks.len() - 1),
    }
}

fn embed(decoder: &Decoder, id: TokenId) -> Vec<f32> {
    let mut row = vec![0.0; decoder.geometry().hidden];
    decoder.embed(id, &mut row);
    row
}

// ------------------------------------------------------------------ the decoder on the machine

struct HostMaths {
    decoder: Arc<Decoder>,
    hidden: usize,
    /// Block of each MoE layer.
    moe_blocks: Vec<usize>,
    drafts: bool,
    wrong: Option<u32>,
    given: Option<Arc<[TokenId]>>,
}

/// A slot's sequence.
struct Sequence {
    state: SequenceState,
    /// Mamba states after each row of the verify batch under way, by block.
    snapshots: Vec<Vec<MambaState>>,
    /// Rows of the batch that passed all blocks, as the draft layer reads them: `[n, hidden]`; empty without drafts.
    finals: Vec<f32>,
    /// Final-normed rows of the batch from `normed_from` on.
    normed: Vec<f32>,
    normed_from: usize,
    /// The last position's among them, for logits.
    last: Vec<f32>,
    /// The last position's row for the draft layer, waiting for the embedding that follows. Empty when that is known
    /// already, and before the first row.
    hidden: Vec<f32>,
    /// Whether the draft layer's state is whole: not after one of its values was not finite.
    drafting: bool,
}

impl HostMaths {
    fn new(decoder: Arc<Decoder>, options: &HostOptions) -> Self {
        let geometry = decoder.geometry();
        let moe_blocks = geometry.blocks_of(BlockKind::Moe).map(BlockIx::index).collect();
        let (hidden, drafts) = (geometry.hidden, options.drafts && geometry.draft);
        let (wrong, given) = (options.wrong_drafts, options.given_drafts.clone());
        Self { hidden, moe_blocks, drafts, wrong, given, decoder }
    }

    /// Mamba, attention and dense blocks.
    fn mix(
        &self,
        sequence: &mut Sequence,
        blocks: Range<usize>,
        rows: &mut [f32],
        snapshots: bool,
    ) -> Result<(), BlockIx> {
        for block in blocks {
            let keep = snapshots.then(|| &mut sequence.snapshots[block]);
            let state = &mut sequence.state.blocks[block];
            self.decoder.mix(BlockIx::from(block), rows, state, keep).map_err(|e| self.block_of(e))?;
        }
        Ok(())
    }

    fn block_of(&self, error: NotFinite) -> BlockIx {
        block_of(&self.decoder, error)
    }

    fn begin(&self, sequence: &mut Sequence) {
        sequence.snapshots = vec![Vec::new(); self.decoder.geometry().blocks.len()];
    }

    /// Gives the draft layer each hidden row with the embedding that followed it (`model.md` §2.2).
    fn remember(&self, sequence: &mut Sequence, inputs: &[f32], kept: usize) -> Result<(), NotFinite> {
        let (width, end) = (self.hidden, kept * self.hidden);
        let before = std::mem::take(&mut sequence.hidden);
        // Before the first row nothing waits; behind a draft the first pair is in the KV already.
        let embeddings = if before.is_empty() { &inputs[width..end] } else { &inputs[..end] };
        let known = [&before, &sequence.finals[..end - width]].concat();
        if !embeddings.is_empty() {
            let fused = self.decoder.draft_fuse(embeddings, &known)?;
            self.decoder.draft_remember(&fused, &mut sequence.state.draft)?;
        }
        sequence.hidden = sequence.finals[end - width..end].to_vec();
        Ok(())
    }

    fn try_draft(&self, sequence: &mut Sequence, next: TokenId, depth: usize) -> Result<Vec<TokenId>, NotFinite> {
        let kv_width = self.decoder.geometry().attention.as_ref().map_or(0, |a| a.kv_width());
        let first = sequence.state.draft.k.len();
        let mut hidden = std::mem::take(&mut sequence.hidden);
        let (mut id, mut drafts) = (next, Vec::with_capacity(depth));
        for _ in 0..depth {
            hidden = self.decoder.draft(&embed(&self.decoder, id), &hidden, &mut sequence.state.draft)?;
            id = self.decoder.head(&hidden)?[0].id;
            drafts.push(id);
        }
        // The pair of the last position and `next` stays, those of deeper drafts were made from drafts.
        sequence.state.draft.k.truncate(first + kv_width);
        sequence.state.draft.v.truncate(first + kv_width);
        Ok(drafts)
    }
}

impl Maths for HostMaths {
    type State = Sequence;

    fn start(&mut self, seed: Option<&Seed>) -> Sequence {
        let fresh = || SequenceState::new(self.decoder.geometry());
        let state = seed.map_or_else(fresh, |seed| seed.state.clone());
        let hidden = seed.map_or_else(Vec::new, |seed| seed.hidden.clone());
        // A seed that does not know its last row leaves a gap in the draft layer's KV.
        let drafting = self.drafts && (state.position.0 == 0 || !hidden.is_empty());
        Sequence {
            state,
            snapshots: Vec::new(),
            finals: Vec::new(),
            normed: Vec::new(),
            normed_from: 0,
            last: Vec::new(),
            hidden,
            drafting,
        }
    }

    fn embed(&self, id: TokenId) -> Vec<f32> {
        embed(&self.decoder, id)
    }

    fn route(
        &mut self,
        sequence: &mut Sequence,
        layer: LayerIx,
        rows: &mut [f32],
        snapshots: bool,
    ) -> Result<Routed, BlockIx> {
        let from = match layer.index().checked_sub(1) {
            None => {
                self.begin(sequence);
                0
            }
            Some(before) => self.moe_blocks[before] + 1,
        };
        self.mix(sequence, from..self.moe_blocks[layer.index()], rows, snapshots)?;
        let Routes { normed, picks, weights } = self.decoder.route(layer, rows).map_err(|e| self.block_of(e))?;
        Ok(Routed { normed, picks, weights })
    }

    fn experts(&mut self, layer: LayerIx, normed: &[f32], wanted: &[(ExpertIx, Vec<u32>)]) -> Vec<f32> {
        self.decoder.experts(layer, normed, &rows_of(wanted))
    }

    fn experts_and_shared(
        &mut self,
        layer: LayerIx,
        normed: &[f32],
        wanted: &[(ExpertIx, Vec<u32>)],
    ) -> (Vec<f32>, Vec<f32>) {
        self.decoder.experts_and_shared(layer, normed, &rows_of(wanted))
    }

    fn shared(&mut self, layer: LayerIx, normed: &[f32]) -> Vec<f32> {
        self.decoder.shared(layer, normed)
    }

    fn sum(
        &mut self,
        layer: LayerIx,
        rows: &mut [f32],
        routed: &Routed,
        outputs: &[f32],
        shared: &[f32],
    ) -> Result<(), BlockIx> {
        let routes = Routes { normed: Vec::new(), picks: routed.picks.clone(), weights: routed.weights.clone() };
        self.decoder.sum(layer, rows, &routes, outputs, shared);
        Ok(())
    }

    fn finish(
        &mut self,
        sequence: &mut Sequence,
        rows: &mut [f32],
        first: usize,
        snapshots: bool,
    ) -> Result<Vec<TokenId>, BlockIx> {
        let from = match self.moe_blocks.last() {
            None => {
                self.begin(sequence);
                0
            }
            Some(last) => last + 1,
        };
        self.mix(sequence, from..self.decoder.geometry().blocks.len(), rows, snapshots)?;
        let n = rows.len() / self.hidden;
        // Drafting reads every row, the head those that give an id, and logits may be asked of the last.
        let from = if sequence.drafting { 0 } else { first.min(n - 1) };
        let normed = self.decoder.final_norm(&rows[from * self.hidden..]).map_err(|e| self.block_of(e))?;
        let picks = if first < n {
            self.decoder.head(&normed[(first - from) * self.hidden..]).map_err(|e| self.block_of(e))?
        } else {
            Vec::new()
        };
        if sequence.drafting {
            let pre = self.decoder.draft_conventions().pre_norm;
            sequence.finals = if pre { rows.to_vec() } else { normed.clone() };
        }
        (sequence.normed, sequence.normed_from) = (normed, from);
        Ok(picks.into_iter().map(|pick| pick.id).collect())
    }

    fn keep(&mut self, sequence: &mut Sequence, inputs: &[f32], kept: usize) {
        let n = inputs.len() / self.hidden;
        let position = sequence.state.position.index() + kept;
        sequence.state.position = Position::from(position);
        if kept < n {
            let width = self.decoder.geometry().attention.as_ref().map_or(0, |a| a.kv_width());
            for (block, after) in sequence.state.blocks.iter_mut().zip(&mut sequence.snapshots) {
                match block {
                    BlockState::Mamba(mamba) => *mamba = after.swap_remove(kept - 1),
                    BlockState::Attention(kv) => kv.truncate(position, width),
                    BlockState::None => {}
                }
            }
        }
        sequence.snapshots.clear();
        let last = kept - 1 - sequence.normed_from;
        sequence.last = sequence.normed[last * self.hidden..][..self.hidden].to_vec();
        if sequence.drafting && self.remember(sequence, inputs, kept).is_err() {
            // Only drafts are lost with it.
            sequence.drafting = false;
        }
        sequence.finals.clear();
    }

    fn draft(&mut self, sequence: &mut Sequence, next: TokenId, depth: usize) -> Vec<TokenId> {
        if !sequence.drafting || sequence.hidden.is_empty() || depth == 0 {
            return Vec::new();
        }
        let mut drafts = self.try_draft(sequence, next, depth).unwrap_or_else(|_| {
            sequence.drafting = false;
            Vec::new()
        });
        if let Some(given) = &self.given {
            // `next` is the id at the state's position, the drafts come behind it.
            let behind = given.get(sequence.state.position.index() + 1..).unwrap_or_default();
            drafts.iter_mut().zip(behind).for_each(|(draft, given)| *draft = *given);
        }
        if let Some(draw) = &mut self.wrong {
            for id in &mut drafts {
                *draw = draw.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                if *draw >> 30 == 0 {
                    id.0 ^= 1;
                }
            }
        }
        drafts
    }

    fn save(&self, sequence: &Sequence) -> Seed {
        Seed { state: sequence.state.clone(), hidden: sequence.hidden.clone() }
    }

    fn logits(&self, sequence: &Sequence) -> Vec<f32> {
        if sequence.last.is_empty() { Vec::new() } else { self.decoder.logits(&sequence.last) }
    }
}
