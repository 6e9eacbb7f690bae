//! The audio encoder: recordings in, rows for the decoder out, chunk by chunk.
//!
//! - **Owns** the recordings under way and the threads the towers run on.
//! - **Takes** [`Message::Encode`], [`Message::Wanted`], [`Message::Align`] from the runtime's transcriptions.
//! - **Gives** each recording's [`Given`]: chunks of rows, then what it took.
//! - **May block on** its own threads; never on a channel: a chunk is only made when there is room for it.
//! - **Stops** on shutdown or when all its handles are gone; a recording stops when its [`Rows`] are dropped.
//!
//! Never does: read files, know of prompts, sessions or tokens. An embedder with an encoder of its own needs none of this.
//!
//! The features are normalised over the whole recording, so all samples come at once; but the rows of the first chunk
//! leave before the second is begun, so that prefill runs beside the encoder. Several recordings take turns by chunk.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, bounded, select_biased};
use rayon::ThreadPool;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot};
use tracing::{Span, info_span};

use super::alive::{Alive, Watch, alive};
use crate::audio::perception::{Chunk, Encoding, Kept, Perception, Step};
use crate::audio::weights::PerceptionError;

/// Recordings under way at a time; a further one waits. Bounds the inbox, and the features held in memory.
pub const RECORDINGS_MAX: usize = 16;

/// Chunks made ahead of their reader: one being read, one ready when it is done.
const CHUNKS_AHEAD: usize = 2;

/// A recording's messages that can lie in the inbox at once: its start, a `Wanted` for each chunk and one for its drop.
const MESSAGES_EACH: usize = CHUNKS_AHEAD + 2;

/// The inbox never refuses: every recording has its share.
const INBOX_MAX: usize = RECORDINGS_MAX * MESSAGES_EACH;

/// A recording under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RecordingId(u64);

/// What the encoder is asked.
pub enum Message {
    /// Begin a recording. Its chunks follow as there is room for them.
    Encode {
        /// Its number.
        recording: RecordingId,
        /// 16 kHz, mono, in [-1, 1].
        samples: Vec<f32>,
        /// Whether to keep what word times need.
        keep: bool,
        /// Its share of [`RECORDINGS_MAX`], dropped at its end.
        place: OwnedSemaphorePermit,
        /// The span its chunks are made in.
        span: Span,
        /// Where rows go. Has room for the chunks made ahead and the end.
        gives: mpsc::Sender<Given>,
    },
    /// A chunk was taken, or nobody wants any more: go on with this recording.
    Wanted {
        /// Its number.
        recording: RecordingId,
    },
    /// Something else that needs the encoder's threads, such as aligning words.
    Align {
        /// What to do.
        work: Box<dyn FnOnce() + Send>,
        /// Its share of [`RECORDINGS_MAX`].
        place: OwnedSemaphorePermit,
    },
}

impl fmt::Debug for Message {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Encode { recording, samples, .. } => write!(f, "Encode({recording:?}, {} samples)", samples.len()),
            Self::Wanted { recording } => write!(f, "Wanted({recording:?})"),
            Self::Align { .. } => f.write_str("Align"),
        }
    }
}

/// What a recording gives, in order.
#[derive(Debug)]
pub enum Given {
    /// The next rows.
    Rows(Chunk),
    /// All rows were given.
    Done(Encoded),
    /// It cannot be encoded.
    Failed(PerceptionError),
}

/// A recording that was encoded to its end.
#[derive(Debug, Default)]
pub struct Encoded {
    /// What word times need, if it was to be kept.
    pub kept: Option<Kept>,
    /// Time the encoder worked on it.
    pub busy: Duration,
}

