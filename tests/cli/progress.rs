//! Progress of the long operations: drawn on a terminal, and not a byte of it elsewhere or with `--quiet`.
#![cfg(target_os = "linux")]
#![allow(clippy::print_stdout, reason = "a test that cannot show something says so")]

use std::process::Command;

use crate::support::{Wav, checkpoint, finish, model, program, recording, samples_of, scratch};

/// What the program writes to stderr when that is a terminal of 120 columns; `None` where there is no `script` to make one.
fn on_terminal(arguments: &[&str]) -> Option<String> {
    let quoted: Vec<String> = arguments.iter().map(|argument| format!("'{argument}'")).collect();
    let line = format!("stty cols 120; '{}' {} >/dev/null", env!("CARGO_BIN_EXE_riparian"), quoted.join(" "));
    let mut script = Command::new("script");
    script
        .args(["-qefc", &line, "/dev/null"])
        .env("CMF_NEMO_DEVICE", "cpu")
        .env("TERM", "xterm")
        .env_remove("RUST_LOG");
    script.stdin(std::process::Stdio::null());
    if script.output().is_err() {
        println!("no script(1) here: progress on a terminal is not shown");
        return None;
    }
    let ran = finish(&mut script);
    assert_eq!(ran.code, 0, "{arguments:?}: {}", ran.stdout);
    // script copies its terminal to stdout.
    Some(ran.stdout)
}

#[test]
fn long_operations_draw_how_far_they_are_on_a_terminal_alone() {
    let at = |name: &str| scratch().join(name).to_str().unwrap().to_owned();
    // Two minutes of recording.
    let mut samples = samples_of(&recording());
    let once = samples.clone();
    while samples.len() < 120 * 16_000 {
        samples.extend_from_slice(&once);
    }
    let long = Wav { rate: 16_000, channels: 1, bits: 16, samples }.write("long.wav");
    let (model, wav, long) = (model(), recording(), long.to_str().unwrap().to_owned());
    let (model, wav) = (model.to_str().unwrap(), wav.to_str().unwrap());
    let (made, counted, tiny) = (at("progress.cmf"), at("progress.hot.json"), at("progress-tiny.cmf"));
    let mut operations = vec![
        ("synth", vec!["synth", &made, "--geometry", "mini", "--layers", "6"], "iB of "),
        ("load", vec!["generate", &made, "--ids", "1", "--max-new-tokens", "1"], "iB of "),
        ("verify", vec!["verify", &made], "iB of "),
        ("calibrate", vec!["calibrate", model, wav, "--out", &counted], "of 1"),
        ("encode", vec!["transcribe", model, &long, "--max-new-tokens", "1"], "of 120"),
        ("bench", vec!["bench", &made, "--prompt-len", "64", "--tokens", "96", "--warmup", "0"], "of 3"),
        ("tune", vec!["tune", &tiny], " of "),
    ];
    finish(program().args(["synth", &tiny, "--geometry", "tiny"])).ok();
    let converted = at("progress-converted.cmf");
    operations.push(("convert", vec!["convert", checkpoint().to_str().unwrap(), &converted], "iB of "));
    for (label, arguments, says) in operations {
        if let Some(drawn) = on_terminal(&arguments) {
            assert!(drawn.contains(label) && drawn.contains(says), "{arguments:?}: {drawn:?}");
            let quiet = on_terminal(&[&arguments[..], &["--quiet"]].concat()).unwrap();
            assert!(!quiet.contains(label) && !quiet.contains('━'), "{arguments:?} --quiet: {quiet:?}");
        }
        let piped = finish(program().args(&arguments)).ok().stderr;
        assert!(
            !piped.contains('━') && !piped.contains('\u{1b}') && !piped.contains(" of "),
            "{arguments:?}: {piped:?}"
        );
    }
}
