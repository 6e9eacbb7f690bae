//! A slot: the buffers of one session, and the bind groups over them.

use std::collections::HashMap;
use std::sync::Arc;

use super::super::kernels::Binding;
use super::super::params::{Control, Flight, Params as _};
use super::adapter::Context;
use super::decode::{self, OUT_ROOM, RING, ROUNDS_ROOM, SPLITS};
use super::layout::padded;
use super::pipelines::{Key, Pipeline};
use super::rounds;
use super::upload::buffer;
use super::weights::Weights;
use crate::device::DeviceError;
use crate::ids::{BlockIx, LayerIx};
use crate::model::geometry::{BlockKind, Geometry, MoeGeometry};
use crate::plan::record::{Name, Plan};

/// Rows that a slot's buffers hold: a step's one, or a verify pass's.
pub const ROWS: usize = 8;

/// What a slot is sized by.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// KV positions.
    pub positions: usize,
    /// Snapshots of the scan state.
    pub snapshots: usize,
    /// Rows that can be given at once.
    pub given: usize,
}

/// The buffers of one session.
#[derive(Debug)]
pub struct Slot {
    buffers: HashMap<Name, wgpu::Buffer>,
}

/// Completions that are handed to the device at once.
pub const COMPLETED_ROOM: usize = 256;

/// Word of the first layer's routes where a flight's counts begin, with partial banks.
#[must_use]
pub const fn counts_at(moe: &MoeGeometry) -> usize {
    ROWS * (1 + moe.top_k * (4 + ROWS)) * 2
}

fn usage() -> wgpu::BufferUsages {
    wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_DST | wgpu::BufferUsages::COPY_SRC
}

/// Every buffer of a slot and its floats or words, 4 bytes each.
fn needs(geometry: &Geometry, weights: &Weights, sizes: Sizes) -> Vec<(Name, usize)> {
    let hidden = padded(geometry.hidden);
    let mut proj = 0;
    let mut inner = 0;
    let mut squares = 0;
    // what a verify pass reads behind the last position is cut when it is accepted
    let kv_rows = sizes.positions + if weights.draft.is_some() { ROWS } else { 0 };
    let mut all = vec![
        (Name::X, ROWS * hidden),
        (Name::Given, sizes.given * hidden),
        (Name::Best, 2 * ROWS * decode::head_groups(weights) as usize),
        (Name::Logits, ROWS * geometry.vocab),
        (Name::Out, OUT_ROOM + ROUNDS_ROOM),
        (Name::Nothing, 64),
    ];
    if let Some(g) = &geometry.mamba {
        proj = proj.max(g.in_proj_rows());
        inner = inner.max(padded(g.inner()));
        squares = g.inner() / decode::p_block(g);
        for block in geometry.blocks_of(BlockKind::Mamba) {
            all.push((Name::Ring(block), RING * g.conv_channels()));
            all.push((Name::State(block), sizes.snapshots * g.ssm_state_len()));
        }
    }
    if let Some(g) = &geometry.attention {
        proj = proj.max(g.q_width());
        inner = inner.max(padded(g.q_width()));
        all.push((Name::Parts, ROWS * g.heads * SPLITS as usize * (g.head_dim + 2)));
        for block in geometry.blocks_of(BlockKind::Attention) {
            all.push((Name::Kv(block), kv_rows * 2 * g.kv_width()));
        }
        if weights.draft.is_some() {
            all.push((Name::Kv(rounds::draft_block(geometry)), kv_rows * 2 * g.kv_width()));
        }
    }
    if let Some(inter) = geometry.mlp_inter {
        inner = inner.max(padded(inter));
    }
    if let Some(g) = geometry.moe.as_ref().filter(|_| !weights.banks.is_empty() || weights.draft.is_some()) {
        // room for f32 activations, the larger of both encodings
        let (shared, inter) = (padded(g.shared_inter), padded(g.inter));
        all.extend([
            (Name::Routing, ROWS * (hidden + g.experts)),
            (Name::SharedAct, ROWS * shared),
            (Name::SharedScale, ROWS * shared / 16),
            (Name::PickAct, ROWS * g.top_k * inter),
            (Name::PickScale, ROWS * g.top_k * inter / 16),
            (Name::Partial, ROWS * hidden),
        ]);
        if weights.is_partial() {
            all.extend([(Name::Cure, 4 + COMPLETED_ROOM), (Name::Completed, COMPLETED_ROOM * hidden)]);
        }
        for layer in (0..weights.banks.len()).map(LayerIx::from) {
            let counts = if layer.0 == 0 { weights.banks.len() * g.experts } else { 0 };
            all.push((Name::Routes(layer), counts_at(g) + counts));
            all.push((Name::SharedOut(layer), ROWS * hidden));
        }
    }
    if weights.draft.is_some() {
        let layer = geometry.draft_layer().expect("a draft layer was uploaded");
        let moe = geometry.moe.as_ref().expect("the draft layer has experts");
        all.extend([
            (Name::Hidden, ROWS * hidden),
            (Name::Next, ROWS * hidden),
            (Name::DraftRows, ROWS * hidden),
            (Name::DraftX(0), hidden),
            (Name::DraftX(1), hidden),
            (Name::DraftOut(0), hidden),
            (Name::DraftOut(1), hidden),
            (Name::Drafts, ROWS),
            (Name::Routes(layer), counts_at(moe)),
            (Name::SharedOut(layer), ROWS * hidden),
        ]);
    }
    all.extend([(Name::Proj, ROWS * proj), (Name::Inner, ROWS * inner), (Name::Squares, ROWS * squares)]);
    all
}

