//! The fast host decoder against every reference, on every instruction set this processor has.

use std::sync::Arc;
use std::time::Instant;

use riparian::host::{
    Decoder, DraftConventions, ExpertRows, HostSequence, Isa, Observer, Pool, Routes, physical_cores,
};
use riparian::ids::{BlockIx, LayerIx, TokenId};
use riparian::knobs::Activations;
use riparian::model::geometry::BlockKind;
use riparian::model::state::{BlockState, KvState, SequenceState};
use riparian::reference::Conventions;

use crate::case::Case;
use crate::harness::{
    Blocks, Decode, DraftLayer, DraftTrace, Engine, Forward, Rounds, RouteTrace, Speculate, Trace, check_blocks,
    check_decode, check_draft_layer, check_drafts_change_nothing, check_forward, check_speculation, check_split,
};
use crate::reference::Reference;
use crate::tolerance::{F32, F32_OTHER_LADDER, INT8, INT8_BLOCK, INT8_EXCUSED_MAX, Tolerance};

/// The host decoder on one instruction set.
pub(crate) struct Host<'a> {
    case: &'a Case,
    act: Activations,
    pool: Pool,
    decoder: Arc<Decoder>,
}

impl<'a> Host<'a> {
    pub(crate) fn new(case: &'a Case, act: Activations, isa: Isa) -> Self {
        let pool = Pool::with_isa(physical_cores(), isa);
        let decoder = Arc::new(Self::decoder(case, act, pool.clone()));
        Self { case, act, pool, decoder }
    }

    /// The case's decoder.
    pub(crate) fn decoder(case: &Case, act: Activations, pool: Pool) -> Decoder {
        match case.opened() {
            Some(model) => Decoder::new(Arc::clone(model), act, pool),
            None => Decoder::from_parts(case.geometry.clone(), case.rebuilt(), act, pool),
        }
    }

    /// All of an MoE layer over rows, by the decoder's own parts.
    fn moe(decoder: &Decoder, layer: LayerIx, rows: &mut [f32]) -> Routes {
        let routes = decoder.route(layer, rows).expect("finite rows");
        let top_k = decoder.geometry().moe.expect("an MoE model").top_k;
        let wanted: Vec<ExpertRows> = routes.by_expert(top_k);
        let outputs = decoder.experts(layer, &routes.normed, &wanted);
        let width = outputs.len() / routes.picks.len();
        let outputs = routes.place(top_k, &wanted, &outputs, width);
        let shared = decoder.shared(layer, &routes.normed);
        decoder.sum(layer, rows, &routes, &outputs, &shared);
        routes
    }
}

fn trace(routes: Routes) -> RouteTrace {
    RouteTrace { logits: None, picks: routes.picks, weights: routes.weights }
}

/// Keeps what passes.
struct Watch {
    trace: Trace,
    moe_blocks: Vec<BlockIx>,
}

impl Observer for Watch {
    fn moe(&mut self, layer: LayerIx, routes: &Routes) {
        self.trace.routes[self.moe_blocks[layer.index()].index()] = Some(trace(routes.clone()));
    }

    fn block(&mut self, block: BlockIx, rows: &[f32]) {
        self.trace.residual[block.index()] = rows.to_vec();
    }
}

impl Engine for Host<'_> {
    fn label(&self) -> String {
        format!("host {:?}, {}", self.act, self.pool.isa())
    }
}

impl Forward for Host<'_> {
    fn embed(&mut self, ids: &[TokenId]) -> Vec<f32> {
        let hidden = self.case.geometry.hidden;
        let mut rows = vec![0.0; ids.len() * hidden];
        rows.chunks_exact_mut(hidden).zip(ids).for_each(|(row, id)| self.decoder.embed(*id, row));
        rows
    }

    fn forward(&mut self, rows: &[f32], state: &mut SequenceState) -> Trace {
        let geometry = &self.case.geometry;
        let blocks = geometry.blocks.len();
        let mut watch = Watch {
            trace: Trace { residual: vec![Vec::new(); blocks], ..Trace::default() },
            moe_blocks: geometry.blocks_of(BlockKind::Moe).collect(),
        };
        watch.trace.routes.resize_with(blocks, || None);
        let mut rows = rows.to_vec();
        self.decoder.forward(&mut rows, state, &mut watch).expect("finite rows");
        let mut trace = watch.trace;
        trace.normed = self.decoder.final_norm(&rows).expect("finite rows");
        trace.logits = self.decoder.logits(&trace.normed);
        trace
    }
}

impl Blocks for Host<'_> {
    fn block(&mut self, block: BlockIx, rows: &mut [f32], state: &mut BlockState) -> Option<RouteTrace> {
        if self.case.geometry.blocks[block.index()] == BlockKind::Moe {
            return Some(trace(Self::moe(&self.decoder, self.case.geometry.layer_of(block), rows)));
        }
        self.decoder.mix(block, rows, state, None).expect("finite rows");
        None
    }
}

impl Decode for Host<'_> {
    fn decode(&mut self, rows: &[f32], steps: usize) -> Vec<TokenId> {
        let mut sequence = HostSequence::new(Arc::clone(&self.decoder)).without_drafts();
        let mut ids = vec![sequence.feed(rows, &mut ()).expect("finite rows").id];
        while ids.len() < steps {
            ids.push(sequence.step(ids[ids.len() - 1]).expect("finite rows").id);
        }
        ids
    }
}

