// Parameters and buffers of `prefill_encode` over the draft layer's two inputs.
struct Params {
    // vec4 in `weights`: norms of the following row and of the hidden row, the column field or NONE
    norm: u32,
    other_norm: u32,
    field: u32,
    // vec4 from row to row of both sources
    stride: u32,
    // columns of each half
    width: u32,
    eps: f32,
    // 1: the hidden half first
    hidden_first: u32,
    layer: u32,
}

@group(0) @binding(2) var<uniform> params: Params;
@group(0) @binding(3) var<storage, read> weights: array<vec4<u32>>;
@group(0) @binding(4) var<storage, read> source: array<vec4<f32>>; // [rows, stride]
@group(0) @binding(5) var<storage, read> hidden: array<vec4<f32>>; // [1 + rows, stride]
@group(0) @binding(6) var<storage, read_write> acts: array<vec4<u32>>;
@group(0) @binding(7) var<storage, read_write> act_scale: array<f32>;

override COLS: u32; // padded width, a multiple of 32
