//! Pipelines, buffers and dispatches for the kernels of a pass, straight on wgpu.
#![allow(dead_code, unreachable_pub, clippy::print_stdout)]

use std::fs;
use std::path::PathBuf;

use wgpu::naga;

/// Written to outputs first: a value that nobody wrote is found.
pub const UNWRITTEN: u32 = 0x7fc0_dead;
/// Behind every buffer.
const GUARD: [u32; 64] = [0xfeed_0bad; 64];

pub struct Gpu {
    pub device: wgpu::Device,
    pub queue: wgpu::Queue,
    pub name: String,
    pub coop: bool,
    /// Whether shaders go without bounds checks, as the device builds them.
    pub trusted: bool,
}

#[derive(Clone)]
pub struct Buffer {
    pub raw: wgpu::Buffer,
    pub words: usize,
}

pub struct Pipeline {
    raw: wgpu::ComputePipeline,
    layout: wgpu::BindGroupLayout,
    bindings: Vec<u32>,
    name: String,
}

/// Text of a shader: the common files, then the kernel.
pub fn source(pieces: &[&str]) -> String {
    let root = std::env::var("RIPARIAN_SHADERS")
        .map_or_else(|_| PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("shaders"), PathBuf::from);
    let mut text = String::new();
    for piece in pieces {
        let path = [root.join(format!("common/{piece}.wgsl")), root.join(format!("{piece}.wgsl"))]
            .into_iter()
            .find(|p| p.exists());
        text.push_str(&fs::read_to_string(path.unwrap_or_else(|| panic!("no shader {piece}"))).expect("readable"));
        text.push('\n');
    }
    text
}

impl Gpu {
    pub fn open() -> Gpu {
        let instance = wgpu::Instance::new(wgpu::InstanceDescriptor {
            flags: wgpu::InstanceFlags::empty(),
            ..wgpu::InstanceDescriptor::new_without_display_handle()
        });
        let adapters = pollster::block_on(instance.enumerate_adapters(wgpu::Backends::VULKAN));
        let adapter = adapters
            .into_iter()
            .min_by_key(|a| u32::from(a.get_info().device_type == wgpu::DeviceType::Cpu))
            .expect("a Vulkan adapter: install mesa-vulkan-drivers");
        let wanted = wgpu::Features::SUBGROUP
            | wgpu::Features::TIMESTAMP_QUERY
            | wgpu::Features::SHADER_F16
            | wgpu::Features::EXPERIMENTAL_COOPERATIVE_MATRIX;
        let features = adapter.features() & wanted;
        let coop = features.contains(wgpu::Features::EXPERIMENTAL_COOPERATIVE_MATRIX);
        #[allow(unsafe_code)]
        let experimental = if coop {
            // SAFETY: only cooperative matrices are used, in shapes that the adapter offers
            unsafe { wgpu::ExperimentalFeatures::enabled() }
        } else {
            wgpu::ExperimentalFeatures::disabled()
        };
        let (device, queue) = pollster::block_on(adapter.request_device(&wgpu::DeviceDescriptor {
            required_features: features,
            required_limits: adapter.limits(),
            experimental_features: experimental,
            ..Default::default()
        }))
        .expect("a device");
        if coop {
            println!("{:?}", adapter.cooperative_matrix_properties());
        }
        let name = format!("{} {}", adapter.get_info().name, adapter.get_info().driver_info);
        Gpu { device, queue, name, coop, trusted: true }
    }

    pub fn pipeline(&self, pieces: &[&str], overrides: &[(&str, f64)]) -> Pipeline {
        let text = source(pieces);
        self.pipeline_of(pieces[pieces.len() - 1], &text, overrides, self.trusted)
    }

