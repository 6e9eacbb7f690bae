//! The comparisons themselves: an engine that is wrong in one way fails the check that should see it, and a near-tie
//! excuses what it may.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use riparian::ids::{BlockIx, ExpertIx, TokenId};
use riparian::knobs::Activations;
use riparian::model::state::{BlockState, SequenceState};
use riparian::reference::Conventions;

use crate::case::Case;
use crate::harness::{
    Blocks, Decode, DraftLayer, DraftTrace, Engine, Forward, Rounds, RouteTrace, Speculate, Trace, check_blocks,
    check_decode, check_draft_layer, check_forward, check_speculation, check_split,
};
use crate::plain::Plain;
use crate::tolerance::F32;

/// What is wrong.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    None,
    /// One value of the residual after this block, by 2e-4.
    Row(usize),
    /// One expert of the last row of this block's choices.
    Expert(usize),
    /// One weight, by 1e-4.
    Weight(usize),
    /// One value of this block's state after each call, by 1e-3.
    State(usize),
    /// One logit of the last row, by 1e-3.
    Logit,
    /// The id at this step of a continuation.
    Id(usize),
    /// The last id of a call is missing.
    Short,
    /// A draft of this round.
    Draft(usize),
    /// The kept count of this round.
    Kept(usize),
    /// Conventions are ignored.
    Conventions,
    /// Mamba states are not carried from call to call.
    Forgets,
}

struct Wrong<'a> {
    right: Plain<'a>,
    fault: Fault,
    /// `decode` calls so far: an id is wrong in the first only.
    calls: usize,
}

impl<'a> Wrong<'a> {
    fn new(case: &'a Case, fault: Fault) -> Self {
        Self { right: Plain::new(case, Activations::F32, None), fault, calls: 0 }
    }

    fn spoil_routes(&self, block: usize, routes: Option<&mut RouteTrace>) {
        if let Some(routes) = routes {
            if self.fault == Fault::Expert(block) {
                let used: Vec<ExpertIx> = routes.picks.clone();
                let other = (0..).map(ExpertIx).find(|e| !used[used.len() - 2..].contains(e)).expect("another expert");
                *routes.picks.last_mut().expect("a pick") = other;
            }
            if self.fault == Fault::Weight(block) {
                routes.weights[0] += 1e-4;
            }
        }
    }

    fn spoil_state(&self, block: usize, state: &mut BlockState) {
        if self.fault == Fault::State(block) {
            match state {
                BlockState::Mamba(state) => *state.ssm.last_mut().expect("a state") += 1e-3,
                BlockState::Attention(kv) => kv.v[0] += 1e-3,
                BlockState::None => panic!("a block with a state"),
            }
        }
    }
}

impl Engine for Wrong<'_> {
    fn label(&self) -> String {
        format!("{:?}", self.fault)
    }
}

impl Forward for Wrong<'_> {
    fn embed(&mut self, ids: &[TokenId]) -> Vec<f32> {
        self.right.embed(ids)
    }

    fn forward(&mut self, rows: &[f32], state: &mut SequenceState) -> Trace {
        if self.fault == Fault::Forgets {
            let position = state.position;
            for (block, fresh) in state.blocks.iter_mut().zip(SequenceState::new(self.right.geometry()).blocks) {
                if matches!(block, BlockState::Mamba(_)) {
                    *block = fresh;
                }
            }
            state.position = position;
        }
        let mut trace = self.right.forward(rows, state);
        if let Fault::Row(block) = self.fault {
            trace.residual[block][0] += 2e-4;
        }
        if self.fault == Fault::Logit {
            *trace.logits.last_mut().expect("a logit") += 1e-3;
        }
        for (block, routes) in trace.routes.iter_mut().enumerate() {
            self.spoil_routes(block, routes.as_mut());
        }
        for (block, state) in state.blocks.iter_mut().enumerate() {
            self.spoil_state(block, state);
        }
        trace
    }
}

impl Blocks for Wrong<'_> {
    fn block(&mut self, block: BlockIx, rows: &mut [f32], state: &mut BlockState) -> Option<RouteTrace> {
        let mut routes = self.right.block(block, rows, state);
        if self.fault == Fault::Row(block.index()) {
            rows[0] += 2e-4;
        }
        self.spoil_routes(block.index(), routes.as_mut());
        self.spoil_state(block.index(), state);
        routes
    }
}

impl Decode for Wrong<'_> {
    fn decode(&mut self, rows: &[f32], steps: usize) -> Vec<TokenId> {
        let mut ids = self.right.decode(rows, steps);
        self.calls += 1;
        match self.fault {
            Fault::Id(step) if self.calls == 1 => ids[step] = TokenId(ids[step].0 ^ 1),
            Fault::Short => drop(ids.pop()),
            _ => {}
        }
        ids
    }
}

impl DraftLayer for Wrong<'_> {
    fn draft(&mut self, conventions: Conventions, embeddings: &[f32], hidden: &[f32]) -> DraftTrace {
        let conventions = if self.fault == Fault::Conventions { Conventions::default() } else { conventions };
        self.right.draft(conventions, embeddings, hidden)
    }
}

