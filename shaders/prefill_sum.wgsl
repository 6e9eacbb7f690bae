// x += sum over picks w * y + shared: the closing sum of an MoE layer over the rows of a pass.
//
// routes   [rows, TOP_K]: expert, place, weight, 0
// made     f32 [rows, TOP_K, stride]: the picks' outputs, from here or from the host
// shared   f32 [rows, stride]
// x        f32 [rows, stride]
// Picks in order, f32, then the shared expert, then the residual. With `alone` x becomes the routed sum and nothing
// else: the latent width goes through a projection first. `model.md` §1.5 steps 6, 7.

struct Params {
    // floats from row to row of all three, and how many count
    stride: u32,
    width: u32,
    // 1: x = the routed sum
    alone: u32,
    // 0: every weight is one
    weighted: u32,
}

@group(0) @binding(2) var<uniform> params: Params;
@group(0) @binding(3) var<storage, read> routes: array<vec4<u32>>; // [rows, TOP_K]
@group(0) @binding(4) var<storage, read> made: array<f32>; // [rows, TOP_K, stride]
@group(0) @binding(5) var<storage, read> shared_out: array<f32>; // [rows, stride]
@group(0) @binding(6) var<storage, read_write> x: array<f32>; // [rows, stride]

override TOP_K: u32;

@compute @workgroup_size(WG)
fn main(ids: Ids) {
    let c = ids.group.x * WG + thread(ids);
    let row = ids.group.y;
    if (!live() || row >= flight.rows || c >= params.width) {
        return;
    }
    var sum = 0.0;
    for (var k = 0u; k < TOP_K; k++) {
        let pick = row * TOP_K + k;
        var w = 1.0;
        if (params.weighted == 1u) {
            w = bitcast<f32>(routes[pick].z);
        }
        sum += w * made[pick * params.stride + c];
    }
    let at = row * params.stride + c;
    if (params.alone == 1u) {
        x[at] = sum;
    } else {
        x[at] += sum + shared_out[at];
    }
}
