//! The trained model: log-mel and rows of two recordings, word times of twelve.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use riparian::audio::config::AudioConfig;
use riparian::audio::perception::{Encoding, Perception, Step};
use riparian::audio::read::read_file;
use riparian::ids::TokenId;
use riparian::model::container::Container;
use riparian::model::mmap::Access;
use riparian::text::tokenizer::Tokenizer;
use riparian::text::transcript::{Transcript, Word};
use serde_json::Value;

use crate::checkpoint::perception;
use crate::common::tiny_transcribe_dir;

/// One recording with what the reference made of it.
pub(crate) struct Utterance {
    pub(crate) wav: PathBuf,
    pub(crate) ids: Vec<TokenId>,
    pub(crate) text: String,
    pub(crate) audio_tokens: usize,
    pub(crate) checks: Option<Value>,
}

pub(crate) fn utterances(tiny: &Path) -> Vec<Utterance> {
    let golden: Value = serde_json::from_slice(&std::fs::read(tiny.join("golden.json")).unwrap()).unwrap();
    let ids = |v: &Value| v.as_array().unwrap().iter().map(|id| TokenId(id.as_u64().unwrap() as u32)).collect();
    let list = golden["utterances"].as_array().unwrap().iter();
    list.map(|u| Utterance {
        wav: tiny.join(u["wav"].as_str().unwrap()),
        ids: ids(&u["ids"]),
        text: u["text"].as_str().unwrap().to_owned(),
        audio_tokens: u["audio_tokens"].as_u64().unwrap() as usize,
        checks: u.get("checks").cloned(),
    })
    .collect()
}

fn all_rows(encoding: &mut Encoding) -> Vec<f32> {
    let mut rows = Vec::new();
    while let Step::Rows(chunk) = encoding.step(&|| false) {
        rows.extend(chunk.rows);
    }
    rows
}

fn numbers(value: &Value) -> Vec<f32> {
    value.as_array().unwrap().iter().map(|v| v.as_f64().unwrap() as f32).collect()
}

fn near(name: &str, seen: &[f32], want: &[f32], tolerance: f32) {
    for (a, b) in seen.iter().zip(want) {
        assert!((a - b).abs() < tolerance, "{name}: {seen:?} {want:?}");
    }
}

/// Sums and samples of the golden file against a perception module.
fn check_golden(tiny: &Path, perception: &Arc<Perception>) {
    let mut checked = 0;
    for utterance in utterances(tiny) {
        let audio = read_file(&utterance.wav).unwrap();
        let mut encoding = perception.encode(&audio.samples, perception.words().is_some()).unwrap();
        assert_eq!(encoding.rows(), utterance.audio_tokens, "{}", utterance.wav.display());
        let Some(checks) = utterance.checks else { continue };
        let raw = encoding.features().raw().to_vec();
        let mel = &checks["log_mel"];
        assert_eq!(raw.len(), 128 * mel["shape"][0].as_u64().unwrap() as usize);
        let sum: f64 = raw.iter().map(|v| f64::from(*v)).sum();
        assert!((sum - mel["sum"].as_f64().unwrap()).abs() < 0.5, "{sum}");
        near("frame 10", &raw[10 * 128..][..8], &numbers(&mel["frame_10"]), 1e-4);

        let rows = all_rows(&mut encoding);
        let (want, hidden) = (&checks["audio_rows"], perception.hidden());
        assert_eq!(rows.len(), hidden * want["shape"][0].as_u64().unwrap() as usize);
        let sum: f64 = rows.iter().map(|v| f64::from(v.abs())).sum();
        let error = (sum / want["abs_sum"].as_f64().unwrap() - 1.0).abs();
        assert!(error < 1e-5, "{error}");
        near("first row", &rows, &numbers(&want["first"]), 3e-4);
        near("last row", &rows[rows.len() - hidden..], &numbers(&want["last"]), 3e-4);

        let kept = encoding.into_kept().unwrap();
        let head = perception.words().unwrap();
        let logits = head.logits(&kept, perception);
        let best = logits.chunks_exact(head.classes()).map(|row| {
            let best = (0..row.len()).max_by(|a, b| row[*a].total_cmp(&row[*b]));
            best.unwrap() as f32
        });
        assert_eq!(best.collect::<Vec<_>>(), numbers(&checks["word_head_argmax"]));
        checked += 1;
    }
    assert_eq!(checked, 2);
}

