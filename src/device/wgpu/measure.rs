//! How fast an adapter is at what decoding asks of it, for `riparian tune`.
//!
//! Four figures that no driver tells: the bus (host memory to device memory), the device's own memory, what a dispatch
//! costs that depends on the one before it, and what it costs to hear of a result.

use std::time::{Duration, Instant};

use super::adapter::{Context, find};
use super::upload::{Uploader, buffer};
use crate::device::DeviceError;
use crate::knobs::DeviceChoice;

/// Bytes of an upload: as much as a batch of experts.
const UPLOAD_BYTES: u64 = 64 << 20;
/// Bytes that are read from the device's memory: more than any cache of one.
const READ_BYTES: u64 = 512 << 20;
/// Loads of an invocation of [`READ`].
const READS: u64 = 32;
/// Dispatches of the short and of the long pass; the difference is free of what a submission costs.
const DISPATCHES: [u32; 2] = [64, 1088];
/// How often each is measured after a first time that does not count.
const REPEATS: usize = 7;

/// Adds one to every word, so that each dispatch has to wait for the one before.
const BUMP: &str = "
@group(0) @binding(0) var<storage, read_write> words: array<u32>;
@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) at: vec3<u32>) { words[at.x] += 1u; }
";

/// Reads a buffer once, side by side, and keeps nothing of it.
const READ: &str = "
@group(0) @binding(0) var<storage, read> source: array<vec4<u32>>;
@group(0) @binding(1) var<storage, read_write> sink: array<u32>;
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    var seen = vec4<u32>();
    for (var i = 0u; i < 32u; i++) { seen ^= source[(wg.x * 32u + i) * 256u + lane]; }
    if seen.x == 1u && seen.y == 2u { sink[0] = seen.z; }
}
";

/// What was measured; medians.
#[derive(Clone, Debug, PartialEq)]
pub struct Measured {
    /// The adapter.
    pub name: String,
    /// Host memory to device memory, GB/s.
    pub upload_gb_s: f64,
    /// Device memory, read by a kernel, GB/s.
    pub memory_gb_s: f64,
    /// A dispatch that waits for the one before it, µs.
    pub dispatch_us: f64,
    /// From the submission of nearly nothing until its result can be read, µs.
    pub readback_us: f64,
}

/// Measures the adapter that `choice` means; takes a second or so on a GPU.
///
/// # Errors
///
/// [`DeviceError`] where there is no such adapter, or where it refuses or is lost.
pub fn measure(choice: &DeviceChoice) -> Result<Measured, DeviceError> {
    let context = find(choice)?.open(None, false)?;
    Ok(Measured {
        name: context.info.name.clone(),
        upload_gb_s: upload(&context)?,
        memory_gb_s: read(&context)?,
        dispatch_us: dispatch(&context)?,
        readback_us: readback(&context)?,
    })
}

/// Bytes that a buffer may have here, whole pages of at most `wanted`.
fn allowed(context: &Context, wanted: u64) -> u64 {
    wanted.min(context.limits.max_buffer_size).min(context.limits.max_storage_buffer_binding_size) & !0xffff
}

fn wait(context: &Context, index: wgpu::SubmissionIndex) -> Result<(), DeviceError> {
    let waited = context.device.poll(wgpu::PollType::Wait { submission_index: Some(index), timeout: None });
    // What was refused explains why there is nothing to wait for.
    context.lost.get().map_or(Ok(()), |why| Err(DeviceError::Lost { why: why.clone() }))?;
    waited.map(|_| ()).map_err(|e| DeviceError::Lost { why: e.to_string() })
}

/// The median of [`REPEATS`] runs, the first one left out.
fn median(mut run: impl FnMut() -> Result<Duration, DeviceError>) -> Result<f64, DeviceError> {
    run()?;
    let mut times = (0..REPEATS).map(|_| Ok(run()?.as_secs_f64())).collect::<Result<Vec<_>, DeviceError>>()?;
    times.sort_by(f64::total_cmp);
    Ok(times[REPEATS / 2])
}

