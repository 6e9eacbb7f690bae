//! A recording's transcript: encoder, prompt, session and word times put together.

use std::sync::Arc;
use std::time::Duration;

use super::{Error, Options, Runtime, Shared, Tokens};
use crate::actors::encoder::Encoded;
use crate::actors::payload::SessionError;
use crate::audio::perception::{Kept, Perception};
use crate::audio::weights::PerceptionError;
use crate::audio::words::Span;
use crate::text::transcript::Transcript;

/// Samples a second of what the encoder reads.
const RATE: f64 = 16_000.0;

/// Choices for one recording.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TranscriptionOptions {
    /// Those of the session: length, end ids, drafts.
    pub session: Options,
    /// The instruction in the user's turn, beside the recording; the model's own by default.
    pub prompt: Option<String>,
    /// Whether [`Transcription::timed_transcript`] will be asked for: what it needs is then kept.
    pub words: bool,
}

/// A recording whose tokens are being made. Dropping it ends the session.
#[derive(Debug)]
pub struct Transcription {
    shared: Arc<Shared>,
    tokens: Tokens,
    kept: Option<Arc<Kept>>,
}

impl Transcription {
    /// The stream.
    pub fn tokens(&mut self) -> &mut Tokens {
        &mut self.tokens
    }

    /// The text made so far, taken apart: turns, tags and words, without times.
    #[must_use]
    pub fn transcript(&self) -> Transcript {
        Transcript::parse(self.tokens.text())
    }

    /// The same with the times of its words (`model.md` §4.7). Ask once the stream has ended.
    ///
    /// # Errors
    ///
    /// When the model has no word timestamp head or no tokenizer for it, or [`TranscriptionOptions::words`] was not set.
    pub async fn timed_transcript(&self) -> Result<Transcript, Error> {
        let hearing = self.shared.hearing("word times")?;
        let aligner = hearing.aligner.as_ref();
        let aligner = aligner.ok_or(Error::Missing { part: "alignment tokenizer", wanted_for: "word times" })?;
        let kept = self.kept.as_ref().map(Arc::clone);
        let kept =
            kept.ok_or(PerceptionError::NoWords { why: "the recording was encoded without keeping its states" })?;
        let mut transcript = self.transcript();
        let alignment = transcript.alignment(aligner)?;
        let (perception, tags) = (Arc::clone(&hearing.perception), alignment.tags.clone());
        let times = hearing.encoder.align(move || perception.word_times(&kept, &tags)).await??;
        let seconds = |span: Option<Span>| span.map(|span| (span.start, span.end));
        let times = times.into_iter().map(|tag| tag.into_iter().map(seconds).collect()).collect();
        transcript.set_times(&alignment, times);
        Ok(transcript)
    }
}

impl Runtime {
    /// Transcribes a recording of `samples` (16 kHz, mono, in [-1, 1]).
    ///
    /// Prefill begins with the prompt's text while the recording is being
    /// encoded, and goes on with each chunk of rows. The future is ready when
    /// the last row was fed.
    ///
    /// # Errors
    ///
    /// [`Error::Missing`] for a model without perception or tokenizer; [`Error::Session`] where recording and prompt do not
    /// fit the context, which is told before anything is encoded; [`Error::Perception`], or whatever fails on the way.
    pub async fn transcribe(&self, samples: Vec<f32>, options: TranscriptionOptions) -> Result<Transcription, Error> {
        self.transcribe_observed(samples, options, |_, _| {}).await
    }

    /// As [`Runtime::transcribe`], calling `encoded` after each chunk of some 40 s of the recording: with what of it is encoded, and
    /// its length.
    ///
    /// # Errors
    ///
    /// As [`Runtime::transcribe`].
    pub async fn transcribe_observed(
        &self,
        samples: Vec<f32>,
        options: TranscriptionOptions,
        mut encoded: impl FnMut(Duration, Duration),
    ) -> Result<Transcription, Error> {
        let shared = &self.shared;
        let hearing = shared.hearing("a transcription")?;
        let prompt = shared.prompter("a transcription")?.transcription(options.prompt.as_deref())?;
        let audio = Duration::from_secs_f64(samples.len() as f64 / RATE);
        let rows = Perception::rows_of(samples.len());
        // An hour of encoding is a long way to find out that it was too much.
        let wanted = prompt.len(rows);
        if wanted > shared.facts.kv_positions {
            return Err(SessionError::ContextFull { limit: shared.facts.kv_positions, wanted }.into());
        }
        let mut session = self.session(options.session).await?;
        let mut chunks = hearing.encoder.encode(samples, options.words).await?;
        session.feed_ids(&prompt.before).await?;
        while let Some(chunk) = chunks.next().await? {
            let share = chunk.range.end as f64 / rows.max(1) as f64;
            encoded(audio.mul_f64(share.min(1.0)), audio);
            session.feed(chunk.rows).await?;
        }
        session.feed_ids(&prompt.after).await?;
        let Encoded { kept, busy } = chunks.take_encoded();
        session.stats.audio = audio;
        session.stats.encode = busy;
        Ok(Transcription { shared: Arc::clone(shared), tokens: session.decode(), kept: kept.map(Arc::new) })
    }
}
