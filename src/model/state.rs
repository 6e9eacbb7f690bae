//! What a decoder remembers of a sequence, in host layout.
//!
//! Devices keep their own layout; this one is for the host, for seeding a
//! device and for reading its state back.

use super::geometry::{BlockKind, Geometry};
use crate::ids::Position;

/// State of one sequence: everything needed to go on with the next row.
#[derive(Clone, Debug, PartialEq)]
pub struct SequenceState {
    /// Rows consumed so far.
    pub position: Position,
    /// One per block, in order.
    pub blocks: Vec<BlockState>,
    /// The draft layer's own KV; empty when the file has no draft layer.
    pub draft: KvState,
}

/// State of one block.
#[derive(Clone, Debug, PartialEq)]
pub enum BlockState {
    /// Conv ring and scan state.
    Mamba(MambaState),
    /// Keys and values.
    Attention(KvState),
    /// MoE and dense blocks remember nothing.
    None,
}

/// `model.md` §1.4
#[derive(Clone, Debug, PartialEq)]
pub struct MambaState {
    /// `[channels, K - 1]`, oldest first
    pub conv: Vec<f32>,
    /// `[heads, P, N]`, N fastest
    pub ssm: Vec<f32>,
}

/// Keys and values, position-major so that appending is a push.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct KvState {
    /// `[positions, kv_heads * head_dim]`
    pub k: Vec<f32>,
    /// `[positions, kv_heads * head_dim]`
    pub v: Vec<f32>,
}

impl KvState {
    /// Drops all but the first `positions` rows of `width` floats.
    pub fn truncate(&mut self, positions: usize, width: usize) {
        self.k.truncate(positions * width);
        self.v.truncate(positions * width);
    }
}

impl SequenceState {
    /// The state before the first row.
    ///
    /// # Panics
    ///
    /// If the geometry has a Mamba block without Mamba numbers, which no open lets through.
    #[must_use]
    pub fn new(geometry: &Geometry) -> Self {
        let blocks = (geometry.blocks.iter())
            .map(|kind| match kind {
                BlockKind::Mamba => {
                    let mamba = geometry.mamba.as_ref().expect("checked on open");
                    BlockState::Mamba(MambaState {
                        conv: vec![0.0; mamba.conv_state_len()],
                        ssm: vec![0.0; mamba.ssm_state_len()],
                    })
                }
                BlockKind::Attention => BlockState::Attention(KvState::default()),
                BlockKind::Moe | BlockKind::Mlp => BlockState::None,
            })
            .collect();
        Self { position: Position(0), blocks, draft: KvState::default() }
    }
}
