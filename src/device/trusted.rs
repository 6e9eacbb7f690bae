//! What wgpu calls unsafe, behind safe functions: shaders without run-time checks, experimental features, the
//! pipeline cache. No other file of the device has `unsafe`.
#![allow(unsafe_code, reason = "wgpu marks these calls unsafe; each block says what makes it true")]

use std::borrow::Cow;

/// A shader module of our own registry without bounds checks and loop counters (13 % on an H200).
///
/// Only for texts of `shaders/`. Those of prefill are tested against guard words in every variant, those of decode so far
/// by what they compute, block by block.
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
