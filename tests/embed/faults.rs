//! What an application sees when files change, contexts fill and recordings are silent.

use std::path::{Path, PathBuf};

use riparian::actors::payload::SessionError;
use riparian::ids::TokenId;
use riparian::knobs::Knobs;
use riparian::runtime::{Error, FinishReason, Options, Runtime, TranscriptionOptions};

use crate::{SAID, asset, decode, endless, on_host, runtime, samples, with_context};

async fn transcribe(runtime: &Runtime, samples: Vec<f32>) -> (Vec<TokenId>, String) {
    let mut transcription = runtime.transcribe(samples, TranscriptionOptions::default()).await.unwrap();
    let finished = transcription.tokens().finish().await.unwrap();
    (finished.ids, finished.text)
}

#[tokio::test]
async fn silence_between_speech_leaves_no_trace() {
    let runtime = runtime().await;
    let (first, said) = transcribe(&runtime, samples()).await;
    assert_eq!(said, SAID);
    let silence = |seconds: usize| vec![0.0; 16_000 * seconds];
    let mut quiet = None;
    for round in 0..3 {
        for seconds in [1, 3] {
            let (ids, _) = transcribe(&runtime, silence(seconds)).await;
            // Silence is as deterministic as speech is.
            if seconds == 1 {
                assert_eq!(*quiet.get_or_insert_with(|| ids.clone()), ids, "round {round}");
            }
        }
        // Not quite silence, and a click.
        let mut noise: Vec<f32> = (0..24_000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 20) as f32 * 1e-8).collect();
        noise[12_000] = 1.0;
        transcribe(&runtime, noise).await;
        assert_eq!(transcribe(&runtime, samples()).await.0, first, "round {round}");
    }
    assert_eq!(runtime.counters().await.unwrap().violations, 0);
}

#[tokio::test]
async fn a_prompt_at_the_edge_of_the_context_ends_by_length() {
    let limit = 24;
    let runtime = crate::runtime_with(with_context(limit as u32)).await;
    let ids: Vec<TokenId> = (0..limit as u32 + 1).map(|i| TokenId(3 + i * 7 % 200)).collect();
    for n in [limit - 1, limit] {
        let rows = runtime.embed(&ids[..n]).unwrap();
        // Asked for just as many as fit, and for one more than that.
        let fits = limit + 1 - n;
        let finished = decode(&runtime, &rows, n, endless(fits)).await;
        assert_eq!((finished.ids.len(), finished.reason), (fits, FinishReason::Length), "{n} rows");
        let mut session = runtime.session(endless(fits + 1)).await.unwrap();
        session.feed(rows).await.unwrap();
        let Err(Error::ContextUsedUp { positions, ids }) = session.decode().finish().await else { panic!("{n} rows") };
        assert_eq!((positions, ids), (limit, finished.ids));
    }
    let mut session = runtime.session(Options::default()).await.unwrap();
    let refused = session.feed_ids(&ids).await;
    let full = SessionError::ContextFull { limit, wanted: limit + 1 };
    assert!(matches!(&refused, Err(Error::Session(error)) if *error == full), "{refused:?}");
    assert!(refused.unwrap_err().to_string().contains("24"), "the limit is named");
    // Refused up front: a recording is not encoded for nothing.
    let long = runtime.transcribe(samples(), TranscriptionOptions::default()).await.unwrap_err();
    assert!(matches!(long, Error::Session(SessionError::ContextFull { limit: 24, .. })), "{long}");
    let rows = runtime.embed(&ids[..5]).unwrap();
    assert_eq!(decode(&runtime, &rows, 5, endless(4)).await.ids.len(), 4);
}

// ------------------------------------------------------------------ the model's file

struct Copy {
    _folder: tempfile::TempDir,
    path: PathBuf,
}

fn copy() -> Copy {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.cmf");
    std::fs::copy(asset("tiny-transcribe.cmf"), &path).unwrap();
    Copy { _folder: folder, path }
}

