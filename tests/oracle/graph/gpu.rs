//! Drafts on the wgpu device, through the actors: ids, rounds and states are those of plain decode.
//!
//! `RIPARIAN_TEST_ADAPTER` names the adapter (default `llvmpipe`); a test fails where there is none. A software adapter
//! compiles for seconds whenever a model is opened, so the least and the greatest depth stand for all, random drafts for all
//! of a partial bank's, and every tenth moment of giving up; with `RIPARIAN_TEST_ALL` set (`.ci/deep`) each one is run.

use std::borrow::Borrow;
use std::collections::BTreeMap;
use std::sync::Arc;

use riparian::actors::payload::{FinishReason, SessionError, SessionOptions};
use riparian::actors::readback::ReadResult;
use riparian::device::wgpu::faults::Faults;
use riparian::device::wgpu::{DraftSetup, Gpu, Setup, find};
use riparian::device::{Read, Seed};
use riparian::host::{DraftConventions, HostSequence, Pool, physical_cores};
use riparian::ids::{ExpertIx, TokenId};
use riparian::knobs::{Activations, DeviceChoice};
use riparian::model::state::BlockState;

use super::drafts::{Known, Spoilt, ends_at};
use super::{Drafting, Source, Through, Way, partial_banks, wait};
use crate::case::Case;
use crate::guards::Guards;
use crate::host::Host;

/// Ids of a session.
const STEPS: usize = 30;

/// The device with guard words behind every buffer, and those.
fn open(source: &Source, way: &Way) -> (Gpu, Guards) {
    let name = std::env::var("RIPARIAN_TEST_ADAPTER").unwrap_or_else(|_| "llvmpipe".into());
    let found = find(&DeviceChoice::Adapter(name.clone())).expect("an adapter for the tests");
    assert!(found.info().name.to_lowercase().contains(&name.to_lowercase()), "{:?}", found.info());
    let setup = Setup {
        activations: source.decoder.activations(),
        positions: way.kv_positions.unwrap_or(512),
        slots: way.slots.unwrap_or(1),
        pass_rows: 32,
        window_bytes: 64 << 20,
        keep_logits: false,
        skip: vec![],
        drafts: Some(DraftSetup { conventions: source.decoder.draft_conventions(), given: way.given_drafts.clone() }),
    };
    let geometry = source.geometry();
    let bank = |places: usize| (0..places).map(ExpertIx::from).collect::<Vec<_>>();
    let residents = way.places.map(|places| vec![bank(places); geometry.decoder_layers()]);
    let faults = Faults::default();
    faults.guard_buffers();
    let context = found.open_with(None, true, faults).expect("a device");
    let guards = Guards::of(&context);
    let weights = source.decoder.weights();
    let gpu = Gpu::open_partial(context, geometry, weights, &setup, residents.as_deref(), &mut |_, _| {})
        .expect("the model on the device");
    (gpu, guards)
}

/// A graph over the device; when it has gone, the guard words are looked at.
struct Guarded {
    graph: Through,
    _guards: Guards,
}

impl Borrow<Through> for Guarded {
    fn borrow(&self) -> &Through {
        &self.graph
    }
}

impl std::ops::Deref for Guarded {
    type Target = Through;

    fn deref(&self) -> &Through {
        &self.graph
    }
}

fn thorough() -> bool {
    std::env::var_os("RIPARIAN_TEST_ALL").is_some()
}

fn start(source: &Source, way: &Way) -> Guarded {
    let (gpu, guards) = open(source, way);
    Guarded { graph: source.start_on(Box::new(gpu), way), _guards: guards }
}

/// Rounds keep what the reference's own speculation keeps, at every depth it was recorded at.
#[test]
fn drafts_kept_are_the_references() {
    for name in ["tiny-nemo", "kernel"] {
        let Some(case) = Case::fixture(name) else { continue };
        let source = Source::of_case(&case, Activations::F32);
        for places in [None, partial_banks(source.geometry()).last().copied()] {
            let graph = start(&source, &Way::bank(places));
            for want in &case.reference.draft.as_ref().expect("drafts").speculation {
                let what = format!("{name}, {places:?} places, depth {}", want.depth);
                let steps = 2 + want.depth + want.accepted.iter().map(|kept| kept + 1).sum::<usize>();
                let got = graph.run(&case.reference.rows, steps, Drafting::Depth(want.depth));
                assert_eq!(got.ids, source.plain(&case.reference.rows, steps), "{what}");
                assert_eq!(got.kept()[..want.accepted.len()], want.accepted, "{what}");
            }
            graph.check_bank(places, name);
        }
    }
}

