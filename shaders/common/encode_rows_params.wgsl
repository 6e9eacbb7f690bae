// Parameters and buffers of `prefill_encode` over f32 rows.
struct Params {
    // vec4 in `weights` of the norm, or NONE
    norm: u32,
    // vec4 of the column field, inside the place where experts are, or NONE
    field: u32,
    // vec4 from place to place
    place: u32,
    // vec4 from row to row of `source`, and where in a row its columns begin
    stride: u32,
    offset: u32,
    // columns that count
    width: u32,
    eps: f32,
    // MoE layer whose own miss does not halt it, or NONE
    layer: u32,
    // IN_ORDER, BY_PICK or SORTED, and the word of `list` where sorted rows begin
    listed: u32,
    order: u32,
    pad: vec2<u32>,
}

@group(0) @binding(2) var<uniform> params: Params;
@group(0) @binding(3) var<storage, read> weights: array<vec4<u32>>;
@group(0) @binding(4) var<storage, read> source: array<vec4<f32>>; // [rows, stride]
@group(0) @binding(5) var<storage, read> list: array<u32>;
@group(0) @binding(6) var<storage, read_write> acts: array<vec4<u32>>;
@group(0) @binding(7) var<storage, read_write> act_scale: array<f32>;

override COLS: u32; // padded width, a multiple of 32
override TOP_K: u32;
