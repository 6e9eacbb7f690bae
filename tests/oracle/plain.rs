//! The plain decoder against every reference: what makes it the twin of everything else.

use std::time::Instant;

use riparian::ids::{BlockIx, TokenId};
use riparian::knobs::Activations;
use riparian::model::geometry::Geometry;
use riparian::model::state::{BlockState, KvState, SequenceState};
use riparian::model::tensors::Matrix;
use riparian::reference::{Capture, Conventions, MoeCapture, PlainDecoder};

use crate::case::Case;
use crate::harness::{
    Blocks, Decode, DraftLayer, DraftTrace, Engine, Forward, Rounds, RouteTrace, Speculate, Trace, check_blocks,
    check_decode, check_draft_layer, check_forward, check_speculation, check_split,
};
use crate::tolerance::{F32, Tolerance};

/// The plain decoder, position by position or with a chunked scan.
pub(crate) struct Plain<'a> {
    decoder: PlainDecoder<'a>,
    act: Activations,
    /// Positions a chunk of the scan has; without it, one position at a time.
    chunk: Option<usize>,
}

impl<'a> Plain<'a> {
    pub(crate) fn new(case: &'a Case, act: Activations, chunk: Option<usize>) -> Self {
        Self { decoder: PlainDecoder::new(&case.geometry, case.weights(), act), act, chunk }
    }
}

impl Plain<'_> {
    /// The model's shapes.
    pub(crate) fn geometry(&self) -> &Geometry {
        self.decoder.geometry()
    }

    /// Normed rows and logits of the rows after the last block.
    pub(crate) fn output(&self, rows: &[f32]) -> (Vec<f32>, Vec<f32>) {
        let rows = rows.chunks_exact(self.geometry().hidden);
        let normed: Vec<f32> = rows.flat_map(|row| self.decoder.final_norm(row)).collect();
        let logits = self.decoder.logits(&normed);
        (normed, logits)
    }
}

fn route(moe: MoeCapture) -> Option<RouteTrace> {
    let routed = !moe.picks.is_empty();
    routed.then_some(RouteTrace { logits: Some(moe.logits), picks: moe.picks, weights: moe.weights })
}

impl Engine for Plain<'_> {
    fn label(&self) -> String {
        match self.chunk {
            Some(chunk) => format!("plain decoder {:?}, scan in chunks of {chunk}", self.act),
            None => format!("plain decoder {:?}", self.act),
        }
    }
}

impl Forward for Plain<'_> {
    fn embed(&mut self, ids: &[TokenId]) -> Vec<f32> {
        self.decoder.embed(ids)
    }

    fn forward(&mut self, rows: &[f32], state: &mut SequenceState) -> Trace {
        let mut capture = Capture::default();
        let out = match self.chunk {
            Some(chunk) => self.decoder.forward_chunked(rows, state, chunk, Some(&mut capture)),
            None => self.decoder.forward(rows, state, Some(&mut capture)),
        };
        Trace {
            residual: capture.residual,
            routes: capture.moe.into_iter().map(route).collect(),
            logits: self.decoder.logits(&out.normed),
            normed: out.normed,
        }
    }
}

impl Blocks for Plain<'_> {
    fn block(&mut self, block: BlockIx, rows: &mut [f32], state: &mut BlockState) -> Option<RouteTrace> {
        let mut moe = MoeCapture::default();
        for row in rows.chunks_exact_mut(self.decoder.geometry().hidden) {
            self.decoder.block(block, row, state, Some(&mut moe));
        }
        route(moe)
    }
}

impl Decode for Plain<'_> {
    fn decode(&mut self, rows: &[f32], steps: usize) -> Vec<TokenId> {
        self.decoder.greedy(rows, &mut SequenceState::new(self.decoder.geometry()), steps).ids()
    }
}

impl DraftLayer for Plain<'_> {
    fn draft(&mut self, conventions: Conventions, embeddings: &[f32], hidden: &[f32]) -> DraftTrace {
        let (mut kv, mut moe) = (KvState::default(), MoeCapture::default());
        let rows = self.decoder.draft_rows(conventions, embeddings, hidden, &mut kv, Some(&mut moe));
        let ids = self.decoder.head(&rows).iter().map(|pick| pick.id).collect();
        DraftTrace { rows, ids, picks: moe.picks, kv }
    }
}

impl Speculate for Plain<'_> {
    fn speculate(&mut self, rows: &[f32], steps: usize, depth: usize) -> Rounds {
        let mut state = SequenceState::new(self.decoder.geometry());
        let done = self.decoder.speculate(Conventions::default(), rows, &mut state, steps, depth);
        Rounds {
            ids: done.picks.iter().map(|pick| pick.id).collect(),
            rounds: done
                .rounds
                .iter()
                .map(|round| (round.drafts.iter().map(|draft| draft.id).collect(), round.accepted))
                .collect(),
        }
    }
}

