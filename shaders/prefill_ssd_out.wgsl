// The scan's outputs, chunk by chunk:
// o_t = e^{l_t} s_in C_t + sum_{r <= t} e^{l_t - l_r} (C_t . B_r) dt_r x_r + D x_t
//
// xbc     f32 [rows, CHANNELS]: x | B | C after the convolution
// steps   vec4<f32> [rows, HEADS]: dt, l and the rest of l
// states  f32 [chunks, HEADS, P, N]: the state before each chunk
// o       f32 [rows, HEADS * P]
// A workgroup has 64 channels of one head in one chunk, an invocation 4 positions by 4; sums in f32, rows and N in
// order. `model.md` §1.4, prefill.

struct Params {
    // word in `vectors`
    d_skip: u32,
    pad_a: u32,
    pad_b: u32,
    pad_c: u32,
}

@group(0) @binding(2) var<uniform> params: Params;
@group(0) @binding(3) var<storage, read> vectors: array<f32>;
@group(0) @binding(4) var<storage, read> xbc: array<vec4<f32>>; // [rows, CHANNELS / 4]
@group(0) @binding(5) var<storage, read> steps: array<vec4<f32>>; // [rows, HEADS]
@group(0) @binding(6) var<storage, read> states: array<vec4<f32>>; // [chunks, HEADS, P, N / 4]
@group(0) @binding(7) var<storage, read_write> o: array<vec4<f32>>; // [rows, HEADS * P / 4]

override HEADS: u32;
override P: u32; // channels of a head, a multiple of 4
override GROUPS: u32;
override N: u32; // d_state, a multiple of 4

const CHUNK: u32 = 64u; // positions

var<workgroup> left: array<vec4<f32>, 256>; // [16, 64]
var<workgroup> right: array<vec4<f32>, 256>; // [16, 64]
var<workgroup> pairs: array<vec4<f32>, 1088>; // [r, t] of the chunk, 17 vec4 from r to r
var<workgroup> step_of: array<vec4<f32>, 64>;

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) me: u32) {
    let p_first = id.x * 64u;
    let head = id.z;
    let first = id.y * CHUNK;
    if (!live() || first >= flight.rows) {
        return;
    }
    let channels = (HEADS * P + 2u * GROUPS * N) / 4u;
    let b_at = (HEADS * P + head / (HEADS / GROUPS) * N) / 4u;
    let c_at = b_at + GROUPS * N / 4u;
    let x_at = (head * P + p_first) / 4u;
    let rows = min(CHUNK, flight.rows - first);
    let tx = me % 16u;
    let ty = me / 16u;
    // neighbours take neighbouring rows: their writes fall into different banks
    let row_of = me % 64u;
    let quarter = me / 64u;
    if (me < 64u) {
        step_of[me] = steps[(first + min(me, rows - 1u)) * HEADS + head];
    }

    // C_t . B_r
    var dots = array<vec4<f32>, 4>();
    for (var k = 0u; k < N; k += 16u) {
        let n = k / 4u + quarter;
        var b4 = vec4<f32>();
        var c4 = vec4<f32>();
        if (row_of < rows && n < N / 4u) {
            b4 = xbc[(first + row_of) * channels + b_at + n];
            c4 = xbc[(first + row_of) * channels + c_at + n];
        }
        for (var i = 0u; i < 4u; i++) {
            left[(4u * quarter + i) * 16u + row_of / 4u][row_of % 4u] = c4[i];
            right[(4u * quarter + i) * 16u + row_of / 4u][row_of % 4u] = b4[i];
        }
        workgroupBarrier();
        for (var i = 0u; i < 16u; i++) {
            let b = right[16u * i + ty];
            let c = left[16u * i + tx];
            dots[0] += b.x * c;
            dots[1] += b.y * c;
            dots[2] += b.z * c;
            dots[3] += b.w * c;
        }
        workgroupBarrier();
    }
    for (var i = 0u; i < 4u; i++) {
        let r = 4u * ty + i;
        let origin = step_of[r];
        var weight = vec4<f32>();
        for (var j = 0u; j < 4u; j++) {
            let t = 4u * tx + j;
            if (r <= t && t < rows) {
                let to = step_of[t];
                weight[j] = exp((to.y - origin.y) + (to.z - origin.z)) * origin.x;
            }
        }
        pairs[17u * r + tx] = select(vec4<f32>(), dots[i] * weight, weight != vec4<f32>());
    }
    workgroupBarrier();

    // within the chunk
    var sum = array<vec4<f32>, 4>();
    for (var k = 0u; k < rows; k += 16u) {
        var x4 = vec4<f32>();
        if (k + ty < rows && p_first + 4u * tx < P) {
            x4 = xbc[(first + k + ty) * channels + x_at + tx];
        }
        right[me] = x4;
        workgroupBarrier();
        for (var i = 0u; i < 16u; i++) {
            let m = pairs[17u * (k + i) + ty];
            let x = right[16u * i + tx];
            sum[0] += m.x * x;
            sum[1] += m.y * x;
            sum[2] += m.z * x;
            sum[3] += m.w * x;
        }
        workgroupBarrier();
    }

    // from the state before it
    var past = array<vec4<f32>, 4>();
    for (var k = 0u; k < N; k += 16u) {
        let n = k / 4u + quarter;
        var c4 = vec4<f32>();
        var s4 = vec4<f32>();
        if (n < N / 4u && row_of < rows) {
            c4 = xbc[(first + row_of) * channels + c_at + n];
        }
        if (n < N / 4u && p_first + row_of < P) {
            s4 = states[((id.y * HEADS + head) * P + p_first + row_of) * (N / 4u) + n];
        }
        for (var i = 0u; i < 4u; i++) {
            left[(4u * quarter + i) * 16u + row_of / 4u][row_of % 4u] = c4[i];
            right[(4u * quarter + i) * 16u + row_of / 4u][row_of % 4u] = s4[i];
        }
        workgroupBarrier();
        for (var i = 0u; i < 16u; i++) {
            let c = left[16u * i + ty];
            let s = right[16u * i + tx];
            past[0] += c.x * s;
            past[1] += c.y * s;
            past[2] += c.z * s;
            past[3] += c.w * s;
        }
        workgroupBarrier();
    }
    let skip = vectors[params.d_skip + head];
    for (var i = 0u; i < 4u; i++) {
        let t = 4u * ty + i;
        if (t < rows) {
            let step = step_of[t];
            let fade = exp(step.y + step.z);
            if (p_first + 4u * tx < P) {
                let x = xbc[(first + t) * channels + x_at + tx];
                o[(first + t) * (HEADS * P / 4u) + x_at + tx] = fade * past[i] + sum[i] + skip * x;
            }
        }
    }
}
