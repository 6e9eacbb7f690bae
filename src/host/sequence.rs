//! One sequence decoded greedily on the host, with or without drafts; no actors.

use std::sync::Arc;

use thiserror::Error;

use super::decoder::{Decoder, NotFinite, Observer};
use super::head::Pick;
use crate::ids::{Position, TokenId};
use crate::model::state::SequenceState;

/// A sequence could not go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum SequenceError {
    /// An activation is not finite.
    #[error(transparent)]
    NotFinite(#[from] NotFinite),
    /// The sequence was asked for a token before it had a row.
    #[error("the sequence has no rows yet")]
    Empty,
}

/// One round of drafting and verifying.
#[derive(Clone, Debug, PartialEq)]
pub struct Round {
    /// What the draft layer proposed.
    pub drafts: Vec<TokenId>,
    /// What the decoder chose: the accepted drafts, then one more.
    pub picks: Vec<Pick>,
}

impl Round {
    /// Drafts that the decoder agreed with.
    #[must_use]
    pub fn accepted(&self) -> usize {
        self.picks.len() - 1
    }
}

/// A sequence with its state.
pub struct HostSequence {
    decoder: Arc<Decoder>,
    state: SequenceState,
    /// Hidden row of the last position, which waits for the next token's embedding to enter the draft layer.
    hidden: Vec<f32>,
    /// Whether the draft layer is kept up to date.
    drafting: bool,
}

impl HostSequence {
    /// An empty sequence.
    #[must_use]
    pub fn new(decoder: Arc<Decoder>) -> Self {
        let state = SequenceState::new(decoder.geometry());
        let drafting = decoder.geometry().draft;
        Self { decoder, state, hidden: Vec::new(), drafting }
    }

    /// A sequence that goes on behind a state. `hidden` is the hidden row of its last position, empty where that is not
    /// known: then it does not draft.
    #[must_use]
    pub fn behind(decoder: Arc<Decoder>, state: SequenceState, hidden: Vec<f32>) -> Self {
        let drafting = decoder.geometry().draft && (state.position.0 == 0 || !hidden.is_empty());
        Self { decoder, state, hidden, drafting }
    }

    /// Never draft: the draft layer's KV is not kept.
    #[must_use]
    pub fn without_drafts(mut self) -> Self {
        self.drafting = false;
        self
    }

    /// Everything the sequence remembers.
    #[must_use]
    pub fn state(&self) -> &SequenceState {
        &self.state
    }

    /// Rows consumed.
    #[must_use]
    pub fn position(&self) -> Position {
        self.state.position
    }

    /// Consumes rows `[n, hidden]`; the choice after the last of them.
    ///
    /// # Errors
    ///
    /// [`SequenceError`]; the sequence is then of no use.
    pub fn feed(&mut self, rows: &[f32], observer: &mut dyn Observer) -> Result<Pick, SequenceError> {
        let width = self.decoder.geometry().hidden;
        if rows.len() < width {
            return Err(SequenceError::Empty);
        }
        let residual = self.consume(rows, observer)?;
        let normed = self.decoder.final_norm(&residual[residual.len() - width..])?;
        Ok(self.decoder.head(&normed)?[0])
    }

    /// Consumes rows `[n, hidden]`, none of which chooses anything.
    ///
    /// # Errors
    ///
    /// [`NotFinite`]; the sequence is then of no use.
    pub fn prefill(&mut self, rows: &[f32]) -> Result<(), NotFinite> {
        if !rows.is_empty() {
            self.consume(rows, &mut ())?;
        }
        Ok(())
    }

    /// Everything the sequence remembers, and the hidden row of the last position, empty where it does not draft.
    #[must_use]
    pub fn into_parts(self) -> (SequenceState, Vec<f32>) {
        (self.state, if self.drafting { self.hidden } else { Vec::new() })
    }

