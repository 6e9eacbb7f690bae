// out = acts . W^T over the rows of a pass, int8 activations.
//
// acts       int8 [rows, COLS], column order;  act_scale  f32 [rows, COLS / 32]
// A workgroup computes 64 rows by 64 columns, an invocation 4 by 4; a group of 32 columns a step, through workgroup
// memory: exact in i32, then times both scales into the f32 sum, groups in order. `runtime.md` §3a, int8.

@group(0) @binding(5) var<storage, read> acts: array<vec4<u32>>; // [rows, COLS / 16]

const TILE_ROWS: u32 = 64u;

var<workgroup> xs: array<vec4<u32>, 128>; // [8, 64]: four codes a word
var<workgroup> ws: array<vec4<u32>, 128>; // [8, 64]
var<workgroup> xd: array<vec4<f32>, 16>; // [64]
var<workgroup> wd: array<vec4<f32>, 16>; // [64]

fn dot4(x: u32, w: vec4<u32>) -> vec4<i32> {
    return vec4<i32>(dot4I8Packed(x, w.x), dot4I8Packed(x, w.y), dot4I8Packed(x, w.z), dot4I8Packed(x, w.w));
}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) me: u32) {
    let tile = tile_at(group.y);
    if (!(live() || own_miss(params.layer)) || tile.count == 0u) {
        return;
    }
    let column = 64u * group.x;
    let base = tile.place + params.base;
    let side = 4u * tile.place + params.side;
    let tx = me % 16u;
    let ty = me / 16u;
    // half of the invocations bring 16 columns of a row of activations each, the others of a row of weights
    let r = me % 64u;
    let half = me / 64u % 2u;
    let row = tile.first + min(r, tile.count - 1u);
    let n = min(column + r, params.rows - 1u);
    var codes: vec4<u32>;
    var scale: f32;
    if (me < 128u) {
        codes = acts[row * (COLS / 16u) + half];
        scale = act_scale[row * (COLS / 32u)];
    } else {
        codes = codes16(base, n, half);
        scale = group_scale(side + n * SIDE_WORDS, 0u);
    }
    var sum = array<vec4<f32>, 4>();
    for (var k = 0u; k < COLS; k += 32u) {
        if (me < 128u) {
            for (var i = 0u; i < 4u; i++) {
                xs[(4u * half + i) * 16u + r / 4u][r % 4u] = codes[i];
            }
            xd[r / 4u][r % 4u] = scale;
        } else {
            for (var i = 0u; i < 4u; i++) {
                ws[(4u * half + i) * 16u + r / 4u][r % 4u] = codes[i];
            }
            wd[r / 4u][r % 4u] = scale;
        }
        workgroupBarrier();
        // the next step's loads are in flight while this one is multiplied
        let next = min(k + 32u, COLS - 32u);
        if (me < 128u) {
            codes = acts[row * (COLS / 16u) + next / 16u + half];
            scale = act_scale[row * (COLS / 32u) + next / 32u];
        } else {
            codes = codes16(base, n, next / 16u + half);
            scale = group_scale(side + n * SIDE_WORDS, next / 32u);
        }
        var inner = array<vec4<i32>, 4>();
        for (var i = 0u; i < 8u; i++) {
            let x = xs[i * 16u + ty];
            let w = ws[i * 16u + tx];
            inner[0] += dot4(x.x, w);
            inner[1] += dot4(x.y, w);
            inner[2] += dot4(x.z, w);
            inner[3] += dot4(x.w, w);
        }
        let x = xd[ty];
        let w = wd[tx];
        sum[0] += vec4<f32>(inner[0]) * (x.x * w);
        sum[1] += vec4<f32>(inner[1]) * (x.y * w);
        sum[2] += vec4<f32>(inner[2]) * (x.z * w);
        sum[3] += vec4<f32>(inner[3]) * (x.w * w);
        workgroupBarrier();
    }
    for (var j = 0u; j < 4u; j++) {
        let to = column + 4u * tx + j;
        if (to < params.rows) {
            let of_row = row_scale(side + to * SIDE_WORDS);
            for (var i = 0u; i < 4u; i++) {
                if (4u * ty + i < tile.count) {
                    put(tile.first + 4u * ty + i, to, sum[i][j] * of_row);
                }
            }
        }
    }
}
