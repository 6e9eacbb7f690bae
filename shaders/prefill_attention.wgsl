// Causal attention of the rows of a pass over all keys and values so far, 64 rows and 64 keys at a time.
//
// q      f32 [rows, stride]
// kv     f32 [positions, 2, KV_HEADS * D]: keys, then values
// out    SPLITS = 1: f32 [rows, HEADS * D]; else f32 [rows, HEADS, SPLITS, D + 2]: weighted values, then the maximum
//        and the sum of exponentials, as `attn_merge` takes them
// A workgroup has 64 rows of one head in one part of the keys. Online softmax, tiles of keys in order, f32.
// `model.md` §1.3.

struct Params {
    // vec4 from row to row of q, and where q begins in it
    stride: u32,
    offset: u32,
    scale: f32,
    pad: u32,
}

@group(0) @binding(2) var<uniform> params: Params;
@group(0) @binding(3) var<storage, read> q: array<vec4<f32>>; // [rows, stride / 4]
@group(0) @binding(4) var<storage, read> kv: array<vec4<f32>>; // [positions, 2, KV_HEADS * D / 4]
@group(0) @binding(5) var<storage, read_write> out: array<f32>;

override D: u32; // a multiple of 4, at most 128
override HEADS: u32;
override KV_HEADS: u32;
override SPLITS: u32;

const LOWEST: f32 = -3.0e38;

