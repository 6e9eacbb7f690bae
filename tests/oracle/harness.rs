//! The comparisons, written once for every engine.
//!
//! An engine is anything that evaluates the model: the plain decoder, the fast
//! host decoder, the actor graph over any device. What it can show of itself
//! it says by the traits it implements; each check asks for one of them:
//!
//! | trait | shows | check |
//! |---|---|---|
//! | [`Forward`] | rows in, everything out | [`check_forward`], [`check_split`] |
//! | [`Blocks`] | one block over rows | [`check_blocks`] |
//! | [`Decode`] | rows in, ids out | [`check_decode`] |
//! | [`DraftLayer`] | the draft layer over rows | [`check_draft_layer`] |
//! | [`Speculate`] | drafting and verifying in rounds | [`check_speculation`], [`check_drafts_change_nothing`] |
//!
//! An id or an expert choice may differ only behind a near-tie of the
//! reference (`runtime.md` §3a). It is then counted and printed, and the check
//! goes on along the reference.

use std::ops::Range;

use riparian::ids::{BlockIx, ExpertIx, TokenId};
use riparian::model::state::{BlockState, KvState, SequenceState};
use riparian::reference::Conventions;
use riparian::reference::argmax::argmax;

use crate::case::Case;
use crate::reference::{Reference, StateReference};
use crate::report::Report;
use crate::tolerance::Tolerance;

/// What every engine says of itself.
pub(crate) trait Engine {
    /// Its name and arithmetic, for the report.
    fn label(&self) -> String;
}

/// An engine that can be looked into.
pub(crate) trait Forward: Engine {
    /// `[n, hidden]`
    fn embed(&mut self, ids: &[TokenId]) -> Vec<f32>;
    /// Reads rows `[n, hidden]` on from `state`.
    fn forward(&mut self, rows: &[f32], state: &mut SequenceState) -> Trace;
}

/// What one pass showed.
#[derive(Debug, Default)]
pub(crate) struct Trace {
    /// `[blocks]` of `[n, hidden]`: the residual after each block
    pub(crate) residual: Vec<Vec<f32>>,
    /// `[blocks]`: choices of the MoE blocks
    pub(crate) routes: Vec<Option<RouteTrace>>,
    /// `[n, hidden]`
    pub(crate) normed: Vec<f32>,
    /// `[n, vocab]`
    pub(crate) logits: Vec<f32>,
}

/// Choices of one MoE block.
#[derive(Debug)]
pub(crate) struct RouteTrace {
    /// `[n, experts]`, if the engine keeps them
    pub(crate) logits: Option<Vec<f32>>,
    /// `[n, k]`, best first
    pub(crate) picks: Vec<ExpertIx>,
    /// `[n, k]`
    pub(crate) weights: Vec<f32>,
}

impl RouteTrace {
    /// Adds the rows of a later call.
    fn append(&mut self, later: Self) {
        self.logits = self.logits.take().zip(later.logits).map(|(all, later)| [all, later].concat());
        self.picks.extend(later.picks);
        self.weights.extend(later.weights);
    }
}

/// An engine that can run one block alone.
pub(crate) trait Blocks: Engine {
    /// Rows `[n, hidden]` in place, on from `state`.
    fn block(&mut self, block: BlockIx, rows: &mut [f32], state: &mut BlockState) -> Option<RouteTrace>;
}

/// An engine that gives ids.
pub(crate) trait Decode: Engine {
    /// Greedy ids after rows `[n, hidden]`, from an empty state; no end id stops it.
    fn decode(&mut self, rows: &[f32], steps: usize) -> Vec<TokenId>;
}

/// An engine whose draft layer can be run alone.
pub(crate) trait DraftLayer: Engine {
    /// The layer over rows whose embeddings and decoder rows are known, `[n, hidden]` each, from an empty KV.
    fn draft(&mut self, conventions: Conventions, embeddings: &[f32], hidden: &[f32]) -> DraftTrace;
}

/// What the draft layer showed.
#[derive(Debug)]
pub(crate) struct DraftTrace {
    /// `m`, `[n, hidden]`
    pub(crate) rows: Vec<f32>,
    /// `[n]`
    pub(crate) ids: Vec<TokenId>,
    /// `[n, k]`
    pub(crate) picks: Vec<ExpertIx>,
    /// The layer's own keys and values.
    pub(crate) kv: KvState,
}

/// An engine that decodes with drafts.
pub(crate) trait Speculate: Engine {
    /// Goes on for at least `steps` ids with `depth` drafts a round.
    fn speculate(&mut self, rows: &[f32], steps: usize, depth: usize) -> Rounds;
}