/// Why there are no rows, or no more.
#[derive(Debug, thiserror::Error)]
pub enum EncodeError {
    /// The recording or the towers.
    #[error(transparent)]
    Perception(#[from] PerceptionError),
    /// The actor has ended.
    #[error("the audio encoder has ended")]
    Gone,
}

/// What the actor asks of the towers, so that it can be tested without them.
pub trait Towers: Send + Sync + 'static {
    /// Begins a recording.
    ///
    /// # Errors
    ///
    /// When the recording cannot be encoded.
    fn begin(&self, samples: &[f32], keep: bool) -> Result<Box<dyn Chunks>, PerceptionError>;
}

/// One recording in the towers.
pub trait Chunks: Send {
    /// The next chunk; `stop` is asked now and then.
    fn step(&mut self, stop: &dyn Fn() -> bool) -> Step;

    /// What word times need, at the end.
    ///
    /// # Errors
    ///
    /// When it was not kept.
    fn into_kept(self: Box<Self>) -> Result<Kept, PerceptionError>;
}

impl Towers for Arc<Perception> {
    fn begin(&self, samples: &[f32], keep: bool) -> Result<Box<dyn Chunks>, PerceptionError> {
        Ok(Box::new(self.encode(samples, keep)?))
    }
}

impl Chunks for Encoding {
    fn step(&mut self, stop: &dyn Fn() -> bool) -> Step {
        self.step(stop)
    }

    fn into_kept(self: Box<Self>) -> Result<Kept, PerceptionError> {
        (*self).into_kept()
    }
}

/// A sender to the encoder. When the last one goes, the encoder stops.
#[derive(Clone, Debug)]
pub struct Handle {
    inbox: Sender<Message>,
    shutdown: Sender<()>,
    places: Arc<Semaphore>,
    next: Arc<AtomicU64>,
    watch: Watch,
}

impl Handle {
    /// Begins a recording of `samples` (16 kHz, mono), once there is a place for it.
    ///
    /// `keep` retains what word times need.
    ///
    /// # Errors
    ///
    /// [`EncodeError::Gone`]. What is wrong with the recording itself comes with its rows.
    pub async fn encode(&self, samples: Vec<f32>, keep: bool) -> Result<Rows, EncodeError> {
        let place = self.place().await?;
        let recording = RecordingId(self.next.fetch_add(1, Ordering::Relaxed));
        let (gives, given) = mpsc::channel(CHUNKS_AHEAD + 1);
        let span = info_span!(target: "riparian::encoder", "encode", recording = recording.0, samples = samples.len());
        let message = Message::Encode { recording, samples, keep, place, span, gives };
        self.inbox.try_send(message).map_err(|_| EncodeError::Gone)?;
        Ok(Rows { recording, inbox: self.inbox.clone(), given, encoded: None, watch: self.watch.clone() })
    }

    /// Runs `work` on the encoder's threads, between two chunks.
    ///
    /// # Errors
    ///
    /// [`EncodeError::Gone`]
    pub async fn align<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> Result<T, EncodeError> {
        let place = self.place().await?;
        let (reply, answer) = oneshot::channel();
        let work = Box::new(move || drop(reply.send(work())));
        self.inbox.try_send(Message::Align { work, place }).map_err(|_| EncodeError::Gone)?;
        self.watch.or_gone(answer).await.and_then(Result::ok).ok_or(EncodeError::Gone)
    }

    /// Stops the encoder; recordings under way end without their last rows.
    pub fn shutdown(&self) {
        // One lies there already, or nobody is left to read it.
        let _ = self.shutdown.try_send(());
    }

    async fn place(&self) -> Result<OwnedSemaphorePermit, EncodeError> {
        let place = self.watch.or_gone(Arc::clone(&self.places).acquire_owned()).await;
        place.and_then(Result::ok).ok_or(EncodeError::Gone)
    }
}

/// A recording's rows, as they come. Dropping it ends the recording.
#[derive(Debug)]
pub struct Rows {
    recording: RecordingId,
    inbox: Sender<Message>,
    given: mpsc::Receiver<Given>,
    encoded: Option<Encoded>,
    watch: Watch,
}

