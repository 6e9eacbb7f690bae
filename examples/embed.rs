//! Riparian inside another program: a recording in, its transcript token by token, then raw rows.
//!
//! ```text
//! cargo run --release --example embed                      the bundled model and recording
//! cargo run --release --example embed -- MODEL.cmf RECORDING
//! ```

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "an example shows what it does")]

use std::error::Error;
use std::io::{Write as _, stdout};
use std::path::PathBuf;

use riparian::knobs::Knobs;
use riparian::runtime::{Options, Runtime, TranscriptionOptions};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1).map(PathBuf::from);
    let model = arguments.next().unwrap_or_else(|| "assets/tiny-transcribe.cmf".into());
    let recording = arguments.next().map_or_else(first_demo, Ok)?;

    // One runtime holds the model, the device and the threads. The knobs are those of the environment here; a program
    // with settings of its own fills in `Knobs` by hand.
    let runtime = Runtime::builder(&model)
        .knobs(Knobs::from_env()?)
        .on_progress(|seen| eprint!("\rloading {} of {} bytes", seen.done_bytes, seen.total_bytes))
        .build()
        .await?;
    eprintln!("\ndecoding on {}", runtime.device());

    // A whole recording: the runtime's own audio encoder feeds a session with the prompt and the audio rows.
    let audio = riparian::audio::read::read_file(&recording)?;
    let mut transcription = runtime.transcribe(audio.samples, TranscriptionOptions::default()).await?;
    while let Some(token) = transcription.tokens().next().await {
        print!("{}", token?.text);
        stdout().flush()?;
    }
    println!();
    let stats = transcription.tokens().stats();
    eprintln!("{} tokens in {:?} of prefill and {:?} of decode", stats.tokens, stats.prefill, stats.decode);

    // Or rows of one's own: anything that has the decoder's width. Here they are the embeddings of a few ids.
    let mut session = runtime.session(Options { max_new_tokens: Some(8), ..Options::default() }).await?;
    session.feed(runtime.embed(&[1, 2, 3].map(riparian::ids::TokenId))?).await?;
    let mut tokens = session.decode();
    while let Some(token) = tokens.next().await {
        let token = token?;
        eprintln!("{} at {}{}", token.id, token.position, if token.drafted { ", drafted" } else { "" });
        // Enough seen: dropping the stream cancels the session and frees its place on the device.
        if tokens.ids().len() == 4 {
            break;
        }
    }
    drop(tokens);

    runtime.shutdown().await;
    Ok(())
}

/// The first of the bundled recordings.
fn first_demo() -> Result<PathBuf, Box<dyn Error>> {
    let mut found: Vec<PathBuf> =
        std::fs::read_dir("assets/demo")?.map(|entry| Ok(entry?.path())).collect::<Result<_, std::io::Error>>()?;
    found.retain(|path| path.extension().is_some_and(|extension| extension == "wav"));
    found.sort();
    found.into_iter().next().ok_or_else(|| "no recording in assets/demo".into())
}