/// What speculative decoding did.
#[derive(Debug)]
pub(crate) struct Rounds {
    /// At least as many as asked for.
    pub(crate) ids: Vec<TokenId>,
    /// Drafts and how many were kept, round by round.
    pub(crate) rounds: Vec<(Vec<TokenId>, usize)>,
}

/// Embeddings, the prompt's pass block by block, states, then the reference's greedy path in a second pass.
pub(crate) fn check_forward(case: &Case, engine: &mut impl Forward, tolerance: &Tolerance) -> usize {
    let reference = &case.reference;
    let mut report = Report::new(&engine.label(), &reference.name);
    if !reference.prompt.is_empty() {
        // a look-up rounds nothing, and a quantised row is dequantised in one order everywhere
        report.close("embeddings", "", &engine.embed(&reference.prompt), &reference.rows, 0.0);
    }

    let mut state = SequenceState::new(&case.geometry);
    let trace = engine.forward(&reference.rows, &mut state);
    let prompt = reference.rows.len() / case.geometry.hidden;
    assert_eq!(state.position.index(), prompt, "{}: position", reference.name);
    let comparable = compare_trace(&mut report, case, &trace, tolerance);
    if comparable == prompt {
        compare_states(&mut report, reference.blocks.iter().map(|block| &block.state), &state, tolerance);
        check_path(&mut report, case, engine, &trace, &mut state, tolerance);
    }
    report.print()
}

/// The second pass: all greedy ids but the last, on from the prompt.
fn check_path(
    report: &mut Report,
    case: &Case,
    engine: &mut impl Forward,
    prompt: &Trace,
    state: &mut SequenceState,
    tolerance: &Tolerance,
) {
    let (reference, vocab) = (&case.reference, case.geometry.vocab);
    let rows = engine.embed(&reference.greedy.ids[..reference.greedy.ids.len() - 1]);
    let path = engine.forward(&rows, state);
    let first = &prompt.logits[prompt.logits.len() - vocab..];
    let logits: Vec<&[f32]> = [first].into_iter().chain(path.logits.chunks_exact(vocab)).collect();
    let steps = (0..logits.len()).take_while(|step| router_gap(reference, *step) >= tolerance.router_gap).count();
    if let Some((ids, want)) = &reference.greedy.logits {
        let few = ids.len() / logits.len();
        let got: Vec<f32> = ids.iter().enumerate().map(|(i, id)| logits[i / few][id.index()]).collect();
        report.close("logits of the path", "", &got[..steps * few], &want[..steps * few], tolerance.rows);
    }
    for (step, logits) in logits.iter().enumerate().take(steps) {
        let pick = argmax(logits);
        if pick.id != reference.greedy.ids[step] {
            excuse_id(report, reference, step, pick.id, tolerance);
            continue;
        }
        report.equal("argmax of the path", 1);
        let margin = reference.greedy.margins[step];
        report.close_absolute(
            "margins of the path",
            &format!("step {step}"),
            &[pick.margin()],
            &[margin],
            tolerance.margin,
        );
    }
    if steps == logits.len() {
        compare_states(report, reference.blocks.iter().map(|block| &block.end), state, tolerance);
    } else {
        report.excuse(format!("from step {steps} on another expert may have been chosen: not compared"));
    }
}

/// Compares the prompt's pass; gives how many leading positions no excused choice of an expert has touched. What lies
/// behind such a choice is another computation and is not compared.
fn compare_trace(report: &mut Report, case: &Case, trace: &Trace, tolerance: &Tolerance) -> usize {
    let (reference, hidden) = (&case.reference, case.geometry.hidden);
    let mut comparable = reference.rows.len() / hidden;
    for (i, want) in reference.blocks.iter().enumerate() {
        if want.routes.is_some() {
            let got =
                trace.routes[i].as_ref().unwrap_or_else(|| panic!("{}: block {i} routed nothing", reference.name));
            comparable = compare_routes(report, case, i, got, comparable, tolerance);
        }
        if let Some(want) = &want.residual {
            let floats = comparable * hidden;
            assert_eq!(trace.residual[i].len(), want.len(), "{}: rows after block {i}", reference.name);
            report.close(
                "rows",
                &format!("after block {i}"),
                &trace.residual[i][..floats],
                &want[..floats],
                tolerance.rows,
            );
        }
    }
    if let Some(want) = &reference.normed {
        let floats = comparable * hidden;
        report.close("normed rows", "", &trace.normed[..floats], &want[..floats], tolerance.rows);
    }
    if let Some(want) = &reference.logits {
        let got = &trace.logits[trace.logits.len() - want.len()..];
        // recorded for every position, or for the last one
        let vocab = case.geometry.vocab;
        let untouched =
            if want.len() == vocab { comparable * vocab * hidden / reference.rows.len() } else { comparable * vocab };
        report.close("logits", "", &got[..untouched], &want[..untouched], tolerance.rows);
    }
    comparable
}

