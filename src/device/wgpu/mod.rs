//! The wgpu device: kernels of `shaders/` over buffers of any adapter.
//!
//! `adapter` finds and opens one, `weights` uploads the model in the `layout`
//! that the kernels read, `decode` records a step as data, `slot` holds a
//! session's buffers and bind groups, `queue` encodes what the submitter
//! appends, `landing` waits for what lands.
//!
//! Knows the model, the plan's records and the device trait; never an actor.

pub mod adapter;
pub mod cache;
pub mod contract;
pub mod core;
pub mod decode;
pub mod describe;
#[doc(hidden)]
pub mod faults;
pub mod landing;
pub mod layout;
pub mod measure;
pub mod memory;
pub mod pace;
pub mod partial;
pub mod pipelines;
pub mod prefill;
mod prepared;
pub mod queue;
pub mod rounds;
pub mod selftest;
pub mod slot;
pub mod staged;
pub mod stamps;
pub mod stream;
pub mod upload;
pub mod weights;

use std::sync::Arc;

pub use adapter::{Context, Found, candidates, find, list};
pub use core::Setup;
pub use rounds::DraftSetup;

use super::{Device, DeviceError, DeviceKind, DraftAbility, Facts, Landings, Queue, Stager, UNLANDED_MAX};
use crate::ids::ExpertIx;
use crate::model::geometry::Geometry;
use crate::model::weights::DecoderWeights;
use landing::{GpuLandings, Shared};
use queue::GpuQueue;

/// Uploads under way with partial banks: as many as an admission round moves.
const UPLOAD_STAGING: usize = 8;

/// The device, ready to decode.
#[derive(Debug)]
pub struct Gpu {
    facts: Facts,
    queue: GpuQueue,
    landings: GpuLandings,
}

impl Gpu {
    /// Uploads a model to the adapter behind `context`.
    ///
    /// # Errors
    ///
    /// [`DeviceError`]: the model does not fit the kernels or the memory, or the device was lost.
    pub fn open(
        context: Context,
        geometry: &Geometry,
        decoder: &DecoderWeights,
        setup: &Setup,
        progress: weights::Progress<'_>,
    ) -> Result<Self, DeviceError> {
        Self::open_partial(context, geometry, decoder, setup, None, progress)
    }

    /// As [`Gpu::open`], with banks of these residents, by layer and place; `None` is all. A layer that lacks experts may
    /// miss.
    ///
    /// # Errors
    ///
    /// As [`Gpu::open`].
    pub fn open_partial(
        context: Context,
        geometry: &Geometry,
        decoder: &DecoderWeights,
        setup: &Setup,
        residents: Option<&[Vec<ExpertIx>]>,
        progress: weights::Progress<'_>,
    ) -> Result<Self, DeviceError> {
        let context = Arc::new(context);
        let core = core::Core::new(context.clone(), geometry, decoder, setup, residents, progress)?;
        let facts = Facts {
            name: format!("{} ({}, {})", context.info.name, context.info.backend, context.team),
            kind: DeviceKind::Gpu,
            activations: setup.activations,
            slots: setup.slots,
            kv_positions: setup.positions,
            hidden: geometry.hidden,
            layers: geometry.decoder_layers(),
            experts: geometry.moe.filter(|_| geometry.decoder_layers() > 0).map_or(0, |moe| moe.experts),
            top_k: geometry.moe.filter(|_| geometry.decoder_layers() > 0).map_or(0, |moe| moe.top_k),
            expert_width: geometry.hidden,
            residents: core
                .weights
                .banks
                .iter()
                .map(|bank| bank.residents.clone())
                .collect::<Vec<Vec<Option<ExpertIx>>>>(),
            spare_place: false,
            prefill_rows: core.sizes.given,
            streamed_rows: core.streamed.as_ref().map(|streamed| streamed.rows),
            verify_rows: core.sizes.snapshots,
            drafts: if core.rounds.is_some() { DraftAbility::OnDevice } else { DraftAbility::None },
            staging: UNLANDED_MAX + 4,
            upload_staging: if core.mend.is_some() { UPLOAD_STAGING } else { 1 },
            landing_deadline: Some(std::time::Duration::from_secs(30)),
            class_times: core.times.clone(),
        };
        let shared = Arc::new(Shared::new(context.clone(), geometry, &core, facts.staging, facts.upload_staging)?);
        // what is made on a lost device looks like any other: only a poll tells
        let polled = context.device.poll(::wgpu::PollType::Poll).map_err(|e| DeviceError::Lost { why: e.to_string() });
        if let Some(why) = context.lost.get() {
            return Err(DeviceError::Lost { why: why.clone() });
        }
        polled?;
        let queue = GpuQueue::new(core, shared.clone());
        Ok(Self { facts, queue, landings: GpuLandings::new(shared) })
    }

    /// The encoder of plans, to profile it. For benches.
    pub fn queue(&mut self) -> &mut GpuQueue {
        &mut self.queue
    }
}

impl Gpu {
    /// Readback's half. For tests.
    pub fn landings(&mut self) -> &mut GpuLandings {
        &mut self.landings
    }
}

impl Device for Gpu {
    fn facts(&self) -> &Facts {
        &self.facts
    }

    fn stager(&self) -> Option<Arc<dyn Stager>> {
        self.queue.core().mend.as_ref().map(|_| Arc::new(staged::GpuStager::new(self.queue.core())) as _)
    }

    fn split(self: Box<Self>) -> (Box<dyn Queue>, Box<dyn Landings>) {
        if self.queue.core().streamed.is_none() {
            return (Box::new(self.queue), Box::new(self.landings));
        }
        let shared = self.landings.shared();
        match stream::Line::new(self.queue, shared.clone()) {
            Ok(line) => (Box::new(line), Box::new(self.landings)),
            Err(error) => {
                shared.lose(&error);
                (Box::new(stream::Gone(error)), Box::new(self.landings))
            }
        }
    }
}
