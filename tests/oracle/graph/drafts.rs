//! Drafts that are right, wrong, or either at random, from the device and from beside it; ends within a round; the state
//! behind a rollback; sessions that share a device.

use std::collections::HashMap;
use std::sync::Arc;

use riparian::actors::drafts::Drafter;
use riparian::actors::payload::{Event, FinishReason, SessionError, SessionOptions};
use riparian::actors::readback::ReadResult;
use riparian::device::Read;
use riparian::host::HostSequence;
use riparian::ids::{SessionId, TokenId};
use riparian::knobs::Activations;
use riparian::model::state::SequenceState;

use super::{Drafting, Got, Source, Through, Way, partial_banks, wait};
use crate::case::Case;

/// Ids of a session where the reference does not say.
const STEPS: usize = 30;

/// Guesses by the number of an id, whoever asks.
pub(super) struct Guesser {
    ids: Arc<[TokenId]>,
    told: HashMap<SessionId, usize>,
}

impl Guesser {
    pub(super) fn new(ids: Arc<[TokenId]>) -> Self {
        Self { ids, told: HashMap::new() }
    }
}

impl Drafter for Guesser {
    fn guess(&mut self, session: SessionId, ids: &[TokenId], n: usize) -> Vec<TokenId> {
        let told = self.told.entry(session).or_default();
        *told += ids.len();
        self.ids.iter().skip(*told).take(n).copied().collect()
    }

    fn forget(&mut self, session: SessionId) {
        self.told.remove(&session);
    }
}

/// How a path of ids is spoilt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Spoilt {
    Right,
    Wrong,
    AtRandom,
}

impl Spoilt {
    pub(super) const ALL: [Self; 3] = [Self::Right, Self::Wrong, Self::AtRandom];

    /// Another id of the vocabulary where it is wrong.
    fn path(self, right: &[TokenId]) -> Vec<TokenId> {
        let mut draw = 0x9E37_79B9_u32;
        let mut spoil = || {
            draw = draw.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            match self {
                Self::Right => false,
                Self::Wrong => true,
                Self::AtRandom => draw >> 30 == 0,
            }
        };
        right.iter().map(|id| TokenId(id.0 ^ u32::from(spoil()))).collect()
    }
}

/// A case, what its prompt is continued with, and the host decoder to say so of other prompts.
pub(super) struct Known {
    pub(super) name: String,
    pub(super) source: Source,
    pub(super) rows: Vec<f32>,
    pub(super) ids: Vec<TokenId>,
}

impl Known {
    pub(super) fn new(case: &Case, act: Activations) -> Self {
        let source = Source::of_case(case, act);
        let (rows, name) = (case.reference.rows.clone(), format!("{} {act:?}", case.reference.name));
        let ids = source.plain(&rows, STEPS + 8);
        Self { name, source, rows, ids }
    }

    /// Cases with a draft layer; of some only where the whole oracle is.
    pub(super) fn all() -> Vec<Self> {
        let fixtures = ["tiny-nemo", "kernel"].into_iter().filter_map(Case::fixture);
        let files = ["nemo-exact-mtp", "kernel-q4tp"].into_iter().filter_map(Case::peer);
        let f32 = fixtures.map(|case| Self::new(&case, Activations::F32));
        f32.chain(files.map(|case| Self::new(&case, Activations::Int8))).collect()
    }

    pub(super) fn positions(&self) -> usize {
        self.rows.len() / self.source.geometry().hidden
    }

    /// The smallest bank and the full one.
    pub(super) fn banks(&self) -> impl Iterator<Item = Option<usize>> + use<> {
        [None].into_iter().chain(partial_banks(self.source.geometry()).first().copied().map(Some))
    }

    /// By position: nothing is drafted for the prompt.
    pub(super) fn given(&self, spoilt: Spoilt) -> Arc<[TokenId]> {
        let mut path = vec![TokenId(0); self.positions()];
        path.extend(spoilt.path(&self.ids));
        path.into()
    }
}

/// Drafts the device is given: right ones are all kept, wrong ones never are.
#[test]
fn right_and_wrong_drafts_of_the_device() {
    for known in Known::all() {
        for spoilt in Spoilt::ALL {
            for places in known.banks() {
                let way = Way { given_drafts: Some(known.given(spoilt)), ..Way::bank(places) };
                for depth in 1..=4 {
                    let graph = known.source.start(&way);
                    let what = format!("{}, {places:?} places, {spoilt:?}, depth {depth}", known.name);
                    let got = graph.run(&known.rows, STEPS, Drafting::Depth(depth));
                    assert_eq!(got.ids, known.ids[..STEPS], "{what}");
                    let (offered, kept) = (got.finished.stats.drafts_offered, got.finished.stats.drafts_kept);
                    match spoilt {
                        Spoilt::Right => assert_eq!(kept, offered, "{what}"),
                        Spoilt::Wrong => assert_eq!(kept, 0, "{what}"),
                        Spoilt::AtRandom => assert!(0 < kept && kept < offered, "{what}: {kept} of {offered}"),
                    }
                    assert!(offered > 0, "{what}");
                    graph.check_bank(places, &what);
                }
            }
        }
        // The draft layer's own, spoilt as it goes.
        for places in known.banks() {
            let graph = known.source.start(&Way { wrong_drafts: true, ..Way::bank(places) });
            for drafting in Drafting::all(known.source.geometry()) {
                let got = graph.run(&known.rows, STEPS, *drafting);
                assert_eq!(got.ids, known.ids[..STEPS], "{}, spoilt, {drafting:?}", known.name);
            }
        }
    }
}