    pub fn pipeline_of(&self, name: &str, text: &str, overrides: &[(&str, f64)], trusted: bool) -> Pipeline {
        let module =
            naga::front::wgsl::parse_str(text).unwrap_or_else(|e| panic!("{name}: {}", e.emit_to_string(text)));
        let mut entries: Vec<wgpu::BindGroupLayoutEntry> = (module.global_variables.iter())
            .filter_map(|(_, v)| {
                let at = v.binding.as_ref()?;
                let ty = match v.space {
                    naga::AddressSpace::Uniform => wgpu::BufferBindingType::Uniform,
                    naga::AddressSpace::Storage { access } => {
                        wgpu::BufferBindingType::Storage { read_only: !access.contains(naga::StorageAccess::STORE) }
                    }
                    _ => return None,
                };
                Some(wgpu::BindGroupLayoutEntry {
                    binding: at.binding,
                    visibility: wgpu::ShaderStages::COMPUTE,
                    ty: wgpu::BindingType::Buffer { ty, has_dynamic_offset: false, min_binding_size: None },
                    count: None,
                })
            })
            .collect();
        entries.sort_by_key(|e| e.binding);
        let storage = entries
            .iter()
            .filter(|e| matches!(e.ty, wgpu::BindingType::Buffer { ty: wgpu::BufferBindingType::Storage { .. }, .. }))
            .count();
        assert!(storage <= 10, "{name} has {storage} storage buffers");
        let layout = self
            .device
            .create_bind_group_layout(&wgpu::BindGroupLayoutDescriptor { label: Some(name), entries: &entries });
        let constants: Vec<(&str, f64)> = overrides
            .iter()
            .copied()
            .filter(|(key, _)| module.overrides.iter().any(|(_, o)| o.name.as_deref() == Some(key)))
            .collect();
        let descriptor =
            wgpu::ShaderModuleDescriptor { label: Some(name), source: wgpu::ShaderSource::Wgsl(text.into()) };
        let shader = if trusted {
            #[allow(unsafe_code)]
            // SAFETY: the kernel bounds its own indices
            unsafe {
                self.device.create_shader_module_trusted(descriptor, wgpu::ShaderRuntimeChecks::unchecked())
            }
        } else {
            self.device.create_shader_module(descriptor)
        };
        let raw = self.device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
            label: Some(name),
            layout: Some(&self.device.create_pipeline_layout(&wgpu::PipelineLayoutDescriptor {
                label: None,
                bind_group_layouts: &[Some(&layout)],
                immediate_size: 0,
            })),
            module: &shader,
            entry_point: Some("main"),
            compilation_options: wgpu::PipelineCompilationOptions {
                constants: &constants,
                zero_initialize_workgroup_memory: false,
            },
            cache: None,
        });
        Pipeline { raw, layout, bindings: entries.iter().map(|e| e.binding).collect(), name: name.into() }
    }

    pub fn buffer(&self, words: &[u32]) -> Buffer {
        let raw = self.device.create_buffer(&wgpu::BufferDescriptor {
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
        self.queue.write_buffer(&raw, 0, bytemuck::cast_slice(&all));
        self.queue.submit([]);
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
        assert_eq!(buffers.len(), pipeline.bindings.len(), "{}", pipeline.name);
        let entries: Vec<_> = (pipeline.bindings.iter().zip(buffers))
            .map(|(at, b)| wgpu::BindGroupEntry { binding: *at, resource: b.raw.as_entire_binding() })
            .collect();
        self.device.create_bind_group(&wgpu::BindGroupDescriptor {
            label: None,
            layout: &pipeline.layout,
            entries: &entries,
        })
    }

    pub fn run(&self, pipeline: &Pipeline, buffers: &[&Buffer], grid: [u32; 3]) {
        self.repeat(pipeline, &self.bind(pipeline, buffers), grid, 1);
    }

    pub fn repeat(&self, pipeline: &Pipeline, group: &wgpu::BindGroup, grid: [u32; 3], times: u32) {
        let mut encoder = self.device.create_command_encoder(&Default::default());
        {
            let mut pass = encoder.begin_compute_pass(&Default::default());
            pass.set_pipeline(&pipeline.raw);
            pass.set_bind_group(0, group, &[]);
            for _ in 0..times {
                pass.dispatch_workgroups(grid[0], grid[1], grid[2]);
            }
        }
        self.queue.submit([encoder.finish()]);
    }

    pub fn wait(&self) {
        self.device.poll(wgpu::PollType::wait_indefinitely()).expect("the device answers");
    }

    pub fn read(&self, buffer: &Buffer) -> Vec<u32> {
        let size = buffer.raw.size();
        let staging = self.device.create_buffer(&wgpu::BufferDescriptor {
            label: None,
            size,
            usage: wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST,
            mapped_at_creation: false,
        });
        let mut encoder = self.device.create_command_encoder(&Default::default());
        encoder.copy_buffer_to_buffer(&buffer.raw, 0, &staging, 0, size);
        self.queue.submit([encoder.finish()]);
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
