//! Synthetic models decode the answer that is known of them, on the host in both arithmetics.

use std::sync::Arc;

use riparian::host::{Decoder, HostSequence, Pool};
use riparian::ids::TokenId;
use riparian::knobs::Activations;
use riparian::model::geometry::{BlockKind, Geometry};
use riparian::model::synth::{SynthOptions, preset, synth};
use riparian::model::tensors::Codec;
use riparian::model::{Model, OpenOptions, open, verify};

const MODES: [Activations; 2] = [Activations::F32, Activations::Int8];

fn options(name: &str, experts: Codec) -> SynthOptions {
    let geometry = Geometry { draft: true, ..preset(name).unwrap() };
    SynthOptions { name: name.into(), geometry, experts, seed: 11, zipf: 0.8, accept: 0.75, hot: true }
}

fn written(options: &SynthOptions) -> Arc<Model> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("synthetic.cmf");
    synth(&path, options, &|_, _| {}).unwrap();
    // The mapping outlives the name.
    let model = open(&path, &OpenOptions { access: riparian::model::mmap::Access::Memory }).unwrap();
    assert_eq!(verify(&model.container, |_| {}).unwrap().tensors, model.container.tensors().len());
    model
}

fn decoder(model: &Arc<Model>, act: Activations) -> Arc<Decoder> {
    Arc::new(Decoder::new(Arc::clone(model), act, Pool::new(2)))
}

/// From any token on, `t` is followed by `t + 1`, over the vocabulary's end too.
fn continues(model: &Arc<Model>, act: Activations, start: u32, prompt: u32, tokens: u32) {
    let vocab = u32::try_from(model.geometry.vocab).unwrap();
    let mut sequence = HostSequence::new(decoder(model, act)).without_drafts();
    let mut pick = sequence.step(TokenId(start % vocab)).unwrap();
    for n in 1..prompt + tokens {
        let next = TokenId((start + n) % vocab);
        assert_eq!(pick.id, next, "{act:?}, {n} tokens after {start}");
        assert!(pick.logit - pick.runner_up > 0.05, "{act:?}: {} is as good as {}", pick.logit, pick.runner_up);
        pick = sequence.step(next).unwrap();
    }
}

#[test]
fn the_continuation_is_the_successor() {
    for (name, codec) in [("tiny", Codec::Q4tp), ("tiny", Codec::Q8_2f), ("kernel", Codec::Q4tp)] {
        let model = written(&options(name, codec));
        let vocab = u32::try_from(model.geometry.vocab).unwrap();
        for act in MODES {
            for start in [0, vocab / 2, vocab - 20] {
                continues(&model, act, start, 8, 40);
            }
        }
    }
}

#[test]
fn dense_blocks_latent_experts_and_narrow_widths_too() {
    let mut options = options("tiny", Codec::Q4tp);
    options.geometry.blocks.push(BlockKind::Mlp);
    options.geometry.mlp_inter = Some(96);
    options.geometry.hidden = 160;
    let moe = options.geometry.moe.as_mut().unwrap();
    (moe.latent, moe.inter) = (Some(64), 96);
    let model = written(&options);
    MODES.into_iter().for_each(|act| continues(&model, act, 7, 4, 60));
}

#[test]
fn drafts_are_kept_at_the_rate_asked_for() {
    for accept in [0.0, 0.75, 1.0] {
        let model = written(&SynthOptions { accept, ..options("kernel", Codec::Q4tp) });
        let vocab = u32::try_from(model.geometry.vocab).unwrap();
        let mut sequence = HostSequence::new(decoder(&model, Activations::F32));
        let mut next = sequence.step(TokenId(5)).unwrap().id;
        let (mut rounds, mut kept) = (0u32, 0);
        while rounds < 300 {
            let round = sequence.round(next, 1).unwrap();
            for pick in &round.picks {
                assert_eq!(pick.id, TokenId((next.0 + 1) % vocab));
                next = pick.id;
            }
            kept += round.accepted();
            rounds += 1;
        }
        let rate = kept as f64 / f64::from(rounds);
        // 300 draws of 0.75 have a standard deviation of 0.025.
        assert!((rate - accept).abs() < 0.08, "{rate} of the drafts were kept, {accept} were asked for");
    }
}

#[test]
fn routing_is_as_uneven_as_asked_for_and_the_file_knows_whom_it_favours() {
    let share = |zipf: f64| {
        let model = written(&SynthOptions { zipf, ..options("kernel", Codec::Q4tp) });
        let mut counts = vec![vec![0u32; 16]; model.geometry.decoder_layers()];
        struct Count<'a>(&'a mut Vec<Vec<u32>>);
        impl riparian::host::Observer for Count<'_> {
            fn moe(&mut self, layer: riparian::ids::LayerIx, routes: &riparian::host::Routes) {
                routes.picks.iter().for_each(|expert| self.0[layer.index()][expert.index()] += 1);
            }
        }
        let decoder = decoder(&model, Activations::F32);
        let mut rows = vec![0.0; 512 * model.geometry.hidden];
        for (row, id) in rows.chunks_exact_mut(model.geometry.hidden).zip(0..) {
            decoder.embed(TokenId(id), row);
        }
        let mut sequence = HostSequence::new(decoder).without_drafts();
        sequence.feed(&rows, &mut Count(&mut counts)).unwrap();
        let hottest = counts.iter().zip(&model.expert_hot).map(|(counts, hot)| {
            let top: u32 = hot[..4].iter().map(|expert| counts[expert.index()]).sum();
            f64::from(top) / f64::from(counts.iter().sum::<u32>())
        });
        hottest.sum::<f64>() / counts.len() as f64
    };
    let (even, skewed) = (share(0.0), share(1.2));
    // A quarter of the experts gets a quarter of even routes, and far more of skewed ones.
    assert!((even - 0.25).abs() < 0.06, "{even}");
    assert!(skewed > 0.45, "{skewed}");
}
