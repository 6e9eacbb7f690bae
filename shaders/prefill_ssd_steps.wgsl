// Step sizes of the scan and their sums over each chunk: dt_t = clamp(softplus(d_t + bias)), l_t = sum_{r <= t} dt_r A
//
// proj   f32 [rows, PROJ]: z | x | B | C | dt
// steps  vec4<f32> [rows, HEADS]: dt, l, what l lost in rounding, 0
// An invocation walks one chunk of one head. l is carried in two floats, so that a difference of two of them is as
// good as the sum over the segment. `model.md` §1.4 step 4 and prefill.

struct Params {
    // words in `vectors`
    a_log: u32,
    dt_bias: u32,
    dt_min: f32,
    dt_max: f32,
}

@group(0) @binding(2) var<uniform> params: Params;
@group(0) @binding(3) var<storage, read> vectors: array<f32>;
@group(0) @binding(4) var<storage, read> proj: array<f32>; // [rows, PROJ]
@group(0) @binding(5) var<storage, read_write> steps: array<vec4<f32>>; // [rows, HEADS]

override HEADS: u32;
override DT_AT: u32; // where dt begins in a row of `proj`
override PROJ: u32; // floats from row to row of `proj`

const CHUNK: u32 = 64u; // positions

fn softplus(x: f32) -> f32 {
    let e = exp(-abs(x));
    // ln(1 + e) where 1 + e would lose e
    return max(x, 0.0) + select(log(1.0 + e), e * (1.0 - 0.5 * e), e < 1e-3);
}

@compute @workgroup_size(WG)
fn main(ids: Ids) {
    let head = ids.group.x * WG + thread(ids);
    let first = ids.group.y * CHUNK;
    if (!live() || head >= HEADS) {
        return;
    }
    let a = -exp(vectors[params.a_log + head]);
    let bias = vectors[params.dt_bias + head];
    var high = 0.0;
    var low = 0.0;
    for (var t = first; t < min(first + CHUNK, flight.rows); t++) {
        let dt = clamp(softplus(proj[t * PROJ + DT_AT + head] + bias), params.dt_min, params.dt_max);
        let term = dt * a;
        let sum = high + term;
        let back = sum - high;
        low += (high - (sum - back)) + (term - back);
        high = sum;
        steps[t * HEADS + head] = vec4<f32>(dt, high, low, 0.0);
    }
}