    /// The residual rows behind the last block.
    fn consume(&mut self, rows: &[f32], observer: &mut dyn Observer) -> Result<Vec<f32>, NotFinite> {
        let mut residual = rows.to_vec();
        self.decoder.forward(&mut residual, &mut self.state, observer)?;
        if self.drafting {
            let normed = match self.decoder.draft_conventions().pre_norm {
                true => None,
                false => Some(self.decoder.final_norm(&residual)?),
            };
            self.remember(rows, normed.as_ref().unwrap_or(&residual))?;
        }
        Ok(residual)
    }

    /// Consumes an id; the choice after it.
    ///
    /// # Errors
    ///
    /// [`SequenceError`]; the sequence is then of no use.
    pub fn step(&mut self, id: TokenId) -> Result<Pick, SequenceError> {
        let row = self.embedding(id);
        self.feed(&row, &mut ())
    }

    /// Consumes `next` and as many of `depth` drafts after it as the decoder agrees with.
    ///
    /// # Errors
    ///
    /// [`SequenceError`]; the sequence is then of no use.
    ///
    /// # Panics
    ///
    /// If the sequence does not draft.
    pub fn round(&mut self, next: TokenId, depth: usize) -> Result<Round, SequenceError> {
        assert!(self.drafting, "a sequence that drafts");
        if self.hidden.is_empty() {
            return Err(SequenceError::Empty);
        }
        let decoder = Arc::clone(&self.decoder);
        let width = decoder.geometry().hidden;
        // The row of the last position joins the draft layer's KV for good, those of deeper drafts do not.
        let first = self.state.draft.k.len();
        let mut hidden = std::mem::take(&mut self.hidden);
        let mut rows = self.embedding(next);
        let mut drafts = Vec::with_capacity(depth);
        for j in 0..depth.max(1) {
            let embedding = &rows[j * width..];
            if depth == 0 {
                let fused = decoder.draft_fuse(embedding, &hidden)?;
                decoder.draft_remember(&fused, &mut self.state.draft)?;
                break;
            }
            hidden = decoder.draft(embedding, &hidden, &mut self.state.draft)?;
            let draft = decoder.head(&hidden)?[0].id;
            drafts.push(draft);
            rows.extend(self.embedding(draft));
        }
        let row = decoder.geometry().attention.as_ref().map_or(0, |a| a.kv_width());
        self.state.draft.k.truncate(first + row);
        self.state.draft.v.truncate(first + row);

        let mut residual = rows.clone();
        let snapshots = decoder.verify(&mut residual, &mut self.state)?;
        let normed = decoder.final_norm(&residual)?;
        let mut picks = decoder.head(&normed)?;
        let accepted = drafts.iter().zip(&picks).take_while(|(draft, pick)| **draft == pick.id).count();
        picks.truncate(accepted + 1);
        if accepted < depth {
            decoder.roll_back(&mut self.state, snapshots, accepted + 1);
        }
        let known = if decoder.draft_conventions().pre_norm { residual } else { normed };
        let kept = (accepted + 1) * width;
        // The pair of the last position and `next` is in the KV already.
        self.hidden.clear();
        self.remember(&rows[..kept], &known[..kept])?;
        Ok(Round { drafts, picks })
    }

    /// Gives the draft layer each hidden row with the embedding that followed it, and keeps the last hidden row.
    fn remember(&mut self, rows: &[f32], hidden: &[f32]) -> Result<(), NotFinite> {
        /// Pairs at a time.
        const PAIRS: usize = 512;
        let width = self.decoder.geometry().hidden;
        let last = hidden.len() - width;
        let (embeddings, known) = if self.hidden.is_empty() {
            (&rows[width..], hidden[..last].to_vec())
        } else {
            (rows, [&self.hidden, &hidden[..last]].concat())
        };
        for (e, h) in embeddings.chunks(PAIRS * width).zip(known.chunks(PAIRS * width)) {
            let fused = self.decoder.draft_fuse(e, h)?;
            self.decoder.draft_remember(&fused, &mut self.state.draft)?;
        }
        self.hidden = hidden[last..].to_vec();
        Ok(())
    }

    fn embedding(&self, id: TokenId) -> Vec<f32> {
        let mut row = vec![0.0; self.decoder.geometry().hidden];
        self.decoder.embed(id, &mut row);
        row
    }
}
