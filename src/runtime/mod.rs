//! The embedding API (`runtime.md` §9).
//!
//! ```no_run
//! # async fn embed() -> Result<(), Box<dyn std::error::Error>> {
//! use riparian::knobs::Knobs;
//! use riparian::runtime::{Options, Runtime};
//!
//! let runtime = Runtime::builder("model.cmf").knobs(Knobs::from_env()?).build().await?;
//! let mut session = runtime.session(Options::default()).await?;
//! # let rows = Vec::new();
//! session.feed(rows).await?; // any number of times; prefill starts at once
//! let mut tokens = session.decode();
//! while let Some(token) = tokens.next().await {
//!     print!("{}", token?.text);
//! } // dropping `tokens` earlier cancels and frees the session's place
//! # Ok(())
//! # }
//! ```
//!
//! A [`Runtime`] holds the model, the device and the actors' threads. A
//! [`Session`] is one sequence that rows are fed to; [`Session::decode`] turns
//! it into [`Tokens`], a stream. [`Runtime::transcribe`] does all of that for a
//! recording, with the model's own audio encoder and prompt.
//!
//! The futures need no particular executor: what they wait for are tokio's
//! channels, which work in any. All heavy work is on the runtime's own threads.

mod builder;
mod error;
mod options;
mod session;
mod stats;
mod tokens;
mod transcription;

use std::fmt;
use std::sync::Arc;
use std::thread::JoinHandle;

use parking_lot::Mutex;
use tokio::sync::oneshot;

pub use self::builder::Builder;
pub use self::error::Error;
pub use self::options::{FinishReason, Finished, Options, Token};
pub use self::session::Session;
pub use self::stats::{BankStats, DraftStats, Stats};
pub use self::tokens::Tokens;
pub use self::transcription::{Transcription, TranscriptionOptions};
use crate::actors::Running;
pub use crate::actors::loader::LoadProgress;
use crate::actors::payload::SessionOptions;
pub use crate::actors::payload::{Counters, SessionError};
use crate::actors::{encoder, loader, session as graph};
use crate::audio::perception::Perception;
use crate::device::{Companion, Facts};
use crate::ids::TokenId;
use crate::model::Model;
use crate::text::prompt::{Message, Prompter, Role};
use crate::text::tokenizer::Tokenizer;

/// A model on a device, with its actors. Clones share it; when the last one
/// and every session are gone, it stops.
#[derive(Clone, Debug)]
pub struct Runtime {
    shared: Arc<Shared>,
}

/// What sessions share.
struct Shared {
    model: Arc<Model>,
    facts: Facts,
    sessions: graph::Handle,
    companion: Arc<dyn Companion>,
    /// Drafts a round where a session does not say; `None` is what pays.
    draft_depth: Option<usize>,
    /// Absent where the file has no tokenizer.
    prompter: Option<Prompter>,
    /// Absent where the file has no perception.
    hearing: Option<Hearing>,
    threads: Mutex<Option<Threads>>,
}

/// The audio encoder's side.
struct Hearing {
    perception: Arc<Perception>,
    encoder: encoder::Handle,
    /// The word alignment's tokenizer, where the file has one.
    aligner: Option<Tokenizer>,
}

/// Threads to stop and wait for.
struct Threads {
    running: Option<Running>,
    loader: loader::Handle,
    encoder: Option<encoder::Handle>,
    rest: Vec<JoinHandle<()>>,
}

impl Runtime {
    /// Begins to build a runtime for the model in `path`.
    pub fn builder(path: impl Into<std::path::PathBuf>) -> Builder {
        Builder::new(path.into())
    }

    /// Opens a session; waits while 64 are open. It gets a place on the device (there are as many as [`Facts::slots`]) when
    /// one is free, in the order of opening; rows can be fed before.
    ///
    /// # Errors
    ///
    /// [`Error::Session`] when the runtime has ended, [`Error::Model`] when the model's file is not the one that was opened: shortened, written to or replaced.
    /// Sessions that are open go on where a file was replaced, since the old one is still mapped. `CMF_NEMO_MMAP=0` makes
    /// all of that of no matter.
    pub async fn session(&self, options: Options) -> Result<Session, Error> {
        let shared = Arc::clone(&self.shared);
        shared.model.still_intact()?;
        let eos: Arc<[TokenId]> = options.eos.map_or_else(|| shared.model.eos.as_slice().into(), Into::into);
        let depth = options.draft_depth.or(shared.draft_depth);
        let wanted = SessionOptions { eos: Arc::clone(&eos), depth, ..SessionOptions::default() };
        let handle = shared.sessions.open(wanted).await?;
        Ok(Session::new(shared, handle, eos, options.max_new_tokens, options.keep_rows))
    }

