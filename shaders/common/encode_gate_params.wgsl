// Parameters and buffers of `prefill_encode` over gated rows.
struct Params {
    // vec4 in `weights` of the group norm's weight, and of the column field or NONE
    norm: u32,
    field: u32,
    // floats from row to row of `gate`
    gate_stride: u32,
    // channels
    width: u32,
    eps: f32,
    layer: u32,
    pad: vec2<u32>,
}

@group(0) @binding(2) var<uniform> params: Params;
@group(0) @binding(3) var<storage, read> weights: array<vec4<u32>>;
@group(0) @binding(4) var<storage, read> plain: array<f32>; // [rows, width]
@group(0) @binding(5) var<storage, read> gate: array<f32>; // [rows, gate_stride]
@group(0) @binding(6) var<storage, read_write> acts: array<vec4<u32>>;
@group(0) @binding(7) var<storage, read_write> act_scale: array<f32>;

override COLS: u32; // padded width, a multiple of 32
