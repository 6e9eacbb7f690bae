//! The adapters of this machine as plain data, for `doctor`.

use super::super::trusted;
use super::selftest::{self, Kinds, Wanted};
use super::{adapter, memory};
use crate::knobs::Activations;

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
    /// What it tells of its memory, and what experts may have of it.
    pub memory: String,
    /// Whether its kernels compute what they should; software rasterisers are not asked.
    pub self_test: String,
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
    let heap = trusted::largest_heap(adapter);
    Description {
        memory: memory::told(heap),
        self_test: self_test(&info, adapter),
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

/// The usual model's kernels, int8 activations, all experts resident.
fn self_test(info: &wgpu::AdapterInfo, adapter: &wgpu::Adapter) -> String {
    if info.device_type == wgpu::DeviceType::Cpu {
        return "not run on a software rasteriser".into();
    }
    let wanted = Wanted { activations: Activations::Int8, full: true, skip: &[] };
    let tested = (adapter::Found::from(adapter.clone()).open(None, true))
        .and_then(|mut context| selftest::run(&mut context, &Kinds::usual(), &wanted));
    match tested {
        Ok(report) => {
            let without =
                report.without_matrix_units.map_or_else(String::new, |why| format!("; no matrix units: {why}"));
            format!("passed, {} pipelines in {} ms{without}", report.pipelines, report.took.as_millis())
        }
        Err(why) => why.to_string(),
    }
}