impl Rows {
    /// The next chunk; `None` after the last.
    ///
    /// # Errors
    ///
    /// What the recording cannot be encoded for, or that the encoder has ended.
    pub async fn next(&mut self) -> Result<Option<Chunk>, EncodeError> {
        if self.encoded.is_some() {
            return Ok(None);
        }
        match self.watch.or_gone(self.given.recv()).await.flatten() {
            Some(Given::Rows(chunk)) => {
                self.want();
                Ok(Some(chunk))
            }
            Some(Given::Done(encoded)) => {
                self.encoded = Some(encoded);
                Ok(None)
            }
            Some(Given::Failed(error)) => Err(error.into()),
            None => Err(EncodeError::Gone),
        }
    }

    /// What the recording took, once [`Rows::next`] said `None`.
    #[must_use]
    pub fn take_encoded(&mut self) -> Encoded {
        self.encoded.as_mut().map(std::mem::take).unwrap_or_default()
    }

    fn want(&self) {
        // There is room by the bound's promise; an encoder that is gone wants nothing.
        let _ = self.inbox.try_send(Message::Wanted { recording: self.recording });
    }
}

impl Drop for Rows {
    fn drop(&mut self) {
        if self.encoded.is_none() {
            self.given.close();
            self.want();
        }
    }
}

/// Starts the encoder on its own thread, its towers on `threads` more.
///
/// # Errors
///
/// When the system refuses a thread.
pub fn spawn(towers: impl Towers, threads: usize) -> std::io::Result<(Handle, JoinHandle<()>)> {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads.max(1)).thread_name(|i| format!("towers-{i}"));
    let pool = pool.build().map_err(std::io::Error::other)?;
    let (inbox, messages) = bounded(INBOX_MAX);
    // One is enough: there is nothing to say after it.
    let (shutdown, stopped) = bounded(1);
    let (alive, watch) = alive();
    let encoder = Encoder { towers: Box::new(towers), pool, recordings: VecDeque::new(), stopped, _alive: alive };
    let thread = thread::Builder::new().name("encoder".into()).spawn(move || encoder.run(&messages))?;
    let places = Arc::new(Semaphore::new(RECORDINGS_MAX));
    Ok((Handle { inbox, shutdown, places, next: Arc::default(), watch }, thread))
}

/// The actor.
struct Encoder {
    towers: Box<dyn Towers>,
    pool: ThreadPool,
    /// Those under way; the first that has room for a chunk is next.
    recordings: VecDeque<Recording>,
    stopped: Receiver<()>,
    _alive: Alive,
}

/// A recording under way.
struct Recording {
    id: RecordingId,
    chunks: Box<dyn Chunks>,
    /// Chunks that its reader has room for.
    room: usize,
    keep: bool,
    busy: Duration,
    span: Span,
    gives: mpsc::Sender<Given>,
    _place: OwnedSemaphorePermit,
}

impl Encoder {
    fn run(mut self, inbox: &Receiver<Message>) {
        let stopped = self.stopped.clone();
        loop {
            let go_on = if self.recordings.iter().any(|recording| recording.room > 0) {
                // Work of its own: look, but do not wait.
                select_biased! {
                    recv(stopped) -> _ => false,
                    recv(inbox) -> message => message.is_ok_and(|message| { self.handle(message); true }),
                    default => { self.step(); true }
                }
            } else {
                select_biased! {
                    recv(stopped) -> _ => false,
                    recv(inbox) -> message => message.is_ok_and(|message| { self.handle(message); true }),
                }
            };
            if !go_on {
                return;
            }
        }
    }

    fn handle(&mut self, message: Message) {
        match message {
            Message::Encode { recording, samples, keep, place, span, gives } => {
                self.begin(recording, &samples, keep, place, span, gives);
            }
            Message::Wanted { recording } => {
                // One that has ended wants nothing.
                if let Some(recording) = self.recordings.iter_mut().find(|r| r.id == recording) {
                    recording.room += 1;
                }
            }
            Message::Align { work, place } => {
                self.pool.install(work);
                drop(place);
            }
        }
    }

