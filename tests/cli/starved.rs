//! The program where the system gives few threads, and with recordings made to break decoders.

use std::process::Command;

use crate::support::{demo, finish, model, program, root};

/// Each thread asks for a gigabyte of stack, and the address space has room for so many: whichever thread is the one too
/// many, there is an error that says so.
#[cfg(target_os = "linux")]
#[test]
fn a_thread_that_cannot_be_started_is_an_error() {
    let (wav, said) = demo().into_iter().next().unwrap();
    let (mut refused, mut well) = (Vec::new(), 0);
    for threads in 0..20 {
        let room_kb = (threads << 20) + (700 << 10);
        let mut limited = Command::new("sh");
        let script = format!("ulimit -v {room_kb} && exec timeout 120 \"$0\" \"$@\"");
        limited.args(["-c", &script, env!("CARGO_BIN_EXE_riparian"), "transcribe"]);
        limited.arg(model()).arg(&wav).args(["--threads", "2", "--device", "cpu"]);
        limited.env("RUST_MIN_STACK", (1_u64 << 30).to_string()).env_remove("RUST_LOG").env("RUST_BACKTRACE", "0");
        let ran = finish(&mut limited);
        assert!(!ran.stderr.contains("panicked"), "room for {threads}: {}", ran.stderr);
        if ran.code == 0 {
            assert!(ran.stdout.contains(&said), "{}", ran.stdout);
            well += 1;
        } else {
            assert_eq!(ran.code, 1, "room for {threads}: {}", ran.stderr);
            assert!(ran.stderr.contains("thread"), "room for {threads}: {}", ran.stderr);
            assert_eq!(well, 0, "room for {threads}, after fewer were enough: {}", ran.stderr);
            refused.push(ran.stderr.lines().next().unwrap_or_default().to_owned());
        }
    }
    refused.dedup();
    assert!(well > 0 && refused.len() > 3, "{refused:#?}");
}

/// Every seed of the audio target is read or refused in a sentence, decoder panics too.
#[test]
fn hostile_recordings_are_refused_without_a_panics_text() {
    let folder = root().join("fuzz/seeds/audio");
    let mut paths: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    for path in paths {
        let ran = finish(program().arg("transcribe").arg(model()).arg(&path).arg("--quiet"));
        assert!(ran.code == 0 || ran.code == 1, "{}: {}", path.display(), ran.stderr);
        assert!(!ran.stderr.contains("panicked"), "{}: {}", path.display(), ran.stderr);
        if path.file_name().unwrap().to_str().unwrap().starts_with("panic-") {
            ran.refused(1, &["is malformed"]);
        }
    }
}
