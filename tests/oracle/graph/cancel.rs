//! Sessions that are given up at every point, and who comes after them.

use std::borrow::Borrow;
use std::time::{Duration, Instant};

use riparian::actors::payload::{Event, FinishReason};
use riparian::knobs::Activations;

use super::{Drafting, Source, Through, Way, partial_banks, wait};
use crate::case::Case;

/// Ids of the session that comes after.
const STEPS: usize = 8;

/// One slot, so that the next session gets the state of the one that was given up. Of the numbers of ids and of the
/// moments at which one is given up each `every`th is run.
pub(super) fn follow<G: Borrow<Through>>(
    case: &Case,
    act: Activations,
    every: usize,
    start: impl Fn(&Source, &Way) -> G,
) {
    let source = Source::of_case(case, act);
    let hidden = source.geometry().hidden;
    let rows = &case.reference.rows;
    // Others than those of the session before.
    let next = &rows[hidden..];
    let (before, after) = (source.plain(rows, 24), source.plain(next, STEPS));
    let drafting = if source.geometry().draft { Drafting::Depth(2) } else { Drafting::Off };
    let mut given_up = 0;
    for places in [None, partial_banks(source.geometry()).first().copied()] {
        for (batches, row_by_row) in [(1, false), (3, true)] {
            let way = Way { slots: Some(1), batches: Some(batches), row_by_row, ..Way::bank(places) };
            let started = start(&source, &way);
            let graph = started.borrow();
            let mut check = |what: &str, session: riparian::actors::session::SessionHandle| {
                drop(session);
                given_up += 1;
                let got = graph.run(next, STEPS, drafting);
                assert_eq!(got.ids, after, "{}, {places:?} places, {batches} batches: {what}", case.reference.name);
            };
            // After each number of ids, by word and by dropping.
            for k in (0..24).step_by(every) {
                let mut session = graph.open(rows, &[], None, drafting.options(&[]));
                let ids: Vec<_> = (0..k)
                    .map(|_| match wait(session.next()) {
                        Some(Event::Token(token)) => token.id,
                        other => panic!("{other:?} after fewer than {k} ids"),
                    })
                    .collect();
                assert_eq!(ids, before[..k]);
                if k % 2 == 0 {
                    session.cancel();
                    // Ids that were under way still come, in order; then the end.
                    let got = Through::take(&mut session);
                    assert_eq!(got.finished.reason, FinishReason::Cancelled);
                    let all = [ids, got.ids].concat();
                    let known = all.len().min(before.len());
                    assert_eq!(all[..known], before[..known]);
                }
                check(&format!("given up after {k} ids"), session);
            }
            // At moments that no event marks: within the prompt's passes, misses, drafts and their verify.
            for moment in (0..24).step_by(every) {
                let session = graph.open(rows, &[3], None, drafting.options(&[]));
                let (begun, pause) = (Instant::now(), Duration::from_micros(moment * 83));
                while begun.elapsed() < pause {
                    std::hint::spin_loop();
                }
                check(&format!("given up after {pause:?}"), session);
            }
            // While the prompt is read, and before.
            for fed in 0..4 {
                let session = graph.running.handle().try_open(drafting.options(&[])).expect("few sessions");
                if fed > 0 {
                    // dropped with its answer under way
                    let answer = session.start_feed(rows[..fed * hidden].to_vec()).expect("room for a request");
                    if fed % 2 == 0 {
                        wait(answer).expect("an answer").expect("rows are taken");
                    }
                }
                check(&format!("given up with {fed} rows fed"), session);
            }
            let seen = graph.counters();
            assert_eq!((seen.sessions_open, seen.violations), (0, 0), "{}", case.reference.name);
        }
    }
    println!("{}, {act:?}: {given_up} sessions given up", case.reference.name);
}

#[test]
fn whoever_comes_after_a_cancel_gets_its_own_ids() {
    if let Some(case) = Case::fixture("tiny-nemo") {
        follow(&case, Activations::F32, 1, Source::start);
    }
    if let Some(case) = Case::peer("nemo-q4tp") {
        follow(&case, Activations::Int8, 1, Source::start);
    }
    if let Some(case) = Case::peer("nemo-exact-mtp") {
        follow(&case, Activations::F32, 1, Source::start);
    }
}