    fn begin(
        &mut self,
        id: RecordingId,
        samples: &[f32],
        keep: bool,
        place: OwnedSemaphorePermit,
        span: Span,
        gives: mpsc::Sender<Given>,
    ) {
        let begun = Instant::now();
        let Self { towers, pool, .. } = self;
        let chunks = span.in_scope(|| pool.install(|| towers.begin(samples, keep)));
        match chunks {
            Ok(chunks) => {
                let (room, busy) = (CHUNKS_AHEAD, begun.elapsed());
                self.recordings.push_back(Recording { id, chunks, room, keep, busy, span, gives, _place: place });
            }
            // Nobody may be waiting any more, which is no error.
            Err(error) => _ = gives.try_send(Given::Failed(error)),
        }
    }

    /// The next chunk of the recording whose turn it is.
    fn step(&mut self) {
        let Some(next) = self.recordings.iter().position(|recording| recording.room > 0) else { return };
        let mut recording = self.recordings.remove(next).expect("a position just found");
        let begun = Instant::now();
        let (gives, stopped) = (&recording.gives, &self.stopped);
        let stop = || gives.is_closed() || !stopped.is_empty();
        let (chunks, span) = (&mut recording.chunks, &recording.span);
        let step = span.in_scope(|| self.pool.install(|| chunks.step(&stop)));
        recording.busy += begun.elapsed();
        match step {
            Step::Rows(chunk) => {
                recording.room -= 1;
                // A reader that left is noticed at the next step.
                let _ = recording.gives.try_send(Given::Rows(chunk));
                self.recordings.push_back(recording);
            }
            Step::Done => recording.end(),
            // Dropped, as its reader or the whole encoder is.
            Step::Cancelled => {}
        }
    }
}

