// a = relu²(up_e . y) for every routed expert, encoded as its down matrix reads it.
//
// routing  f32: normed rows [rows, COLS]
// bank     places of experts; in each the up matrix, its side words, its column field
// made     [rows, TOP_K, OUT_COLS] encoded activations of the picks
// A workgroup computes BLOCK rows of one expert of the rows' union for all rows that chose it: each weight is read once.
// Sums: lanes in steps of CHUNK columns, f32, then the team (`products`). `model.md` §1.5 step 6.

struct Params {
    layer: u32,
    // vec4 a place takes, and in it: up's base (vec4), side (word), field (vec4 or NONE)
    place: u32,
    base: u32,
    side: u32,
    field: u32,
    rows: u32,
    // column field of the expert's down, vec4 in the place or NONE
    next_field: u32,
    pad: u32,
}

@group(0) @binding(2) var<uniform> params: Params;
@group(0) @binding(3) var<storage, read> weights: array<vec4<u32>>; // the layer's bank
@group(0) @binding(4) var<storage, read> words: array<u32>; // the same
@group(0) @binding(5) var<storage, read> routing: array<vec4<f32>>; // [rows, COLS / 4]
@group(0) @binding(6) var<storage, read> routes: array<u32>;
@group(0) @binding(7) var<storage, read_write> made: array<vec4<u32>>; // [rows, TOP_K, OUT_COLS / 16 * OUT_VECS]
@group(0) @binding(8) var<storage, read_write> made_scale: array<vec2<f32>>; // [rows, TOP_K, OUT_COLS / 32]

override BLOCK: u32; // rows a workgroup computes, a multiple of 32
override TOP_K: u32;
override OUT_COLS: u32; // padded width of an expert
override OUT_CELLS: u32; // ROWS * BLOCK

var<workgroup> cells: array<f32, OUT_CELLS>;

fn out_write(row: u32, at: u32, v: vec4<u32>) {
    made[row * (OUT_COLS / 16u * OUT_VECS) + at] = v;
}

fn out_write_scale(row: u32, group: u32, v: vec2<f32>) {
    made_scale[row * (OUT_COLS / 32u) + group] = v;
}

fn normed(row: u32, unit: u32) -> Sixteen {
    let start = row * (COLS / 4u) + 4u * min(unit, COLS / 16u - 1u);
    return Sixteen(routing[start], routing[start + 1u], routing[start + 2u], routing[start + 3u]);
}

@compute @workgroup_size(WG)
fn main(ids: Ids) {
    let first = ids.group.z * ROWS;
    let at = ids.group.z * union_words(TOP_K);
    // the row waits for nobody, so it is asked for first
    let near = normed(first, thread(ids));
    // everything is asked for at once; what an absent expert reads is never used
    let entry = at + 1u + ids.group.y * ENTRY;
    let place = routes[entry + 1u];
    let by = routes[entry + 2u];
    let go = (live() || own_miss(params.layer)) && ids.group.y < routes[at] && place != NONE;
    let base = select(0u, place * params.place, go);
    let block = ids.group.x * BLOCK;
    var held = ahead(ids, base + params.base, block + team(ids) * WIDE, params.rows - 1u);
    wanted_rows = by;
    for (var r = 0u; r < ROWS; r++) {
        // rows that did not choose the expert are left out
        for (var t = 0u; t < COLS / 16u && (ROWS == 1u || wanted(r)); t += WG) {
            let unit = t + thread(ids);
            var v = Sixteen();
            if (unit < COLS / 16u) {
                v = near;
                if (r > 0u || t > 0u) {
                    v = normed(first + r, unit);
                }
                if (params.field != NONE) {
                    v = times(v, floats16(base + params.field, unit));
                }
            }
            in_encode(ids, r, unit, v, unit < COLS / 16u);
        }
    }
    workgroupBarrier();
    if (!go) {
        return;
    }
    for (var t = 0u; t < BLOCK; t += teams(ids) * WIDE) {
        let row = block + t + team(ids) * WIDE;
        if (t > 0u) {
            held = ahead(ids, base + params.base, row, params.rows - 1u);
        }
        let sums = products(ids, base + params.base, 4u * base + params.side, row, params.rows - 1u, held);
        for (var q = 0u; q < WIDE; q++) {
            for (var r = 0u; r < ROWS; r++) {
                if (t + team(ids) * WIDE + q < BLOCK && lane(ids) == 0u) {
                    let y = select(0.0, relu(sums[q * ROWS + r]), row + q < params.rows);
                    cells[r * BLOCK + t + team(ids) * WIDE + q] = y * y;
                }
            }
        }
    }
    workgroupBarrier();
    for (var t = 0u; t < ROWS * BLOCK / 16u; t += WG) {
        let unit = t + thread(ids);
        let r = unit / (BLOCK / 16u);
        let cell = unit % (BLOCK / 16u);
        let to = block / 16u + cell;
        let keep = unit < ROWS * BLOCK / 16u && (by >> r & 1u) == 1u && to < OUT_COLS / 16u;
        var v = Sixteen();
        var pick = 0u;
        if (keep) {
            pick = routes[entry + 3u + r];
            v = cells16(r * BLOCK + 16u * cell);
            if (params.next_field != NONE) {
                v = times(v, floats16(base + params.next_field, to));
            }
        }
        out_encode(ids, (first + r) * TOP_K + pick, to, v, keep);
    }
}
