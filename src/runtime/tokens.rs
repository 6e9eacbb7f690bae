//! The stream of a session's tokens.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use futures_core::Stream;

use super::{Error, FinishReason, Finished, Shared, Stats, Token};
use crate::actors::payload::{Event, FinishReason as Ended, SessionError, SessionStats, Token as Made};
use crate::actors::session::SessionHandle;
use crate::ids::TokenId;
use crate::text::tokenizer::TextStream;

/// Tokens while they are made, each id once and in order.
///
/// A `Stream<Item = Result<Token, Error>>`; [`Tokens::next`] needs no stream
/// library. An error is the last item, and the ids before it stand. Dropping
/// the stream cancels the session and frees its slot.
#[derive(Debug)]
pub struct Tokens {
    shared: Arc<Shared>,
    handle: SessionHandle,
    /// `None` where the file has no tokenizer: pieces are then empty.
    pieces: Option<TextStream>,
    eos: Arc<[TokenId]>,
    /// What the caller bounded the length by.
    max_new_tokens: Option<usize>,
    /// `[n, hidden]`; empty unless they were to be kept.
    prompt_rows: Vec<f32>,
    ids: Vec<TokenId>,
    text: String,
    stats: Stats,
    end: End,
}

/// Where the stream stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Running,
    Finished(FinishReason),
    Failed,
}

impl Tokens {
    pub(super) fn new(
        shared: Arc<Shared>,
        handle: SessionHandle,
        eos: Arc<[TokenId]>,
        max_new_tokens: Option<usize>,
        prompt_rows: Vec<f32>,
        stats: Stats,
    ) -> Self {
        let pieces = shared.prompter.as_ref().map(|prompter| prompter.tokenizer().stream());
        let (ids, text) = (Vec::new(), String::new());
        Self { shared, handle, pieces, eos, max_new_tokens, prompt_rows, ids, text, stats, end: End::Running }
    }

    /// The next token; `None` after the last.
    pub async fn next(&mut self) -> Option<Result<Token, Error>> {
        std::future::poll_fn(|cx| self.poll(cx)).await
    }

    /// Ends the session. Tokens made before are still there to be taken; then
    /// the stream ends with [`FinishReason::Cancelled`], or as it would have if
    /// it had ended already.
    pub fn cancel(&mut self) {
        self.handle.cancel();
    }

    /// Takes what is left and tells how it ended.
    ///
    /// # Errors
    ///
    /// What the session failed with; [`Tokens::ids`] and [`Tokens::text`] keep what was right before.
    pub async fn finish(&mut self) -> Result<Finished, Error> {
        while let Some(token) = self.next().await {
            token?;
        }
        let reason = self.reason().ok_or(SessionError::Ended)?;
        Ok(Finished { reason, ids: self.ids.clone(), text: self.text.clone(), stats: self.stats })
    }

    /// All ids taken so far.
    #[must_use]
    pub fn ids(&self) -> &[TokenId] {
        &self.ids
    }

    /// The prompt's rows `[n, hidden]` where [`Options::keep_rows`](super::Options::keep_rows) asked for them, else none.
    #[must_use]
    pub fn prompt_rows(&self) -> &[f32] {
        &self.prompt_rows
    }

    /// The text of the ids taken so far.
    #[must_use]
    pub fn text(&self) -> &str {
        &self.text
    }

    /// What it took so far; complete once the stream has ended.
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.stats
    }

    /// Why the stream ended; `None` while it runs and when it failed.
    #[must_use]
    pub fn reason(&self) -> Option<FinishReason> {
        match self.end {
            End::Finished(reason) => Some(reason),
            End::Running | End::Failed => None,
        }
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Token, Error>>> {
        if self.end != End::Running {
            return Poll::Ready(None);
        }
        let Poll::Ready(event) = self.handle.poll_next(cx) else { return Poll::Pending };
        Poll::Ready(match event {
            Some(Event::Token(token)) => Some(self.take(token)),
            Some(Event::Finished(finished)) => {
                self.take_stats(&finished.stats);
                match self.flush().and_then(|()| self.ended(finished.reason)) {
                    Ok(reason) => {
                        self.end = End::Finished(reason);
                        None
                    }
                    Err(error) => {
                        self.end = End::Failed;
                        Some(Err(error))
                    }
                }
            }
            None => {
                self.end = End::Failed;
                Some(Err(SessionError::Gone { actor: "submitter" }.into()))
            }
        })
    }

    fn take(&mut self, token: Made) -> Result<Token, Error> {
        self.ids.push(token.id);
        self.stats.tokens = self.ids.len();
        let ends = self.eos.contains(&token.id);
        let text = match &mut self.pieces {
            Some(pieces) if !ends => pieces.push(token.id)?,
            _ => String::new(),
        };
        self.text.push_str(&text);
        Ok(Token { id: token.id, text, position: token.position, drafted: token.drafted })
    }

    /// Bytes that never became a character still belong to the text.
    fn flush(&mut self) -> Result<(), Error> {
        if let Some(pieces) = self.pieces.take() {
            self.text.push_str(&pieces.finish()?);
        }
        Ok(())
    }

    fn ended(&self, reason: Ended) -> Result<FinishReason, Error> {
        match reason {
            Ended::End => Ok(FinishReason::Stop),
            // Fewer than the caller allowed, or no bound of the caller's: what ended it is the context.
            Ended::Length if self.max_new_tokens.is_none_or(|most| self.ids.len() < most) => {
                Err(Error::ContextUsedUp { positions: self.shared.facts.kv_positions, ids: self.ids.clone() })
            }
            Ended::Length => Ok(FinishReason::Length),
            Ended::Cancelled => Ok(FinishReason::Cancelled),
            Ended::Failed(error) => Err(error.into()),
        }
    }

    fn take_stats(&mut self, seen: &SessionStats) {
        self.stats.prefill = seen.prefill;
        self.stats.decode = seen.decode;
        self.stats.prompt_rows = seen.rows;
        self.stats.bank.misses = seen.misses as u64;
        self.stats.bank.completed = seen.completed as u64;
        self.stats.bank.admitted = seen.admitted as u64;
        self.stats.drafts.offered = seen.drafts_offered as u64;
        self.stats.drafts.kept = seen.drafts_kept as u64;
        self.stats.recovered = seen.recovered;
    }
}

impl Stream for Tokens {
    type Item = Result<Token, Error>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.poll(cx)
    }
}
