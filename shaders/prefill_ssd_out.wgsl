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
    pad: vec3<u32>,
}

@group(0) @binding(2) var<uniform> params: Params;
@group(0) @binding(3) var<storage, read> vectors: array<f32>;
@group(0) @binding(4) var<storage, read> xbc: array<f32>; // [rows, CHANNELS]
@group(0) @binding(5) var<storage, read> steps: array<vec4<f32>>; // [rows, HEADS]
@group(0) @binding(6) var<storage, read> states: array<f32>; // [chunks, HEADS, P, N]
@group(0) @binding(7) var<storage, read_write> o: array<f32>; // [rows, HEADS * P]

override HEADS: u32;
override P: u32; // channels of a head
override GROUPS: u32;
override N: u32; // d_state

const CHUNK: u32 = 64u; // positions

var<workgroup> left: array<vec4<f32>, 256>; // [16, 64]
var<workgroup> right: array<vec4<f32>, 256>; // [16, 64]
var<workgroup> pairs: array<vec4<f32>, 1088>; // [r, t] of the chunk, 17 vec4 from r to r
var<workgroup> step_of: array<vec4<f32>, 64>;

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) me: u32) {
    let p_first = id.x * 64u;
    let head = id.y;
    let first = id.z * CHUNK;
    if (!live() || first >= flight.rows) {
        return;
    }
    let channels = HEADS * P + 2u * GROUPS * N;
    let b_at = HEADS * P + head / (HEADS / GROUPS) * N;
    let c_at = b_at + GROUPS * N;
    let rows = min(CHUNK, flight.rows - first);
    let tx = me % 16u;
    let ty = me / 16u;
    if (me < 64u) {
        step_of[me] = steps[(first + min(me, rows - 1u)) * HEADS + head];
    }

    // C_t . B_r
    var dots = array<vec4<f32>, 4>();
    for (var k = 0u; k < N; k += 16u) {
        for (var i = me; i < 1024u; i += 256u) {
            let t = i / 16u;
            let n = k + i % 16u;
            var b = 0.0;
            var c = 0.0;
            if (t < rows && n < N) {
                b = xbc[(first + t) * channels + b_at + n];
                c = xbc[(first + t) * channels + c_at + n];
            }
            left[i % 16u * 16u + t / 4u][t % 4u] = c;
            right[i % 16u * 16u + t / 4u][t % 4u] = b;
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
        for (var i = me; i < 1024u; i += 256u) {
            let r = k + i / 64u;
            let p = p_first + i % 64u;
            var x = 0.0;
            if (r < rows && p < P) {
                x = xbc[(first + r) * channels + head * P + p];
            }
            right[i / 4u][i % 4u] = x;
        }
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
        for (var i = me; i < 1024u; i += 256u) {
            let row = i / 16u;
            let n = k + i % 16u;
            var c = 0.0;
            var s = 0.0;
            if (n < N) {
                if (row < rows) {
                    c = xbc[(first + row) * channels + c_at + n];
                }
                if (p_first + row < P) {
                    s = states[((id.z * HEADS + head) * P + p_first + row) * N + n];
                }
            }
            left[i % 16u * 16u + row / 4u][row % 4u] = c;
            right[i % 16u * 16u + row / 4u][row % 4u] = s;
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
            for (var j = 0u; j < 4u; j++) {
                let p = p_first + 4u * tx + j;
                if (p < P) {
                    let x = xbc[(first + t) * channels + head * P + p];
                    o[(first + t) * (HEADS * P) + head * P + p] = fade * past[i][j] + sum[i][j] + skip * x;
                }
            }
        }
    }
}
