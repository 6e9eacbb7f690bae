//! The embedding API as an application uses it, on the bundled model and the host.

mod faults;

use std::future::Future;
use std::path::{Path, PathBuf};
use std::pin::{Pin, pin};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;

use futures_core::Stream;
use riparian::actors::payload::SessionError;
use riparian::audio::perception::{Perception, Step};
use riparian::audio::read::read_file;
use riparian::ids::TokenId;
use riparian::knobs::{DeviceChoice, Knobs};
use riparian::runtime::{Error, FinishReason, Finished, Options, Runtime, TranscriptionOptions};
use riparian::text::prompt::Prompter;
use riparian::text::tokenizer::Tokenizer;

fn asset(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("assets").join(path)
}

fn on_host() -> Knobs {
    Knobs { device: DeviceChoice::Cpu, ..Knobs::default() }
}

/// The host with a context of so many positions.
fn with_context(positions: u32) -> Knobs {
    Knobs { ctx: Some(positions), ..on_host() }
}

async fn runtime_with(knobs: Knobs) -> Runtime {
    Runtime::builder(asset("tiny-transcribe.cmf")).knobs(knobs).build().await.expect("the bundled model")
}

async fn runtime() -> Runtime {
    runtime_with(on_host()).await
}

fn samples() -> Vec<f32> {
    read_file(&asset("demo/command-00.wav")).unwrap().samples
}

const SAID: &str = "How long is the drive from Vienna to London?";

/// The whole prompt of the recording as rows, made without the runtime.
fn prompt_rows(runtime: &Runtime) -> &'static [f32] {
    static ROWS: OnceLock<Vec<f32>> = OnceLock::new();
    ROWS.get_or_init(|| {
        let model = runtime.model();
        let perception = Arc::new(Perception::open(model).unwrap().expect("a perception module"));
        let prompter = Prompter::new(Tokenizer::from_bytes(model.tokenizer().unwrap()).unwrap(), &model.provenance);
        let prompt = prompter.transcription(None).unwrap();
        let mut encoding = perception.encode(&samples(), false).unwrap();
        let mut rows = runtime.embed(&prompt.before).unwrap();
        while let Step::Rows(chunk) = encoding.step(&|| false) {
            rows.extend(chunk.rows);
        }
        rows.extend(runtime.embed(&prompt.after).unwrap());
        rows
    })
}

/// Feeds `rows` in pieces of `each` rows and takes what comes.
async fn decode(runtime: &Runtime, rows: &[f32], each: usize, options: Options) -> Finished {
    let mut session = runtime.session(options).await.unwrap();
    for piece in rows.chunks(each * runtime.hidden()) {
        session.feed(piece.to_vec()).await.unwrap();
    }
    session.decode().finish().await.unwrap()
}

/// Goes on until `max_new_tokens`, whatever the model says.
fn endless(max_new_tokens: usize) -> Options {
    Options { max_new_tokens: Some(max_new_tokens), eos: Some(Vec::new()), ..Options::default() }
}

#[tokio::test]
async fn a_prompt_in_pieces_is_the_same_prompt() {
    let runtime = runtime().await;
    let rows = prompt_rows(&runtime);
    let n = rows.len() / runtime.hidden();
    let whole = decode(&runtime, rows, n, Options::default()).await;
    assert_eq!((whole.text.as_str(), whole.reason), (SAID, FinishReason::Stop));
    for each in [1, 7, 64] {
        let pieces = decode(&runtime, rows, each, Options::default()).await;
        assert_eq!(pieces.ids, whole.ids, "{each} rows at a time");
        assert_eq!(pieces.stats.prompt_rows, n);
    }
    // As the runtime's own transcription feeds it: text, chunks, text.
    let mut transcription = runtime.transcribe(samples(), TranscriptionOptions::default()).await.unwrap();
    assert_eq!(transcription.tokens().finish().await.unwrap().ids, whole.ids);
}

#[tokio::test]
async fn a_long_recording_is_fed_chunk_by_chunk() {
    // More than the 40 s of one chunk: the demo recording over and over.
    let once = samples();
    let long: Vec<f32> = once.iter().copied().cycle().take(16_000 * 45).collect();
    let runtime = runtime().await;
    let mut seen = Vec::new();
    let options = TranscriptionOptions { session: endless(4), ..TranscriptionOptions::default() };
    let observed = |done: std::time::Duration, all: std::time::Duration| seen.push((done, all));
    let mut transcription = runtime.transcribe_observed(long, options, observed).await.unwrap();
    let finished = transcription.tokens().finish().await.unwrap();
    assert_eq!(finished.stats.tokens, 4);
    assert!(seen.len() > 1 && seen.is_sorted() && seen.iter().all(|(done, all)| done <= all), "{seen:?}");
    assert_eq!(seen.last().unwrap().0, seen.last().unwrap().1);
}

