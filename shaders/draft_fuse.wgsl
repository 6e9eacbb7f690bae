// out[r] = W . concat(rms(following[r]; enorm), rms(hidden[r]; hnorm)): what the draft layer makes of a position and of
// what the decoder reads next to it.
//
// following  f32 [rows, ROW], padded with zeros
// hidden     f32 [rows, ROW]
// out        f32 [rows, ROW]
// tail       f32 [1, ROW]: row `control.kept` - 1 of `out` once more, where asked for
// A workgroup computes BLOCK rows for ROWS activation rows; each recomputes the norms. The halves begin at multiples of
// 16 columns. Sums: lanes in steps of CHUNK columns, f32, then the team (`products`). `model.md` §2.1.

struct Params {
    // vec4 in `weights`
    enorm: u32,
    hnorm: u32,
    // the matrix: rows, vec4, word, vec4 or NONE
    rows: u32,
    base: u32,
    side: u32,
    field: u32,
    // 1: the hidden half first
    hidden_first: u32,
    // the row of `following` that row 0 reads
    start: u32,
    // 1: `tail` is wanted
    tail: u32,
    pad_a: u32,
    pad_b: u32,
    pad_c: u32,
}

@group(0) @binding(2) var<uniform> params: Params;
@group(0) @binding(3) var<storage, read> weights: array<vec4<u32>>;
@group(0) @binding(4) var<storage, read> words: array<u32>;
@group(0) @binding(5) var<storage, read> following: array<vec4<f32>>; // [rows, ROW / 4]
@group(0) @binding(6) var<storage, read> hidden: array<vec4<f32>>; // [rows, ROW / 4]
@group(0) @binding(7) var<storage, read_write> out: array<f32>; // [rows, ROW]
@group(0) @binding(8) var<storage, read_write> tail: array<f32>; // [1, ROW]

override BLOCK: u32; // weight rows a workgroup computes
override HIDDEN: u32; // columns of a half, a multiple of 16
override ROW: u32; // floats from row to row: HIDDEN with padding
override EPS: f32;
override NORM_CELLS: u32; // ROWS * WG / 4: a partial sum a row and team, teams of 4 at least

var<workgroup> norm_cells: array<vec2<f32>, NORM_CELLS>;

fn following16(row: u32, unit: u32) -> Sixteen {
    let at = (params.start + row) * (ROW / 4u) + 4u * unit;
    return Sixteen(following[at], following[at + 1u], following[at + 2u], following[at + 3u]);
}

fn hidden16(row: u32, unit: u32) -> Sixteen {
    let at = row * (ROW / 4u) + 4u * unit;
    return Sixteen(hidden[at], hidden[at + 1u], hidden[at + 2u], hidden[at + 3u]);
}

@compute @workgroup_size(WG)
fn main(ids: Ids) {
    let first = ids.group.y * ROWS;
    let block = ids.group.x * BLOCK;
    var held = ahead(ids, params.base, block + team(ids) * WIDE, params.rows - 1u);
    for (var r = 0u; r < ROWS; r++) {
        var sum = vec2<f32>();
        if (first + r < flight.rows) {
            for (var unit = thread(ids); unit < HIDDEN / 16u; unit += WG) {
                sum += vec2<f32>(squares(following16(first + r, unit)), squares(hidden16(first + r, unit)));
            }
        }
        sum = vec2<f32>(team_sum(ids, sum.x), team_sum(ids, sum.y));
        if (lane(ids) == 0u) {
            norm_cells[r * (WG / 4u) + team(ids)] = sum;
        }
    }
    workgroupBarrier();
    for (var r = 0u; r < ROWS; r++) {
        var sum = vec2<f32>();
        for (var t = 0u; t < teams(ids); t++) {
            sum += norm_cells[r * (WG / 4u) + t];
        }
        let scale = inverseSqrt(sum / f32(HIDDEN) + EPS);
        for (var t = 0u; t < COLS / 16u; t += WG) {
            let unit = t + thread(ids);
            var v = Sixteen();
            if (unit < HIDDEN / 8u && first + r < flight.rows) {
                let second = unit >= HIDDEN / 16u;
                let at = unit - select(0u, HIDDEN / 16u, second);
                if (second != (params.hidden_first == 1u)) {
                    v = times(scaled(hidden16(first + r, at), scale.y), floats16(params.hnorm, at));
                } else {
                    v = times(scaled(following16(first + r, at), scale.x), floats16(params.enorm, at));
                }
                if (params.field != NONE) {
                    v = times(v, floats16(params.field, unit));
                }
            }
            in_encode(ids, r, unit, v, unit < COLS / 16u);
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
            let inside = t + team(ids) * WIDE + q < BLOCK && row + q < params.rows;
            for (var r = 0u; r < ROWS; r++) {
                if (inside && lane(ids) == 0u && first + r < flight.rows) {
                    let y = sums[q * ROWS + r];
                    out[(first + r) * ROW + row + q] = y;
                    if (params.tail == 1u && first + r + 1u == control.kept) {
                        tail[row + q] = y;
                    }
                }
            }
        }
    }
}