/// Drafts from beside the device: refused ones stop the slot and are rolled back through the queue.
#[test]
fn right_and_wrong_drafts_from_beside_the_device() {
    for known in Known::all() {
        for spoilt in Spoilt::ALL {
            let (mut verifies, mut rollbacks) = (0, 0);
            for places in known.banks() {
                let way = Way { drafter: Some(spoilt.path(&known.ids).into()), batches: Some(1), ..Way::bank(places) };
                let graph = known.source.start(&way);
                for depth in 1..=4 {
                    let got = graph.run(&known.rows, STEPS, Drafting::Depth(depth));
                    assert_eq!(got.ids, known.ids[..STEPS], "{}, {places:?}, {spoilt:?}, depth {depth}", known.name);
                }
                let seen = graph.counters();
                (verifies, rollbacks) = (verifies + seen.verifies, rollbacks + seen.rollbacks);
                graph.check_bank(places, &known.name);
            }
            assert!(verifies > 0, "{}, {spoilt:?}: nothing was verified", known.name);
            let some = spoilt != Spoilt::Right;
            assert_eq!(rollbacks > 0, some, "{}, {spoilt:?}: {rollbacks} of {verifies} rolled back", known.name);
        }
    }
}

/// A session with an end id, and where it has to end.
pub(super) fn ends_at(known: &Known, graph: &Through, eos: TokenId, depth: usize) -> Got {
    let options = Drafting::Depth(depth).options(&[eos]);
    let got = Through::take(&mut graph.open(&known.rows, &[], Some(STEPS), options));
    let end = known.ids.iter().position(|id| *id == eos).expect("an id of the path");
    assert_eq!(got.ids, known.ids[..=end], "{}: ends with id number {end}, depth {depth}", known.name);
    assert_eq!(got.finished.reason, FinishReason::End, "{}", known.name);
    // right drafts, of which those behind the end do not count
    assert_eq!(got.finished.stats.drafts_kept, got.finished.stats.drafts_offered, "{}", known.name);
    got
}

/// Every id of the path ends the text once, most of them within a round that keeps all its drafts.
#[test]
fn the_end_of_text_within_a_round() {
    let mut drafted = 0;
    for known in Known::all() {
        for places in known.banks() {
            let graph =
                known.source.start(&Way { given_drafts: Some(known.given(Spoilt::Right)), ..Way::bank(places) });
            for depth in [1, 4] {
                for eos in &known.ids[..12] {
                    drafted += usize::from(*ends_at(&known, &graph, *eos, depth).drafted.last().expect("an id"));
                }
            }
        }
    }
    assert!(drafted > 20, "{drafted} texts ended with a draft");
}

/// A context and a length that end at every place of a round.
#[test]
fn capacity_and_length_within_a_round() {
    for known in Known::all() {
        for spoilt in [Spoilt::Right, Spoilt::AtRandom] {
            let given = Some(known.given(spoilt));
            for ids in 1..=11 {
                // The last id needs no place of its own.
                let kv_positions = Some(known.positions() + ids - 1);
                let way =
                    Way { given_drafts: given.clone(), kv_positions, ..Way::bank(known.banks().last().flatten()) };
                let graph = known.source.start(&way);
                for depth in [4, 3, 1] {
                    let options = Drafting::Depth(depth).options(&[]);
                    let got = Through::take(&mut graph.open(&known.rows, &[], None, options.clone()));
                    assert_eq!(
                        got.ids,
                        known.ids[..ids],
                        "{}: a context of {kv_positions:?}, depth {depth}",
                        known.name
                    );
                    assert_eq!(got.finished.reason, FinishReason::Length, "{}", known.name);
                }
            }
            let graph = known.source.start(&Way { given_drafts: given, ..Way::default() });
            for ids in 1..=11 {
                let got = graph.run(&known.rows, ids, Drafting::Depth(4));
                assert_eq!(got.ids, known.ids[..ids], "{}: {ids} ids", known.name);
            }
        }
    }
}

