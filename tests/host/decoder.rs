//! The host decoder against the plain one, on the small files of the oracle.

use std::sync::Arc;

use riparian::host::{Decoder, HostSequence, Isa, NotFinite, Observer, Place, Pool, Routes};
use riparian::ids::{BlockIx, LayerIx, TokenId};
use riparian::knobs::Activations;
use riparian::model::state::{BlockState, SequenceState};
use riparian::model::{Model, OpenOptions, open};
use riparian::reference::{self, PlainDecoder};

use crate::common;

const FILES: [&str; 4] = ["tiny-f32", "kernel-q4tp", "nemo-q4tp", "nemo-exact-mtp"];
const MODES: [Activations; 2] = [Activations::F32, Activations::Int8];

fn models() -> impl Iterator<Item = (&'static str, Arc<Model>)> {
    FILES.into_iter().filter_map(|name| {
        let path = common::oracle(&format!("cmf/{name}.cmf"))?;
        Some((name, open(&path, &OpenOptions::default()).unwrap()))
    })
}

fn prompt(model: &Model, len: u32) -> Vec<TokenId> {
    let vocab = u32::try_from(model.geometry.vocab).unwrap();
    (0..len).map(|i| TokenId((i * 131 + 7) % vocab)).collect()
}

fn embed(decoder: &Decoder, ids: &[TokenId]) -> Vec<f32> {
    let hidden = decoder.geometry().hidden;
    let mut rows = vec![0.0; ids.len() * hidden];
    rows.chunks_exact_mut(hidden).zip(ids).for_each(|(row, id)| decoder.embed(*id, row));
    rows
}

#[derive(Default)]
struct Seen {
    blocks: Vec<Vec<f32>>,
    moe: Vec<Routes>,
}

impl Observer for Seen {
    fn moe(&mut self, layer: LayerIx, routes: &Routes) {
        assert_eq!(layer.index(), self.moe.len());
        self.moe.push(routes.clone());
    }

    fn block(&mut self, block: BlockIx, rows: &[f32]) {
        assert_eq!(block.index(), self.blocks.len());
        self.blocks.push(rows.to_vec());
    }
}

/// Largest difference over the largest value.
fn error(seen: &[f32], wanted: &[f32]) -> f32 {
    assert_eq!(seen.len(), wanted.len());
    let peak = wanted.iter().fold(0.0f32, |m, x| m.max(x.abs()));
    let most = seen.iter().zip(wanted).fold(0.0f32, |m, (a, b)| m.max((a - b).abs()));
    if peak == 0.0 { most } else { most / peak }
}

fn states_agree(seen: &SequenceState, wanted: &SequenceState, most: f32, what: &str) {
    assert_eq!(seen.position, wanted.position);
    for (i, (seen, wanted)) in seen.blocks.iter().zip(&wanted.blocks).enumerate() {
        match (seen, wanted) {
            (BlockState::Mamba(s), BlockState::Mamba(w)) => {
                assert!(error(&s.conv, &w.conv) < most && error(&s.ssm, &w.ssm) < most, "{what} block {i}");
            }
            (BlockState::Attention(s), BlockState::Attention(w)) => {
                assert!(error(&s.k, &w.k) < most && error(&s.v, &w.v) < most, "{what} block {i}");
            }
            (seen, wanted) => assert_eq!(seen, wanted),
        }
    }
}

/// In f32 mode every block, route, state and logit agrees. (In int8 mode a code may flip by one, and a random
/// model's expert choices with it: there the blocks are compared one by one, below.)
#[test]
fn forward_agrees_with_the_plain_decoder() {
    for (name, model) in models() {
        let plain = PlainDecoder::new(&model.geometry, &model.decoder, Activations::F32);
        let ids = prompt(&model, 37);
        let mut wanted_state = SequenceState::new(&model.geometry);
        let mut capture = reference::Capture::default();
        let wanted = plain.forward(&plain.embed(&ids), &mut wanted_state, Some(&mut capture));
        for isa in Isa::present() {
            let what = format!("{name} {isa}");
            let decoder = Decoder::new(Arc::clone(&model), Activations::F32, Pool::with_isa(2, isa));
            let mut rows = embed(&decoder, &ids);
            let (mut state, mut seen) = (SequenceState::new(&model.geometry), Seen::default());
            decoder.forward(&mut rows, &mut state, &mut seen).unwrap();
            for (i, (seen, wanted)) in seen.blocks.iter().zip(&capture.residual).enumerate() {
                let error = error(seen, wanted);
                assert!(error < 2e-5, "{what} block {i}: {error}");
            }
            let wanted_moe: Vec<_> = capture.moe.iter().filter(|moe| !moe.picks.is_empty()).collect();
            assert_eq!(seen.moe.len(), wanted_moe.len());
            for (seen, wanted) in seen.moe.iter().zip(wanted_moe) {
                assert_eq!(seen.picks, wanted.picks, "{what}: routes");
                assert!(error(&seen.weights, &wanted.weights) < 2e-5, "{what}: weights");
                assert!(error(&seen.normed, &wanted.normed) < 5e-5, "{what}: normed");
            }
            states_agree(&state, &wanted_state, 5e-5, &what);
            let normed = decoder.final_norm(&rows).unwrap();
            assert!(error(&normed, &wanted.normed) < 5e-5, "{what}: final norm");
            let logits = decoder.logits(&normed);
            assert!(error(&logits, &plain.logits(&wanted.normed)) < 5e-5, "{what}: logits");
            for (pick, logits) in decoder.head(&normed).unwrap().iter().zip(logits.chunks_exact(model.geometry.vocab)) {
                let wanted = reference::argmax::argmax(logits);
                assert_eq!((pick.id, pick.logit, pick.runner_up), (wanted.id, wanted.logit, wanted.runner_up));
            }
        }
    }
}

