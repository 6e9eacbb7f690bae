//! The trained tiny model on its 40 golden recordings, in the five arithmetics a file can be decoded in.
//!
//! Here ids can be held to the reference in int8 too: the margins are those of a model that knows what it says.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use riparian::audio::config::AudioConfig;
use riparian::audio::perception::{Perception, Step};
use riparian::audio::read::read_file;
use riparian::host::Isa;
use riparian::ids::TokenId;
use riparian::knobs::Activations;
use riparian::model::config::parse_json;
use riparian::model::convert::{ConvertOptions, Quant, convert};
use riparian::model::state::SequenceState;
use riparian::model::{Model, OpenOptions, open};
use riparian::reference::PlainDecoder;
use riparian::reference::argmax::{Pick, argmax};
use riparian::reference::embed::embed;
use riparian::text::prompt::{Prompter, TranscriptionPrompt};
use riparian::text::tokenizer::Tokenizer;
use serde_json::Value;

use crate::case::Case;
use crate::common::tiny_transcribe_dir;
use crate::harness::{Forward, check_decode, check_drafts_change_nothing};
use crate::host::Host;
use crate::plain::Plain;
use crate::reference::{GreedyReference, Reference};
use crate::report::Report;
use crate::tolerance::INT8;

fn converted(checkpoint: &Path, out: &Path, quant: Quant) -> Arc<Model> {
    convert(checkpoint, out, &ConvertOptions { quant, ..ConvertOptions::default() }, |_| {}).expect("converted");
    open(out, &OpenOptions::default()).expect("opened")
}

/// A recording's prompt, with what the reference made of it. The audio rows come from the exact file; the prompt's
/// text is embedded anew in each.
struct Recording {
    name: String,
    before: Vec<TokenId>,
    audio: Vec<f32>,
    after: Vec<TokenId>,
    ids: Vec<TokenId>,
    margins: Vec<f32>,
}

/// A model's perception and the prompt its rows stand in.
pub(crate) struct Ears {
    perception: Arc<Perception>,
    pub(crate) prompt: TranscriptionPrompt,
}

impl Ears {
    pub(crate) fn of(model: &Model) -> Self {
        let config = AudioConfig::from_json(&model.provenance).expect("an audio config");
        let perception = Arc::new(Perception::load(&model.container, config).expect("perception"));
        let tokenizer = Tokenizer::from_bytes(model.tokenizer().expect("a tokenizer")).expect("a tokenizer");
        let prompt = Prompter::new(tokenizer, &model.provenance).transcription(None).expect("a prompt");
        Self { perception, prompt }
    }

    /// Rows of a recording.
    pub(crate) fn hear(&self, wav: &Path) -> Vec<f32> {
        let samples = read_file(wav).expect("a recording").samples;
        let mut encoding = self.perception.encode(&samples, false).expect("samples");
        let mut rows = Vec::new();
        while let Step::Rows(chunk) = encoding.step(&|| false) {
            rows.extend(chunk.rows);
        }
        rows
    }
}

/// The golden recordings: paths below the folder, ids, margins.
pub(crate) fn golden(folder: &Path) -> Vec<(String, Vec<TokenId>, Vec<f32>)> {
    let text = std::fs::read_to_string(folder.join("golden.json")).expect("golden.json");
    let golden = parse_json(&text).expect("JSON");
    let of = |utterance: &Value| {
        let list = |key: &str| utterance[key].as_array().expect("a list").iter();
        let ids = list("ids").map(|id| TokenId(id.as_u64().expect("an id") as u32)).collect();
        let margins = list("margins").map(|m| m.as_f64().expect("a margin") as f32).collect();
        (utterance["wav"].as_str().expect("a path").to_owned(), ids, margins)
    };
    golden["utterances"].as_array().expect("utterances").iter().map(of).collect()
}

fn recordings(folder: &Path, model: &Model) -> Vec<Recording> {
    let ears = Ears::of(model);
    let of = |(name, ids, margins): (String, _, _)| {
        let (before, after) = (ears.prompt.before.clone(), ears.prompt.after.clone());
        let audio = ears.hear(&folder.join(&name));
        Recording { name, before, audio, after, ids, margins }
    };
    golden(folder).into_iter().map(of).collect()
}

impl Recording {
    fn case(&self, model: &Arc<Model>) -> Case {
        let rows_of = |ids: &[TokenId]| {
            let mut rows = vec![0.0; ids.len() * model.geometry.hidden];
            for (id, row) in ids.iter().zip(rows.chunks_exact_mut(model.geometry.hidden)) {
                embed(&model.decoder.embedding, *id, row);
            }
            rows
        };
        let greedy = GreedyReference {
            ids: self.ids.clone(),
            margins: self.margins.clone(),
            path_gaps: Vec::new(),
            logits: None,
        };
        let rows = [rows_of(&self.before), self.audio.clone(), rows_of(&self.after)].concat();
        Case::of_model(model, Reference::of_ids(&self.name, rows, greedy))
    }
}

