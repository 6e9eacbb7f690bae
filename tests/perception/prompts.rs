//! Prompts of the two Transcribe checkpoints: the template's ids, and the fixed layout's.

use std::path::Path;

use riparian::ids::TokenId;
use riparian::text::prompt::Prompter;
use riparian::text::tokenizer::Tokenizer;
use serde_json::json;

use crate::checkpoint::Checkpoint;
use crate::common::{oracle, tiny_transcribe_dir};

fn prompters(checkpoint: &Path) -> [Prompter; 2] {
    let tokenizer = Tokenizer::from_bytes(&std::fs::read(checkpoint.join("tokenizer.json")).unwrap()).unwrap();
    let template = std::fs::read_to_string(checkpoint.join("chat_template.jinja")).unwrap();
    [json!({ "chat_template": template }), json!({})].map(|source| Prompter::new(tokenizer.clone(), &source))
}

#[test]
fn the_case_has_the_reference_ids() {
    let Some(case) = oracle("fixtures/transcribe-tiny") else { return };
    let reference = Checkpoint::open(&case.join("reference.safetensors"));
    let want: Vec<TokenId> = reference.ids("input_ids").iter().map(|id| TokenId(*id)).collect();
    for prompter in prompters(&case.join("checkpoint")) {
        assert_eq!(prompter.transcription(None).unwrap().ids(67, TokenId(512)), want);
    }
}

#[test]
fn the_trained_model_reads_forty_ids_before_and_eleven_after() {
    let Some(tiny) = tiny_transcribe_dir() else { return };
    let [template, layout] = prompters(&tiny.join("checkpoint"));
    let prompt = template.transcription(None).unwrap();
    assert_eq!((prompt.before.len(), prompt.after.len()), (40, 11));
    assert_eq!(prompt, layout.transcription(None).unwrap());
    assert_eq!(prompt.len(11), 62);
    // Another instruction changes what stands before the audio, and nothing after it.
    let other = template.transcription(Some("Digits only.")).unwrap();
    assert_eq!(other.after, prompt.after);
    assert_ne!(other.before, prompt.before);
}

#[test]
fn golden_texts_decode_whole_and_in_pieces() {
    let Some(tiny) = tiny_transcribe_dir() else { return };
    let tokenizer = std::fs::read(tiny.join("checkpoint/tokenizer.json")).unwrap();
    let tokenizer = Tokenizer::from_bytes(&tokenizer).unwrap();
    for utterance in crate::golden::utterances(&tiny) {
        let mut stream = tokenizer.stream();
        let mut text: String = utterance.ids.iter().map(|id| stream.push(*id).unwrap()).collect();
        text += &stream.finish().unwrap();
        assert_eq!(text, utterance.text);
        assert_eq!(tokenizer.decode(&utterance.ids).unwrap(), utterance.text);
    }
}
