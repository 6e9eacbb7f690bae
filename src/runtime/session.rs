//! One sequence: rows in, then tokens out.

use std::sync::Arc;

use super::{Error, Shared, Stats, Tokens};
use crate::actors::session::SessionHandle;
use crate::ids::{SessionId, TokenId};

/// Rows handed over at a time: a long prompt waits for room instead of lying in the queue.
const FEED_ROWS: usize = 512;

/// A session that is being fed. Dropping it frees its place.
#[derive(Debug)]
pub struct Session {
    shared: Arc<Shared>,
    handle: SessionHandle,
    eos: Arc<[TokenId]>,
    max_new_tokens: Option<usize>,
    /// Rows fed so far, where they are wanted afterwards.
    kept: Option<Vec<f32>>,
    pub(super) stats: Stats,
}

impl Session {
    pub(super) fn new(
        shared: Arc<Shared>,
        handle: SessionHandle,
        eos: Arc<[TokenId]>,
        max_new_tokens: Option<usize>,
        keep_rows: bool,
    ) -> Self {
        let mut stats = Stats::default();
        stats.bank.slots = shared.places();
        let kept = keep_rows.then(Vec::new);
        Self { shared, handle, eos, max_new_tokens, kept, stats }
    }

    /// Its number, as in spans.
    #[must_use]
    pub fn id(&self) -> SessionId {
        self.handle.id()
    }

    /// Appends embedding rows `[n, hidden]` to the prompt, any number of times.
    ///
    /// Prefill starts at once; the call returns when there is room for more.
    /// Dropping the future before that leaves rows fed that were already handed over.
    ///
    /// # Errors
    ///
    /// [`Error::NotFiniteInput`], of which nothing is fed; [`Error::Session`] for floats that are no whole rows, for more
    /// rows than the context holds (those handed over before stay), or with what the session failed meanwhile.
    pub async fn feed(&mut self, rows: Vec<f32>) -> Result<(), Error> {
        let hidden = self.shared.model.geometry.hidden;
        if let Some(at) = rows.iter().position(|value| !value.is_finite()) {
            return Err(Error::NotFiniteInput { row: at / hidden, value: rows[at] });
        }
        if rows.is_empty() {
            return Ok(());
        }
        if let Some(kept) = &mut self.kept {
            kept.extend_from_slice(&rows);
        }
        if rows.len() <= FEED_ROWS * hidden || !rows.len().is_multiple_of(hidden) {
            return Ok(self.handle.feed(rows).await?);
        }
        for part in rows.chunks(FEED_ROWS * hidden) {
            self.handle.feed(part.to_vec()).await?;
        }
        Ok(())
    }

    /// Appends the embedding rows of `ids`.
    ///
    /// # Errors
    ///
    /// [`Error::UnknownId`], of which nothing is fed, and as [`Session::feed`].
    pub async fn feed_ids(&mut self, ids: &[TokenId]) -> Result<(), Error> {
        // All of them first, so that a bad one leaves nothing fed.
        let rows = self.shared.embed(ids)?;
        self.feed(rows).await
    }

    /// Begins to decode behind all that was fed.
    ///
    /// A session that nothing was fed to ends with an error in the stream.
    #[must_use = "dropping the stream cancels the session"]
    pub fn decode(self) -> Tokens {
        let Self { shared, handle, eos, max_new_tokens, kept, stats } = self;
        // A submitter that is gone closes the events too, which the stream reports.
        let _ = handle.decode(max_new_tokens);
        Tokens::new(shared, handle, eos, max_new_tokens, kept.unwrap_or_default(), stats)
    }
}