#[tokio::test(flavor = "multi_thread")]
async fn sessions_side_by_side_are_as_alone() {
    let runtime = runtime().await;
    let rows = prompt_rows(&runtime);
    let alone = decode(&runtime, rows, 16, Options::default()).await;
    let ids: Vec<TokenId> = [5, 99, 300, 41, 7].map(TokenId).to_vec();
    let other = decode(&runtime, &runtime.embed(&ids).unwrap(), 5, endless(12)).await;
    // More than there are slots on the device, so that some wait for others.
    let beside: Vec<_> = (0..12)
        .map(|i| {
            let (runtime, ids) = (runtime.clone(), ids.clone());
            tokio::spawn(async move {
                let other = runtime.embed(&ids).unwrap();
                if i % 2 == 0 {
                    decode(&runtime, prompt_rows(&runtime), 9, Options::default()).await
                } else {
                    decode(&runtime, &other, 2, endless(12)).await
                }
            })
        })
        .collect();
    for (i, task) in beside.into_iter().enumerate() {
        let finished = task.await.unwrap();
        assert_eq!(finished.ids, if i % 2 == 0 { alone.ids.clone() } else { other.ids.clone() }, "session {i}");
    }
    assert_eq!(runtime.counters().await.unwrap().violations, 0);
}

#[tokio::test]
async fn dropping_the_stream_frees_its_place() {
    let runtime = runtime().await;
    let rows = runtime.embed(&[1, 2, 3].map(TokenId)).unwrap();
    // Many more than the device has slots, or may be open: none of them is ever finished.
    for _ in 0..100 {
        let mut session = runtime.session(endless(10_000)).await.unwrap();
        session.feed(rows.clone()).await.unwrap();
        let mut tokens = session.decode();
        assert!(tokens.next().await.unwrap().is_ok());
    }
    assert_eq!(decode(&runtime, &rows, 3, endless(3)).await.stats.tokens, 3);
    // Also one that was only fed.
    for _ in 0..100 {
        let mut session = runtime.session(Options::default()).await.unwrap();
        session.feed(rows.clone()).await.unwrap();
    }
    assert_eq!(decode(&runtime, &rows, 3, endless(3)).await.stats.tokens, 3);
}

#[tokio::test]
async fn cancelling_keeps_what_was_made() {
    let runtime = runtime().await;
    let rows = runtime.embed(&[1, 2, 3].map(TokenId)).unwrap();
    let all = decode(&runtime, &rows, 3, endless(200)).await.ids;
    let mut session = runtime.session(endless(10_000)).await.unwrap();
    session.feed(rows).await.unwrap();
    let mut tokens = session.decode();
    for _ in 0..5 {
        tokens.next().await.unwrap().unwrap();
    }
    tokens.cancel();
    let finished = tokens.finish().await.unwrap();
    assert_eq!(finished.reason, FinishReason::Cancelled);
    assert!(finished.ids.len() >= 5);
    let both = finished.ids.len().min(all.len());
    assert_eq!(finished.ids[..both], all[..both]);
    assert!(tokens.next().await.is_none(), "the end stays the end");
}

#[tokio::test]
async fn pieces_make_the_text_and_positions_follow_the_prompt() {
    let runtime = runtime().await;
    let rows = prompt_rows(&runtime);
    let n = rows.len() / runtime.hidden();
    let mut session = runtime.session(Options::default()).await.unwrap();
    session.feed(rows.to_vec()).await.unwrap();
    let mut tokens = session.decode();
    let (mut text, mut drafted) = (String::new(), 0);
    let mut at = n;
    // By the trait, as stream combinators would take it.
    while let Some(token) = std::future::poll_fn(|cx| Pin::new(&mut tokens).poll_next(cx)).await {
        let token = token.unwrap();
        assert_eq!(token.position.index(), at);
        at += 1;
        text += &token.text;
        drafted += u64::from(token.drafted);
    }
    assert_eq!((text.as_str(), tokens.text()), (SAID, SAID));
    let stats = tokens.stats();
    assert_eq!((stats.tokens, stats.drafts.kept), (tokens.ids().len(), drafted));
    assert!(stats.drafts.kept > 0 && stats.drafts.kept <= stats.drafts.offered);
    assert!(!stats.prefill.is_zero() && !stats.decode.is_zero());
}

#[tokio::test]
async fn what_cannot_be_fed_is_refused_and_the_session_goes_on() {
    let runtime = runtime_with(with_context(64)).await;
    let hidden = runtime.hidden();
    let mut session = runtime.session(endless(4)).await.unwrap();
    let odd = session.feed(vec![0.0; hidden + 1]).await;
    assert!(matches!(odd, Err(Error::Session(SessionError::RowWidth { .. }))), "{odd:?}");
    let mut rows = vec![0.1; 3 * hidden];
    rows[2 * hidden + 5] = f32::NAN;
    let nan = session.feed(rows).await;
    assert!(matches!(nan, Err(Error::NotFiniteInput { row: 2, .. })), "{nan:?}");
    let unknown = session.feed_ids(&[TokenId(1), TokenId(512)]).await;
    assert!(matches!(unknown, Err(Error::UnknownId { id: TokenId(512), vocab: 512 })), "{unknown:?}");
    let long = session.feed(vec![0.1; 65 * hidden]).await;
    assert!(matches!(long, Err(Error::Session(SessionError::ContextFull { limit: 64, wanted: 65 }))), "{long:?}");
    session.feed(Vec::new()).await.unwrap();
    // Nothing of all that was taken.
    session.feed_ids(&[1, 2].map(TokenId)).await.unwrap();
    let finished = session.decode().finish().await.unwrap();
    assert_eq!((finished.stats.prompt_rows, finished.stats.tokens), (2, 4));

    let empty = runtime.session(Options::default()).await.unwrap().decode().finish().await;
    assert!(matches!(empty, Err(Error::Session(SessionError::EmptyPrompt))), "{empty:?}");
}

