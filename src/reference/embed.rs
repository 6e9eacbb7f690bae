//! Row `id` of the embedding table, in any codec.
//!
//! Never quantised further, never scaled. Source: `model.md` §1.2.

use super::dequantize::dequantize_row;
use crate::ids::TokenId;
use crate::model::tensors::Matrix;

/// Writes the embedding of `id` to `out`, `[hidden]`.
///
/// # Panics
///
/// If the id is past the table, or `out` is not one row.
pub fn embed(table: &Matrix, id: TokenId, out: &mut [f32]) {
    dequantize_row(table, id.index(), out);
}
