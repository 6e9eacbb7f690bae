//! The adapters of this machine as plain data, for `doctor`.

use super::adapter;

/// What an adapter offers.
#[derive(Clone, Debug)]
pub struct Description {
    /// `backend:index`, as `CMF_NEMO_DEVICE` takes it.
    pub id: String,
    /// Its name.
    pub name: String,
    /// Discrete, integrated, virtual, or a software rasteriser.
    pub kind: &'static str,
    /// The driver and its version.
    pub driver: String,
    /// Lanes of a subgroup, fewest and most.
    pub subgroup: [u32; 2],
    /// Features we make use of, where it has them.
    pub features: Vec<&'static str>,
    /// Limits that decide what fits, by name.
    pub limits: Vec<(&'static str, u64)>,
}

/// All of them.
#[must_use]
pub fn describe() -> Vec<Description> {
    adapter::adapters().iter().map(|(id, adapter)| description(id, adapter)).collect()
}

fn description(id: &str, adapter: &wgpu::Adapter) -> Description {
    let info = adapter.get_info();
    let (offered, limits) = (adapter.features(), adapter.limits());
    let kind = match info.device_type {
        wgpu::DeviceType::DiscreteGpu => "discrete GPU",
        wgpu::DeviceType::IntegratedGpu => "integrated GPU",
        wgpu::DeviceType::VirtualGpu => "virtual GPU",
        wgpu::DeviceType::Cpu => "software rasteriser, used only when it is named",
        wgpu::DeviceType::Other => "of unknown kind",
    };
    let used = [
        ("subgroups", wgpu::Features::SUBGROUP),
        ("f16", wgpu::Features::SHADER_F16),
        ("cooperative matrices", wgpu::Features::EXPERIMENTAL_COOPERATIVE_MATRIX),
        ("timestamps", wgpu::Features::TIMESTAMP_QUERY),
        ("timestamps inside passes", wgpu::Features::TIMESTAMP_QUERY_INSIDE_PASSES),
        ("pipeline cache", wgpu::Features::PIPELINE_CACHE),
    ];
    Description {
        id: id.to_owned(),
        name: info.name,
        kind,
        driver: format!("{} {}", info.driver, info.driver_info).trim().to_owned(),
        subgroup: [info.subgroup_min_size, info.subgroup_max_size],
        features: used.into_iter().filter(|(_, feature)| offered.contains(*feature)).map(|(name, _)| name).collect(),
        limits: vec![
            ("buffer bytes", limits.max_buffer_size),
            ("binding bytes", limits.max_storage_buffer_binding_size),
            ("storage buffers a stage", u64::from(limits.max_storage_buffers_per_shader_stage)),
            ("workgroup bytes", u64::from(limits.max_compute_workgroup_storage_size)),
            ("workgroup invocations", u64::from(limits.max_compute_invocations_per_workgroup)),
            ("workgroups a dimension", u64::from(limits.max_compute_workgroups_per_dimension)),
        ],
    }
}