/// The points on which sources differ move what is kept as they do on the host.
#[test]
fn conventions_are_the_hosts() {
    let Some(case) = Case::fixture("kernel") else { return };
    let decoder = |conventions| {
        let decoder = Host::decoder(&case, Activations::F32, Pool::new(physical_cores()));
        Source {
            decoder: Arc::new(decoder.with_draft_conventions(conventions)),
            ..Source::of_case(&case, Activations::F32)
        }
    };
    let none = DraftConventions::default();
    let mut seen = vec![];
    for conventions in [
        DraftConventions { pre_norm: true, ..none },
        DraftConventions { layer_norm: true, ..none },
        DraftConventions { hidden_first: true, ..none },
    ] {
        let source = decoder(conventions);
        let run = |graph: &Through| graph.run(&case.reference.rows, 16, Drafting::Depth(2));
        let (host, gpu) = (run(&source.start(&Way::default())), run(&start(&source, &Way::default())));
        assert_eq!((&gpu.ids, gpu.kept()), (&host.ids, host.kept()), "{conventions:?}");
        seen.push(gpu.kept());
    }
    assert!(seen.windows(2).any(|two| two[0] != two[1]), "no convention made a difference: {seen:?}");
}

/// Logits nearer than this leave no clear winner where activations are int8, as a share of the largest.
const TIE: f32 = 2e-2;

/// Whether ids are the wanted ones up to a near tie of the host's along them, and nothing but int8 codes may make one.
fn same_up_to_a_tie(known: &Known, got: &[TokenId], what: &str) -> bool {
    let wanted = &known.ids[..got.len()];
    let Some(at) = (0..got.len()).find(|at| got[*at] != wanted[*at]) else { return true };
    assert_eq!(known.source.decoder.activations(), Activations::Int8, "{what}: {got:?} instead of {wanted:?}");
    let mut sequence = HostSequence::new(known.source.decoder.clone());
    let mut pick = sequence.feed(&known.rows, &mut ()).expect("rows");
    for id in &wanted[..at] {
        pick = sequence.step(*id).expect("an id");
    }
    let margin = (pick.logit - pick.runner_up) / pick.logit.abs().max(1.0);
    assert!(margin < TIE, "{what}, id {at}: margin {margin}, {got:?} instead of {wanted:?}");
    false
}

/// However the drafts are and whatever a bank holds, the ids are the same. In int8 the adapter's own plain ids are the
/// measure, and near ties are excused and counted: a code that falls otherwise changes a random model's ids for good.
#[test]
fn ids_do_not_depend_on_drafts_or_on_the_bank() {
    let (mut runs, mut excused) = (0, 0);
    for mut known in Known::all() {
        if known.source.decoder.activations() == Activations::Int8 {
            let graph = start(&known.source, &Way::default());
            let plain = graph.run(&known.rows, known.ids.len(), Drafting::Off).ids;
            excused += usize::from(!same_up_to_a_tie(&known, &plain, &known.name));
            known.ids = plain;
        }
        let small = known.source.geometry().hidden <= 64;
        for places in known.banks() {
            let all = match (small, places) {
                (true, None) => &Spoilt::ALL[..],
                (true, Some(_)) if thorough() => &Spoilt::ALL,
                (true, Some(_)) | (false, None) => &[Spoilt::AtRandom],
                (false, Some(_)) => &[],
            };
            for spoilt in all {
                let graph =
                    start(&known.source, &Way { given_drafts: Some(known.given(*spoilt)), ..Way::bank(places) });
                let depths: &[usize] = if thorough() { &[1, 2, 3, 4] } else { &[1, 4] };
                for depth in depths.iter().copied() {
                    let what = format!("{}, {places:?} places, {spoilt:?}, depth {depth}", known.name);
                    let got = graph.run(&known.rows, STEPS, Drafting::Depth(depth));
                    runs += 1;
                    if !same_up_to_a_tie(&known, &got.ids, &what) {
                        excused += 1;
                        continue;
                    }
                    let (offered, kept) = (got.finished.stats.drafts_offered, got.finished.stats.drafts_kept);
                    match spoilt {
                        Spoilt::Right => assert_eq!(kept, offered, "{what}"),
                        Spoilt::Wrong => assert_eq!(kept, 0, "{what}"),
                        Spoilt::AtRandom => assert!(0 < kept && kept < offered, "{what}: {kept} of {offered}"),
                    }
                    assert!(offered > 0, "{what}");
                }
                let got = graph.run(&known.rows, STEPS, Drafting::Off);
                assert_eq!((got.ids.as_slice(), got.finished.stats.drafts_offered), (&known.ids[..STEPS], 0));
                graph.check_bank(places, &known.name);
            }
            // the draft layer's own, its depth the scheduler's
            if !small && places.is_none() {
                continue;
            }
            let graph = start(&known.source, &Way { row_by_row: true, ..Way::bank(places) });
            for drafting in [Drafting::Scheduled, Drafting::Depth(2)] {
                let got = graph.run(&known.rows, STEPS, drafting);
                runs += 1;
                excused += usize::from(!same_up_to_a_tie(&known, &got.ids, &format!("{}, {drafting:?}", known.name)));
            }
        }
    }
    println!("{excused} of {runs} runs ended in a near tie");
    assert!(3 * excused <= runs, "{excused} near ties in {runs} runs");
}