impl Slot {
    /// Bytes that a slot takes.
    #[must_use]
    pub fn bytes(geometry: &Geometry, weights: &Weights, sizes: Sizes) -> u64 {
        needs(geometry, weights, sizes).iter().map(|(_, words)| 4 * *words as u64).sum()
    }

    /// Makes the buffers; all zero. `shared` are those that all slots have together.
    ///
    /// # Errors
    ///
    /// [`DeviceError::OutOfMemory`], [`DeviceError::Unfit`].
    pub fn new(
        context: &Context,
        geometry: &Geometry,
        weights: &Weights,
        sizes: Sizes,
        shared: &HashMap<Name, wgpu::Buffer>,
    ) -> Result<Self, DeviceError> {
        let mut buffers = shared.clone();
        for (name, words) in needs(geometry, weights, sizes) {
            buffers.insert(name, buffer(context, &format!("{name:?}"), 4 * words as u64, usage())?);
        }
        let uniform = wgpu::BufferUsages::UNIFORM | wgpu::BufferUsages::COPY_DST;
        let flight = size_of::<Flight>() as u64;
        buffers.insert(Name::Flight, buffer(context, Flight::STRUCT, flight, uniform)?);
        buffers.insert(Name::FlightCure, buffer(context, Flight::STRUCT, flight, uniform)?);
        buffers.insert(Name::FlightLast, buffer(context, Flight::STRUCT, flight, uniform)?);
        for name in [Name::Control, Name::RowsControl, Name::ChainControl] {
            buffers.insert(name, buffer(context, Control::STRUCT, size_of::<Control>() as u64, usage())?);
        }
        Ok(Self { buffers })
    }

    /// The slot with other buffers in the place of some, or beside its own.
    #[must_use]
    pub fn with(&self, others: &HashMap<Name, wgpu::Buffer>) -> Self {
        let mut buffers = self.buffers.clone();
        buffers.extend(others.iter().map(|(name, buffer)| (*name, buffer.clone())));
        Self { buffers }
    }

    /// A buffer of the slot.
    ///
    /// # Panics
    ///
    /// If the geometry has no such buffer.
    #[must_use]
    pub fn buffer(&self, name: Name) -> &wgpu::Buffer {
        self.buffers.get(&name).unwrap_or_else(|| panic!("no buffer for {name:?}"))
    }

    fn resolve<'a>(&'a self, weights: &'a Weights, name: Name) -> &'a wgpu::Buffer {
        match name {
            Name::Arena(block) => &weights.arenas[block.index()],
            Name::Bank(layer) => &weights.bank(layer).buffer,
            Name::Head(part) => &weights.head[part as usize].buffer,
            Name::Embedding(part) => &weights.embedding[part as usize].buffer,
            Name::Map => &weights.map,
            name => self.buffer(name),
        }
    }

    /// A bind group for every dispatch of a plan.
    #[must_use]
    pub fn bind(
        &self,
        context: &Context,
        weights: &Weights,
        plan: &Plan<Key>,
        pipelines: &[Arc<Pipeline>],
        uniforms: &wgpu::Buffer,
        flight: Name,
    ) -> Vec<wgpu::BindGroup> {
        (plan.dispatches.iter())
            .map(|dispatch| {
                let pipeline = &pipelines[dispatch.pipeline];
                let mut names = dispatch.buffers.iter();
                let entries: Vec<_> = (pipeline.bindings.iter().enumerate())
                    .map(|(at, binding)| {
                        let resource = match (at, binding) {
                            (0, _) => self.buffer(flight).as_entire_binding(),
                            (_, Binding::Uniform) => wgpu::BindingResource::Buffer(wgpu::BufferBinding {
                                buffer: uniforms,
                                offset: dispatch.params.expect("a kernel with params") as u64,
                                size: std::num::NonZeroU64::new(Plan::<Key>::ALIGN as u64),
                            }),
                            _ => {
                                let name = names.next().unwrap_or_else(|| {
                                    panic!(
                                        "{} wants more than {} buffers",
                                        pipeline.kernel.name,
                                        dispatch.buffers.len()
                                    )
                                });
                                self.resolve(weights, *name).as_entire_binding()
                            }
                        };
                        wgpu::BindGroupEntry { binding: at as u32, resource }
                    })
                    .collect();
                assert_eq!(names.next(), None, "{} has buffers to spare", pipeline.kernel.name);
                context.device.create_bind_group(&wgpu::BindGroupDescriptor {
                    label: Some(pipeline.kernel.name),
                    layout: &pipeline.layout,
                    entries: &entries,
                })
            })
            .collect()
    }

    /// Blocks whose scan state must be cleared for a new session.
    pub fn states<'a>(&'a self, geometry: &'a Geometry) -> impl Iterator<Item = (BlockIx, &'a wgpu::Buffer)> + 'a {
        geometry.blocks_of(BlockKind::Mamba).map(|block| (block, self.buffer(Name::State(block))))
    }
}
