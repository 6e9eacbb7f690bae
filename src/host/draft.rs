//! The draft layer (`model.md` §2): fusion, attention over its own KV, experts, output norm.
//!
//! Its experts are a bank like the decoder's, reached by [`Decoder::route`] and
//! its siblings with [`Geometry::draft_layer`].
//!
//! [`Geometry::draft_layer`]: crate::model::geometry::Geometry::draft_layer

use super::decoder::{Decoder, NotFinite, Place};
use super::kernels::{Job, prepare, run};
use super::{attention, norm};
use crate::model::state::KvState;
use crate::model::weights::DraftWeights;

/// Points on which sources differ (`model.md` §2.1); they move acceptance, never the output.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DraftConventions {
    /// Drafts read the residual before the final norm instead of after.
    pub pre_norm: bool,
    /// A LayerNorm instead of an RMSNorm comes last.
    pub layer_norm: bool,
    /// The hidden half comes first in the fusion's columns.
    pub hidden_first: bool,
}

impl Decoder {
    fn draft_weights(&self) -> &DraftWeights {
        self.weights().draft.as_deref().expect("a file with a draft layer")
    }

    /// The conventions in use.
    #[must_use]
    pub fn draft_conventions(&self) -> DraftConventions {
        self.conventions
    }

    /// `[n, hidden]` of embeddings of the next tokens fused with hidden rows, `[n, hidden]` each.
    ///
    /// # Errors
    ///
    /// [`NotFinite`] if a row is not.
    ///
    /// # Panics
    ///
    /// If the model has no draft layer or the lengths differ.
    pub fn draft_fuse(&self, embeddings: &[f32], hidden: &[f32]) -> Result<Vec<f32>, NotFinite> {
        assert_eq!(embeddings.len(), hidden.len(), "an embedding for each hidden row");
        let (weights, width, eps) = (self.draft_weights(), self.geometry().hidden, self.geometry().norm_eps);
        let mut both = vec![0.0; 2 * hidden.len()];
        for ((both, e), h) in
            both.chunks_exact_mut(2 * width).zip(embeddings.chunks_exact(width)).zip(hidden.chunks_exact(width))
        {
            let (first, second) = both.split_at_mut(width);
            let (to_e, to_h) = if self.conventions.hidden_first { (second, first) } else { (first, second) };
            let squares = norm::rms(e, &weights.enorm, eps, to_e) + norm::rms(h, &weights.hnorm, eps, to_h);
            NotFinite::check(squares, Place::Draft)?;
        }
        let mut out = vec![0.0; hidden.len()];
        let input = prepare(&self.pool, &weights.eh_proj, self.act, &both);
        run(&self.pool, vec![Job { matrix: &weights.eh_proj, input: &input, out: &mut out }]);
        Ok(out)
    }

    /// `rows [n, hidden] += attention(norm(rows))` over the draft layer's own KV, which grows by `n`.
    ///
    /// # Errors
    ///
    /// [`NotFinite`] if a row is not.
    ///
    /// # Panics
    ///
    /// If the model has no draft layer.
    pub fn draft_attend(&self, rows: &mut [f32], kv: &mut KvState) -> Result<(), NotFinite> {
        let weights = self.draft_weights();
        let normed = self.normed(rows, &weights.attention_norm, Place::Draft)?;
        let geometry = self.geometry().attention.as_ref().expect("checked on open");
        let mixed = attention::mix(&self.pool, geometry, &weights.attention, self.act, &normed, kv);
        rows.iter_mut().zip(&mixed).for_each(|(x, m)| *x += m);
        Ok(())
    }

    /// Appends the KV of fused rows `[n, hidden]` and nothing more: all that rows
    /// whose draft nobody wants leave behind.
    ///
    /// # Errors
    ///
    /// [`NotFinite`] if a row is not.
    ///
    /// # Panics
    ///
    /// If the model has no draft layer.
    pub fn draft_remember(&self, fused: &[f32], kv: &mut KvState) -> Result<(), NotFinite> {
        let weights = self.draft_weights();
        let normed = self.normed(fused, &weights.attention_norm, Place::Draft)?;
        attention::remember(&self.pool, &weights.attention, self.act, &normed, kv);
        Ok(())
    }

    /// The draft layer's last norm: what the head reads, and what stands for the hidden row when drafting on.
    ///
    /// # Errors
    ///
    /// [`NotFinite`] if a row is not.
    ///
    /// # Panics
    ///
    /// If the model has no draft layer.
    pub fn draft_output(&self, rows: &[f32]) -> Result<Vec<f32>, NotFinite> {
        let weights = self.draft_weights();
        if !self.conventions.layer_norm {
            return self.normed(rows, &weights.final_norm, Place::Draft);
        }
        let width = self.geometry().hidden;
        let mut out = vec![0.0; rows.len()];
        for (out, row) in out.chunks_exact_mut(width).zip(rows.chunks_exact(width)) {
            let variance = norm::layer(row, &weights.final_norm, self.geometry().norm_eps, out);
            NotFinite::check(variance, Place::Draft)?;
        }
        Ok(out)
    }

    /// The whole layer for rows whose embeddings and hidden rows are known, `[n, hidden]` each;
    /// its KV grows by `n`. Gives what the head reads.
    ///
    /// # Errors
    ///
    /// [`NotFinite`] if a row is not.
    ///
    /// # Panics
    ///
    /// If the model has no draft layer or the lengths differ.
    pub fn draft(&self, embeddings: &[f32], hidden: &[f32], kv: &mut KvState) -> Result<Vec<f32>, NotFinite> {
        let mut rows = self.draft_fuse(embeddings, hidden)?;
        self.draft_attend(&mut rows, kv)?;
        let layer = self.geometry().draft_layer().expect("a file with a draft layer");
        self.mix_experts(layer, &mut rows, &mut ())?;
        self.draft_output(&rows)
    }
}
