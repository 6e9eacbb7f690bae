//! Recordings and model files that are not as they should be.

use std::process::Stdio;

use crate::support::{Wav, demo, file, finish, model, program, recording, run, samples_of};

/// Exit code when something failed.
const FAILURE: i32 = 1;

fn transcribe(recordings: &[std::path::PathBuf], flags: &[&str]) -> crate::support::Ran {
    finish(program().arg("transcribe").arg(model()).args(recordings).args(flags))
}

#[test]
fn a_recording_that_cannot_be_read_is_named() {
    let cases = [
        (file("empty.wav", b""), "empty.wav"),
        (file("text.wav", b"This is no recording, whatever its name says.\n"), "text.wav"),
        (crate::support::scratch().join("nowhere.wav"), "nowhere.wav"),
        (Wav { rate: 16_000, channels: 1, bits: 16, samples: vec![] }.write("none.wav"), "none.wav"),
        (crate::support::scratch().to_path_buf(), ""),
    ];
    for (path, name) in cases {
        let ran = transcribe(&[path], &[]);
        ran.refused(FAILURE, &["error: ", name]);
        assert_eq!(ran.stdout, "");
        assert_eq!(ran.stderr.lines().count(), 1, "{}", ran.stderr);
    }
}

#[test]
fn a_failing_file_does_not_stop_the_others() {
    let (good, said) = demo().swap_remove(0);
    let bad = file("broken.wav", b"RIFF....WAVE");
    let ran = transcribe(&[bad.clone(), good.clone()], &[]);
    ran.refused(FAILURE, &["broken.wav"]);
    assert_eq!(ran.stdout, format!("{}: {said}\n", good.display()));

    let ran = transcribe(&[bad, good], &["--format", "json"]);
    assert_eq!(ran.code, FAILURE);
    let lines = ran.json();
    assert!(lines[0]["error"].as_str().is_some_and(|error| error.contains("broken.wav")), "{}", lines[0]);
    assert_eq!(lines[1]["text"], said);
}

#[test]
fn silence_and_snippets_end_well() {
    for (name, samples) in
        [("silent.wav", vec![0.0; 32_000]), ("short.wav", samples_of(&recording())[4000..4800].to_vec())]
    {
        let path = Wav { rate: 16_000, channels: 1, bits: 16, samples }.write(name);
        let ran = transcribe(&[path], &["--format", "json", "--max-new-tokens", "32"]).ok();
        let reason = ran.json()[0]["finish_reason"].clone();
        assert!(reason == "stop" || reason == "length", "{name}: {reason}");
    }
}

#[test]
fn any_rate_width_and_channel_count_is_the_same_recording() {
    let (path, said) = demo().swap_remove(0);
    let samples = samples_of(&path);
    // Every other sample of a signal without anything above 4 kHz would be 8 kHz; averaging two is close enough.
    let halved: Vec<f32> = samples.chunks_exact(2).map(|pair| f32::midpoint(pair[0], pair[1])).collect();
    let tripled: Vec<f32> = samples
        .windows(2)
        .flat_map(|pair| [0.0, 1.0, 2.0].map(|third| pair[0] + (pair[1] - pair[0]) * third / 3.0))
        .collect();
    for (name, wav) in [
        ("stereo24.wav", Wav { rate: 16_000, channels: 2, bits: 24, samples: samples.clone() }),
        ("rate48.wav", Wav { rate: 48_000, channels: 1, bits: 16, samples: tripled }),
        ("rate8stereo.wav", Wav { rate: 8_000, channels: 2, bits: 16, samples: halved }),
    ] {
        let ran = transcribe(&[wav.write(name)], &["--format", "json"]).ok();
        let heard = &ran.json()[0];
        if name == "rate8stereo.wav" {
            // Half the spectrum is gone: the words need not be the same, the length has to be.
            let length = heard["audio_s"].as_f64().unwrap();
            assert!((length - samples.len() as f64 / 16_000.0).abs() < 0.01, "{length}");
        } else {
            assert_eq!(heard["text"], said, "{name}");
        }
    }
}

#[test]
fn a_prompt_longer_than_the_context_is_refused() {
    let ran = transcribe(&[recording()], &["--ctx", "16"]);
    ran.refused(FAILURE, &["context", "16"]);
    assert_eq!(ran.stdout, "");
}

#[test]
fn a_context_that_is_used_up_keeps_what_was_right() {
    let (path, said) = demo().swap_remove(0);
    let whole = transcribe(std::slice::from_ref(&path), &["--format", "json"]).ok();
    let rows = whole.json()[0]["prompt_rows"].as_u64().unwrap();
    let ctx = (rows + 1).to_string();
    let ran = transcribe(&[path], &["--format", "json", "--ctx", &ctx]);
    ran.refused(FAILURE, &["context", &ctx]);
    let cut = &ran.json()[0];
    assert_eq!(cut["finish_reason"], "error");
    let (ids, all) = (cut["ids"].as_array().unwrap(), whole.json()[0]["ids"].as_array().unwrap().clone());
    assert!(!ids.is_empty() && ids.len() < all.len() && all.starts_with(ids), "{ids:?} of {all:?}");
    assert!(said.starts_with(cut["text"].as_str().unwrap()));
}

#[test]
fn a_model_file_that_is_cut_or_none_at_all_is_refused() {
    let bytes = std::fs::read(model()).unwrap();
    for (name, content) in [
        ("cut.cmf", &bytes[..bytes.len() / 2]),
        ("head.cmf", &bytes[..100]),
        ("void.cmf", &[][..]),
        ("prose.cmf", &b"Once upon a time there was a file of another kind. ".repeat(8)[..]),
    ] {
        let ran = run(["transcribe".as_ref(), file(name, content).as_os_str(), recording().as_os_str()]);
        ran.refused(FAILURE, &["error: ", name]);
        assert_eq!(ran.stdout, "");
    }
}

#[test]
fn a_reader_that_has_enough_is_no_panic() {
    let mut child = (program().arg("transcribe").arg(model()).arg(recording()))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // Closed before the first word.
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code().is_some() && !stderr.contains("panicked"), "{stderr}");
    assert!(!stderr.contains("error"), "{stderr}");
}

#[cfg(unix)]
#[test]
fn ctrl_c_keeps_the_partial_transcript() {
    use std::io::{BufRead as _, BufReader, Read as _};
    // Ends only at the context's end: time enough to interrupt it.
    let mut child = (program().args(["generate", "--ignore-eos", "--format", "text", "--ids", "1,2,3"]).arg(model()))
        .env("CMF_NEMO_MTP", "0")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut out = BufReader::new(child.stdout.take().unwrap());
    let mut first = vec![0; 1];
    out.read_exact(&mut first).unwrap();
    let kill = std::process::Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert!(kill.success());
    let mut rest = String::new();
    out.read_line(&mut rest).unwrap();
    let status = child.wait().unwrap();
    assert_eq!(status.code(), Some(130));
}