/// Everything there is to check of one case. No reference comes near a tie, so nothing may be excused.
fn check_all(case: &Case, tolerance: &Tolerance, depths: &[usize]) {
    let started = Instant::now();
    let plain = &mut Plain::new(case, Activations::F32, None);
    let positions = case.reference.rows.len() / case.geometry.hidden;
    let mut excused = check_forward(case, plain, tolerance)
        + check_decode(case, plain, tolerance)
        + check_forward(case, &mut Plain::new(case, Activations::F32, Some(7)), tolerance);
    check_split(case, &mut Plain::new(case, Activations::F32, Some(4)), &[1, positions / 2], tolerance);
    if case.reference.blocks.iter().all(|block| block.residual.is_some()) {
        excused += check_blocks(case, plain, &[1, 4], tolerance);
    }
    if case.reference.draft.is_some() {
        excused += check_draft_layer(case, plain, tolerance);
    }
    if !depths.is_empty() {
        excused += check_speculation(case, plain, depths, tolerance);
    }
    println!("{}: {:.1} s", case.reference.name, started.elapsed().as_secs_f32());
    assert_eq!(excused, 0, "{}: excused where no near-tie was recorded", case.reference.name);
}

macro_rules! fixtures {
    ($($test:ident $name:literal $depths:expr;)*) => {$(
        #[test]
        fn $test() {
            if let Some(case) = Case::fixture($name) {
                check_all(&case, &F32, $depths);
            }
        }
    )*};
}

fixtures! {
    tiny "tiny" &[];
    tiny_groups "tiny-groups" &[];
    tiny_mlp "tiny-mlp" &[];
    tiny_latent "tiny-latent" &[];
    tiny_clamp "tiny-clamp" &[];
    tiny_nemo "tiny-nemo" &[1, 2, 3];
    transcribe_tiny "transcribe-tiny" &[];
    kernel "kernel" &[1, 2, 3];
    // nothing is kept there, so deeper rounds begin with the drafts of shallower ones
    wide "wide" &[3];
}

macro_rules! peer_files {
    ($($test:ident $name:literal;)*) => {$(
        #[test]
        fn $test() {
            if let Some(case) = Case::peer($name) {
                check_all(&case, &F32, &[]);
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

/// After drafting, keeping and rolling back, the state is that of having read the emitted ids one by one, bit for bit.
#[test]
fn rounds_leave_the_state_of_plain_decode() {
    for (name, must_keep) in [("tiny-nemo", false), ("kernel", true)] {
        let Some(case) = Case::fixture(name) else { continue };
        let decoder = PlainDecoder::new(&case.geometry, case.weights(), Activations::F32);
        for depth in 1..=3 {
            let mut state = SequenceState::new(&case.geometry);
            let done = decoder.speculate(Conventions::default(), &case.reference.rows, &mut state, 24, depth);
            let (kept, offered) = done.rounds.iter().fold((0, 0), |(k, o), r| (k + r.accepted, o + r.drafts.len()));
            assert!(
                kept < offered && (kept > 0 || !must_keep),
                "{name}: {kept} of {offered} kept: nothing to see here"
            );

            let mut plain = SequenceState::new(&case.geometry);
            decoder.forward(&case.reference.rows, &mut plain, None);
            let read: Vec<TokenId> = done.picks[..done.picks.len() - 1].iter().map(|pick| pick.id).collect();
            decoder.forward(&decoder.embed(&read), &mut plain, None);
            assert_eq!((state.position, &state.blocks), (plain.position, &plain.blocks), "{name}, {depth} drafts");

            // the layer has read every position before the last round's, each with the row that follows it
            let width = case.geometry.attention.expect("attends").kv_width();
            let last = done.rounds.last().expect("a round").accepted + 1;
            assert_eq!(state.draft.k.len(), (state.position.index() - last) * width, "{name}, {depth} drafts");
        }
    }
}

/// No reference has the halves of the fusion swapped, but swapped columns under the swapped convention are the same.
#[test]
fn hidden_first_is_the_fusion_with_its_columns_swapped() {
    let case = Case::fixture("tiny-nemo").expect("bundled");
    let mut swapped = case.rebuilt();
    let hidden = case.geometry.hidden;
    let draft = swapped.draft.as_deref_mut().expect("a draft layer");
    let bytes = draft.eh_proj.payload();
    let row = bytes.len() / hidden;
    let payload =
        bytes.chunks_exact(row).flat_map(|row| [&row[row.len() / 2..], &row[..row.len() / 2]].concat()).collect();
    draft.eh_proj = Matrix::from_payload("swapped", draft.eh_proj.codec(), [hidden, 2 * hidden], payload);

    let want = &case.reference.draft.as_ref().expect("a draft layer").ids[0].1;
    let (path, read) = case.path();
    let ids = |weights, hidden_first| {
        let decoder = PlainDecoder::new(&case.geometry, weights, Activations::F32);
        let conventions = Conventions { hidden_first, ..Conventions::default() };
        Plain { decoder, act: Activations::F32, chunk: None }.draft(conventions, &path[hidden..], &read.normed).ids
    };
    assert_eq!(&ids(&swapped, true), want);
    assert_ne!(&ids(&swapped, false), want);
    assert_ne!(&ids(case.weights(), true), want);
}