impl DraftLayer for Host<'_> {
    fn draft(&mut self, conventions: Conventions, embeddings: &[f32], hidden: &[f32]) -> DraftTrace {
        let Conventions { prenorm_hidden: pre_norm, layer_norm, hidden_first } = conventions;
        let decoder = Self::decoder(self.case, self.act, self.pool.clone()).with_draft_conventions(DraftConventions {
            pre_norm,
            layer_norm,
            hidden_first,
        });
        let mut kv = KvState::default();
        let mut out = decoder.draft_fuse(embeddings, hidden).expect("finite rows");
        decoder.draft_attend(&mut out, &mut kv).expect("finite rows");
        let layer = self.case.geometry.draft_layer().expect("a draft layer");
        let picks = Self::moe(&decoder, layer, &mut out).picks;
        let rows = decoder.draft_output(&out).expect("finite rows");
        let ids = decoder.head(&rows).expect("finite logits").iter().map(|pick| pick.id).collect();

        let mut again = KvState::default();
        let whole = decoder.draft(embeddings, hidden, &mut again).expect("finite rows");
        assert_eq!((&whole, &again), (&rows, &kv), "the layer in one call and in its parts");
        DraftTrace { rows, ids, picks, kv }
    }
}

impl Speculate for Host<'_> {
    fn speculate(&mut self, rows: &[f32], steps: usize, depth: usize) -> Rounds {
        let mut sequence = HostSequence::new(Arc::clone(&self.decoder));
        let mut ids = vec![sequence.feed(rows, &mut ()).expect("finite rows").id];
        let mut rounds = Vec::new();
        while ids.len() < steps {
            let round = sequence.round(ids[ids.len() - 1], depth).expect("finite rows");
            ids.extend(round.picks.iter().map(|pick| pick.id));
            let accepted = round.accepted();
            rounds.push((round.drafts, accepted));
        }
        Rounds { ids, rounds }
    }
}

/// Everything there is to check of one case in f32. No reference comes near a tie, so nothing may be excused.
fn f32_everywhere(case: &Case, sets: impl IntoIterator<Item = Isa>, depths: &[usize], tolerance: &Tolerance) {
    for isa in sets {
        let (host, started) = (&mut Host::new(case, Activations::F32, isa), Instant::now());
        let positions = case.reference.rows.len() / case.geometry.hidden;
        let mut excused = check_forward(case, host, tolerance) + check_decode(case, host, tolerance);
        check_split(case, host, &[1, positions / 2], tolerance);
        if case.reference.blocks.iter().all(|block| block.residual.is_some()) {
            excused += check_blocks(case, host, &[1, 4], tolerance);
        }
        if let Some(draft) = &case.reference.draft {
            excused += check_draft_layer(case, host, tolerance);
            if draft.speculation.is_empty() {
                check_drafts_change_nothing(case, host, depths);
            } else {
                excused += check_speculation(case, host, depths, tolerance);
            }
        }
        println!("{}, {}: {:.1} s", case.reference.name, host.label(), started.elapsed().as_secs_f32());
        assert_eq!(excused, 0, "{}: excused where no near-tie was recorded", case.reference.name);
    }
}

/// int8 against the plain decoder's, which no other implementation has.
fn int8_everywhere(case: Case) {
    let int8 = Reference::record(&case, Activations::Int8, 24);
    let case = case.with_reference(int8);
    for isa in Isa::present() {
        let host = &mut Host::new(&case, Activations::Int8, isa);
        check_blocks(&case, host, &[1, 4], &INT8_BLOCK);
        let excused = check_decode(&case, host, &INT8);
        assert!(excused as f32 <= INT8_EXCUSED_MAX * 24.0, "{}: {excused} of 24 ids excused", case.reference.name);
        if case.reference.draft.is_some() {
            check_draft_layer(&case, host, &INT8_BLOCK);
            check_drafts_change_nothing(&case, host, &[1, 2, 3]);
        }
    }
}

macro_rules! fixtures {
    ($($test:ident $name:literal $sets:expr, $depths:expr;)*) => {$(
        #[test]
        fn $test() {
            if let Some(case) = Case::fixture($name) {
                f32_everywhere(&case, $sets, $depths, &F32);
            }
        }
    )*};
}

fixtures! {
    tiny "tiny" Isa::present(), &[1, 2, 3];
    tiny_groups "tiny-groups" Isa::present(), &[1, 2, 3];
    tiny_mlp "tiny-mlp" Isa::present(), &[1, 2, 3];
    tiny_latent "tiny-latent" Isa::present(), &[1, 2, 3];
    tiny_clamp "tiny-clamp" Isa::present(), &[1, 2, 3];
    tiny_nemo "tiny-nemo" Isa::present(), &[1, 2, 3];
    transcribe_tiny "transcribe-tiny" Isa::present(), &[1, 2, 3];
    kernel "kernel" Isa::present(), &[1, 2, 3];
    // nothing is kept there, so deeper rounds begin with the drafts of shallower ones
    wide "wide" [Isa::best()], &[3];
}

macro_rules! peer_files {
    ($($test:ident $name:literal;)*) => {$(
        #[test]
        fn $test() {
            if let Some(case) = Case::peer($name) {
                f32_everywhere(&case, Isa::present(), &[1, 2, 3], &F32_OTHER_LADDER);
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