/// What happens to a file while a runtime has it open.
fn change(how: &str, path: &Path) {
    let file = || std::fs::File::options().write(true).open(path).unwrap();
    match how {
        "cut" => file().set_len(std::fs::metadata(path).unwrap().len() / 2).unwrap(),
        "written" => {
            let later = std::time::SystemTime::now() + std::time::Duration::from_secs(5);
            file().set_modified(later).unwrap();
        }
        "replaced" => {
            let other = path.with_extension("other");
            std::fs::copy(asset("tiny-transcribe.cmf"), &other).unwrap();
            std::fs::rename(other, path).unwrap();
        }
        "removed" => std::fs::remove_file(path).unwrap(),
        _ => unreachable!("{how}"),
    }
}

#[cfg(unix)]
#[tokio::test]
async fn a_model_file_that_changed_refuses_new_sessions() {
    let cases = [
        ("cut", "bytes, it had"),
        ("written", "was written to"),
        ("replaced", "another file"),
        ("removed", "another file"),
    ];
    for (how, says) in cases {
        let copy = copy();
        let runtime = Runtime::builder(&copy.path).knobs(on_host()).build().await.unwrap();
        let rows = runtime.embed(&[1, 2, 3].map(TokenId)).unwrap();
        let before = decode(&runtime, &rows, 3, endless(6)).await;
        change(how, &copy.path);
        let refused = runtime.session(Options::default()).await.unwrap_err();
        assert!(matches!(refused, Error::Model(_)), "{how}: {refused}");
        let text = refused.to_string();
        assert!(text.contains(says) && text.contains("model.cmf"), "{how}: {text}");
        runtime.shutdown().await;

        // Read into memory, nothing of that matters.
        let copy = self::copy();
        let knobs = Knobs { mmap: false, ..on_host() };
        let runtime = Runtime::builder(&copy.path).knobs(knobs).build().await.unwrap();
        change(how, &copy.path);
        assert_eq!(decode(&runtime, &rows, 3, endless(6)).await.ids, before.ids, "{how}");
    }
}

/// Files whose reads fail, mapped or not: an error of the open that names the file.
#[cfg(target_os = "linux")]
#[tokio::test]
async fn a_file_that_cannot_be_read_is_an_error_of_the_build() {
    // A regular file to the system, with a length: reads of it fail, or end before that.
    for path in ["/sys/class/net/lo/speed", "/sys/kernel/mm/transparent_hugepage/enabled"].map(Path::new) {
        for mmap in [true, false].into_iter().filter(|_| path.exists()) {
            let error = Runtime::builder(path).knobs(Knobs { mmap, ..on_host() }).build().await.unwrap_err();
            assert!(matches!(error, Error::Model(_)), "{error}");
            assert!(error.to_string().contains(path.to_str().unwrap()), "mapped {mmap}: {error}");
        }
    }
}

/// The loader's death reaches whoever builds.
#[tokio::test]
async fn a_loader_that_dies_is_an_error_of_the_build() {
    let dies = |_| panic!("a test kills the loader");
    let built = Runtime::builder(asset("tiny-transcribe.cmf")).knobs(on_host()).on_progress(dies).build().await;
    let error = built.unwrap_err();
    assert!(matches!(error, Error::Session(SessionError::Gone { actor: "loader" })), "{error}");
}

#[tokio::test]
async fn a_cancelled_transcription_keeps_its_transcript() {
    let runtime = runtime().await;
    let (all, said) = transcribe(&runtime, samples()).await;
    for taken in [0, 1, 5] {
        let mut transcription = runtime.transcribe(samples(), TranscriptionOptions::default()).await.unwrap();
        for _ in 0..taken {
            transcription.tokens().next().await.unwrap().unwrap();
        }
        transcription.tokens().cancel();
        let finished = transcription.tokens().finish().await.unwrap();
        assert!(finished.ids.len() >= taken && all.starts_with(&finished.ids));
        assert!(said.starts_with(&finished.text), "{}", finished.text);
        let parts = transcription.transcript();
        assert!(finished.text.is_empty() || format!("{parts:?}").contains(finished.text.split(' ').next().unwrap()));
    }
    // One that was dropped at once took nothing from the next.
    drop(runtime.transcribe(samples(), TranscriptionOptions::default()).await.unwrap());
    assert_eq!(transcribe(&runtime, samples()).await.0, all);
}