impl Speculate for Wrong<'_> {
    fn speculate(&mut self, rows: &[f32], steps: usize, depth: usize) -> Rounds {
        let mut done = self.right.speculate(rows, steps, depth);
        match self.fault {
            Fault::Draft(round) => done.rounds[round].0[depth - 1].0 ^= 1,
            Fault::Kept(round) => done.rounds[round].1 ^= 1,
            Fault::Id(step) => done.ids[step].0 ^= 1,
            _ => {}
        }
        done
    }
}

fn case() -> Arc<Case> {
    Case::fixture("tiny-nemo").expect("bundled")
}

/// Runs a check with a fault and expects its assertion to fail with a message about `what`.
fn caught(what: &str, fault: Fault, check: impl FnOnce(&Case, &mut Wrong<'_>)) {
    let case = case();
    let message = failure(|| check(&case, &mut Wrong::new(&case, fault)));
    let message = message.unwrap_or_else(|| panic!("{fault:?} was not seen"));
    assert!(message.contains(what), "{fault:?} was seen as something else: {message}");
}

/// The message a check fails with, if it does.
fn failure(check: impl FnOnce()) -> Option<String> {
    let payload = catch_unwind(AssertUnwindSafe(check)).err()?;
    Some(payload.downcast::<String>().map_or_else(|_| String::new(), |message| *message))
}

#[test]
fn a_right_engine_passes() {
    let case = case();
    let right = &mut Wrong::new(&case, Fault::None);
    assert_eq!(
        check_forward(&case, right, &F32) + check_blocks(&case, right, &[], &F32) + check_decode(&case, right, &F32),
        0
    );
}

#[test]
fn a_pass_that_is_wrong_somewhere_is_seen() {
    // blocks of tiny-nemo: ME*EME
    let faults = [
        ("rows after block 0", Fault::Row(0)),
        ("rows after block 5", Fault::Row(5)),
        ("block 1 row 20: experts", Fault::Expert(1)),
        ("block 5 row 20: experts", Fault::Expert(5)),
        ("router weights block 3 row 0", Fault::Weight(3)),
        ("ssm states of block 0", Fault::State(0)),
        ("values of block 2", Fault::State(2)),
        ("ssm states of block 4", Fault::State(4)),
    ];
    for (what, fault) in faults {
        caught(what, fault, |case, engine| _ = check_forward(case, engine, &F32));
        caught(what, fault, |case, engine| _ = check_blocks(case, engine, &[], &F32));
    }
    caught("logits", Fault::Logit, |case, engine| _ = check_forward(case, engine, &F32));
    caught("logits of the path", Fault::Forgets, |case, engine| _ = check_forward(case, engine, &F32));
    caught("normed rows", Fault::Forgets, |case, engine| check_split(case, engine, &[3, 9], &F32));
}

#[test]
fn a_wrong_id_is_seen_wherever_it_is() {
    for (what, fault) in [("step 0", Fault::Id(0)), ("step 47", Fault::Id(47)), ("ids given", Fault::Short)] {
        caught(what, fault, |case, engine| _ = check_decode(case, engine, &F32));
    }
    caught("ids with 1 drafts", Fault::Id(5), |case, engine| _ = check_speculation(case, engine, &[1], &F32));
}

#[test]
fn wrong_drafts_are_seen() {
    caught("layer_norm: true", Fault::Conventions, |case, engine| _ = check_draft_layer(case, engine, &F32));
    for (what, fault) in [
        ("round 0: drafts", Fault::Draft(0)),
        ("round 40: drafts", Fault::Draft(40)),
        ("round 3: kept", Fault::Kept(3)),
    ] {
        caught(what, fault, |case, engine| _ = check_speculation(case, engine, &[2], &F32));
    }
}

/// A near-tie at the step excuses another id there, and a router near-tie before it does; the check goes on along the
/// reference.
#[test]
fn near_ties_excuse_and_are_counted() {
    let near = |margin: Option<usize>, gap: Option<usize>| {
        let mut case = Case::load_fixture("tiny-nemo").expect("bundled");
        if let Some(step) = margin {
            case.reference.greedy.margins[step] = F32.margin / 2.0;
        }
        if let Some(position) = gap {
            case.reference.greedy.path_gaps[position] = F32.router_gap / 2.0;
        }
        case
    };
    let prompt = 21;
    for case in [near(Some(7), None), near(None, Some(0)), near(None, Some(prompt + 6))] {
        assert_eq!(check_decode(&case, &mut Wrong::new(&case, Fault::Id(7)), &F32), 1);
    }
    // a tie at another step, or a router gap behind the step, excuses nothing
    for case in [near(Some(6), None), near(None, Some(prompt + 7))] {
        let message = failure(|| _ = check_decode(&case, &mut Wrong::new(&case, Fault::Id(7)), &F32));
        assert!(message.is_some_and(|message| message.contains("step 7")), "excused without a reason");
    }
}