/// The margin of each of the reference's ids, which all come out, by one pass over prompt and ids.
fn margins(case: &Case, engine: &mut impl Forward) -> Vec<f32> {
    let ids = &case.reference.greedy.ids;
    let rows = [&case.reference.rows[..], &case.embed(&ids[..ids.len() - 1])].concat();
    let logits = engine.forward(&rows, &mut SequenceState::new(&case.geometry)).logits;
    let vocab = case.geometry.vocab;
    let picks = logits[logits.len() - ids.len() * vocab..].chunks_exact(vocab).map(argmax);
    let margin = |(pick, id): (Pick, &TokenId)| {
        assert_eq!(pick.id, *id, "{}, {}", case.reference.name, engine.label());
        pick.margin()
    };
    picks.zip(ids).map(margin).collect()
}

/// The reference's own margins. transformers clamps the step size to 0.001 from below while it prefills, and not in its
/// steps (`oracle/README.md`); with that done the plain decoder's margins are its, and so are the ids without it.
fn check_margins(case: &Case, margins: &[f32], report: &mut Report) {
    let mut clamped = case.geometry.clone();
    clamped.mamba.as_mut().expect("Mamba blocks").dt_limit[0] = 0.001;
    let prefill = PlainDecoder::new(&clamped, case.weights(), Activations::F32);
    let steps = PlainDecoder::new(&case.geometry, case.weights(), Activations::F32);
    let mut state = SequenceState::new(&case.geometry);
    let mut normed = prefill.forward(&case.reference.rows, &mut state, None).normed;
    let mut got = Vec::new();
    for id in &case.reference.greedy.ids {
        let pick = steps.head(&normed[normed.len() - case.geometry.hidden..])[0];
        assert_eq!(pick.id, *id, "{}", case.reference.name);
        got.push(pick.margin());
        normed = steps.forward(&steps.embed(&[*id]), &mut state, None).normed;
    }
    // recorded to four places; perception and decoder add some 1e-5 each
    report.close_absolute("margins as transformers has them", &case.reference.name, &got, margins, 5e-4);
}

#[test]
fn golden_ids_in_every_arithmetic() {
    let Some(folder) = tiny_transcribe_dir() else { return };
    let out = tempfile::tempdir().expect("a folder");
    let model = |quant: Quant, name: &str| converted(&folder.join("checkpoint"), &out.path().join(name), quant);
    let exact = model(Quant::Exact, "exact.cmf");
    let recordings = recordings(&folder, &exact);
    assert_eq!(recordings.len(), 40);
    let mut report = Report::new("plain decoder F32", "golden recordings");
    for recording in recordings.iter().step_by(5) {
        check_margins(&recording.case(&exact), &recording.margins, &mut report);
    }
    report.print();

    let (q8, q4) = (model(Quant::Q8_2f, "q8_2f.cmf"), model(Quant::Q4tp, "q4tp.cmf"));
    let arithmetics = [
        ("exact", &exact, Activations::F32),
        ("q8_2f", &q8, Activations::F32),
        ("q8_2f", &q8, Activations::Int8),
        ("q4tp", &q4, Activations::F32),
        ("q4tp", &q4, Activations::Int8),
    ];
    let mut first: Option<Vec<f32>> = None;
    for (file, model, act) in arithmetics {
        let (started, mut all) = (Instant::now(), Vec::new());
        for (i, recording) in recordings.iter().enumerate() {
            let case = recording.case(model);
            let host = &mut Host::new(&case, act, Isa::best());
            all.extend(margins(&case, host));
            if i % 5 == 0 {
                assert_eq!(check_decode(&case, host, &INT8), 0, "{file} {act:?}: {}", recording.name);
                check_drafts_change_nothing(&case, host, &[1, 3]);
            }
            if i % 20 == 0 {
                let plain = &mut Plain::new(&case, act, None);
                assert_eq!(check_decode(&case, plain, &INT8), 0, "{file} {act:?}: {}", recording.name);
            }
        }
        let first = first.get_or_insert_with(|| all.clone());
        let shifts: Vec<f32> = all.iter().zip(first.iter()).map(|(margin, exact)| (margin - exact).abs()).collect();
        println!(
            "{file}, {act:?} activations: 40 recordings, {} ids equal; margins moved by {:.4} on average, {:.3} at most, \
             from the exact ones; the smallest is {:.2}; {:.1} s",
            all.len(),
            shifts.iter().sum::<f32>() / shifts.len() as f32,
            shifts.iter().copied().fold(0.0, f32::max),
            all.iter().copied().fold(f32::INFINITY, f32::min),
            started.elapsed().as_secs_f32(),
        );
    }
}
