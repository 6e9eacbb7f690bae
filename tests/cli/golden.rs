//! Transcripts against the reference: the bundled recordings, and the 40 golden
//! ones where the tiny model's folder stands beside the clone.

#![allow(clippy::print_stdout, reason = "figures are printed for whoever runs the tests")]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use serde_json::Value;

use crate::support::{Ran, demo, finish, model, program, run, scratch, tiny_transcribe};

/// A golden recording.
struct Golden {
    wav: PathBuf,
    ids: Vec<u64>,
    text: String,
}

fn goldens(folder: &Path) -> Vec<Golden> {
    let file = std::fs::read(folder.join("golden.json")).unwrap();
    let file: Value = serde_json::from_slice(&file).unwrap();
    let read = |utterance: &Value| Golden {
        wav: folder.join(utterance["wav"].as_str().unwrap()),
        ids: utterance["ids"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap()).collect(),
        text: utterance["text"].as_str().unwrap().to_owned(),
    };
    let goldens: Vec<Golden> = file["utterances"].as_array().unwrap().iter().map(read).collect();
    assert_eq!(goldens.len(), 40);
    goldens
}

/// The checkpoint as we convert it, made once for all tests.
fn converted(folder: &Path, quant: &'static str) -> PathBuf {
    static MADE: OnceLock<parking_lot::Mutex<BTreeMap<&'static str, PathBuf>>> = OnceLock::new();
    let mut made = MADE.get_or_init(parking_lot::Mutex::default).lock();
    let make = || {
        let out = scratch().join(format!("tiny-{quant}.cmf"));
        let checkpoint = folder.join("checkpoint");
        finish(program().arg("convert").arg(checkpoint).arg(&out).args(["--quant", quant])).ok();
        out
    };
    made.entry(quant).or_insert_with(make).clone()
}

fn transcribe(model: &Path, goldens: &[Golden], flags: &[&str]) -> Ran {
    let wavs = goldens.iter().map(|golden| &golden.wav);
    finish(program().arg("transcribe").arg(model).args(wavs).args(["--format", "json"]).args(flags)).ok()
}

/// Every line has the golden ids; gives the lines.
#[track_caller]
fn same(ran: &Ran, goldens: &[Golden], what: &str) -> Vec<Value> {
    let lines = ran.json();
    assert_eq!(lines.len(), goldens.len());
    for (line, golden) in lines.iter().zip(goldens) {
        let ids: Vec<u64> = line["ids"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap()).collect();
        assert_eq!(ids, golden.ids, "{what}: {}", golden.wav.display());
        assert_eq!(line["text"], golden.text.as_str(), "{what}: {}", golden.wav.display());
        assert_eq!(line["finish_reason"], "stop");
    }
    lines
}

fn total(lines: &[Value], field: &str) -> f64 {
    lines.iter().map(|line| line.pointer(field).and_then(Value::as_f64).unwrap()).sum()
}

#[test]
fn the_bundled_recordings_are_transcribed() {
    let (wavs, said): (Vec<_>, Vec<_>) = demo().into_iter().unzip();
    let ran = finish(program().arg("transcribe").arg(model()).args(&wavs)).ok();
    let want: String = wavs.iter().zip(&said).map(|(wav, said)| format!("{}: {said}\n", wav.display())).collect();
    assert_eq!(ran.stdout, want);
    // One recording's text stands alone.
    let ran = finish(program().arg("transcribe").arg(model()).arg(&wavs[0])).ok();
    assert_eq!(ran.stdout, format!("{}\n", said[0]));
}

#[test]
fn nothing_named_takes_what_is_bundled() {
    let ran = run(["transcribe"]).ok();
    let first = demo().into_iter().min().unwrap();
    assert_eq!(ran.stdout, format!("{}\n", first.1));
}

#[test]
fn goldens_are_equal_in_every_codec_and_arithmetic() {
    let Some(folder) = tiny_transcribe() else { return };
    let goldens = goldens(&folder);
    for quant in ["exact", "q8_2f", "q4tp"] {
        let model = converted(&folder, quant);
        for act in ["f32", "int8"] {
            let lines = same(&transcribe(&model, &goldens, &["--act", act]), &goldens, &format!("{quant} {act}"));
            println!(
                "{quant:>5} {act:>4}: {:.1} s of audio, encode {:.2} s, prefill {:.2} s, decode {:.2} s",
                total(&lines, "/audio_s"),
                total(&lines, "/encode_s"),
                total(&lines, "/prefill_s"),
                total(&lines, "/decode_s"),
            );
        }
    }
}

