//! A text's routes, found by feeding it once more.

use super::decoder::{Decoder, NotFinite, Observer};
use super::moe::Routes;
use crate::ids::{ExpertIx, LayerIx, TokenId};
use crate::model::state::SequenceState;

/// Puts the picks of passes, which come layer by layer, in order of positions.
struct Collect {
    layers: usize,
    top_k: usize,
    /// Positions of the passes before this one.
    before: usize,
    /// `[positions, layers, top_k]`
    picks: Vec<ExpertIx>,
}

impl Observer for Collect {
    fn moe(&mut self, layer: LayerIx, routes: &Routes) {
        let stride = self.layers * self.top_k;
        let rows = routes.picks.len() / self.top_k;
        self.picks.resize((self.before + rows) * stride, ExpertIx(0));
        let places = self.picks[self.before * stride..].chunks_exact_mut(stride);
        for (place, picks) in places.zip(routes.picks.chunks_exact(self.top_k)) {
            place[layer.index() * self.top_k..][..self.top_k].copy_from_slice(picks);
        }
        if layer.index() + 1 == self.layers {
            self.before += rows;
        }
    }
}

/// The experts each position of a text is routed to, `[positions, layers, top_k]`: those of the prompt's rows
/// `[n, hidden]`, then those of all `ids` decoded behind it but the last, which was fed to nothing. The draft layer's
/// bank is not among the layers. A model without experts has no routes.
///
/// The text passes through the host's decoder once, in wide passes: a choice between two experts that were all but
/// equal may fall otherwise than it did when the text was made on another device.
///
/// # Errors
///
/// [`NotFinite`], naming the block.
pub fn routes_of(decoder: &Decoder, rows: &[f32], ids: &[TokenId]) -> Result<Vec<ExpertIx>, NotFinite> {
    let geometry = decoder.geometry();
    let Some(moe) = geometry.moe.filter(|_| geometry.decoder_layers() > 0) else { return Ok(Vec::new()) };
    let fed = &ids[..ids.len().saturating_sub(1)];
    let mut rows = rows.to_vec();
    let prompt = rows.len();
    rows.resize(prompt + fed.len() * geometry.hidden, 0.0);
    rows[prompt..].chunks_exact_mut(geometry.hidden).zip(fed).for_each(|(row, id)| decoder.embed(*id, row));
    let (layers, top_k) = (geometry.decoder_layers(), moe.top_k);
    let mut collect = Collect { layers, top_k, before: 0, picks: Vec::new() };
    decoder.forward(&mut rows, &mut SequenceState::new(geometry), &mut collect)?;
    Ok(collect.picks)
}