/// Sessions of different prompts, more than there are slots, drafting each in its own way.
#[test]
fn sessions_at_once_give_what_each_gives_alone() {
    for known in Known::all() {
        let hidden = known.source.geometry().hidden;
        let prompts: Vec<&[f32]> =
            (0..7).map(|i| &known.rows[(i % 3) * hidden..known.rows.len() - i * hidden]).collect();
        let alone: Vec<_> = prompts.iter().map(|rows| known.source.plain(rows, STEPS)).collect();
        assert!(alone.windows(2).any(|two| two[0] != two[1]), "{}: prompts that differ", known.name);
        for places in known.banks() {
            let graph = known.source.start(&Way { slots: Some(3), batches: Some(2), ..Way::bank(places) });
            let all = Drafting::all(known.source.geometry());
            let mut sessions: Vec<_> = (prompts.iter().enumerate())
                .map(|(i, rows)| graph.open(rows, &[1 + i], Some(STEPS), all[i % all.len()].options(&[])))
                .collect();
            for (i, (session, want)) in sessions.iter_mut().zip(&alone).enumerate() {
                assert_eq!(Through::take(session).ids, *want, "{}, {places:?} places, session {i}", known.name);
            }
            graph.check_bank(places, &known.name);
        }
    }
}

/// States after each position, as one row after the other leaves them.
fn plain_states(known: &Known) -> Vec<SequenceState> {
    let (hidden, ids) = (known.source.geometry().hidden, &known.ids);
    let mut sequence = HostSequence::new(Arc::clone(&known.source.decoder));
    let mut states = vec![sequence.state().clone()];
    for row in known.rows.chunks_exact(hidden) {
        sequence.feed(row, &mut ()).expect("finite rows");
        states.push(sequence.state().clone());
    }
    for id in ids {
        sequence.step(*id).expect("finite rows");
        states.push(sequence.state().clone());
    }
    states
}

/// `runtime.md` §6: whatever was drafted and refused, the state is that of plain decode to the bit; and a session that
/// is seeded with it goes on as the one it was read from.
#[test]
fn the_state_behind_a_rollback_is_plain_decodes() {
    let (mut compared, mut behind_the_prompt) = (0, 0);
    for known in Known::all() {
        let (states, positions) = (plain_states(&known), known.positions());
        let hidden = known.source.geometry().hidden;
        for (spoilt, by_host) in [(Spoilt::Wrong, false), (Spoilt::AtRandom, false), (Spoilt::AtRandom, true)] {
            for places in known.banks() {
                let given_drafts = (!by_host).then(|| known.given(spoilt));
                let drafter = by_host.then(|| spoilt.path(&known.ids).into());
                let one = Way { row_by_row: true, batches: Some(1), ..Way::bank(places) };
                let graph = known.source.start(&Way { given_drafts, drafter, ..one });
                for depth in [1, 3, 4] {
                    let what =
                        format!("{}, {places:?} places, {spoilt:?}, by host {by_host}, depth {depth}", known.name);
                    let options = Drafting::Depth(depth).options(&[]);
                    let mut session = graph.open(&known.rows, &[], Some(STEPS), options);
                    let (mut seed, mut ids) = (None, Vec::new());
                    loop {
                        // Ids are taken in between: without room for more a session waits.
                        while let Some(Event::Token(token)) = session.try_next() {
                            ids.push(token.id);
                        }
                        let read = match wait(session.start_read(Read::State).expect("room for a request")) {
                            Ok(Ok(ReadResult::State(read))) => read,
                            Ok(Err(SessionError::Ended)) => break,
                            other => panic!("{what}: {other:?}"),
                        };
                        let at = read.state.position.index();
                        assert!(read.state == states[at], "{what}: state at position {at}");
                        compared += 1;
                        if at >= positions {
                            behind_the_prompt += 1;
                            seed = Some(read);
                        }
                    }
                    while let Some(event) = wait(session.next()) {
                        if let Event::Token(token) = event {
                            ids.push(token.id);
                        }
                    }
                    assert_eq!(ids, known.ids[..STEPS], "{what}");
                    // The next row of the one it was read from, and on.
                    let Some(seed) = seed.filter(|seed| seed.state.position.index() + 4 < positions + STEPS) else {
                        continue;
                    };
                    let next = seed.state.position.index() - positions;
                    let mut row = vec![0.0; hidden];
                    known.source.decoder.embed(known.ids[next], &mut row);
                    let options = SessionOptions { seed: Some(Arc::new(*seed)), ..Drafting::Depth(depth).options(&[]) };
                    let got = Through::take(&mut graph.open(&row, &[], Some(6), options));
                    assert_eq!(got.ids, known.ids[next + 1..next + 7], "{what}: seeded behind id number {next}");
                }
            }
        }
    }
    println!("{compared} states compared, {behind_the_prompt} of them behind the prompt");
    assert!(behind_the_prompt > 100, "{behind_the_prompt} states behind a round");
}
