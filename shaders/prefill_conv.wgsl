// The causal convolution over the rows of a pass: c_t[j] = silu(bias[j] + sum_i w[j, i] * u_{t-K+1+i}[j])
//
// proj  f32 [rows, PROJ]: z | x | B | C | dt
// ring  f32 [RING, channels]: inputs before the pass by position modulo RING
// xbc   f32 [rows, channels]
// An invocation has one channel of one row. Taps in order, f32. `model.md` §1.4 step 2.

struct Params {
    // words in `vectors`
    conv: u32,
    conv_bias: u32,
    pad: vec2<u32>,
}

@group(0) @binding(2) var<uniform> params: Params;
@group(0) @binding(3) var<storage, read> vectors: array<f32>;
@group(0) @binding(4) var<storage, read> proj: array<f32>; // [rows, PROJ]
@group(0) @binding(5) var<storage, read> ring: array<f32>; // [RING, CHANNELS]
@group(0) @binding(6) var<storage, read_write> xbc: array<f32>; // [rows, CHANNELS]

override INNER: u32;
override CHANNELS: u32;
override TAPS: u32;
override RING: u32;
override PROJ: u32; // floats from row to row of `proj`

fn input(channel: u32, row: i32) -> f32 {
    if (row >= 0) {
        return proj[u32(row) * PROJ + INNER + channel];
    }
    let position = i32(control.position) + row;
    if (position < 0) {
        return 0.0;
    }
    return ring[u32(position) % RING * CHANNELS + channel];
}

@compute @workgroup_size(WG)
fn main(ids: Ids) {
    let channel = ids.group.x * WG + thread(ids);
    let row = ids.group.y;
    if (!live() || row >= flight.rows || channel >= CHANNELS) {
        return;
    }
    var sum = vectors[params.conv_bias + channel];
    for (var i = 0u; i < TAPS; i++) {
        sum += vectors[params.conv + channel * TAPS + i] * input(channel, i32(row + i) - i32(TAPS - 1u));
    }
    xbc[row * CHANNELS + channel] = sum / (1.0 + exp(-sum));
}
