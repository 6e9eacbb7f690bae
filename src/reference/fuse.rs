//! `f = eh_proj . concat(rms(embedding; enorm), rms(hidden; hnorm))`
//!
//! The input row of the draft layer: the next token's embedding (or the audio
//! row that stands there) and the decoder's hidden row. Source: `model.md` §2.1.

use super::matvec::matvec;
use super::rms_norm::rms_norm;
use crate::knobs::Activations;
use crate::model::weights::DraftWeights;

/// Fuses one row.
///
/// Shapes: `embedding`, `hidden`, `out` `[hidden]`. `hidden_first` swaps the halves of the concatenation.
///
/// # Panics
///
/// If the lengths do not fit the weights.
pub fn fuse(
    weights: &DraftWeights,
    embedding: &[f32],
    hidden: &[f32],
    hidden_first: bool,
    eps: f32,
    act: Activations,
    out: &mut [f32],
) {
    let mut columns = vec![0.0; 2 * out.len()];
    let (first, second) = columns.split_at_mut(out.len());
    let (e, h) = if hidden_first { (second, first) } else { (first, second) };
    rms_norm(embedding, &weights.enorm, eps, e);
    rms_norm(hidden, &weights.hnorm, eps, h);
    matvec(&weights.eh_proj, &columns, act, out);
}
