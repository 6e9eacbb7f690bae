//! What wgpu calls unsafe, behind safe functions: shaders without run-time checks, experimental features, the
//! pipeline cache, the driver's account of its memory. No other file of the device has `unsafe`.
#![allow(unsafe_code, reason = "wgpu marks these calls unsafe; each block says what makes it true")]

use std::borrow::Cow;

/// A shader module of our own registry without bounds checks and loop counters (13 % on an H200).
///
/// Only for texts of `shaders/`. Those of prefill and drafts are tested one by one between guard words, in every variant; all
/// that decode a model, block by block and whole, with guard words behind every buffer of the device.
pub(super) fn module(device: &wgpu::Device, label: &str, text: String) -> wgpu::ShaderModule {
    let descriptor =
        wgpu::ShaderModuleDescriptor { label: Some(label), source: wgpu::ShaderSource::Wgsl(Cow::Owned(text)) };
    // SAFETY: every text comes from the crate's registry. Its buffers are sized by the same geometry as its loops,
    // and `contract` refuses a geometry they are not made for; all its loops have finite bounds.
    unsafe { device.create_shader_module_trusted(descriptor, wgpu::ShaderRuntimeChecks::unchecked()) }
}

/// Leave to use features that wgpu calls experimental: cooperative matrices.
pub(super) fn experimental() -> wgpu::ExperimentalFeatures {
    // SAFETY: the token only says that their rough edges are known: cooperative matrices are used in the one shape and
    // format that was compared with the plain tiles on the card, and `CMF_NEMO_COOP=0` turns them off.
    unsafe { wgpu::ExperimentalFeatures::enabled() }
}

/// A pipeline cache that begins with `data`, which an earlier run of this very program on this very driver wrote.
pub(super) fn pipeline_cache(device: &wgpu::Device, data: Option<&[u8]>) -> wgpu::PipelineCache {
    let descriptor = wgpu::PipelineCacheDescriptor { label: Some("kernels"), data, fallback: true };
    // SAFETY: the caller read `data` from the file that `PipelineCache::get_data` filled under the key wgpu derives
    // from adapter and driver; wgpu checks its header and starts empty where it does not match.
    unsafe { device.create_pipeline_cache(&descriptor) }
}

/// Bytes of the largest device-local heap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heap {
    /// All of them.
    pub bytes: u64,
    /// What this process may still take, where the driver tells (`VK_EXT_memory_budget`).
    pub free_bytes: Option<u64>,
}

/// The largest device-local heap of an adapter; `None` where the backend has no such question.
#[cfg(any(target_os = "linux", target_os = "android", windows))]
pub(in crate::device) fn largest_heap(adapter: &wgpu::Adapter) -> Option<Heap> {
    use ash::vk;
    // SAFETY: the guard is only read, and dropped before the adapter, which outlives this call.
    let hal = unsafe { adapter.as_hal::<wgpu::hal::api::Vulkan>() }?;
    let capabilities = hal.physical_device_capabilities();
    let instance = hal.shared_instance();
    if instance.instance_api_version().min(capabilities.properties().api_version) < vk::API_VERSION_1_1 {
        return None;
    }
    let known = capabilities.supports_extension(vk::EXT_MEMORY_BUDGET_NAME);
    let mut budget = vk::PhysicalDeviceMemoryBudgetPropertiesEXT::default();
    let mut asked = vk::PhysicalDeviceMemoryProperties2::default();
    if known {
        asked = asked.push_next(&mut budget);
    }
    let device = hal.raw_physical_device();
    // SAFETY: Vulkan 1.1 has the function, checked above; the device is the instance's; the extension's struct is chained
    // only where the device has the extension, and lives longer than `asked`.
    unsafe { instance.raw_instance().get_physical_device_memory_properties2(device, &mut asked) };
    let heaps = asked.memory_properties;
    let largest = (0..heaps.memory_heap_count as usize)
        .filter(|i| heaps.memory_heaps[*i].flags.contains(vk::MemoryHeapFlags::DEVICE_LOCAL))
        .max_by_key(|i| heaps.memory_heaps[*i].size)?;
    let free = budget.heap_budget[largest].saturating_sub(budget.heap_usage[largest]);
    let bytes = heaps.memory_heaps[largest].size;
    Some(Heap { bytes, free_bytes: (known && budget.heap_budget[largest] > 0).then_some(free.min(bytes)) })
}

/// The backends here have no such question.
#[cfg(not(any(target_os = "linux", target_os = "android", windows)))]
pub(in crate::device) fn largest_heap(_adapter: &wgpu::Adapter) -> Option<Heap> {
    None
}