#[tokio::test]
async fn a_context_that_is_used_up_ends_with_the_ids_so_far() {
    let runtime = runtime_with(with_context(32)).await;
    let rows = runtime.embed(&[1, 2, 3].map(TokenId)).unwrap();
    let all = decode(&runtime, &rows, 3, endless(20)).await.ids;
    let mut session = runtime.session(Options { eos: Some(Vec::new()), ..Options::default() }).await.unwrap();
    session.feed(rows).await.unwrap();
    let mut tokens = session.decode();
    let Err(Error::ContextUsedUp { positions: 32, ids }) = tokens.finish().await else { panic!("the context ends it") };
    assert_eq!(ids, tokens.ids());
    assert!(ids.len() > 20 && ids.starts_with(&all), "{ids:?}");
}

#[tokio::test]
async fn a_decoder_alone_decodes_and_says_what_it_lacks() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/oracle/cmf/nemo-exact-mtp.cmf");
    let runtime = Runtime::builder(file).knobs(on_host()).build().await.unwrap();
    let refused = runtime.transcribe(samples(), TranscriptionOptions::default()).await;
    assert!(matches!(refused, Err(Error::Missing { .. })), "{refused:?}");
    let rows = runtime.embed(&[1, 2, 3].map(TokenId)).unwrap();
    assert_eq!(decode(&runtime, &rows, 3, endless(5)).await.ids.len(), 5);
}

#[tokio::test]
async fn ending_the_runtime_ends_its_sessions() {
    let runtime = runtime().await;
    let rows = runtime.embed(&[1, 2, 3].map(TokenId)).unwrap();
    let mut session = runtime.session(endless(100_000)).await.unwrap();
    session.feed(rows.clone()).await.unwrap();
    let mut tokens = session.decode();
    tokens.next().await.unwrap().unwrap();
    let mut waiting = runtime.session(Options::default()).await.unwrap();
    let clone = runtime.clone();
    runtime.shutdown().await;
    // Whatever was made comes, then an end; nobody waits for ever.
    while let Some(Ok(_)) = tokens.next().await {}
    assert!(tokens.next().await.is_none());
    assert!(waiting.feed(rows).await.is_err());
    assert!(clone.session(Options::default()).await.is_err());
    assert!(clone.transcribe(samples(), TranscriptionOptions::default()).await.is_err());
    assert!(clone.counters().await.is_err());
    clone.shutdown().await;
}

#[tokio::test]
async fn a_file_that_is_no_model_is_refused() {
    let missing = Runtime::builder("/nowhere/model.cmf").build().await;
    assert!(missing.is_err_and(|e| matches!(e, Error::Model(_)) && e.to_string().contains("/nowhere/model.cmf")));
    let named = Knobs { device: DeviceChoice::Adapter("No Such Adapter".into()), ..Knobs::default() };
    let adapter = Runtime::builder(asset("tiny-transcribe.cmf")).knobs(named).build().await;
    assert!(adapter.is_err_and(|e| e.to_string().contains("No Such Adapter")));
}

#[tokio::test]
async fn a_load_tells_how_far_it_is() {
    let seen = Arc::new(parking_lot::Mutex::new(Vec::new()));
    let told = Arc::clone(&seen);
    let builder = Runtime::builder(asset("tiny-transcribe.cmf")).knobs(on_host());
    builder.on_progress(move |progress| told.lock().push(progress)).build().await.unwrap();
    let seen = seen.lock();
    let last = seen.last().expect("some progress");
    assert!(last.total_bytes > 0 && last.done_bytes == last.total_bytes, "{last:?}");
    assert!(seen.is_sorted_by_key(|progress| progress.done_bytes));
}

/// An executor of a few lines: what the runtime gives needs no particular one.
fn block_on<T>(future: impl Future<Output = T>) -> T {
    struct Unpark(Thread);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut future = pin!(future);
    loop {
        match future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(done) => return done,
            Poll::Pending => std::thread::park(),
        }
    }
}

#[test]
fn any_executor_will_do() {
    block_on(async {
        let runtime = runtime().await;
        let mut transcription = runtime.transcribe(samples(), TranscriptionOptions::default()).await.unwrap();
        assert_eq!(transcription.tokens().finish().await.unwrap().text, SAID);
        runtime.shutdown().await;
    });
}