#[test]
fn rows_equal_the_golden_ones() {
    let Some(tiny) = tiny_transcribe_dir() else { return };
    check_golden(&tiny, &perception(&tiny.join("checkpoint")).0);
}

#[test]
fn a_peers_file_gives_the_same_rows() {
    let Some(tiny) = tiny_transcribe_dir() else { return };
    let container = Container::open(&tiny.join("peer/tiny-q4tp.cmf"), Access::default()).unwrap();
    let source = &container.header()["provenance"]["nemotron_transcribe"];
    let config = AudioConfig::from_json(source).unwrap();
    check_golden(&tiny, &Arc::new(Perception::load(&container, config).unwrap()));
}

/// A block of the peer's word times: a path, a text, and a word a line.
fn peer_words(tiny: &Path) -> Vec<(PathBuf, String, Vec<(f64, f64, String)>)> {
    let text = std::fs::read_to_string(tiny.join("peer/words-q8_2f.txt")).unwrap();
    let mut blocks: Vec<(PathBuf, String, Vec<_>)> = Vec::new();
    for line in text.lines() {
        if let Some(path) = line.strip_prefix("# ") {
            blocks.push((tiny.join(path), String::new(), Vec::new()));
        } else if let (_, text, words) = blocks.last_mut().unwrap()
            && line.starts_with(' ')
        {
            let mut parts = line.split_whitespace();
            let mut number = || parts.next().unwrap().parse::<f64>().unwrap();
            let (start, end) = (number(), number());
            assert!(!text.is_empty());
            words.push((start, end, parts.next().unwrap().to_owned()));
        } else {
            blocks.last_mut().unwrap().1 = line.to_owned();
        }
    }
    blocks
}

/// Times of a transcript's words.
fn word_times(perception: &Arc<Perception>, tokenizer: &Tokenizer, wav: &Path, text: &str) -> Vec<Word> {
    let audio = read_file(wav).unwrap();
    let mut encoding = perception.encode(&audio.samples, true).unwrap();
    all_rows(&mut encoding);
    let kept = encoding.into_kept().unwrap();
    let mut transcript = Transcript::parse(text);
    let alignment = transcript.alignment(tokenizer).unwrap();
    let times = perception.word_times(&kept, &alignment.tags).unwrap();
    let times = times.into_iter().map(|t| t.into_iter().map(|s| s.map(|s| (s.start, s.end))).collect()).collect();
    transcript.set_times(&alignment, times);
    transcript.words().cloned().collect()
}

#[test]
fn word_times_are_within_a_row_of_the_peers() {
    let Some(tiny) = tiny_transcribe_dir() else { return };
    let (perception, _) = perception(&tiny.join("checkpoint"));
    let tokenizer = std::fs::read(tiny.join("checkpoint/alignment_tokenizer/tokenizer.json")).unwrap();
    let tokenizer = Tokenizer::from_bytes(&tokenizer).unwrap();
    let (mut worst, mut words, mut wrong) = (0.0f64, 0, Vec::new());
    let blocks = peer_words(&tiny);
    assert_eq!(blocks.len(), 12);
    for (wav, text, want) in blocks {
        let seen = word_times(&perception, &tokenizer, &wav, &text);
        assert_eq!(seen.len(), want.len(), "{text}");
        for (seen, (start, end, word)) in seen.iter().zip(&want) {
            assert_eq!(&seen.word, word);
            let off = (seen.start.unwrap() - start).abs().max((seen.end.unwrap() - end).abs());
            worst = worst.max(off);
            words += 1;
            if off > 0.04 {
                wrong.push(format!("{}: {seen:?}, wanted {start} {end}", wav.display()));
            }
        }
    }
    println!("{words} words, worst difference {worst:.4} s");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
