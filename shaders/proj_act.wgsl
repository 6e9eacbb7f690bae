// out[r] = W . a: a matrix over activations that the kernel before left encoded (the shared expert's down).
//
// made  [rows, COLS] encoded activations
// out   f32 [rows, stride]
// A workgroup computes BLOCK rows for ROWS activation rows. Sums: lanes in steps, f32, then the team (`products`).

struct Params {
    layer: u32,
    rows: u32,
    // vec4, word
    base: u32,
    side: u32,
    stride: u32,
    pad_a: u32,
    pad_b: u32,
    pad_c: u32,
}

@group(0) @binding(2) var<uniform> params: Params;
@group(0) @binding(3) var<storage, read> weights: array<vec4<u32>>;
@group(0) @binding(4) var<storage, read> words: array<u32>;
@group(0) @binding(5) var<storage, read> made: array<vec4<u32>>; // [rows, COLS / 16 * IN_VECS]
@group(0) @binding(6) var<storage, read> made_scale: array<vec2<f32>>; // [rows, COLS / 32]
@group(0) @binding(7) var<storage, read_write> out: array<f32>; // [rows, stride]

override COLS: u32;
override BLOCK: u32; // rows a workgroup computes

var<private> first_row: u32;

fn act(row: u32, at: u32) -> vec4<u32> {
    return made[(first_row + row) * (COLS / 16u * IN_VECS) + at];
}

fn act_scale(row: u32, group: u32) -> vec2<f32> {
    return made_scale[(first_row + row) * (COLS / 32u) + group];
}

@compute @workgroup_size(WG)
fn main(ids: Ids) {
    first_row = ids.group.y * ROWS;
    let begin = ids.group.x * BLOCK + team(ids) * WIDE;
    var held = ahead(ids, params.base, begin, params.rows - 1u);
    if (!(live() || own_miss(params.layer))) {
        return;
    }
    for (var t = 0u; t < BLOCK; t += teams(ids) * WIDE) {
        let row = ids.group.x * BLOCK + t + team(ids) * WIDE;
        if (t > 0u) {
            held = ahead(ids, params.base, row, params.rows - 1u);
        }
        let sums = products(ids, params.base, params.side, row, params.rows - 1u, held);
        for (var q = 0u; q < WIDE; q++) {
            let inside = t + team(ids) * WIDE + q < BLOCK && row + q < params.rows;
            for (var r = 0u; r < ROWS; r++) {
                if (inside && lane(ids) == 0u && first_row + r < flight.rows) {
                    out[(first_row + r) * params.stride + row + q] = sums[q * ROWS + r];
                }
            }
        }
    }
}
