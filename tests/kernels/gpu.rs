//! Pipelines of the registry, buffers between guard words, and dispatches.
#![allow(dead_code, unreachable_pub)]

use std::cell::RefCell;
use std::sync::Arc;

use riparian::device::kernels::{Kernel, Variant};
use riparian::device::pass::PassChoice;
use riparian::device::wgpu::pipelines::{Key, Pipeline, Pipelines};
use riparian::device::wgpu::{Context, find};
use riparian::knobs::DeviceChoice;

/// Written to outputs first: a value that nobody wrote is found.
pub const UNWRITTEN: u32 = 0x7fc0_dead;
/// Behind every buffer.
const GUARD: [u32; 64] = [0xfeed_0bad; 64];

pub struct Gpu {
    pub context: Context,
    pipelines: RefCell<Pipelines>,
}

#[derive(Clone)]
pub struct Buffer {
    pub raw: wgpu::Buffer,
    pub words: usize,
}

impl Gpu {
    /// The adapter that `RIPARIAN_TEST_ADAPTER` names, lavapipe otherwise.
    pub fn open() -> Gpu {
        let name = std::env::var("RIPARIAN_TEST_ADAPTER").unwrap_or_else(|_| "llvmpipe".into());
        let context = find(&DeviceChoice::Adapter(name)).expect("an adapter for the tests").open(None, true);
        let context = context.expect("a device");
        let pipelines = RefCell::new(Pipelines::new(&context));
        Gpu { context, pipelines }
    }

