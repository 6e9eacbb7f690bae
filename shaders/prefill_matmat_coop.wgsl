// out = acts . W^T over the rows of a pass, through matrix units (16x16x16, f16 in, f32 out).
//
// acts  f16 [rows, COLS]: what the mode's activations stand for, over the row's own power of two;  act_scale  f32 [rows]
// A workgroup of four subgroups of 32 computes 64 rows by 128 columns, a subgroup 32 by 64; 32 columns of the sum a
// step, through workgroup memory, the next step's loads in flight meanwhile. Sums in f32. All workgroup variables are
// of whole 16 bytes: a matrix load or store takes its address without the rest.
// In int8 mode the codes are exact and code times scale is rounded to f16 once: 2^-11, where the int8 step itself is
// 2^-8 of the group's largest. `runtime.md` §3a, matrix units.

@group(0) @binding(5) var<storage, read> acts: array<vec4<f16>>; // [rows, COLS / 4]

const TILE_ROWS: u32 = 64u;
const PITCH: u32 = 10u; // vec4 from row to row of a tile: 32 columns and 8 that keep banks apart

var<workgroup> xt: array<vec4<f16>, 640>; // [64, PITCH]
var<workgroup> wt: array<vec4<f16>, 1280>; // [128, PITCH]
var<workgroup> cells: array<vec4<f32>, 256>; // [4, 16, 16]
var<workgroup> here: vec4<u32>; // a tile

fn hold_x(at: u32, v: vec4<f16>) {
    xt[at] = v;
}

fn hold_w(at: u32, v: vec4<f16>) {
    wt[at] = v;
}

fn spill(team: u32, lane: u32, tile: Tile, column: u32, side: u32, i: u32, j: u32) {
    let row = 32u * (team / 2u) + 16u * i + lane / 2u;
    let first = column + 64u * (team % 2u) + 16u * j + 8u * (lane % 2u);
    if (row < tile.count) {
        let scale = act_scale[tile.first + row];
        for (var c = 0u; c < 8u; c++) {
            if (first + c < params.rows) {
                let y = cells[64u * team + 2u * lane + c / 4u][c % 4u];
                put(tile.first + row, first + c, y * scale * sum_scale(side + (first + c) * SIDE_WORDS));
            }
        }
    }
}

