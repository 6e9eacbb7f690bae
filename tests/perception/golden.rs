//! The trained model: log-mel and rows of two recordings, word times of twelve.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use riparian::audio::config::AudioConfig;
use riparian::audio::perception::{Encoding, Perception, Step};
use riparian::audio::read::read_file;
use riparian::ids::TokenId;
use riparian::model::OpenOptions;
use riparian::model::container::Container;
use riparian::model::convert::{ConvertOptions, Quant, convert};
use riparian::model::mmap::Access;
use riparian::text::prompt::{Message, Prompter, Role};
use riparian::text::tokenizer::Tokenizer;
use riparian::text::transcript::{Transcript, Word};
use serde_json::Value;

use crate::checkpoint::{Checkpoint, config, perception};
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

/// Perception matrices as our own files may hold them.
fn quantized(tiny: &Path) -> Arc<Perception> {
    let checkpoint = Checkpoint::open(&tiny.join("checkpoint/model.safetensors"));
    let config = AudioConfig::from_json(&config(&tiny.join("checkpoint"))).unwrap();
    Arc::new(Perception::load(&checkpoint.in_q8_2f(), config).unwrap())
}

#[test]
fn q8_2f_matrices_stay_near() {
    let Some(tiny) = tiny_transcribe_dir() else { return };
    let (exact, _) = perception(&tiny.join("checkpoint"));
    let coarse = quantized(&tiny);
    let (mut square, mut error) = (0.0f64, 0.0f64);
    for utterance in utterances(&tiny).iter().step_by(5) {
        let audio = read_file(&utterance.wav).unwrap();
        let [want, seen] = [&exact, &coarse].map(|p| all_rows(&mut p.encode(&audio.samples, false).unwrap()));
        square += want.iter().map(|v| f64::from(v * v)).sum::<f64>();
        error += want.iter().zip(&seen).map(|(a, b)| f64::from((a - b) * (a - b))).sum::<f64>();
    }
    let relative = (error / square).sqrt();
    println!("relative error of the rows: {relative:.2e}");
    assert!(relative > 1e-4 && relative < 0.05, "{relative}");
}

#[test]
fn files_of_ours_hold_all_that_is_needed() {
    let Some(tiny) = tiny_transcribe_dir() else { return };
    let folder = tempfile::tempdir().unwrap();
    for perception in [Quant::Exact, Quant::Q8_2f] {
        let path = folder.path().join(format!("{perception}.cmf"));
        let options = ConvertOptions { quant: Quant::Q8_2f, perception, ..ConvertOptions::default() };
        convert(&tiny.join("checkpoint"), &path, &options, |_| ()).unwrap();
        let model = riparian::model::open(&path, &OpenOptions::default()).unwrap();
        let module = Arc::new(Perception::open(&model).unwrap().unwrap());
        if perception == Quant::Exact {
            check_golden(&tiny, &module);
        }
        let tokenizer = Tokenizer::from_bytes(model.alignment_tokenizer().unwrap().as_bytes()).unwrap();
        let (wav, text, want) = &peer_words(&tiny)[0];
        let words = word_times(&module, &tokenizer, wav, text);
        assert!(words.iter().zip(want).all(|(w, (start, ..))| (w.start.unwrap() - start).abs() < 0.04), "{words:?}");

        let tokenizer = Tokenizer::from_bytes(model.tokenizer().unwrap()).unwrap();
        let prompter = Prompter::new(tokenizer, &model.provenance);
        let prompt = prompter.transcription(None).unwrap();
        assert_eq!((prompt.before.len(), prompt.after.len(), model.audio_token), (40, 11, Some(TokenId(512))));
        // What the template and the fixed layout make of a dialogue is the same.
        let messages = [Message { role: Role::User, content: "What time is it?".into() }];
        let bare = Prompter::new(prompter.tokenizer().clone(), &Value::Null);
        assert_eq!(prompter.dialogue(&messages).unwrap(), bare.dialogue(&messages).unwrap());
    }
}

/// Start, end and the word.
type PeerWord = (f64, f64, String);

/// A block of the peer's word times: a path, a text, and a word a line.
fn peer_words(tiny: &Path) -> Vec<(PathBuf, String, Vec<PeerWord>)> {
    let text = std::fs::read_to_string(tiny.join("peer/words-q8_2f.txt")).unwrap();
    let mut blocks: Vec<(PathBuf, String, Vec<PeerWord>)> = Vec::new();
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
    // The peer's times come from its q8_2f conversion; exact weights give the same.
    compare_words(&tiny, &perception(&tiny.join("checkpoint")).0);
    compare_words(&tiny, &quantized(&tiny));
}

fn alignment_tokenizer(tiny: &Path) -> Tokenizer {
    let tokenizer = std::fs::read(tiny.join("checkpoint/alignment_tokenizer/tokenizer.json")).unwrap();
    Tokenizer::from_bytes(&tokenizer).unwrap()
}

fn compare_words(tiny: &Path, perception: &Arc<Perception>) {
    let tokenizer = alignment_tokenizer(tiny);
    let (mut worst, mut words, mut wrong) = (0.0f64, 0, Vec::new());
    let blocks = peer_words(tiny);
    assert_eq!(blocks.len(), 12);
    for (wav, text, want) in blocks {
        let seen = word_times(perception, &tokenizer, &wav, &text);
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

#[test]
fn words_of_a_tagged_speaker_lie_in_their_activity() {
    let Some(tiny) = tiny_transcribe_dir() else { return };
    let (perception, _) = perception(&tiny.join("checkpoint"));
    let tokenizer = alignment_tokenizer(&tiny);
    for (wav, text, untagged) in peer_words(&tiny) {
        let words = word_times(&perception, &tokenizer, &wav, &format!("<spk:0> {text}"));
        let end = read_file(&wav).unwrap().duration_s();
        for (word, (start, _, _)) in words.iter().zip(&untagged) {
            let (seen, until) = (word.start.unwrap(), word.end.unwrap());
            assert!(seen >= 0.0 && seen < until && until <= end + 0.04, "{word:?}");
            // The recording has one speaker: within half a second of where the words are without the tag.
            assert!((seen - start).abs() < 0.5, "{word:?} {start}");
        }
        assert!(words.windows(2).all(|w| w[0].start <= w[1].start && w[0].end <= w[1].end), "{words:?}");
    }
}

#[test]
fn words_that_cannot_be_told_have_no_times() {
    let Some(tiny) = tiny_transcribe_dir() else { return };
    let (perception, _) = perception(&tiny.join("checkpoint"));
    let tokenizer = alignment_tokenizer(&tiny);
    let wav = tiny.join("wavs/digits-theo-04.wav");
    // Far more words than rows.
    let long = "seven ".repeat(40);
    assert!(word_times(&perception, &tokenizer, &wav, &long).iter().all(|w| w.start.is_none()));
    // More speakers than the model knows: the ones left over have none, the others may.
    let crowd: String = (0..9).map(|s| format!("<spk:{s}> one ")).collect();
    let words = word_times(&perception, &tokenizer, &wav, &crowd);
    assert!(words.len() == 9 && words.iter().any(|w| w.start.is_none()));
    assert!(word_times(&perception, &tokenizer, &wav, "").is_empty());
}