    /// The model.
    #[must_use]
    pub fn model(&self) -> &Arc<Model> {
        &self.shared.model
    }

    /// The name of the device that decodes.
    #[must_use]
    pub fn device(&self) -> &str {
        &self.shared.facts.name
    }

    /// What is known of the device that decodes: its arithmetic, places, rows of a pass. After a loss the host goes on
    /// with its own.
    #[must_use]
    pub fn facts(&self) -> &Facts {
        &self.shared.facts
    }

    /// What kind of device decodes.
    #[must_use]
    pub fn device_kind(&self) -> crate::device::DeviceKind {
        self.shared.facts.kind
    }

    /// Floats of a row.
    #[must_use]
    pub fn hidden(&self) -> usize {
        self.shared.model.geometry.hidden
    }

    /// Positions a session can hold, prompt and text together.
    #[must_use]
    pub fn context(&self) -> usize {
        self.shared.facts.kv_positions
    }

    /// All counters since the start: of ids, flights, misses, admissions, drafts, bytes, and what waits now.
    ///
    /// # Errors
    ///
    /// [`Error::Session`] when the runtime has ended.
    pub async fn counters(&self) -> Result<Counters, Error> {
        Ok(self.shared.sessions.counters().await?)
    }

    /// Device time by dispatch class since the start, where `CMF_NEMO_TS` asks for it and the device has timestamps.
    #[must_use]
    pub fn class_times(&self) -> Vec<crate::device::times::ClassTime> {
        self.shared.facts.class_times.as_ref().map_or_else(Vec::new, |times| times.list())
    }

    /// Embedding rows of `ids`, `[n, hidden]`.
    ///
    /// # Errors
    ///
    /// [`Error::UnknownId`]: an id at or beyond the vocabulary's end, such as the audio placeholder's.
    pub fn embed(&self, ids: &[TokenId]) -> Result<Vec<f32>, Error> {
        self.shared.embed(ids)
    }

    /// Ids of a text as it stands.
    ///
    /// # Errors
    ///
    /// [`Error::Missing`] where the file has no tokenizer, [`Error::Tokenizer`] for a text it refuses.
    pub fn encode(&self, text: &str) -> Result<Vec<TokenId>, Error> {
        Ok(self.shared.prompter("text")?.raw(text)?)
    }

    /// Ids of a user's message in the model's chat template, ready for the answer.
    ///
    /// # Errors
    ///
    /// [`Error::Missing`] where the file has no tokenizer, [`Error::Prompt`] where the template fails.
    pub fn chat(&self, message: &str) -> Result<Vec<TokenId>, Error> {
        let message = Message { role: Role::User, content: message.to_owned() };
        Ok(self.shared.prompter("a chat")?.dialogue(&[message])?)
    }

    /// Ends all sessions and waits until every thread has ended.
    ///
    /// Dropping the runtime does the same without waiting for it in an `await`.
    pub async fn shutdown(self) {
        let Some(threads) = self.shared.threads.lock().take() else { return };
        let (done, ended) = oneshot::channel();
        // Threads are joined on a thread: a long pass may have to end first, and nobody's executor should wait for it.
        let join = move || {
            drop(threads);
            let _ = done.send(());
        };
        if let Ok(_thread) = std::thread::Builder::new().name("shutdown".into()).spawn(join) {
            let _ = ended.await;
        }
    }
}

impl Shared {
    fn embed(&self, ids: &[TokenId]) -> Result<Vec<f32>, Error> {
        let vocab = self.model.geometry.vocab;
        if let Some(&id) = ids.iter().find(|id| id.index() >= vocab) {
            return Err(Error::UnknownId { id, vocab });
        }
        Ok(ids.iter().flat_map(|&id| self.companion.embed(id)).collect())
    }

    fn prompter(&self, wanted_for: &'static str) -> Result<&Prompter, Error> {
        self.prompter.as_ref().ok_or(Error::Missing { part: "tokenizer", wanted_for })
    }

    fn hearing(&self, wanted_for: &'static str) -> Result<&Hearing, Error> {
        self.hearing.as_ref().ok_or(Error::Missing { part: "audio encoder", wanted_for })
    }

    /// Places of all layers' banks.
    fn places(&self) -> usize {
        self.facts.residents.iter().map(Vec::len).sum()
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.loader.shutdown();
        if let Some(encoder) = &self.encoder {
            encoder.shutdown();
        }
        drop(self.running.take());
        for thread in self.rest.drain(..) {
            // A panic was told to everybody who waited.
            let _ = thread.join();
        }
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} on {}", self.model.container, self.facts.name)
    }
}