@compute @workgroup_size(128)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(local_invocation_index) me: u32,
    @builtin(subgroup_id) team: u32,
    @builtin(subgroup_invocation_id) lane: u32,
) {
    // through workgroup memory, so that every compiler sees one way for all
    if (me == 0u) {
        let mine = tile_at(group.y);
        here = vec4<u32>(mine.first, select(0u, mine.count, live() || own_miss(params.layer)), mine.place, 0u);
    }
    workgroupBarrier();
    let tile = Tile(here.x, here.y, here.z);
    if (tile.count == 0u) {
        return;
    }
    let column = 128u * group.x;
    let base = tile.place + params.base;
    let side = 4u * tile.place + params.side;

    // an invocation brings 16 columns of one row of activations and of two of weights
    let r = me / 2u;
    let half = me % 2u;
    let to = r * PITCH + 4u * half;
    let start = (tile.first + min(r, tile.count - 1u)) * (COLS / 4u) + 4u * half;
    let n = min(column + r, params.rows - 1u);
    let n_side = side + n * SIDE_WORDS;
    let ladder = ladder_of(n_side);
    let other = min(column + 64u + r, params.rows - 1u);
    let other_side = side + other * SIDE_WORDS;
    let other_ladder = ladder_of(other_side);

    var w = fetch(base, n_side, ladder, n, 0u, half);
    var v = fetch(base, other_side, other_ladder, other, 0u, half);
    var x0 = acts[start];
    var x1 = acts[start + 1u];
    var x2 = acts[start + 2u];
    var x3 = acts[start + 3u];

    var c00 = coop_mat16x16<f32, C>();
    var c01 = coop_mat16x16<f32, C>();
    var c02 = coop_mat16x16<f32, C>();
    var c03 = coop_mat16x16<f32, C>();
    var c10 = coop_mat16x16<f32, C>();
    var c11 = coop_mat16x16<f32, C>();
    var c12 = coop_mat16x16<f32, C>();
    var c13 = coop_mat16x16<f32, C>();
    let xa = 32u * (team / 2u) * PITCH;
    let wa = 64u * (team % 2u) * PITCH;

    for (var k = 0u; k < COLS; k += 32u) {
        hold_x(to, x0);
        hold_x(to + 1u, x1);
        hold_x(to + 2u, x2);
        hold_x(to + 3u, x3);
        unfold(w, half, to);
        unfold(v, half, to + 64u * PITCH);
        workgroupBarrier();
        if (k + 32u < COLS) {
            let next = start + (k + 32u) / 4u;
            w = fetch(base, n_side, ladder, n, k + 32u, half);
            v = fetch(base, other_side, other_ladder, other, k + 32u, half);
            x0 = acts[next];
            x1 = acts[next + 1u];
            x2 = acts[next + 2u];
            x3 = acts[next + 3u];
        }
        for (var s = 0u; s < 8u; s += 4u) {
            let a0 = coopLoadT<coop_mat16x16<f16, A>>(&xt[xa + s], PITCH);
            let a1 = coopLoadT<coop_mat16x16<f16, A>>(&xt[xa + 16u * PITCH + s], PITCH);
            let b0 = coopLoad<coop_mat16x16<f16, B>>(&wt[wa + s], PITCH);
            let b1 = coopLoad<coop_mat16x16<f16, B>>(&wt[wa + 16u * PITCH + s], PITCH);
            let b2 = coopLoad<coop_mat16x16<f16, B>>(&wt[wa + 32u * PITCH + s], PITCH);
            let b3 = coopLoad<coop_mat16x16<f16, B>>(&wt[wa + 48u * PITCH + s], PITCH);
            c00 = coopMultiplyAdd(a0, b0, c00);
            c01 = coopMultiplyAdd(a0, b1, c01);
            c02 = coopMultiplyAdd(a0, b2, c02);
            c03 = coopMultiplyAdd(a0, b3, c03);
            c10 = coopMultiplyAdd(a1, b0, c10);
            c11 = coopMultiplyAdd(a1, b1, c11);
            c12 = coopMultiplyAdd(a1, b2, c12);
            c13 = coopMultiplyAdd(a1, b3, c13);
        }
        workgroupBarrier();
    }

    coopStoreT(c00, &cells[64u * team], 4u);
    workgroupBarrier();
    spill(team, lane, tile, column, side, 0u, 0u);
    workgroupBarrier();
    coopStoreT(c01, &cells[64u * team], 4u);
    workgroupBarrier();
    spill(team, lane, tile, column, side, 0u, 1u);
    workgroupBarrier();
    coopStoreT(c02, &cells[64u * team], 4u);
    workgroupBarrier();
    spill(team, lane, tile, column, side, 0u, 2u);
    workgroupBarrier();
    coopStoreT(c03, &cells[64u * team], 4u);
    workgroupBarrier();
    spill(team, lane, tile, column, side, 0u, 3u);
    workgroupBarrier();
    coopStoreT(c10, &cells[64u * team], 4u);
    workgroupBarrier();
    spill(team, lane, tile, column, side, 1u, 0u);
    workgroupBarrier();
    coopStoreT(c11, &cells[64u * team], 4u);
    workgroupBarrier();
    spill(team, lane, tile, column, side, 1u, 1u);
    workgroupBarrier();
    coopStoreT(c12, &cells[64u * team], 4u);
    workgroupBarrier();
    spill(team, lane, tile, column, side, 1u, 2u);
    workgroupBarrier();
    coopStoreT(c13, &cells[64u * team], 4u);
    workgroupBarrier();
    spill(team, lane, tile, column, side, 1u, 3u);
}
