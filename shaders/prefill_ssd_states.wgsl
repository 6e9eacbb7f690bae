// What each chunk adds to the scan's state: s[p, n] = sum_r e^{l_last - l_r} dt_r x_r[p] B_r[n]
//
// xbc     f32 [rows, CHANNELS]: x | B | C after the convolution
// steps   vec4<f32> [rows, HEADS]: dt, l and the rest of l (`prefill_ssd_steps`)
// states  f32 [chunks, HEADS, P, N]
// A workgroup has 64 by 64 of one head's state in one chunk, an invocation 4 by 4; rows in order, f32.
// `model.md` §1.4, prefill.

@group(0) @binding(2) var<storage, read> xbc: array<vec4<f32>>; // [rows, CHANNELS / 4]
@group(0) @binding(3) var<storage, read> steps: array<vec4<f32>>; // [rows, HEADS]
@group(0) @binding(4) var<storage, read_write> states: array<f32>; // [chunks, HEADS, P, N]

override HEADS: u32;
override P: u32; // channels of a head, a multiple of 4
override GROUPS: u32;
override N: u32; // d_state, a multiple of 4

const CHUNK: u32 = 64u; // positions

var<workgroup> xs: array<vec4<f32>, 256>; // [16, 64]
var<workgroup> bs: array<vec4<f32>, 256>; // [16, 64]

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) me: u32) {
    let blocks = (N + 63u) / 64u;
    let p_first = id.x / blocks * 64u;
    let n_first = id.x % blocks * 64u;
    let head = id.z;
    let first = id.y * CHUNK;
    if (!live() || first >= flight.rows) {
        return;
    }
    let channels = (HEADS * P + 2u * GROUPS * N) / 4u;
    let b_at = (HEADS * P + head / (HEADS / GROUPS) * N) / 4u;
    let end = min(first + CHUNK, flight.rows);
    let last = steps[(end - 1u) * HEADS + head];
    let tx = me % 16u;
    let ty = me / 16u;
    var sum = array<vec4<f32>, 4>();
    for (var k = first; k < end; k += 16u) {
        let r = k + ty;
        var left = vec4<f32>();
        var right = vec4<f32>();
        if (r < end) {
            let step = steps[r * HEADS + head];
            if (p_first + 4u * tx < P) {
                let fade = exp((last.y - step.y) + (last.z - step.z)) * step.x;
                left = fade * xbc[r * channels + (head * P + p_first) / 4u + tx];
            }
            if (n_first + 4u * tx < N) {
                right = xbc[r * channels + b_at + n_first / 4u + tx];
            }
        }
        xs[me] = left;
        bs[me] = right;
        workgroupBarrier();
        for (var i = 0u; i < 16u; i++) {
            let x = xs[16u * i + ty];
            let b = bs[16u * i + tx];
            sum[0] += x.x * b;
            sum[1] += x.y * b;
            sum[2] += x.z * b;
            sum[3] += x.w * b;
        }
        workgroupBarrier();
    }
    for (var i = 0u; i < 4u; i++) {
        for (var j = 0u; j < 4u; j++) {
            let p = p_first + 4u * ty + i;
            let n = n_first + 4u * tx + j;
            if (p < P && n < N) {
                states[((id.y * HEADS + head) * P + p) * N + n] = sum[i][j];
            }
        }
    }
}