    pub fn pass(&self, kernel: &Kernel, choice: PassChoice, numbers: &[(&'static str, usize)]) -> Arc<Pipeline> {
        self.pipeline(kernel.pass_variant(&choice), numbers)
    }

    /// A variant with those of the overrides that its text names.
    pub fn pipeline(&self, variant: Variant, numbers: &[(&'static str, usize)]) -> Arc<Pipeline> {
        let text = variant.source();
        let named = |name: &str| text.contains(&format!("override {name}:"));
        let numbers = numbers.iter().filter(|(name, _)| named(name)).map(|(name, n)| (*name, *n as u32)).collect();
        let key = Key { variant, numbers, floats: Vec::new() };
        self.pipelines.borrow_mut().get(&self.context, &key).expect("a pipeline")
    }

    pub fn buffer(&self, words: &[u32]) -> Buffer {
        let raw = self.context.device.create_buffer(&wgpu::BufferDescriptor {
            label: None,
            size: 4 * (words.len().div_ceil(4) * 4 + GUARD.len()) as u64,
            usage: wgpu::BufferUsages::STORAGE
                | wgpu::BufferUsages::UNIFORM
                | wgpu::BufferUsages::COPY_DST
                | wgpu::BufferUsages::COPY_SRC,
            mapped_at_creation: false,
        });
        let mut all = words.to_vec();
        all.resize(words.len().div_ceil(4) * 4, GUARD[0]);
        all.extend(GUARD);
        self.context.queue.write_buffer(&raw, 0, bytemuck::cast_slice(&all));
        self.context.queue.submit([]);
        Buffer { raw, words: words.len() }
    }

    pub fn floats(&self, floats: &[f32]) -> Buffer {
        self.buffer(bytemuck::cast_slice(floats))
    }

    /// A buffer of `words` that nobody has written yet.
    pub fn empty(&self, words: usize) -> Buffer {
        self.buffer(&vec![UNWRITTEN; words])
    }

    pub fn bind(&self, pipeline: &Pipeline, buffers: &[&Buffer]) -> wgpu::BindGroup {
        assert_eq!(buffers.len(), pipeline.bindings.len(), "{}", pipeline.kernel.name);
        let entries: Vec<_> = (buffers.iter().zip(0..))
            .map(|(b, binding)| wgpu::BindGroupEntry { binding, resource: b.raw.as_entire_binding() })
            .collect();
        self.context.device.create_bind_group(&wgpu::BindGroupDescriptor {
            label: None,
            layout: &pipeline.layout,
            entries: &entries,
        })
    }

    pub fn run(&self, pipeline: &Pipeline, buffers: &[&Buffer], grid: [u32; 3]) {
        self.repeat(pipeline, &self.bind(pipeline, buffers), grid, 1);
    }

    pub fn repeat(&self, pipeline: &Pipeline, group: &wgpu::BindGroup, grid: [u32; 3], times: u32) {
        let mut encoder = self.context.device.create_command_encoder(&Default::default());
        {
            let mut pass = encoder.begin_compute_pass(&Default::default());
            pass.set_pipeline(&pipeline.pipeline);
            pass.set_bind_group(0, group, &[]);
            for _ in 0..times {
                pass.dispatch_workgroups(grid[0], grid[1], grid[2]);
            }
        }
        self.context.queue.submit([encoder.finish()]);
    }

    pub fn wait(&self) {
        self.context.device.poll(wgpu::PollType::wait_indefinitely()).expect("the device answers");
    }

    pub fn read(&self, buffer: &Buffer) -> Vec<u32> {
        let size = buffer.raw.size();
        let staging = self.context.device.create_buffer(&wgpu::BufferDescriptor {
            label: None,
            size,
            usage: wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST,
            mapped_at_creation: false,
        });
        let mut encoder = self.context.device.create_command_encoder(&Default::default());
        encoder.copy_buffer_to_buffer(&buffer.raw, 0, &staging, 0, size);
        self.context.queue.submit([encoder.finish()]);
        staging.map_async(wgpu::MapMode::Read, .., |r| r.expect("mapped"));
        self.wait();
        let all: Vec<u32> = bytemuck::cast_slice(&staging.get_mapped_range(..).expect("mapped")).to_vec();
        let from = all.len() - GUARD.len();
        assert_eq!(all[from..], GUARD, "a kernel wrote behind its buffer");
        all[..buffer.words].to_vec()
    }

    pub fn read_floats(&self, buffer: &Buffer) -> Vec<f32> {
        self.read(buffer).into_iter().map(f32::from_bits).collect()
    }
}

/// How far a kernel may be from its twin.
#[derive(Clone, Copy)]
pub struct Tolerance {
    pub nmse: f64,
    /// Of the largest value wanted.
    pub max_abs: f64,
    pub why: &'static str,
}

#[track_caller]
pub fn close(what: &str, got: &[f32], want: &[f32], tolerance: Tolerance) -> (f64, f64) {
    assert_eq!(got.len(), want.len(), "{what}");
    let peak = want.iter().fold(0.0f64, |m, v| m.max(f64::from(v.abs()))).max(1e-30);
    let (mut error, mut power, mut largest) = (0.0f64, 0.0f64, (0.0f64, 0));
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        assert!(g.is_finite(), "{what}: {g} ({:#x}) at {i}, wanted {w}", g.to_bits());
        let d = f64::from(*g) - f64::from(*w);
        error += d * d;
        power += f64::from(*w) * f64::from(*w);
        if d.abs() > largest.0 {
            largest = (d.abs(), i);
        }
    }
    let nmse = error / power.max(1e-30);
    assert!(
        nmse <= tolerance.nmse && largest.0 <= tolerance.max_abs * peak,
        "{what}: nmse {nmse:.2e} (allowed {:.2e}), largest {:.2e} of {peak:.2e} at {} ({} for {}; allowed {:.1e} of the peak): {}",
        tolerance.nmse,
        largest.0,
        largest.1,
        got[largest.1],
        want[largest.1],
        tolerance.max_abs,
        tolerance.why
    );
    (nmse, largest.0 / peak)
}

pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    pub fn bits(&mut self) -> u32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 32) as u32
    }

    pub fn unit(&mut self) -> f32 {
        self.bits() as f32 / 4_294_967_296.0
    }

    /// Roughly normal.
    pub fn normal(&mut self) -> f32 {
        (0..6).map(|_| self.unit() - 0.5).sum::<f32>() * std::f32::consts::SQRT_2
    }

    pub fn normals(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.normal()).collect()
    }
}
