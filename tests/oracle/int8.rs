//! int8 activations (`runtime.md` §3a). No other implementation has this arithmetic, so the reference is the plain
//! decoder's own int8, and what that is held to is its f32.

use riparian::ids::{BlockIx, TokenId};
use riparian::knobs::Activations;
use riparian::model::state::{BlockState, SequenceState};
use riparian::reference::argmax::argmax;

use crate::case::Case;
use crate::harness::{
    Blocks, Decode, Engine, Forward, RouteTrace, Trace, check_blocks, check_decode, check_drafts_change_nothing,
    check_forward,
};
use crate::plain::Plain;
use crate::reference::Reference;
use crate::tolerance::{F32, INT8, INT8_BLOCK, INT8_ERROR, INT8_EXCUSED_MAX, Tolerance};

/// The plain decoder with every row nudged in its last bits before each block: what another order of f32 sums does to
/// the rows, and so to the codes that lie near a rounding edge.
struct Nudged<'a> {
    plain: Plain<'a>,
    nudges: u32,
}

impl<'a> Nudged<'a> {
    fn new(case: &'a Case) -> Self {
        Self { plain: Plain::new(case, Activations::Int8, None), nudges: 0 }
    }

    /// By up to four units in the last place, up or down.
    fn nudge(&mut self, row: &mut [f32]) {
        for x in row {
            self.nudges = self.nudges.wrapping_mul(0x9E37_79B1).wrapping_add(0x7F4A_7C15);
            let ulps = (self.nudges >> 28) as f32 / 2.0 - 4.0;
            *x += *x * ulps * f32::EPSILON;
        }
    }
}

impl Engine for Nudged<'_> {
    fn label(&self) -> String {
        "plain decoder Int8, rows nudged".into()
    }
}

impl Blocks for Nudged<'_> {
    fn block(&mut self, block: BlockIx, rows: &mut [f32], state: &mut BlockState) -> Option<RouteTrace> {
        self.nudge(rows);
        self.plain.block(block, rows, state)
    }
}

impl Forward for Nudged<'_> {
    fn embed(&mut self, ids: &[TokenId]) -> Vec<f32> {
        self.plain.embed(ids)
    }

    fn forward(&mut self, rows: &[f32], state: &mut SequenceState) -> Trace {
        let (mut trace, mut rows, hidden) = (Trace::default(), rows.to_vec(), self.plain.geometry().hidden);
        for i in 0..state.blocks.len() {
            let routes = self.block(BlockIx::from(i), &mut rows, &mut state.blocks[i]);
            trace.routes.push(routes);
            trace.residual.push(rows.clone());
        }
        state.position.0 += (rows.len() / hidden) as u32;
        (trace.normed, trace.logits) = self.plain.output(&rows);
        trace
    }
}

impl Decode for Nudged<'_> {
    fn decode(&mut self, rows: &[f32], steps: usize) -> Vec<TokenId> {
        let mut state = SequenceState::new(self.plain.geometry());
        let (mut ids, mut rows, vocab) = (Vec::new(), rows.to_vec(), self.plain.geometry().vocab);
        while ids.len() < steps {
            let logits = self.forward(&rows, &mut state).logits;
            ids.push(argmax(&logits[logits.len() - vocab..]).id);
            rows = self.embed(&ids[ids.len() - 1..]);
        }
        ids
    }
}

/// Matrices stored exactly always use f32 activations.
#[test]
fn exact_weights_do_not_know_the_difference() {
    let case = Case::fixture("tiny-nemo").expect("bundled");
    let [f32, int8] = [Activations::F32, Activations::Int8].map(|act| Reference::record(&case, act, 8));
    assert_eq!((&f32.normed, &f32.logits), (&int8.normed, &int8.logits));
    assert_eq!(f32.greedy.ids, int8.greedy.ids);
    let rows = |reference: &Reference| reference.draft.as_ref().expect("a draft layer").rows.clone();
    assert_eq!(rows(&f32), rows(&int8));
}

/// Block by block from the f32 rows: the error of the activations alone, which is there and is small.
fn error_against_f32(name: &str) {
    let Some(case) = Case::peer(name) else { return };
    let (f32, int8) = (Reference::record(&case, Activations::F32, 1), Reference::record(&case, Activations::Int8, 1));
    assert_ne!(f32.normed, int8.normed, "{name}: int8 activations change something");
    let case = case.with_reference(f32);
    check_blocks(&case, &mut Plain::new(&case, Activations::Int8, None), &[], &INT8_ERROR);
}

/// The same arithmetic with rounding errors elsewhere: what every other engine is held to.
fn another_order(name: &str) {
    let Some(case) = Case::peer(name) else { return };
    let int8 = Reference::record(&case, Activations::Int8, 24);
    let case = case.with_reference(int8);
    let nudged = &mut Nudged::new(&case);
    check_blocks(&case, nudged, &[1, 4], &INT8_BLOCK);
    let excused = check_decode(&case, nudged, &INT8);
    assert!(excused as f32 <= INT8_EXCUSED_MAX * 24.0, "{name}: {excused} of 24 ids excused");

    // recorded by the same loops: not one value differs, so nothing is excused
    let plain = &mut Plain::new(&case, Activations::Int8, None);
    assert_eq!(check_forward(&case, plain, &Tolerance { rows: 0.0, states: 0.0, margin: 0.0, ..F32 }), 0);
    if case.geometry.draft {
        check_drafts_change_nothing(&case, plain, &[1, 2, 3]);
    }
}

#[test]
fn nemo_q4tp() {
    error_against_f32("nemo-q4tp");
    another_order("nemo-q4tp");
}

#[test]
fn kernel_q4tp() {
    error_against_f32("kernel-q4tp");
    another_order("kernel-q4tp");
}