impl Recording {
    fn end(self) {
        let kept = if self.keep { self.chunks.into_kept().map(Some) } else { Ok(None) };
        let end = match kept {
            Ok(kept) => Given::Done(Encoded { kept, busy: self.busy }),
            Err(error) => Given::Failed(error),
        };
        // The last place in the channel is the end's; whoever left needs none.
        let _ = self.gives.try_send(end);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;

    /// Towers whose chunk `i` is the row `[i]`; as many chunks as there are samples.
    struct Counting {
        made: Arc<AtomicUsize>,
    }

    struct Counted {
        left: std::ops::Range<usize>,
        made: Arc<AtomicUsize>,
    }

    impl Towers for Counting {
        fn begin(&self, samples: &[f32], _keep: bool) -> Result<Box<dyn Chunks>, PerceptionError> {
            if samples.is_empty() {
                return Err(PerceptionError::TooShort { samples: 0, wanted: 160 });
            }
            Ok(Box::new(Counted { left: 0..samples.len(), made: Arc::clone(&self.made) }))
        }
    }

    impl Chunks for Counted {
        fn step(&mut self, stop: &dyn Fn() -> bool) -> Step {
            if stop() {
                return Step::Cancelled;
            }
            let Some(i) = self.left.next() else { return Step::Done };
            self.made.fetch_add(1, Ordering::SeqCst);
            Step::Rows(Chunk { range: i..i + 1, rows: vec![i as f32] })
        }

        fn into_kept(self: Box<Self>) -> Result<Kept, PerceptionError> {
            Ok(Kept { frames: 8, ..Kept::default() })
        }
    }

    fn start() -> (Handle, JoinHandle<()>, Arc<AtomicUsize>) {
        let made = Arc::new(AtomicUsize::new(0));
        let (handle, thread) = spawn(Counting { made: Arc::clone(&made) }, 1).unwrap();
        (handle, thread, made)
    }

    /// Waits until a count stands still, and says at what.
    fn settled(made: &AtomicUsize) -> usize {
        let mut last = usize::MAX;
        loop {
            thread::sleep(Duration::from_millis(20));
            let now = made.load(Ordering::SeqCst);
            if now == last {
                return now;
            }
            last = now;
        }
    }

    #[tokio::test]
    async fn rows_come_in_order_then_what_it_took() {
        let (handle, thread, _) = start();
        let mut rows = handle.encode(vec![0.0; 5], true).await.unwrap();
        for i in 0..5 {
            assert_eq!(rows.next().await.unwrap().unwrap().range, i..i + 1);
        }
        assert!(rows.next().await.unwrap().is_none());
        assert!(rows.next().await.unwrap().is_none(), "the end stays the end");
        assert_eq!(rows.take_encoded().kept.unwrap().frames, 8);
        drop((handle, rows));
        thread.join().unwrap();
    }

    #[tokio::test]
    async fn it_works_no_further_ahead_than_its_bound() {
        let (handle, _thread, made) = start();
        let mut rows = handle.encode(vec![0.0; 9], false).await.unwrap();
        assert_eq!(settled(&made), CHUNKS_AHEAD);
        rows.next().await.unwrap();
        assert_eq!(settled(&made), CHUNKS_AHEAD + 1);
        // A second recording gets its turn beside one whose reader sleeps.
        let mut other = handle.encode(vec![0.0; 1], false).await.unwrap();
        assert!(other.next().await.unwrap().is_some() && other.next().await.unwrap().is_none());
    }

    #[tokio::test]
    async fn a_recording_nobody_reads_any_more_frees_its_place() {
        let (handle, _thread, made) = start();
        for _ in 0..3 * RECORDINGS_MAX {
            let mut rows = handle.encode(vec![0.0; 100], false).await.unwrap();
            rows.next().await.unwrap();
        }
        assert!(settled(&made) <= 3 * RECORDINGS_MAX * (CHUNKS_AHEAD + 1));
        assert_eq!(handle.places.available_permits(), RECORDINGS_MAX);
    }

    #[tokio::test]
    async fn a_bad_recording_fails_alone() {
        let (handle, _thread, _) = start();
        let mut bad = handle.encode(vec![], false).await.unwrap();
        assert!(matches!(bad.next().await, Err(EncodeError::Perception(PerceptionError::TooShort { .. }))));
        let mut good = handle.encode(vec![0.0], false).await.unwrap();
        assert!(good.next().await.unwrap().is_some());
    }

    #[tokio::test]
    async fn other_work_runs_between_chunks() {
        let (handle, _thread, _) = start();
        assert_eq!(handle.align(|| 6 * 7).await.unwrap(), 42);
    }

    #[tokio::test]
    async fn a_panic_is_told_to_whoever_waits() {
        let (handle, thread, _) = start();
        let mut rows = handle.encode(vec![0.0; 100], false).await.unwrap();
        rows.next().await.unwrap();
        let died = handle.align(|| -> () { panic!("a test kills the encoder") }).await;
        assert!(matches!(died, Err(EncodeError::Gone)));
        let end = loop {
            match rows.next().await {
                Ok(Some(_)) => {}
                end => break end,
            }
        };
        assert!(matches!(end, Err(EncodeError::Gone)));
        assert!(matches!(handle.encode(vec![0.0], false).await, Err(EncodeError::Gone)));
        assert!(thread.join().is_err());
    }

    #[tokio::test]
    async fn shutdown_ends_whoever_waits() {
        let (handle, thread, _) = start();
        let mut rows = handle.encode(vec![0.0; 100], false).await.unwrap();
        handle.shutdown();
        thread.join().unwrap();
        let end = loop {
            match rows.next().await {
                Ok(Some(_)) => {}
                end => break end,
            }
        };
        assert!(matches!(end, Err(EncodeError::Gone)));
        assert!(matches!(handle.encode(vec![0.0], false).await, Err(EncodeError::Gone)));
    }
}