/// Ends of text, lengths and contexts that come at every place of a round.
#[test]
fn ends_within_a_round() {
    let Some(case) = Case::fixture("tiny-nemo") else { return };
    let known = Known::new(&case, Activations::F32);
    let mut drafted = 0;
    for places in known.banks() {
        let given = Some(known.given(Spoilt::Right));
        let graph = start(&known.source, &Way { given_drafts: given.clone(), ..Way::bank(places) });
        for depth in [1, 4] {
            for eos in &known.ids[..12] {
                drafted += usize::from(*ends_at(&known, &graph, *eos, depth).drafted.last().expect("an id"));
            }
            for ids in 1..=11 {
                let got = graph.run(&known.rows, ids, Drafting::Depth(depth));
                assert_eq!(got.ids, known.ids[..ids], "{ids} ids, depth {depth}");
            }
        }
        for ids in [1, 4, 8] {
            // the last id needs no place of its own
            let kv_positions = Some(known.positions() + ids - 1);
            let graph = start(&known.source, &Way { given_drafts: given.clone(), kv_positions, ..Way::bank(places) });
            for depth in [4, 3, 1] {
                let options = Drafting::Depth(depth).options(&[]);
                let got = Through::take(&mut graph.open(&known.rows, &[], None, options));
                assert_eq!(got.ids, known.ids[..ids], "a context of {kv_positions:?}, depth {depth}");
                assert_eq!(got.finished.reason, FinishReason::Length);
            }
        }
    }
    assert!(drafted > 10, "{drafted} texts ended with a draft");
}

#[test]
fn whoever_comes_after_a_cancel_gets_its_own_ids() {
    if let Some(case) = Case::fixture("tiny-nemo") {
        // five is odd: as many are dropped as are told
        super::cancel::follow(&case, Activations::F32, if thorough() { 1 } else { 10 }, start);
    }
}

/// States between the batches of a session, by position, from some id on: a read waits for what is queued, so that one
/// session shows every second or third of them.
fn states(graph: &Through, rows: &[f32], drafting: Drafting, steps: usize, from: usize) -> BTreeMap<usize, Seed> {
    let mut session = graph.open(rows, &[], Some(steps), drafting.options(&[]));
    let mut states = BTreeMap::new();
    for _ in 0..from {
        wait(session.next()).expect("an id");
    }
    loop {
        // ids are taken in between: without room for more a session waits
        while session.try_next().is_some() {}
        match wait(session.start_read(Read::State).expect("room for a request")) {
            Ok(Ok(ReadResult::State(read))) => states.insert(read.state.position.index(), *read),
            Ok(Err(SessionError::Ended)) => break,
            other => panic!("{other:?}"),
        };
    }
    while wait(session.next()).is_some() {}
    states
}

fn far(got: &[f32], want: &[f32]) -> f64 {
    assert_eq!(got.len(), want.len());
    let error: f64 = got.iter().zip(want).map(|(g, w)| f64::from(g - w).powi(2)).sum();
    error / want.iter().map(|w| f64::from(*w).powi(2)).sum::<f64>().max(1e-30)
}

