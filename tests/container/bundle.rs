//! The model that travels with the source: whole, and good for what it is for.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use riparian::audio::config::AudioConfig;
use riparian::audio::perception::{Perception, Step};
use riparian::audio::read::read_file;
use riparian::host::{Decoder, HostSequence, Pool};
use riparian::knobs::Activations;
use riparian::model::layout::Role;
use riparian::model::{self, Model, OpenOptions, Summary, verify};
use riparian::text::prompt::Prompter;
use riparian::text::tokenizer::Tokenizer;
use serde_json::Value;

use crate::common::tiny_transcribe_dir;

fn assets() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("assets")
}

/// Recordings to text, as plainly as can be: all rows at once, one id after the other.
struct Transcriber {
    model: Arc<Model>,
    perception: Arc<Perception>,
    prompter: Prompter,
    decoder: Arc<Decoder>,
}

impl Transcriber {
    fn open(path: &Path) -> Self {
        let model = model::open(path, &OpenOptions::default()).unwrap();
        let config = AudioConfig::from_json(&model.provenance).unwrap();
        let perception = Arc::new(Perception::load(&model.container, config).unwrap());
        let tokenizer = Tokenizer::from_bytes(model.tokenizer().unwrap()).unwrap();
        let prompter = Prompter::new(tokenizer, &model.provenance);
        let pool = Pool::with_all_cores();
        let decoder = Arc::new(Decoder::new(model.clone(), Activations::default(), pool));
        Self { model, perception, prompter, decoder }
    }

    fn text(&self, wav: &Path) -> String {
        let audio = read_file(wav).unwrap();
        let prompt = self.prompter.transcription(None).unwrap();
        let hidden = self.model.geometry.hidden;
        let embed = |rows: &mut Vec<f32>, ids: &[riparian::ids::TokenId]| {
            for id in ids {
                let at = rows.len();
                rows.resize(at + hidden, 0.0);
                self.decoder.embed(*id, &mut rows[at..]);
            }
        };
        let mut rows = Vec::new();
        embed(&mut rows, &prompt.before);
        let mut encoding = self.perception.encode(&audio.samples, false).unwrap();
        while let Step::Rows(chunk) = encoding.step(&|| false) {
            rows.extend(chunk.rows);
        }
        embed(&mut rows, &prompt.after);
        let mut sequence = HostSequence::new(self.decoder.clone()).without_drafts();
        let mut pick = sequence.feed(&rows, &mut ()).unwrap();
        let mut ids = Vec::new();
        while !self.model.eos.contains(&pick.id) && ids.len() < 64 {
            ids.push(pick.id);
            pick = sequence.step(pick.id).unwrap();
        }
        self.prompter.tokenizer().decode(&ids).unwrap()
    }
}

#[test]
fn the_bundled_model_is_whole_and_small() {
    let path = assets().join("tiny-transcribe.cmf");
    let model = model::open(&path, &OpenOptions::default()).unwrap();
    verify(&model.container, |_| {}).unwrap();
    let summary = Summary::of(&model.container).unwrap();
    assert!(summary.file_bytes <= 18_000_000, "{}", summary.file_bytes);
    assert!(summary.geometry.draft && model.alignment_tokenizer().is_some());
    for role in [Role::Routed, Role::DraftRouted] {
        let size = summary.roles.iter().find(|size| size.role == role).unwrap();
        assert_eq!(size.codecs.iter().collect::<Vec<_>>(), ["q4tp"]);
    }
}

#[test]
fn the_bundled_model_transcribes_the_demo_recordings() {
    let transcriber = Transcriber::open(&assets().join("tiny-transcribe.cmf"));
    let demo = assets().join("demo");
    let references = fs::read_to_string(demo.join("references.tsv")).unwrap();
    assert_eq!(references.lines().count(), 4);
    for line in references.lines() {
        let (wav, want) = line.split_once('\t').unwrap();
        assert_eq!(transcriber.text(&demo.join(wav)), want, "{wav}");
    }
}

#[test]
fn the_bundled_model_transcribes_the_golden_recordings() {
    let Some(dir) = tiny_transcribe_dir() else { return };
    let golden: Value = serde_json::from_slice(&fs::read(dir.join("golden.json")).unwrap()).unwrap();
    let transcriber = Transcriber::open(&assets().join("tiny-transcribe.cmf"));
    let list = golden["utterances"].as_array().unwrap();
    assert_eq!(list.len(), 40);
    for utterance in list {
        let wav = utterance["wav"].as_str().unwrap();
        assert_eq!(transcriber.text(&dir.join(wav)), utterance["text"].as_str().unwrap(), "{wav}");
    }
}