var<workgroup> left: array<vec4<f32>, 256>; // [16, 64]
var<workgroup> right: array<vec4<f32>, 512>; // [16, 64], or values [16, 128]
var<workgroup> score: array<vec4<f32>, 1088>; // [key, row], 17 vec4 from key to key
var<workgroup> share: array<f32, 256>; // [4, 64]: each quarter of the keys
var<workgroup> top: array<f32, 64>;
var<workgroup> total: array<f32, 64>;
var<workgroup> fade: array<f32, 64>;

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) me: u32) {
    let first = 64u * id.y;
    let head = id.x;
    let part = id.z;
    if (!live() || first >= flight.rows) {
        return;
    }
    let rows = min(64u, flight.rows - first);
    let kv_head = head / (HEADS / KV_HEADS);
    let length = control.position + first + rows;
    let per = (length + SPLITS * 64u - 1u) / (SPLITS * 64u) * 64u;
    let begin = part * per;
    let end = min(begin + per, length);
    let tx = me % 16u;
    let ty = me / 16u;
    let row_of = me % 64u;
    let quarter = me / 64u;
    // 4 rows by 4 columns, and again 64 columns on
    var low = array<vec4<f32>, 4>();
    var high = array<vec4<f32>, 4>();
    if (me < 64u) {
        top[me] = LOWEST;
        total[me] = 0.0;
    }
    for (var key = begin; key < end; key += 64u) {
        var dots = array<vec4<f32>, 4>();
        for (var k = 0u; k < D; k += 16u) {
            // neighbours take neighbouring rows: their writes fall into different banks
            let d = k / 4u + quarter;
            var a = vec4<f32>();
            var b = vec4<f32>();
            if (d < D / 4u && row_of < rows) {
                a = q[(first + row_of) * params.stride + params.offset + head * (D / 4u) + d] * params.scale;
            }
            if (d < D / 4u && key + row_of < end) {
                b = kv[((key + row_of) * 2u * KV_HEADS + kv_head) * (D / 4u) + d];
            }
            for (var i = 0u; i < 4u; i++) {
                left[(4u * quarter + i) * 16u + row_of / 4u][row_of % 4u] = a[i];
                right[(4u * quarter + i) * 16u + row_of / 4u][row_of % 4u] = b[i];
            }
            workgroupBarrier();
            for (var i = 0u; i < 16u; i++) {
                let a = left[16u * i + tx];
                let b = right[16u * i + ty];
                dots[0] += b.x * a;
                dots[1] += b.y * a;
                dots[2] += b.z * a;
                dots[3] += b.w * a;
            }
            workgroupBarrier();
        }
        for (var i = 0u; i < 4u; i++) {
            let j = key + 4u * ty + i;
            let row = vec4<u32>(control.position + first + 4u * tx) + vec4<u32>(0u, 1u, 2u, 3u);
            let seen = (vec4<u32>(j) <= row) & vec4<bool>(j < end);
            score[17u * (4u * ty + i) + tx] = select(vec4<f32>(LOWEST), dots[i], seen);
        }
        workgroupBarrier();
        var most = LOWEST;
        for (var j = 16u * quarter; j < 16u * quarter + 16u; j++) {
            most = max(most, score[17u * j + row_of / 4u][row_of % 4u]);
        }
        share[64u * quarter + row_of] = most;
        workgroupBarrier();
        let before = top[row_of];
        most = max(max(share[row_of], share[64u + row_of]), max(share[128u + row_of], share[192u + row_of]));
        most = max(most, before);
        workgroupBarrier();
        var sum = 0.0;
        for (var j = 16u * quarter; j < 16u * quarter + 16u; j++) {
            let s = score[17u * j + row_of / 4u][row_of % 4u];
            // a row that has seen no key yet has no maximum
            let e = select(0.0, exp(s - most), s > LOWEST);
            score[17u * j + row_of / 4u][row_of % 4u] = e;
            sum += e;
        }
        share[64u * quarter + row_of] = sum;
        workgroupBarrier();
        if (quarter == 0u) {
            fade[row_of] = exp(before - most);
            top[row_of] = most;
            total[row_of] = total[row_of] * fade[row_of]
                + ((share[row_of] + share[64u + row_of]) + (share[128u + row_of] + share[192u + row_of]));
        }
        workgroupBarrier();
        for (var i = 0u; i < 4u; i++) {
            low[i] *= fade[4u * ty + i];
            high[i] *= fade[4u * ty + i];
        }
        for (var k = 0u; k < 64u; k += 16u) {
            for (var i = me; i < 512u; i += 256u) {
                let j = key + k + i / 32u;
                let d = i % 32u;
                var v = vec4<f32>();
                if (j < end && d < D / 4u) {
                    v = kv[(j * 2u * KV_HEADS + KV_HEADS + kv_head) * (D / 4u) + d];
                }
                right[i] = v;
            }
            workgroupBarrier();
            for (var i = 0u; i < 16u; i++) {
                let s = score[17u * (k + i) + ty];
                let a = right[32u * i + tx];
                let b = right[32u * i + 16u + tx];
                low[0] += s.x * a;
                low[1] += s.y * a;
                low[2] += s.z * a;
                low[3] += s.w * a;
                high[0] += s.x * b;
                high[1] += s.y * b;
                high[2] += s.z * b;
                high[3] += s.w * b;
            }
            workgroupBarrier();
        }
    }
    workgroupBarrier();
    for (var i = 0u; i < 4u; i++) {
        let r = 4u * ty + i;
        if (r < rows) {
            let at = (first + r) * HEADS + head;
            let divisor = select(1.0, total[r], SPLITS == 1u);
            for (var j = 0u; j < 8u; j++) {
                let d = 64u * (j / 4u) + 4u * tx + j % 4u;
                if (d < D) {
                    var y = low[i][j % 4u];
                    if (j >= 4u) {
                        y = high[i][j % 4u];
                    }
                    if (SPLITS == 1u) {
                        out[at * D + d] = y / divisor;
                    } else {
                        out[(at * SPLITS + part) * (D + 2u) + d] = y;
                    }
                }
            }
            if (SPLITS > 1u && tx == 0u) {
                out[(at * SPLITS + part) * (D + 2u) + D] = top[r];
                out[(at * SPLITS + part) * (D + 2u) + D + 1u] = total[r];
            }
        }
    }
}
