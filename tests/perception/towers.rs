//! The case `transcribe-tiny`: every intermediate value the oracle holds.

use riparian::audio::logmel::LogMel;
use riparian::audio::perception::{Kept, Probe, Step};
use riparian::audio::read::read_file;
use riparian::audio::weights::PerceptionError;

use crate::checkpoint::{Checkpoint, perception};
use crate::common::oracle;

/// Largest difference `model.md` §6 saw in states, embeddings and logits, with room for another order of sums.
const STATES: f32 = 4e-5;
/// The same for log-mel values.
const LOG_MEL: f32 = 1e-4;

fn close(name: &str, seen: &[f32], want: &[f32], tolerance: f32) {
    assert_eq!(seen.len(), want.len(), "{name}");
    let worst = seen.iter().zip(want).map(|(a, b)| (a - b).abs()).fold(0.0, |a: f32, b| if b > a { b } else { a });
    assert!(seen.iter().all(|v| v.is_finite()), "{name} is not finite");
    assert!(worst <= tolerance, "{name}: {worst:e} above {tolerance:e}");
    println!("{name}: {worst:.1e}");
}

#[test]
fn constants_equal_the_checkpoint() {
    let Some(case) = oracle("fixtures/transcribe-tiny") else { return };
    let checkpoint = Checkpoint::open(&case.join("checkpoint/model.safetensors"));
    let mel = LogMel::new();
    assert_eq!(mel.window(), checkpoint.values("perception.preprocessor.featurizer.window"));
    assert_eq!(mel.bank(), checkpoint.values("perception.preprocessor.featurizer.fb"));
}

#[test]
fn every_intermediate_value_equals_the_reference() {
    let Some(case) = oracle("fixtures/transcribe-tiny") else { return };
    let (perception, _) = perception(&case.join("checkpoint"));
    let reference = Checkpoint::open(&case.join("reference.safetensors"));
    let audio = read_file(&case.join("audio.wav")).unwrap();
    let mut encoding = perception.encode(&audio.samples, true).unwrap();
    assert_eq!((encoding.features().frames(), encoding.rows(), encoding.chunks_left()), (530, 67, 4));
    close("input_features", encoding.features().raw(), &reference.values("input_features"), LOG_MEL);
    let mut normalized = Vec::new();
    encoding.features().normalized(0..encoding.features().encoder_frames(), &mut normalized);
    close("asr_features", &normalized, &reference.values("asr_features"), LOG_MEL);

    let (mut rows, mut fused, mut probs) = (Vec::new(), Vec::new(), Vec::new());
    for chunk in 0.. {
        let mut probe = Some(Probe::default());
        let Step::Rows(given) = encoding.probed_step(&|| false, &mut probe) else {
            assert_eq!(chunk, 4);
            break;
        };
        let probe = probe.unwrap();
        assert_eq!(given.range.start * perception.hidden(), rows.len());
        rows.extend(given.rows);
        fused.extend(probe.fused);
        probs.extend(probe.frame_probs);
        let stacked = format!("asr.stacked.chunk{chunk}");
        close(&stacked, &probe.asr_embedded, &reference.values(&stacked), STATES);
        for (part, layers) in [("asr", &probe.asr_layers), ("diar", &probe.diar_layers)] {
            assert_eq!(layers.len(), 2);
            for (i, layer) in layers.iter().enumerate() {
                let name = format!("{part}.layer{i}.chunk{chunk}");
                close(&name, layer, &reference.values(&name), STATES);
            }
        }
    }
    close("encoder_out", &fused, &reference.values("encoder_out"), STATES);
    close("audio_embeds", &rows, &reference.values("audio_embeds"), STATES);
    close("speaker_frame_probs", &probs, &reference.values("speaker_frame_probs"), STATES);
    let kept = encoding.into_kept().unwrap();
    close("asr_states", &kept.states, &reference.values("asr_states"), STATES);
    close("speaker_logits", &kept.speaker_logits, &reference.values("speaker_logits"), STATES);
    let head = perception.words().unwrap();
    assert_eq!((head.classes(), head.blank()), (41, 40));
    close("word_logits", &head.logits(&kept, &perception), &reference.values("word_logits"), STATES);
    // The same from the reference's own states, so that an error of the towers cannot hide one here.
    let given = Kept { states: reference.values("asr_states"), ..kept };
    close("word_logits alone", &head.logits(&given, &perception), &reference.values("word_logits"), STATES);
}

#[test]
fn a_cancelled_step_can_be_taken_again() {
    let Some(case) = oracle("fixtures/transcribe-tiny") else { return };
    let (perception, _) = perception(&case.join("checkpoint"));
    let audio = read_file(&case.join("audio.wav")).unwrap();
    let run = |cancel: bool| {
        let mut encoding = perception.encode(&audio.samples, false).unwrap();
        let (mut rows, mut asked) = (Vec::new(), 0);
        loop {
            // Cancelled before each layer in turn, in the middle of the first and of the second tower.
            for layer in 0..if cancel { 4 } else { 0 } {
                let count = std::cell::Cell::new(0);
                let stop = || count.replace(count.get() + 1) == layer;
                match encoding.step(&stop) {
                    Step::Cancelled => asked += 1,
                    Step::Done => break,
                    Step::Rows(_) => panic!("rows after a stop before layer {layer}"),
                }
            }
            match encoding.step(&|| false) {
                Step::Rows(chunk) => rows.extend(chunk.rows),
                Step::Done => return (rows, asked),
                Step::Cancelled => panic!("nobody cancelled"),
            }
        }
    };
    let (whole, none) = run(false);
    let (again, asked) = run(true);
    assert_eq!((none, asked), (0, 16));
    assert_eq!(whole, again);
}

#[test]
fn words_need_what_was_kept() {
    let Some(case) = oracle("fixtures/transcribe-tiny") else { return };
    let (perception, _) = perception(&case.join("checkpoint"));
    let samples = vec![0.01; 16_000];
    let early = perception.encode(&samples, true).unwrap();
    assert!(matches!(early.into_kept(), Err(PerceptionError::NoWords { .. })));
    let mut bare = perception.encode(&samples, false).unwrap();
    while bare.step(&|| false) != Step::Done {}
    assert!(matches!(bare.into_kept(), Err(PerceptionError::NoWords { .. })));
}
