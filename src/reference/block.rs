//! The blocks, composed of the twins: `x + mixer(rms(x; norm))`.
//!
//! Each function takes one residual row `[hidden]` and adds its block to it,
//! but for [`Frame::mamba_chunked`], which takes many rows at once to check the
//! chunked scan. Source: `model.md` §1.2 to §1.6.

use super::attention::attention;
use super::conv_step::conv_step;
use super::gated_group_norm::gated_group_norm;
use super::matvec::{matmul, matvec};
use super::mlp::mlp;
use super::moe_sum::moe_sum;
use super::rms_norm::rms_norm;
use super::router::{Route, router};
use super::ssm_chunked::ssm_chunked;
use super::ssm_step::ssm_step;
use crate::knobs::Activations;
use crate::model::geometry::{Geometry, MambaGeometry};
use crate::model::state::{KvState, MambaState};
use crate::model::weights::{AttentionWeights, MambaWeights, MlpWeights, MoeWeights};

/// What every block needs beside its weights.
#[derive(Clone, Copy, Debug)]
pub struct Frame<'a> {
    /// The model's shapes.
    pub geometry: &'a Geometry,
    /// The arithmetic of products with quantised matrices.
    pub act: Activations,
}

/// What an MoE block did with one row.
#[derive(Clone, Debug)]
pub struct Routed {
    /// `[hidden]`, what router, experts and shared expert read
    pub normed: Vec<f32>,
    /// The router's choice.
    pub route: Route,
}

impl Frame<'_> {
    fn mamba_geometry(&self) -> &MambaGeometry {
        self.geometry.mamba.as_ref().expect("a Mamba block has Mamba numbers: checked on open")
    }

    fn normed(&self, row: &[f32], norm: &[f32]) -> Vec<f32> {
        let mut normed = vec![0.0; row.len()];
        rms_norm(row, norm, self.geometry.norm_eps, &mut normed);
        normed
    }

    /// A Mamba-2 block over one row.
    pub fn mamba(&self, norm: &[f32], weights: &MambaWeights, row: &mut [f32], state: &mut MambaState) {
        let g = self.mamba_geometry();
        let (inner, channels) = (g.inner(), g.conv_channels());
        let mut projected = vec![0.0; g.in_proj_rows()];
        matvec(&weights.in_proj, &self.normed(row, norm), self.act, &mut projected);
        let (z, rest) = projected.split_at(inner);
        let (u, d) = rest.split_at(channels);

        let mut xbc = vec![0.0; channels];
        conv_step(u, &weights.conv, &weights.conv_bias, &mut state.conv, &mut xbc);
        let mut o = vec![0.0; inner];
        ssm_step(g, weights, &xbc, d, &mut state.ssm, &mut o);
        let mut v = vec![0.0; inner];
        gated_group_norm(&o, z, &weights.norm, g.groups, self.geometry.norm_eps, &mut v);

        let mut out = vec![0.0; row.len()];
        matvec(&weights.out_proj, &v, self.act, &mut out);
        add(row, &out);
    }

    /// A Mamba-2 block over rows `[T, hidden]`, the scan in chunks of `chunk` positions.
    pub fn mamba_chunked(
        &self,
        norm: &[f32],
        weights: &MambaWeights,
        rows: &mut [f32],
        state: &mut MambaState,
        chunk: usize,
    ) {
        let g = self.mamba_geometry();
        let (inner, channels) = (g.inner(), g.conv_channels());
        let hidden = self.geometry.hidden;
        let normed: Vec<f32> = rows.chunks_exact(hidden).flat_map(|row| self.normed(row, norm)).collect();
        let projected = matmul(&weights.in_proj, &normed, self.act);
        let positions = rows.len() / hidden;

        let (mut xbc, mut d) = (vec![0.0; positions * channels], Vec::new());
        for (projected, xbc) in projected.chunks_exact(g.in_proj_rows()).zip(xbc.chunks_exact_mut(channels)) {
            let u = &projected[inner..inner + channels];
            conv_step(u, &weights.conv, &weights.conv_bias, &mut state.conv, xbc);
            d.extend_from_slice(&projected[inner + channels..]);
        }
        let mut o = vec![0.0; positions * inner];
        ssm_chunked(g, weights, chunk, &xbc, &d, &mut state.ssm, &mut o);
        let mut v = vec![0.0; positions * inner];
        for (t, v) in v.chunks_exact_mut(inner).enumerate() {
            let z = &projected[t * g.in_proj_rows()..][..inner];
            gated_group_norm(&o[t * inner..][..inner], z, &weights.norm, g.groups, self.geometry.norm_eps, v);
        }
        add(rows, &matmul(&weights.out_proj, &v, self.act));
    }

    /// An attention block over one row; its key and value are appended first.
    pub fn attention(&self, norm: &[f32], weights: &AttentionWeights, row: &mut [f32], kv: &mut KvState) {
        let g = self.geometry.attention.as_ref().expect("an attention block has attention numbers: checked on open");
        let normed = self.normed(row, norm);
        let mut q = vec![0.0; g.q_width()];
        matvec(&weights.q, &normed, self.act, &mut q);
        let mut fresh = vec![0.0; g.kv_width()];
        matvec(&weights.k, &normed, self.act, &mut fresh);
        kv.k.extend_from_slice(&fresh);
        matvec(&weights.v, &normed, self.act, &mut fresh);
        kv.v.extend_from_slice(&fresh);

        let mut mixed = vec![0.0; g.q_width()];
        attention(g, &q, &kv.k, &kv.v, &mut mixed);
        let mut out = vec![0.0; row.len()];
        matvec(&weights.o, &mixed, self.act, &mut out);
        add(row, &out);
    }

    /// An MoE block over one row.
    pub fn moe(&self, norm: &[f32], weights: &MoeWeights, row: &mut [f32]) -> Routed {
        let g = self.geometry.moe.as_ref().expect("an MoE block has MoE numbers: checked on open");
        let normed = self.normed(row, norm);
        let route = router(g, &weights.gate, &weights.bias, &normed);

        let latent = weights.latent.as_ref();
        let input = latent.map_or_else(|| normed.clone(), |[fc1, _]| matmul(fc1, &normed, self.act));
        let mut outputs = vec![0.0; route.picks.len() * input.len()];
        for (pick, output) in route.picks.iter().zip(outputs.chunks_exact_mut(input.len())) {
            mlp(&weights.experts[pick.index()], &input, self.act, output);
        }
        let mut shared = vec![0.0; row.len()];
        mlp(&weights.shared, &normed, self.act, &mut shared);
        moe_sum(row, &route.weights, &outputs, latent.map(|[_, fc2]| fc2), &shared, self.act);
        Routed { normed, route }
    }

    /// A dense block over one row.
    pub fn mlp(&self, norm: &[f32], weights: &MlpWeights, row: &mut [f32]) {
        let mut out = vec![0.0; row.len()];
        mlp(weights, &self.normed(row, norm), self.act, &mut out);
        add(row, &out);
    }
}

fn add(row: &mut [f32], out: &[f32]) {
    for (row, out) in row.iter_mut().zip(out) {
        *row += out;
    }
}