/// Compares the choices of the leading `rows` positions; gives how many of these chose the same experts.
fn compare_routes(
    report: &mut Report,
    case: &Case,
    block: usize,
    got: &RouteTrace,
    rows: usize,
    tolerance: &Tolerance,
) -> usize {
    let want = case.reference.blocks[block].routes.as_ref().expect("recorded routes");
    let k = case.geometry.moe.expect("an MoE model").top_k;
    if let (Some(got), Some(want)) = (&got.logits, &want.logits) {
        let floats = rows * case.geometry.moe.expect("an MoE model").experts;
        assert_eq!(got.len(), want.len(), "{} block {block}: router logits", case.reference.name);
        report.close("router logits", &format!("of block {block}"), &got[..floats], &want[..floats], tolerance.rows);
    }
    assert_eq!(got.picks.len(), want.picks.len(), "{} block {block}: picks", case.reference.name);
    let mut same = rows;
    for (t, (picks, expected)) in got.picks.chunks_exact(k).zip(want.picks.chunks_exact(k)).enumerate().take(rows) {
        let place = format!("block {block} row {t}");
        if picks == expected {
            report.equal("expert choices", 1);
            if let Some(weights) = &want.weights {
                let (got, want) = (&got.weights[t * k..][..k], &weights[t * k..][..k]);
                report.close_absolute("router weights", &place, got, want, tolerance.weights);
            }
            continue;
        }
        // the same experts in another order: a near-tie among the chosen, which changes nothing but the order of a sum
        let sorted = |picks: &[ExpertIx]| {
            let mut picks = picks.to_vec();
            picks.sort_unstable();
            picks
        };
        let gap = want.gaps.as_ref().map(|gaps| gaps[t]);
        let reordered = sorted(picks) == sorted(expected);
        assert!(
            reordered || gap.is_some_and(|gap| gap < tolerance.router_gap),
            "{}: {place}: experts {picks:?}, the reference has {expected:?}, gap {gap:?}",
            case.reference.name
        );
        report.excuse(format!("{place}: experts {picks:?} for {expected:?}, gap {gap:?}"));
        if !reordered {
            same = same.min(t);
        }
    }
    same
}

fn compare_states<'r>(
    report: &mut Report,
    want: impl Iterator<Item = &'r StateReference>,
    got: &SequenceState,
    tolerance: &Tolerance,
) {
    for (i, (want, got)) in want.zip(&got.blocks).enumerate() {
        let (conv, ssm, k, v) = match got {
            BlockState::Mamba(state) => (&state.conv[..], &state.ssm[..], &[][..], &[][..]),
            BlockState::Attention(kv) => (&[][..], &[][..], &kv.k[..], &kv.v[..]),
            BlockState::None => (&[][..], &[][..], &[][..], &[][..]),
        };
        for (kind, got, want) in [
            ("conv states", conv, &want.conv),
            ("ssm states", ssm, &want.ssm),
            ("keys", k, &want.k),
            ("values", v, &want.v),
        ] {
            if let Some(want) = want {
                report.close(kind, &format!("of block {i}"), got, want, tolerance.states);
            }
        }
    }
}

/// Asserts that a different id at `step` stands behind a near-tie, and notes it.
fn excuse_id(report: &mut Report, reference: &Reference, step: usize, got: TokenId, tolerance: &Tolerance) {
    let greedy = &reference.greedy;
    let (margin, gap) = (greedy.margins[step], router_gap(reference, step));
    assert!(
        margin < tolerance.margin || gap < tolerance.router_gap,
        "{}: step {step}: {got:?}, the reference has {:?}, margin {margin}, smallest router gap before it {gap}",
        reference.name,
        greedy.ids[step],
    );
    report.excuse(format!("step {step}: {got:?} for {:?}, margin {margin}, router gap {gap}", greedy.ids[step]));
}

/// The smallest router gap of all that was read before the id at `step`; infinite where none were recorded.
fn router_gap(reference: &Reference, step: usize) -> f32 {
    let gaps = &reference.greedy.path_gaps;
    let read = (gaps.len() + step + 1).saturating_sub(reference.greedy.ids.len());
    gaps.iter().take(read).copied().fold(f32::INFINITY, f32::min)
}