/// Each block alone, from the plain decoder's rows, in both modes.
#[test]
fn each_block_agrees_from_the_same_input() {
    for (name, model) in models() {
        for act in MODES {
            let plain = PlainDecoder::new(&model.geometry, &model.decoder, act);
            let ids = prompt(&model, 21);
            let mut capture = reference::Capture::default();
            plain.forward(&plain.embed(&ids), &mut SequenceState::new(&model.geometry), Some(&mut capture));
            let decoder = Decoder::new(Arc::clone(&model), act, Pool::new(2));
            let fresh = SequenceState::new(&model.geometry);
            let mut layer = 0;
            for (i, wanted) in capture.residual.iter().enumerate() {
                let mut rows = if i == 0 { plain.embed(&ids) } else { capture.residual[i - 1].clone() };
                let before = rows.clone();
                let block = BlockIx::from(i);
                if capture.moe[i].picks.is_empty() {
                    decoder.mix(block, &mut rows, &mut fresh.blocks[i].clone(), None).unwrap();
                } else {
                    let routes = decoder.route(LayerIx::from(layer), &rows).unwrap();
                    assert_eq!(routes.picks, capture.moe[i].picks, "{name} {act:?} block {i}");
                    let top_k = model.geometry.moe.as_ref().unwrap().top_k;
                    let wanted = routes.by_expert(top_k);
                    let outputs = decoder.experts(LayerIx::from(layer), &routes.normed, &wanted);
                    let width = outputs.len() / routes.picks.len();
                    let placed = routes.place(top_k, &wanted, &outputs, width);
                    let shared = decoder.shared(LayerIx::from(layer), &routes.normed);
                    decoder.sum(LayerIx::from(layer), &mut rows, &routes, &placed, &shared);
                    layer += 1;
                }
                let change = |rows: &[f32]| rows.iter().zip(&before).map(|(a, b)| a - b).collect::<Vec<_>>();
                let (seen, wanted) = (change(&rows), change(wanted));
                let squares = |x: &[f32]| x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>();
                let apart: Vec<f32> = seen.iter().zip(&wanted).map(|(a, b)| a - b).collect();
                let nmse = squares(&apart) / squares(&wanted);
                // A code that flips moves one product by 1/127 of a group's largest.
                let most = if act == Activations::F32 { 1e-9 } else { 1e-5 };
                assert!(nmse < most, "{name} {act:?} block {i}: {nmse:e}");
            }
        }
    }
}

/// A prompt gives the same bits however it is cut, and a verify pass the bits of its steps.
#[test]
fn prefill_verify_and_steps_are_one() {
    for (name, model) in models() {
        for act in MODES {
            let ids = prompt(&model, 40);
            let run = |cuts: &[usize], threads| {
                let decoder = Decoder::new(Arc::clone(&model), act, Pool::new(threads));
                let mut state = SequenceState::new(&model.geometry);
                let mut all = Vec::new();
                let mut from = 0;
                for cut in cuts {
                    let mut rows = embed(&decoder, &ids[from..from + cut]);
                    decoder.forward(&mut rows, &mut state, &mut ()).unwrap();
                    all.extend(rows);
                    from += cut;
                }
                assert_eq!(from, ids.len());
                (all, state)
            };
            let whole = run(&[40], 3);
            assert!(run(&[1; 40], 1) == whole, "{name} {act:?}: steps differ");
            assert!(run(&[3, 8, 1, 17, 11], 2) == whole, "{name} {act:?}: pieces differ");

            let decoder = Decoder::new(Arc::clone(&model), act, Pool::new(2));
            for kept in 1..=8 {
                let mut state = SequenceState::new(&model.geometry);
                decoder.forward(&mut embed(&decoder, &ids[..10]), &mut state, &mut ()).unwrap();
                let mut rows = embed(&decoder, &ids[10..18]);
                let snapshots = decoder.verify(&mut rows, &mut state).unwrap();
                let hidden = model.geometry.hidden;
                assert_eq!(rows, whole.0[10 * hidden..18 * hidden], "{name} {act:?}: verify differs");
                decoder.roll_back(&mut state, snapshots, kept);
                let mut rows = embed(&decoder, &ids[10 + kept..]);
                decoder.forward(&mut rows, &mut state, &mut ()).unwrap();
                assert!(rows == whole.0[(10 + kept) * hidden..] && state == whole.1, "{name} {act:?}: kept {kept}");
            }
        }
    }
}

