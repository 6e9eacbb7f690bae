// Rows as the draft layer reads them: the residual through a norm, as it is, or less its mean (an RMS norm of which is a
// LayerNorm without bias).
//
// x       f32 [rows, COLS], padded with zeros
// before  f32 [1, COLS]: a row that was kept from the batch before and comes first, where asked for
// out     f32 [rows, COLS], or [1 + rows, COLS] with the row from before
// A workgroup makes one row. Sums in f32, a tree over the workgroup. `model.md` §1.2, §2.1.

struct Params {
    // vec4 in `weights`
    norm: u32,
    // AS_IS, NORMED or CENTRED
    how: u32,
    // 1: the row from before comes first
    before: u32,
    pad: u32,
}

const AS_IS: u32 = 0u;
const NORMED: u32 = 1u;
const CENTRED: u32 = 2u;

@group(0) @binding(2) var<uniform> params: Params;
@group(0) @binding(3) var<storage, read> weights: array<vec4<u32>>;
@group(0) @binding(4) var<storage, read> x: array<vec4<f32>>; // [rows, COLS / 4]
@group(0) @binding(5) var<storage, read> before: array<vec4<f32>>; // [1, COLS / 4]
@group(0) @binding(6) var<storage, read_write> out: array<vec4<f32>>; // [rows, COLS / 4]

override COLS: u32;
override HIDDEN: u32; // columns that count
override EPS: f32;

@compute @workgroup_size(WG)
fn main(ids: Ids) {
    let row = ids.group.x - min(params.before, ids.group.x);
    if (!live() || row >= flight.rows) {
        return;
    }
    if (params.before == 1u && ids.group.x == 0u) {
        for (var i = thread(ids); i < COLS / 4u; i += WG) {
            out[i] = before[i];
        }
        return;
    }
    var sum = 0.0;
    for (var i = thread(ids); i < COLS / 4u; i += WG) {
        let v = x[row * (COLS / 4u) + i];
        sum += select(dot(v, v), v.x + v.y + v.z + v.w, params.how == CENTRED);
    }
    let mean = wide_sum(ids, sum) / f32(HIDDEN);
    for (var i = thread(ids); i < COLS / 4u; i += WG) {
        var v = x[row * (COLS / 4u) + i];
        if (params.how == NORMED) {
            v = v * inverseSqrt(mean + EPS) * bitcast<vec4<f32>>(weights[params.norm + i]);
        } else if (params.how == CENTRED) {
            let column = vec4<u32>(4u * i) + vec4<u32>(0u, 1u, 2u, 3u);
            v = select(vec4<f32>(), v - mean, column < vec4<u32>(HIDDEN));
        }
        out[ids.group.x * (COLS / 4u) + i] = v;
    }
}