/// A prompt read in parts is the prompt read at once; `cuts` are positions.
pub(crate) fn check_split(case: &Case, engine: &mut impl Forward, cuts: &[usize], tolerance: &Tolerance) {
    let (reference, hidden) = (&case.reference, case.geometry.hidden);
    let mut report = Report::new(&format!("{} in parts", engine.label()), &reference.name);
    let (mut whole, mut state) = (SequenceState::new(&case.geometry), SequenceState::new(&case.geometry));
    let want = engine.forward(&reference.rows, &mut whole);
    let mut normed = Vec::new();
    for part in parts(cuts, reference.rows.len() / hidden) {
        normed.extend(engine.forward(&reference.rows[part.start * hidden..part.end * hidden], &mut state).normed);
    }
    report.close("normed rows", "", &normed, &want.normed, tolerance.rows);
    for (i, (a, b)) in whole.blocks.iter().zip(&state.blocks).enumerate() {
        let place = format!("of block {i}");
        match (a, b) {
            (BlockState::Mamba(a), BlockState::Mamba(b)) => {
                report.close("conv states", &place, &b.conv, &a.conv, tolerance.states);
                report.close("ssm states", &place, &b.ssm, &a.ssm, tolerance.states);
            }
            (BlockState::Attention(a), BlockState::Attention(b)) => {
                report.close("keys", &place, &b.k, &a.k, tolerance.states);
                report.close("values", &place, &b.v, &a.v, tolerance.states);
            }
            (a, b) => assert_eq!(a, b),
        }
    }
    report.print();
}

/// Each block alone, from the reference's own input of it: how errors are seen that a whole pass would blur. The rows
/// come in parts cut at `cuts`, so that steps, verify passes and prefill are all seen.
///
/// Only for cases with the residual after every block (the fixtures; peers recorded the last one).
pub(crate) fn check_blocks(case: &Case, engine: &mut impl Blocks, cuts: &[usize], tolerance: &Tolerance) -> usize {
    let (reference, hidden) = (&case.reference, case.geometry.hidden);
    let mut report = Report::new(&format!("{}, block by block", engine.label()), &reference.name);
    let mut state = SequenceState::new(&case.geometry);
    let mut input = &reference.rows;
    let positions = input.len() / hidden;
    for (i, want) in reference.blocks.iter().enumerate() {
        let residual = want.residual.as_ref().expect("a case with the residual after every block");
        let mut rows = input.clone();
        let mut all: Option<RouteTrace> = None;
        for part in parts(cuts, positions) {
            let rows = &mut rows[part.start * hidden..part.end * hidden];
            if let Some(routes) = engine.block(BlockIx::from(i), rows, &mut state.blocks[i]) {
                match &mut all {
                    Some(all) => all.append(routes),
                    None => all = Some(routes),
                }
            }
        }
        let mut same = positions;
        if want.routes.is_some() {
            let routes = all.unwrap_or_else(|| panic!("{}: block {i} routed nothing", reference.name));
            same = compare_routes(&mut report, case, i, &routes, positions, tolerance);
        }
        let floats = same * hidden;
        report.close("rows", &format!("after block {i}"), &rows[..floats], &residual[..floats], tolerance.rows);
        input = residual;
    }
    compare_states(&mut report, reference.blocks.iter().map(|block| &block.state), &state, tolerance);
    report.print()
}

/// Ranges of positions between cuts.
fn parts(cuts: &[usize], positions: usize) -> Vec<Range<usize>> {
    let bounds: Vec<usize> = [0].into_iter().chain(cuts.iter().copied()).chain([positions]).collect();
    bounds.windows(2).map(|bound| bound[0]..bound[1]).collect()
}

/// Ids of the continuation; behind an excused id the engine goes on from the reference's.
pub(crate) fn check_decode(case: &Case, engine: &mut impl Decode, tolerance: &Tolerance) -> usize {
    let reference = &case.reference;
    let mut report = Report::new(&engine.label(), &reference.name);
    let want = &reference.greedy.ids;
    let mut known = 0;
    while known < want.len() {
        let mut rows = reference.rows.clone();
        rows.extend(case.embed(&want[..known]));
        let got = engine.decode(&rows, want.len() - known);
        assert_eq!(got.len(), want.len() - known, "{}: ids given", reference.name);
        let same = got.iter().zip(&want[known..]).take_while(|(got, want)| got == want).count();
        report.equal("greedy ids", same);
        known += same;
        if known < want.len() {
            excuse_id(&mut report, reference, known, got[same], tolerance);
            known += 1;
        }
    }
    report.print()
}