#[test]
fn the_peers_conversion_gives_the_same_transcripts() {
    let Some(folder) = tiny_transcribe() else { return };
    let goldens = goldens(&folder);
    same(&transcribe(&folder.join("peer/tiny-q4tp.cmf"), &goldens, &[]), &goldens, "peer q4tp");
}

#[test]
fn partial_banks_and_drafts_change_no_id() {
    let Some(folder) = tiny_transcribe() else { return };
    // A sixth of the recordings, both kinds among them: the ids of all are compared above.
    let goldens: Vec<Golden> = goldens(&folder).into_iter().step_by(6).collect();
    let model = converted(&folder, "q4tp");
    let info = finish(program().arg("info").arg(&model).arg("--json")).ok().json_value();
    let expert = info.pointer("/experts/bytes_each").and_then(Value::as_f64).unwrap();
    let layers = info.pointer("/experts/layers").and_then(Value::as_f64).unwrap();
    let experts = info.pointer("/experts/routed").and_then(Value::as_f64).unwrap();
    let top_k = info.pointer("/experts/top_k").and_then(Value::as_f64).unwrap();
    for share in [0.25, 0.5, 0.75] {
        let slots = (share * experts).max(top_k).round();
        // Half an expert above what the slots need, so that rounding takes none away.
        let gb = format!("{}", (slots * layers + 0.5) * expert / 1e9);
        for drafts in [true, false] {
            let mut flags = vec!["--expert-gb", &gb];
            if !drafts {
                flags.push("--no-drafts");
            }
            let what = format!("{slots} slots a layer, drafts {drafts}");
            let lines = same(&transcribe(&model, &goldens, &flags), &goldens, &what);
            let (misses, completed) = (total(&lines, "/bank/misses"), total(&lines, "/bank/completed"));
            let (offered, kept) = (total(&lines, "/drafts/offered"), total(&lines, "/drafts/kept"));
            println!("{what}: {misses} misses, {completed} completed, {kept} of {offered} drafts kept");
            assert!(misses > 0.0 && completed > 0.0, "{what}: a partial bank has to miss");
            assert!(drafts || offered == 0.0, "{what}");
        }
    }
}

/// Start, end and word.
type Spoken = (f64, f64, String);

#[test]
fn word_times_agree_with_the_peers() {
    let Some(folder) = tiny_transcribe() else { return };
    let model = converted(&folder, "q8_2f");
    let table = std::fs::read_to_string(folder.join("peer/words-q8_2f.txt")).unwrap();
    let mut wanted: Vec<(PathBuf, Vec<Spoken>)> = Vec::new();
    for line in table.lines().filter(|line| !line.trim().is_empty()) {
        if let Some(wav) = line.strip_prefix("# ") {
            wanted.push((folder.join(wav.trim()), Vec::new()));
        } else if line.starts_with(' ') {
            let mut columns = line.split_whitespace();
            let mut number = || columns.next().unwrap().parse::<f64>().unwrap();
            let (start, end) = (number(), number());
            let word = columns.next().unwrap().to_owned();
            wanted.last_mut().unwrap().1.push((start, end, word));
        }
    }
    assert_eq!(wanted.len(), 12);
    let wavs = wanted.iter().map(|(wav, _)| wav);
    let ran =
        finish(program().arg("transcribe").arg(&model).args(wavs).args(["--timestamps", "--format", "json"])).ok();
    // A row of the word head is 40 ms; times printed by the peer are rounded to a millisecond.
    let row = 0.040 + 0.001;
    for (line, (wav, words)) in ran.json().iter().zip(&wanted) {
        let seen = line["words"].as_array().unwrap();
        assert_eq!(seen.len(), words.len(), "{}", wav.display());
        for (seen, (start, end, word)) in seen.iter().zip(words) {
            assert_eq!(seen["word"], word.as_str());
            for (field, want) in [("start_s", start), ("end_s", end)] {
                let at = seen[field].as_f64().unwrap();
                assert!((at - want).abs() <= row, "{}: {word} {field} {at}, the peer has {want}", wav.display());
            }
        }
    }
}
