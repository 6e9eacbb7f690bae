//! Pipelines, each built once: a variant of a kernel and its overrides.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use rayon::prelude::*;

use super::super::kernels::{Binding, Kernel, LANES, Variant};
use super::super::trusted;
use super::adapter::Context;
use super::cache::CacheFile;
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
    /// Where the cache lies between runs, and how long it was when it was read.
    kept: Option<(CacheFile, usize)>,
}

impl Pipelines {
    /// None yet; with a pipeline cache where the driver has one, beginning with what an earlier run kept.
    #[must_use]
    pub fn new(context: &Context) -> Self {
        if !context.device.features().contains(wgpu::Features::PIPELINE_CACHE) {
            return Self::default();
        }
        let file = context.cache_folder.as_deref().and_then(|folder| CacheFile::new(folder, &context.info));
        let data = file.as_ref().and_then(CacheFile::read);
        let cache = trusted::pipeline_cache(&context.device, data.as_deref());
        let kept = file.map(|file| (file, data.map_or(0, |data| data.len())));
        Self { cache: Some(cache), kept, ..Self::default() }
    }

    /// How many there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.made.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.made.is_empty()
    }

    /// Keeps what the driver compiled for the next run, if it is more than before.
    pub fn keep(&self) {
        let Some((file, before)) = &self.kept else { return };
        if let Some(data) = self.cache.as_ref().and_then(wgpu::PipelineCache::get_data).filter(|d| d.len() > *before) {
            file.write(&data);
        }
    }

    /// Builds the pipelines for `keys` on all threads: drivers compile for tens of milliseconds each.
    ///
    /// # Errors
    ///
    /// As [`Pipelines::get`].
    pub fn prepare<'k>(
        &mut self,
        context: &Context,
        keys: impl IntoIterator<Item = &'k Key>,
    ) -> Result<(), DeviceError> {
        let begun = Instant::now();
        let mut wanted: Vec<&Key> = Vec::new();
        for key in keys {
            if !self.made.contains_key(key) && !wanted.contains(&key) {
                wanted.push(key);
            }
        }
        let mut variants: Vec<&Variant> = Vec::new();
        for key in &wanted {
            if !self.modules.contains_key(&key.variant) && !variants.contains(&&key.variant) {
                variants.push(&key.variant);
            }
        }
        let modules: Vec<_> = variants
            .par_iter()
            .map(|variant| Ok(((*variant).clone(), module(context, variant)?)))
            .collect::<Result<_, _>>()?;
        self.modules.extend(modules);
        let made: Vec<_> = (wanted.par_iter())
            .map(|key| {
                let made = build(context, key, &self.modules[&key.variant], self.cache.as_ref())?;
                Ok(((*key).clone(), Arc::new(made)))
            })
            .collect::<Result<_, _>>()?;
        tracing::debug!(pipelines = made.len(), took_ms = begun.elapsed().as_millis() as u64, "compiled");
        self.made.extend(made);
        Ok(())
    }

    /// The pipeline for a key.
    ///
    /// # Errors
    ///
    /// [`DeviceError::Unfit`] where the driver refuses it.
    pub fn get(&mut self, context: &Context, key: &Key) -> Result<Arc<Pipeline>, DeviceError> {
        if !self.made.contains_key(key) {
            self.prepare(context, [key])?;
        }
        Ok(self.made[key].clone())
    }
}

fn module(context: &Context, variant: &Variant) -> Result<wgpu::ShaderModule, DeviceError> {
    let scope = context.device.push_error_scope(wgpu::ErrorFilter::Validation);
    let name = variant.kernel().name;
    // what tells whether a team is what it is believed to be runs before anything may be trusted
    let module = if name == LANES.name {
        let source = wgpu::ShaderSource::Wgsl(variant.source().into());
        context.device.create_shader_module(wgpu::ShaderModuleDescriptor { label: Some(name), source })
    } else {
        trusted::module(&context.device, name, variant.source())
    };
    match pollster::block_on(scope.pop()) {
        Some(error) => Err(DeviceError::Unfit { why: format!("{name}: {error}") }),
        None => Ok(module),
    }
}

fn build(
    context: &Context,
    key: &Key,
    module: &wgpu::ShaderModule,
    cache: Option<&wgpu::PipelineCache>,
) -> Result<Pipeline, DeviceError> {
    let kernel = key.variant.kernel();
    let bindings = key.variant.bindings();
    let storage = bindings.iter().filter(|b| **b != Binding::Uniform).count() as u32;
    if storage > context.limits.max_storage_buffers_per_shader_stage {
        let most = context.limits.max_storage_buffers_per_shader_stage;
        return Err(DeviceError::Unfit { why: format!("{} binds {storage} buffers, of {most}", kernel.name) });
    }
    let scope = context.device.push_error_scope(wgpu::ErrorFilter::Validation);
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
        cache,
    });
    if let Some(error) = pollster::block_on(scope.pop()) {
        return Err(DeviceError::Unfit { why: format!("{}: {error}", kernel.name) });
    }
    Ok(Pipeline { kernel, pipeline, bindings, layout })
}