fn upload(context: &Context) -> Result<f64, DeviceError> {
    let bytes = allowed(context, UPLOAD_BYTES);
    let target = buffer(context, "tune: upload", bytes, wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_DST)?;
    let source = vec![7_u8; bytes as usize];
    let took = median(|| {
        let began = Instant::now();
        let uploader = Uploader::new(context, bytes);
        uploader.write_long(&target, 0, &source)?;
        uploader.finish()?;
        Ok(began.elapsed())
    })?;
    Ok(bytes as f64 / took / 1e9)
}

fn read(context: &Context) -> Result<f64, DeviceError> {
    let bytes = allowed(context, READ_BYTES);
    let usage = wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_DST;
    let [from, out] = [buffer(context, "tune: from", bytes, usage)?, buffer(context, "tune: out", 256, usage)?];
    let kernel = Kernel::new(context, READ, &[&from, &out]);
    // 16 bytes a load, READS loads an invocation, 256 of them a workgroup.
    let groups = (bytes / (16 * READS * 256)).min(65_535) as u32;
    let took = kernel.once(context, groups, 9)? - kernel.once(context, groups, 1)?;
    Ok(8.0 * f64::from(groups) * (16 * READS * 256) as f64 / took.max(1e-9) / 1e9)
}

/// A pipeline over buffers.
struct Kernel {
    pipeline: wgpu::ComputePipeline,
    group: wgpu::BindGroup,
}

impl Kernel {
    fn new(context: &Context, text: &str, buffers: &[&wgpu::Buffer]) -> Self {
        let source = wgpu::ShaderSource::Wgsl(text.into());
        let module = context.device.create_shader_module(wgpu::ShaderModuleDescriptor { label: Some("tune"), source });
        let pipeline = context.device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
            label: Some("tune"),
            layout: None,
            module: &module,
            entry_point: Some("main"),
            compilation_options: wgpu::PipelineCompilationOptions::default(),
            cache: None,
        });
        let entries: Vec<_> = (buffers.iter().zip(0..))
            .map(|(buffer, binding)| wgpu::BindGroupEntry { binding, resource: buffer.as_entire_binding() })
            .collect();
        let layout = pipeline.get_bind_group_layout(0);
        let group = context.device.create_bind_group(&wgpu::BindGroupDescriptor {
            label: Some("tune"),
            layout: &layout,
            entries: &entries,
        });
        Self { pipeline, group }
    }

    /// Median seconds of a submission with `n` dispatches of `groups` workgroups.
    fn once(&self, context: &Context, groups: u32, n: u32) -> Result<f64, DeviceError> {
        median(|| {
            let began = Instant::now();
            let mut encoder = context.device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
            {
                let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
                pass.set_pipeline(&self.pipeline);
                pass.set_bind_group(0, &self.group, &[]);
                (0..n).for_each(|_| pass.dispatch_workgroups(groups, 1, 1));
            }
            let commands = encoder.finish();
            wait(context, context.queue.submit([commands]))?;
            Ok(began.elapsed())
        })
    }
}

fn dispatch(context: &Context) -> Result<f64, DeviceError> {
    let usage = wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_DST;
    let words = buffer(context, "tune: words", 64 * 64 * 4, usage)?;
    let kernel = Kernel::new(context, BUMP, &[&words]);
    let [few, many] = DISPATCHES;
    let took = kernel.once(context, 64, many)? - kernel.once(context, 64, few)?;
    Ok(1e6 * took.max(0.0) / f64::from(many - few))
}

fn readback(context: &Context) -> Result<f64, DeviceError> {
    let bytes = 256;
    let usage = wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_SRC;
    let source = buffer(context, "tune: result", bytes, usage)?;
    let landing = buffer(context, "tune: landing", bytes, wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST)?;
    let took = median(|| {
        let began = Instant::now();
        let mut encoder = context.device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        encoder.copy_buffer_to_buffer(&source, 0, &landing, 0, bytes);
        let index = context.queue.submit([encoder.finish()]);
        landing.slice(..).map_async(wgpu::MapMode::Read, |_| {});
        wait(context, index)?;
        let took = began.elapsed();
        landing.unmap();
        Ok(took)
    })?;
    Ok(1e6 * took)
}
