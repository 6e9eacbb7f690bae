//! Which shapes the kernels can do. A model outside is decoded on the host, with one line that says which number was out.

use super::adapter::Context;
use super::decode::RING;
use crate::device::DeviceError;
use crate::model::geometry::Geometry;

/// Checks a model against the kernels.
///
/// # Errors
///
/// [`DeviceError::Unfit`] with the number and what it may be.
pub fn check(geometry: &Geometry, context: &Context) -> Result<(), DeviceError> {
    let mut wrong = None;
    let mut must = |holds: bool, what: &str, seen: usize, wanted: &str| {
        if !holds && wrong.is_none() {
            wrong = Some(format!("{what} is {seen}, the kernels take {wanted}"));
        }
    };
    let room = context.limits.max_compute_workgroup_storage_size as usize;
    // f32 activations of a row are staged whole
    let widest = (room - 8 * 1024) / 4;
    must(geometry.hidden <= widest, "hidden", geometry.hidden, "what workgroup memory holds");
    if let Some(g) = &geometry.mamba {
        must(g.d_state.is_multiple_of(4), "d_state", g.d_state, "multiples of 4");
        must(g.inner().is_multiple_of(32), "the Mamba inner width", g.inner(), "multiples of 32");
        must((g.inner() / g.groups).is_multiple_of(16), "a B/C group", g.inner() / g.groups, "multiples of 16");
        must(g.head_dim.is_multiple_of(4), "the Mamba head_dim", g.head_dim, "multiples of 4");
        must(g.groups <= 256, "B/C groups", g.groups, "at most 256");
        must(g.d_conv <= RING - 8, "d_conv", g.d_conv, "at most 8");
        must(g.inner() <= widest, "the Mamba inner width", g.inner(), "what workgroup memory holds");
    }
    if let Some(g) = &geometry.attention {
        must(g.head_dim.is_multiple_of(4), "head_dim", g.head_dim, "multiples of 4");
        must(g.head_dim <= 128, "head_dim", g.head_dim, "at most 128");
        must(g.q_width().is_multiple_of(32), "the query width", g.q_width(), "multiples of 32");
        must(g.q_width() <= widest, "the query width", g.q_width(), "what workgroup memory holds");
        let cells = (g.heads / g.kv_heads * (2 * g.head_dim + 32) + 16 * (g.head_dim + 4)) * 4;
        must(cells + 4096 <= room, "a key/value head's queries", g.heads / g.kv_heads, "what workgroup memory holds");
    }
    if let Some(g) = &geometry.moe {
        must(g.top_k <= 32 && g.experts <= 1024, "experts", g.experts, "at most 1024, 32 chosen");
        must(g.latent.is_none(), "the latent width", g.latent.unwrap_or(0), "none");
    }
    if let Some(inter) = geometry.mlp_inter {
        must(inter <= widest, "the dense width", inter, "what workgroup memory holds");
    }
    wrong.map_or(Ok(()), |why| Err(DeviceError::Unfit { why }))
}