/// The draft layer over the reference's path, under every convention that was recorded. The decoder's rows are the
/// plain decoder's, so that only the layer itself is compared.
pub(crate) fn check_draft_layer(case: &Case, engine: &mut impl DraftLayer, tolerance: &Tolerance) -> usize {
    let reference = &case.reference;
    let draft = reference.draft.as_ref().expect("a case with a draft layer");
    let mut report = Report::new(&format!("{}, draft layer", engine.label()), &reference.name);
    let (path, read) = case.path();
    for (conventions, want) in &draft.ids {
        let got = engine.draft(*conventions, &path[case.geometry.hidden..], conventions.hidden(read));
        for (t, (id, want)) in got.ids.iter().zip(want).enumerate() {
            if id == want {
                report.equal("drafts", 1);
                continue;
            }
            // margins of the other conventions were not recorded: only the default ones can excuse
            let margin = draft.margins.as_ref().filter(|_| *conventions == Conventions::default()).map(|m| m[t]);
            assert!(
                margin.is_some_and(|margin| margin < tolerance.margin),
                "{}: {conventions:?} row {t}: draft {id:?}, the reference has {want:?}, margin {margin:?}",
                reference.name,
            );
            report.excuse(format!("row {t}: draft {id:?} for {want:?}, margin {margin:?}"));
        }
        assert_eq!(got.ids.len(), want.len(), "{}: drafts", reference.name);
        if *conventions == Conventions::default() {
            report.close("draft rows", "", &got.rows, &draft.rows, tolerance.draft);
            if let Some(want) = &draft.picks {
                assert_eq!(&got.picks, want, "{}: the draft layer's experts", reference.name);
                report.equal("expert choices", want.len());
            }
            for (kind, got, want) in [("keys", &got.kv.k, &draft.kv.k), ("values", &got.kv.v, &draft.kv.v)] {
                if let Some(want) = want {
                    report.close(kind, "of the draft layer", got, want, tolerance.draft);
                }
            }
        }
    }
    report.print()
}

/// Decoding with drafts: the ids are those of plain decoding, drafts and kept counts the reference's.
pub(crate) fn check_speculation(
    case: &Case,
    engine: &mut impl Speculate,
    depths: &[usize],
    tolerance: &Tolerance,
) -> usize {
    let reference = &case.reference;
    let draft = reference.draft.as_ref().expect("a case with a draft layer");
    let mut report = Report::new(&format!("{}, drafts kept", engine.label()), &reference.name);
    let want_ids = &reference.greedy.ids;
    for want in draft.speculation.iter().filter(|speculation| depths.contains(&speculation.depth)) {
        let depth = want.depth;
        let got = engine.speculate(&reference.rows, want_ids.len(), depth);
        assert_eq!(&got.ids[..want_ids.len()], want_ids, "{}: ids with {depth} drafts a round", reference.name);
        report.equal("greedy ids", want_ids.len());
        let mut same = true;
        for (round, (drafts, accepted)) in got.rounds.iter().enumerate() {
            let expected = &want.drafts[round * depth..][..depth];
            if let Some(j) = (0..depth).find(|j| drafts[*j] != expected[*j]) {
                let margin = want.margins[round * depth + j];
                assert!(
                    margin < tolerance.margin,
                    "{}: depth {depth} round {round}: drafts {drafts:?}, the reference has {expected:?}, margin {margin}",
                    reference.name,
                );
                // another draft may be kept or not, and so shift all later rounds: only the ids can be compared
                report.excuse(format!(
                    "depth {depth} round {round}: drafts {drafts:?} for {expected:?}, margin {margin}"
                ));
                same = false;
                break;
            }
            assert_eq!(*accepted, want.accepted[round], "{}: depth {depth} round {round}: kept", reference.name);
            report.equal("drafts", depth);
            report.equal("kept counts", 1);
        }
        assert!(
            !same || got.rounds.len() == want.accepted.len(),
            "{}: depth {depth}: {} rounds",
            reference.name,
            got.rounds.len()
        );
    }
    report.print()
}

/// Decoding with drafts gives the engine's own ids of decoding without.
pub(crate) fn check_drafts_change_nothing<E: Decode + Speculate>(case: &Case, engine: &mut E, depths: &[usize]) {
    let (rows, steps) = (&case.reference.rows, case.reference.greedy.ids.len());
    let want = engine.decode(rows, steps);
    for depth in depths {
        let got = engine.speculate(rows, steps, *depth);
        assert_eq!(
            got.ids[..steps],
            want,
            "{}, {}: ids with {depth} drafts a round",
            case.reference.name,
            engine.label()
        );
        let emitted: usize = got.rounds.iter().map(|(_, accepted)| accepted + 1).sum();
        assert_eq!(got.ids.len(), emitted + 1, "{}: a round emits what it kept and one more", case.reference.name);
    }
}
