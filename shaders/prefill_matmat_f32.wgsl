// out = acts . W^T over the rows of a pass, f32 activations.
//
// acts  f32 [rows, COLS]
// A workgroup computes 64 rows by 64 columns, an invocation 4 by 4; 32 columns of the sum a step, through workgroup
// memory. Sums in f32, columns in order; q4tp's group scale is on the weight, q8_2f's row scale on the sum.
// `runtime.md` §3a, f32; `cmf.md` §5.

@group(0) @binding(5) var<storage, read> acts: array<vec4<u32>>; // [rows, COLS / 4]

const TILE_ROWS: u32 = 64u;

var<workgroup> xs: array<vec4<f32>, 512>; // [32, 64]
var<workgroup> ws: array<vec4<f32>, 512>; // [32, 64]

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
    var sum = array<vec4<f32>, 4>();
    for (var k = 0u; k < COLS; k += 32u) {
        for (var t = me; t < 512u; t += 256u) {
            // neighbours take neighbouring rows: their writes fall into different banks
            let r = t % 64u;
            let c = t / 64u;
            let row = tile.first + min(r, tile.count - 1u);
            let x = bitcast<vec4<f32>>(acts[row * (COLS / 4u) + k / 4u + c]);
            let n = min(column + r, params.rows - 1u);
            let w = columns4(base, n, k / 4u + c) * group_scale(side + n * SIDE_WORDS, k / 32u);
            for (var i = 0u; i < 4u; i++) {
                xs[(4u * c + i) * 16u + r / 4u][r % 4u] = x[i];
                ws[(4u * c + i) * 16u + r / 4u][r % 4u] = w[i];
            }
        }
        workgroupBarrier();
        for (var i = 0u; i < 32u; i++) {
            let x = xs[i * 16u + ty];
            let w = ws[i * 16u + tx];
            sum[0] += x.x * w;
            sum[1] += x.y * w;
            sum[2] += x.z * w;
            sum[3] += x.w * w;
        }
        workgroupBarrier();
    }
    for (var j = 0u; j < 4u; j++) {
        let n = column + 4u * tx + j;
        if (n < params.rows) {
            let scale = row_scale(side + n * SIDE_WORDS);
            for (var i = 0u; i < 4u; i++) {
                if (4u * ty + i < tile.count) {
                    put(tile.first + 4u * ty + i, n, sum[i][j] * scale);
                }
            }
        }
    }
}