/// Whatever was drafted and refused, the state is plain decode's, the draft layer's too; and a session seeded with it
/// goes on as the one that it was read from. The sums of several rows are those of one row each, so all but the order of
/// the draft layer's products is the same.
#[test]
fn the_state_behind_a_round_is_plain_decodes() {
    let Some(case) = Case::fixture("tiny-nemo") else { return };
    let known = Known::new(&case, Activations::F32);
    let (mut compared, mut worst) = (0, 0.0f64);
    for places in known.banks() {
        let given_drafts = Some(known.given(Spoilt::AtRandom));
        let graph = start(&known.source, &Way { given_drafts, batches: Some(1), ..Way::bank(places) });
        let mut plain = BTreeMap::new();
        for from in 0..4 {
            plain.extend(states(&graph, &known.rows, Drafting::Off, STEPS, from));
        }
        assert!(plain.len() > STEPS / 2, "{} states", plain.len());
        for depth in [1, 3, 4] {
            for (position, got) in states(&graph, &known.rows, Drafting::Depth(depth), STEPS, 0) {
                let Some(want) = plain.get(&position) else { continue };
                let mut pairs = vec![
                    (&got.state.draft.k, &want.state.draft.k),
                    (&got.state.draft.v, &want.state.draft.v),
                    (&got.hidden, &want.hidden),
                ];
                for (got, want) in got.state.blocks.iter().zip(&want.state.blocks) {
                    match (got, want) {
                        (BlockState::Mamba(g), BlockState::Mamba(w)) => {
                            pairs.extend([(&g.conv, &w.conv), (&g.ssm, &w.ssm)])
                        }
                        (BlockState::Attention(g), BlockState::Attention(w)) => {
                            pairs.extend([(&g.k, &w.k), (&g.v, &w.v)])
                        }
                        (BlockState::None, BlockState::None) => {}
                        other => panic!("{other:?}"),
                    }
                }
                for (at, (got, want)) in pairs.into_iter().enumerate() {
                    let far = far(got, want);
                    worst = worst.max(far);
                    assert!(far < 1e-9, "{places:?} places, depth {depth}, position {position}, part {at}: {far:e}");
                }
                compared += 1;
                let next = position.wrapping_sub(known.positions());
                if next.is_multiple_of(7) && next + 8 < STEPS {
                    let mut row = vec![0.0; known.source.geometry().hidden];
                    known.source.decoder.embed(known.ids[next], &mut row);
                    let options = SessionOptions { seed: Some(Arc::new(got)), ..Drafting::Depth(depth).options(&[]) };
                    let got = Through::take(&mut graph.open(&row, &[], Some(6), options));
                    assert_eq!(got.ids, known.ids[next + 1..next + 7], "seeded behind id number {next}");
                }
            }
        }
    }
    println!("{compared} states compared, the farthest {worst:e}");
    assert!(compared > 12, "{compared} states");
}

/// Recordings of the trained model: ids with drafts are those without, and as many drafts are kept as on the host.
#[test]
fn recordings_keep_what_the_host_keeps() {
    const RECORDINGS: usize = 6;
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/tiny-transcribe.cmf");
    let (source, model) = Source::of_file(&path, Activations::Int8);
    let recordings = super::trained::recordings(&source, &model);
    let places = partial_banks(source.geometry()).last().copied();
    let host = source.start(&Way::default());
    let gpus = [start(&source, &Way::default()), start(&source, &Way::bank(places))];
    let eos = &model.eos;
    for depth in [1, 3] {
        let mut sums = [[0; 2]; 3];
        for recording in recordings.iter().take(RECORDINGS) {
            for (graph, sums) in [&host, &gpus[0], &gpus[1]].into_iter().zip(&mut sums) {
                let options = Drafting::Depth(depth).options(eos);
                let got = Through::take(&mut graph.open(&recording.rows, &[], None, options));
                assert_eq!(got.ids, recording.ids, "{} at depth {depth}", recording.name);
                sums[0] += got.finished.stats.drafts_kept;
                sums[1] += got.finished.stats.drafts_offered;
            }
        }
        println!("depth {depth}: kept and offered on the host, with a full and a partial bank: {sums:?}");
        let [host, full, partial] = sums.map(|[kept, offered]| kept as f64 / offered as f64);
        assert!((full - host).abs() < 0.02 && (partial - host).abs() < 0.02, "depth {depth}: {sums:?}");
    }
}