/// Drafts change the number of passes, never the ids.
#[test]
fn drafts_never_change_the_ids() {
    for (name, model) in models().filter(|(_, model)| model.geometry.draft) {
        for act in MODES {
            let decoder = Arc::new(Decoder::new(Arc::clone(&model), act, Pool::new(2)));
            let rows = embed(&decoder, &prompt(&model, 20));
            let mut plain = HostSequence::new(Arc::clone(&decoder)).without_drafts();
            let mut wanted = vec![plain.feed(&rows, &mut ()).unwrap()];
            while wanted.len() < 40 {
                wanted.push(plain.step(wanted[wanted.len() - 1].id).unwrap());
            }
            for depth in 0..4 {
                let mut sequence = HostSequence::new(Arc::clone(&decoder));
                let mut seen = vec![sequence.feed(&rows, &mut ()).unwrap()];
                let mut accepted = 0;
                while seen.len() < 40 {
                    let round = sequence.round(seen[seen.len() - 1].id, depth).unwrap();
                    assert_eq!(round.drafts.len(), depth);
                    accepted += round.accepted();
                    seen.extend(round.picks);
                }
                seen.truncate(40);
                assert_eq!(seen, wanted, "{name} {act:?} depth {depth}");
                println!("{name} {act:?} depth {depth}: {accepted} drafts accepted");
            }
        }
    }
}

/// Drafts and their acceptance are the plain decoder's, in every convention.
#[test]
fn drafts_agree_with_the_plain_decoder() {
    for (name, model) in models().filter(|(_, model)| model.geometry.draft) {
        for (pre_norm, layer_norm, hidden_first) in
            [(false, false, false), (true, false, false), (false, true, false), (false, false, true)]
        {
            let plain = PlainDecoder::new(&model.geometry, &model.decoder, Activations::F32);
            let conventions = reference::Conventions { prenorm_hidden: pre_norm, layer_norm, hidden_first };
            let ids = prompt(&model, 20);
            let wanted =
                plain.speculate(conventions, &plain.embed(&ids), &mut SequenceState::new(&model.geometry), 24, 2);
            let decoder = Decoder::new(Arc::clone(&model), Activations::F32, Pool::new(2))
                .with_draft_conventions(riparian::host::DraftConventions { pre_norm, layer_norm, hidden_first });
            let decoder = Arc::new(decoder);
            let mut sequence = HostSequence::new(Arc::clone(&decoder));
            let mut next = sequence.feed(&embed(&decoder, &ids), &mut ()).unwrap();
            for wanted in &wanted.rounds {
                let seen = sequence.round(next.id, 2).unwrap();
                let drafts: Vec<TokenId> = wanted.drafts.iter().map(|draft| draft.id).collect();
                assert_eq!(seen.drafts, drafts, "{name} {conventions:?}");
                assert_eq!(seen.accepted(), wanted.accepted, "{name} {conventions:?}");
                next = seen.picks[seen.picks.len() - 1];
            }
        }
    }
}

#[test]
fn what_is_not_finite_is_an_error_that_names_the_place() {
    let Some((_, model)) = models().next() else { return };
    let decoder = Decoder::new(Arc::clone(&model), Activations::Int8, Pool::new(1));
    for bad in [f32::NAN, f32::INFINITY, 1e30] {
        let mut rows = embed(&decoder, &prompt(&model, 3));
        rows[5] = bad;
        let mut state = SequenceState::new(&model.geometry);
        let seen = decoder.forward(&mut rows, &mut state, &mut ()).unwrap_err();
        assert_eq!(seen, NotFinite { place: Place::Input });
        assert!(seen.to_string().contains("input rows"));
        let last = model.geometry.blocks.len() - 1;
        let seen = decoder.final_norm(&rows).unwrap_err();
        assert_eq!(seen, NotFinite { place: Place::Block(BlockIx::from(last)) });
    }
}
