//! The draft (multi-token prediction) layer, and plain speculative decoding.
//!
//! ```text
//! f = fuse(embedding[t_{i+1}], h_i)        f += attention(rms(f))    f += moe(rms(f))
//! m_i = norm(f; final_norm)                draft of token i + 2 = argmax(head m_i)
//! ```
//! Source: `model.md` §2.

use super::argmax::Pick;
use super::decoder::{Forward, MoeCapture, PlainDecoder};
use super::fuse::fuse;
use super::layer_norm::layer_norm;
use super::rms_norm::rms_norm;
use crate::ids::TokenId;
use crate::model::state::{KvState, SequenceState};
use crate::model::weights::DraftWeights;

/// The points on which sources differ (`model.md` §2.1). They move the acceptance, never the ids.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Conventions {
    /// `h_i` is the residual before the final norm, not after it.
    pub prenorm_hidden: bool,
    /// The last norm is a LayerNorm without bias, not an RMSNorm.
    pub layer_norm: bool,
    /// The hidden half comes first in the columns of `eh_proj`.
    pub hidden_first: bool,
}

impl Conventions {
    /// The rows that the draft layer takes for `h`.
    #[must_use]
    pub fn hidden<'f>(&self, forward: &'f Forward) -> &'f [f32] {
        if self.prenorm_hidden { &forward.residual } else { &forward.normed }
    }
}

/// One round of drafting and verifying.
#[derive(Clone, Debug, PartialEq)]
pub struct Round {
    /// The `k` drafts, with their margins.
    pub drafts: Vec<Pick>,
    /// How many of them the decoder agreed with; the round emits one id more.
    pub accepted: usize,
}

/// What [`PlainDecoder::speculate`] did.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Speculation {
    /// The decoder's ids, at least as many as asked for: the last round is not cut short.
    pub picks: Vec<Pick>,
    /// Round by round; the first id comes from the prompt, before any round.
    pub rounds: Vec<Round>,
}

impl PlainDecoder<'_> {
    /// The draft layer over one row; appends to its KV and returns `m`, `[hidden]`.
    ///
    /// Shapes: `embedding`, `hidden` `[hidden]`.
    ///
    /// # Panics
    ///
    /// If the model has no draft layer.
    pub fn draft_row(
        &self,
        conventions: Conventions,
        embedding: &[f32],
        hidden: &[f32],
        kv: &mut KvState,
        capture: Option<&mut MoeCapture>,
    ) -> Vec<f32> {
        let (weights, eps) = (self.draft_weights(), self.geometry().norm_eps);
        let mut row = vec![0.0; self.geometry().hidden];
        fuse(weights, embedding, hidden, conventions.hidden_first, eps, self.frame.act, &mut row);
        self.frame.attention(&weights.attention_norm, &weights.attention, &mut row, kv);
        let routed = self.frame.moe(&weights.moe_norm, &weights.moe, &mut row);
        if let Some(capture) = capture {
            capture.push(routed);
        }
        let mut out = vec![0.0; row.len()];
        let norm = if conventions.layer_norm { layer_norm } else { rms_norm };
        norm(&row, &weights.final_norm, eps, &mut out);
        out
    }

    /// The draft layer over rows `[n, hidden]`; `m`, `[n, hidden]`.
    ///
    /// # Panics
    ///
    /// As [`PlainDecoder::draft_row`], or if the two inputs differ in length.
    pub fn draft_rows(
        &self,
        conventions: Conventions,
        embeddings: &[f32],
        hidden: &[f32],
        kv: &mut KvState,
        mut capture: Option<&mut MoeCapture>,
    ) -> Vec<f32> {
        assert_eq!(embeddings.len(), hidden.len(), "an embedding for each hidden row");
        let width = self.geometry().hidden;
        (embeddings.chunks_exact(width).zip(hidden.chunks_exact(width)))
            .flat_map(|(e, h)| self.draft_row(conventions, e, h, kv, capture.as_deref_mut()))
            .collect()
    }

    /// Reads `rows` and goes on for at least `steps` ids with `depth` drafts a round.
    ///
    /// The draft layer's KV in `state` must hold nothing, as the state must have read nothing. At the end the state
    /// has read all emitted ids but the last.
    ///
    /// # Panics
    ///
    /// If the model has no draft layer, there is no row, or `depth` is 0.
    pub fn speculate(
        &self,
        conventions: Conventions,
        rows: &[f32],
        state: &mut SequenceState,
        steps: usize,
        depth: usize,
    ) -> Speculation {
        let width = self.geometry().hidden;
        assert!(depth > 0 && !rows.is_empty() && state.draft.k.is_empty());
        let mut out = Speculation::default();
        let forward = self.forward(rows, state, None);
        let mut emitted = self.head(last_row(&forward.normed, width))[0];
        out.picks.push(emitted);

        // rows that the draft layer has not read: h_i, and what the decoder reads at i + 1
        let mut hidden = conventions.hidden(&forward).to_vec();
        let mut following = rows[width..].to_vec();
        while out.picks.len() < steps {
            following.extend(self.embed(&[emitted.id]));
            let caught_up = self.draft_rows(conventions, &following, &hidden, &mut state.draft, None);
            let drafts = self.extend(conventions, last_row(&caught_up, width).to_vec(), &mut state.draft, depth);

            // verify position by position, keeping the state after each: rolling back is taking an earlier one
            let window: Vec<TokenId> = [emitted.id].into_iter().chain(drafts.iter().map(|draft| draft.id)).collect();
            let (mut after, mut passes, mut choices) = (Vec::new(), Vec::new(), Vec::new());
            for id in &window {
                let pass = self.forward(&self.embed(&[*id]), state, None);
                choices.push(self.head(&pass.normed)[0]);
                passes.push(pass);
                after.push(state.clone());
            }
            let accepted = drafts.iter().zip(&choices).take_while(|(draft, choice)| draft.id == choice.id).count();
            *state = after.swap_remove(accepted);

            hidden = passes[..=accepted].iter().flat_map(|pass| conventions.hidden(pass).to_vec()).collect();
            following = self.embed(&window[1..=accepted]);
            out.picks.extend(&choices[..=accepted]);
            emitted = choices[accepted];
            out.rounds.push(Round { drafts, accepted });
        }
        out
    }

    /// `depth` drafts, the first from `m`, each further one from the draft before it and the layer's own output. The
    /// KV rows made here come from no decoder state and are dropped again.
    fn extend(&self, conventions: Conventions, mut m: Vec<f32>, kv: &mut KvState, depth: usize) -> Vec<Pick> {
        let kv_width = self.geometry().attention.as_ref().expect("the draft layer attends").kv_width();
        let caught_up = kv.k.len() / kv_width;
        let mut drafts = vec![self.head(&m)[0]];
        while drafts.len() < depth {
            m = self.draft_row(conventions, &self.embed(&[drafts[drafts.len() - 1].id]), &m, kv, None);
            drafts.push(self.head(&m)[0]);
        }
        kv.truncate(caught_up, kv_width);
        drafts
    }

    fn draft_weights(&self) -> &DraftWeights {
        self.weights.draft.as_deref().expect("a model with a draft layer")
    }
}

fn last_row(rows: &[f32], width: usize) -> &[f32] {
    &rows[rows.len() - width..]
}
