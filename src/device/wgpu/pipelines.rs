//! Pipelines, each built once: a variant of a kernel and its overrides.

use std::collections::HashMap;
use std::sync::Arc;

use super::super::kernels::{Binding, Kernel, Variant};
use super::super::trusted;
use super::adapter::Context;
use crate::device::DeviceError;

/// What a pipeline is made of.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Key {
    /// The text.
    pub variant: Variant,
    /// Overrides; f32 ones by their bits in `floats`.
    pub numbers: Vec<(&'static str, u32)>,
    /// f32 overrides.
    pub floats: Vec<(&'static str, u32)>,
}

/// A pipeline and its layout.
#[derive(Debug)]
pub struct Pipeline {
    /// Its kernel.
    pub kernel: &'static Kernel,
    /// The pipeline.
    pub pipeline: wgpu::ComputePipeline,
    /// Bindings of group 0.
    pub bindings: Vec<Binding>,
    /// Group 0.
    pub layout: wgpu::BindGroupLayout,
}

/// All pipelines of a device.
#[derive(Debug, Default)]
pub struct Pipelines {
    made: HashMap<Key, Arc<Pipeline>>,
    modules: HashMap<Variant, wgpu::ShaderModule>,
    cache: Option<wgpu::PipelineCache>,
}

impl Pipelines {
    /// None yet; with a pipeline cache where the driver has one, beginning with `data`.
    #[must_use]
    pub fn new(context: &Context, data: Option<&[u8]>) -> Self {
        let cached = context.device.features().contains(wgpu::Features::PIPELINE_CACHE);
        Self { cache: cached.then(|| trusted::pipeline_cache(&context.device, data)), ..Self::default() }
    }

    /// What the driver wants kept for the next start.
    #[must_use]
    pub fn cache_data(&self) -> Option<Vec<u8>> {
        self.cache.as_ref().and_then(wgpu::PipelineCache::get_data)
    }

    /// The pipeline for a key.
    ///
    /// # Errors
    ///
    /// [`DeviceError::Unfit`] where the driver refuses it.
    pub fn get(&mut self, context: &Context, key: &Key) -> Result<Arc<Pipeline>, DeviceError> {
        if let Some(made) = self.made.get(key) {
            return Ok(made.clone());
        }
        let kernel = key.variant.kernel();
        let bindings = key.variant.bindings();
        let storage = bindings.iter().filter(|b| **b != Binding::Uniform).count() as u32;
        if storage > context.limits.max_storage_buffers_per_shader_stage {
            let most = context.limits.max_storage_buffers_per_shader_stage;
            return Err(DeviceError::Unfit { why: format!("{} binds {storage} buffers, of {most}", kernel.name) });
        }
        let scope = context.device.push_error_scope(wgpu::ErrorFilter::Validation);
        let module = self
            .modules
            .entry(key.variant.clone())
            .or_insert_with(|| trusted::module(&context.device, kernel.name, key.variant.source()));
        let entries: Vec<_> = (bindings.iter().zip(0..))
            .map(|(binding, at)| wgpu::BindGroupLayoutEntry {
                binding: at,
                visibility: wgpu::ShaderStages::COMPUTE,
                ty: wgpu::BindingType::Buffer {
                    ty: match binding {
                        Binding::Uniform => wgpu::BufferBindingType::Uniform,
                        Binding::Read => wgpu::BufferBindingType::Storage { read_only: true },
                        Binding::Write => wgpu::BufferBindingType::Storage { read_only: false },
                    },
                    has_dynamic_offset: false,
                    min_binding_size: None,
                },
                count: None,
            })
            .collect();
        let layout = context
            .device
            .create_bind_group_layout(&wgpu::BindGroupLayoutDescriptor { label: Some(kernel.name), entries: &entries });
        let whole = context.device.create_pipeline_layout(&wgpu::PipelineLayoutDescriptor {
            label: Some(kernel.name),
            bind_group_layouts: &[Some(&layout)],
            immediate_size: 0,
        });
        let constants: Vec<(&str, f64)> = (key.numbers.iter().map(|(name, n)| (*name, f64::from(*n))))
            .chain(key.floats.iter().map(|(name, bits)| (*name, f64::from(f32::from_bits(*bits)))))
            .collect();
        let pipeline = context.device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
            label: Some(kernel.name),
            layout: Some(&whole),
            module,
            entry_point: Some("main"),
            compilation_options: wgpu::PipelineCompilationOptions {
                constants: &constants,
                zero_initialize_workgroup_memory: false,
            },
            cache: self.cache.as_ref(),
        });
        if let Some(error) = pollster::block_on(scope.pop()) {
            return Err(DeviceError::Unfit { why: format!("{}: {error}", kernel.name) });
        }
        let made = Arc::new(Pipeline { kernel, pipeline, bindings, layout });
        self.made.insert(key.clone(), made.clone());
        Ok(made)
    }
}
