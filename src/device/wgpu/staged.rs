//! Experts laid out ahead of their upload, in memory that the device copies from.
//!
//! Laying out an expert and copying its bytes takes milliseconds, which the
//! submitter does not have between two flights. So whoever fetched the expert
//! does it, on its own thread, and the submitter encodes one copy. The buffers
//! are made as they are first needed and used again: as many as are under way.

use std::fmt;
use std::sync::Arc;

use parking_lot::Mutex;

use super::adapter::Context;
use super::core::Core;
use super::stream::lay_out;
use super::weights::{PlaceLaid, expert_in};
use crate::device::{DeviceError, Payload, Stager};
use crate::model::tensors::Codec;
use crate::model::weights::MlpWeights;

/// Codec and shape of an expert's up and down.
type Shapes = [(Codec, [usize; 2]); 2];

/// Lays out experts for one device.
pub struct GpuStager {
    context: Arc<Context>,
    /// How a layer's places lie, and its experts' matrices as the file holds them.
    layers: Vec<(PlaceLaid, Vec<Shapes>)>,
    /// Bytes of the largest place.
    bytes: u64,
    free: Free,
}

/// Mapped buffers that nobody uses.
type Free = Arc<Mutex<Vec<wgpu::Buffer>>>;

/// An expert in a buffer that the device copies from.
pub struct Staged {
    buffer: wgpu::Buffer,
    free: Free,
}

impl GpuStager {
    /// For the banks of `core`.
    #[must_use]
    pub fn new(core: &Core) -> Self {
        let banks = &core.weights.banks;
        Self {
            context: core.context.clone(),
            layers: banks.iter().map(|bank| (bank.place, bank.shapes.clone())).collect(),
            bytes: banks.iter().map(|bank| bank.place.bytes).max().unwrap_or(0),
            free: Free::default(),
        }
    }

    fn take(&self) -> Result<wgpu::Buffer, DeviceError> {
        if let Some(free) = self.free.lock().pop() {
            return Ok(free);
        }
        let scope = self.context.device.push_error_scope(wgpu::ErrorFilter::OutOfMemory);
        let made = self.context.device.create_buffer(&wgpu::BufferDescriptor {
            label: Some("staged"),
            size: self.bytes,
            usage: wgpu::BufferUsages::MAP_WRITE | wgpu::BufferUsages::COPY_SRC,
            // as a used one comes back
            mapped_at_creation: true,
        });
        match pollster::block_on(scope.pop()) {
            Some(_) => Err(DeviceError::OutOfMemory { what: "an expert on its way".into(), bytes: self.bytes }),
            None => Ok(made),
        }
    }

    /// An expert as a place of `layer` holds it.
    fn lay(&self, place: &PlaceLaid, expert: &MlpWeights) -> Result<Staged, DeviceError> {
        let staged = Staged { buffer: self.take()?, free: self.free.clone() };
        lay_out(&staged.buffer, place, expert)?;
        Ok(staged)
    }
}

impl Stager for GpuStager {
    fn stage(&self, payload: Arc<Payload>) -> Result<Arc<Payload>, DeviceError> {
        let (layer, expert) = (payload.layer, payload.expert);
        if !payload.is_intact() {
            return Err(DeviceError::Unfit { why: format!("{payload:?} arrived changed") });
        }
        let Some((place, shapes)) = self.layers.get(layer.index()) else {
            return Err(DeviceError::Unfit { why: format!("no bank of {layer:?}") });
        };
        let weights = expert_in(shapes, expert, &payload.bytes)?;
        let staged = self.lay(place, &weights)?;
        let payload = Arc::try_unwrap(payload).unwrap_or_else(|shared| (*shared).clone());
        Ok(Arc::new(Payload { staged: Some(Arc::new(staged)), ..payload }))
    }
}

impl Staged {
    /// The buffer.
    #[must_use]
    pub fn buffer(&self) -> &wgpu::Buffer {
        &self.buffer
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        let (buffer, free) = (self.buffer.clone(), self.free.clone());
        // not before the device has copied from it, if it was to
        self.buffer.map_async(wgpu::MapMode::Write, .., move |mapped| {
            if mapped.is_ok() {
                free.lock().push(buffer);
            }
        });
    }
}

impl fmt::Debug for GpuStager {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GpuStager").field("bytes", &self.bytes).field("free", &self.free.lock().len()).finish()
    }
}

impl fmt::Debug for Staged {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.buffer.fmt(f)
    }
}
