// x += W . a: the projection that ends a block, with the residual. How `a` is made of the block's rows is in `source16`
// (gated group norm for Mamba, as it is for attention and dense blocks).
//
// inner  f32 [rows, COLS]
// x      f32 [rows, stride]
// A workgroup computes BLOCK rows for ROWS activation rows. Sums: lanes in steps, f32, then the team (`products`).
// `model.md` §1.3, §1.4 steps 7 and 8, §1.6.

struct Params {
    // vec4 of the group norm's weight
    norm: u32,
    rows: u32,
    base: u32,
    side: u32,
    field: u32,
    stride: u32,
    pad: vec2<u32>,
}

@group(0) @binding(2) var<uniform> params: Params;
@group(0) @binding(3) var<storage, read> weights: array<vec4<u32>>;
@group(0) @binding(4) var<storage, read> words: array<u32>;
@group(0) @binding(5) var<storage, read> inner: array<vec4<f32>>; // [rows, COLS / 4]
@group(0) @binding(6) var<storage, read> squares_of: array<f32>; // [rows, CELLS]
@group(0) @binding(7) var<storage, read_write> x: array<f32>; // [rows, stride]

override BLOCK: u32;

fn inner16(row: u32, unit: u32) -> Sixteen {
    let at = row * (COLS / 4u) + 4u * unit;
    return Sixteen(inner[at], inner[at + 1u], inner[at + 2u], inner[at + 3u]);
}

// 16 columns of a row, times the matrix's column field where it has one; past the rows and columns, the last ones again.
fn source(row: u32, unit: u32) -> Sixteen {
    let last = min(unit, COLS / 16u - 1u);
    let v = source16(min(row, flight.rows - 1u), last);
    if (params.field == NONE) {
        return v;
    }
    return times(v, floats16(params.field, last));
}

@compute @workgroup_size(WG)
fn main(ids: Ids) {
    let first = ids.group.y * ROWS;
    let block = ids.group.x * BLOCK;
    // the first units are asked for before the weights, which they would have to wait for otherwise
    let near = source(first, thread(ids));
    let near_cell = first_cell(ids, first);
    var held = ahead(ids, params.base, block + team(ids) * WIDE, params.rows - 1u);
    prepare(ids, first, near_cell);
    workgroupBarrier();
    for (var r = 0u; r < ROWS; r++) {
        for (var t = 0u; t < COLS / 16u; t += WG) {
            let unit = t + thread(ids);
            var v = near;
            if (r > 0u || t > 0u) {
                v = source(first + r, unit);
            }
            in_encode(ids, r, unit, finished(r, min(unit, COLS / 16u - 1u), v), unit < COLS / 16u);
        }
    }
    workgroupBarrier();
    if (!live()) {
        return;
    }
    for (var t = 0u; t < BLOCK; t += teams(ids) * WIDE) {
        let row = block + t + team(ids) * WIDE;
        if (t > 0u) {
            held = ahead(ids, params.base, row, params.rows - 1u);
        }
        let sums = products(ids, params.base, params.side, row, params.rows - 1u, held);
        for (var q = 0u; q < WIDE; q++) {
            for (var r = 0u; r < ROWS; r++) {
                if (t + team(ids) * WIDE + q < BLOCK && row + q < params.rows && lane(ids) == 0u && first + r < flight.rows) {
                    x[(first + r) * params.stride + row + q] += sums[q * ROWS + r];
                }
            }
        }
    }
}
