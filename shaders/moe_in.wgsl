// Everything of an MoE layer that reads only the normed row: router logits, and the shared expert's up with relu².
//
// x        f32 [rows, COLS]
// routing  f32: normed [rows, COLS], then logits [rows, EXPERTS]
// made     the shared expert's activations, encoded as its down matrix reads them: [rows, OUT_COLS]
// The first groups compute ROUTER_BLOCK experts' logits each, in f32; the others BLOCK rows of the shared up.
// Sums: lanes in steps, f32, then the team; logits: invocations in steps, then teams, then the workgroup. `model.md` §1.5 steps 1 and 7.

struct Params {
    // vec4 in `weights`
    norm: u32,
    gate: u32,
    router_groups: u32,
    // the shared expert's up: rows, vec4, word, vec4 or NONE
    rows: u32,
    base: u32,
    side: u32,
    field: u32,
    // column field of the shared expert's down, vec4 or NONE
    next_field: u32,
    // where logits begin in `routing`
    logits: u32,
    pad_a: u32,
    pad_b: u32,
    pad_c: u32,
}

@group(0) @binding(2) var<uniform> params: Params;
@group(0) @binding(3) var<storage, read> weights: array<vec4<u32>>;
@group(0) @binding(4) var<storage, read> words: array<u32>;
@group(0) @binding(5) var<storage, read> x: array<vec4<f32>>; // [rows, COLS / 4]
@group(0) @binding(6) var<storage, read_write> routing: array<f32>; // [rows, COLS] then [rows, EXPERTS]
@group(0) @binding(7) var<storage, read_write> made: array<vec4<u32>>; // [rows, OUT_COLS / 16 * OUT_VECS]
@group(0) @binding(8) var<storage, read_write> made_scale: array<vec2<f32>>; // [rows, OUT_COLS / 32]

override BLOCK: u32; // rows a workgroup computes, a multiple of 32
override EXPERTS: u32;
override OUT_COLS: u32; // padded width of the shared expert
override OUT_CELLS: u32; // ROWS * BLOCK

// experts a router workgroup computes
const ROUTER_BLOCK: u32 = 4u;

var<workgroup> cells: array<f32, OUT_CELLS>;
var<workgroup> router_cells: array<vec4<f32>, NORM_CELLS>; // a partial sum a row and team

fn out_write(row: u32, at: u32, v: vec4<u32>) {
    made[row * (OUT_COLS / 16u * OUT_VECS) + at] = v;
}

fn out_write_scale(row: u32, group: u32, v: vec2<f32>) {
    made_scale[row * (OUT_COLS / 32u) + group] = v;
}

// Logits of ROUTER_BLOCK experts, and this workgroup's share of the normed rows. All invocations share a row of the gate; what
// a round needs is asked for at once, and the rows' scales come last.
fn route(ids: Ids, first: u32) {
    let begin = ids.group.x * ROUTER_BLOCK;
    let last = EXPERTS - 1u;
    for (var r = 0u; r < ROWS; r++) {
        let row = min(first + r, flight.rows - 1u) * (COLS / 4u);
        var sums = vec4<f32>();
        var squares_of = 0.0;
        for (var t = 0u; t < COLS / 4u; t += WG) {
            let i = min(t + thread(ids), COLS / 4u - 1u);
            let v = x[row + i];
            let y = v * bitcast<vec4<f32>>(weights[params.norm + i]);
            let a = bitcast<vec4<f32>>(weights[params.gate + min(begin, last) * (COLS / 4u) + i]);
            let b = bitcast<vec4<f32>>(weights[params.gate + min(begin + 1u, last) * (COLS / 4u) + i]);
            let c = bitcast<vec4<f32>>(weights[params.gate + min(begin + 2u, last) * (COLS / 4u) + i]);
            let d = bitcast<vec4<f32>>(weights[params.gate + min(begin + 3u, last) * (COLS / 4u) + i]);
            let inside = t + thread(ids) < COLS / 4u;
            sums += select(vec4<f32>(), vec4<f32>(dot(y, a), dot(y, b), dot(y, c), dot(y, d)), inside);
            squares_of += select(0.0, dot(v, v), inside);
        }
        let total = vec4<f32>(team_sum(ids, sums.x), team_sum(ids, sums.y), team_sum(ids, sums.z), team_sum(ids, sums.w));
        let square = team_sum(ids, squares_of);
        if (lane(ids) == 0u) {
            router_cells[r * (WG / 4u) + team(ids)] = total;
            norm_cells[r * (WG / 4u) + team(ids)] = square;
        }
    }
    workgroupBarrier();
    if (!live()) {
        return;
    }
    for (var r = 0u; r < ROWS; r++) {
        if (first + r < flight.rows) {
            let scale = rms_of(ids, r, true);
            if (thread(ids) < ROUTER_BLOCK && begin + thread(ids) < EXPERTS) {
                var sum = 0.0;
                for (var t = 0u; t < teams(ids); t++) {
                    sum += router_cells[r * (WG / 4u) + t][thread(ids)];
                }
                routing[params.logits + (first + r) * EXPERTS + begin + thread(ids)] = sum * scale;
            }
            for (var i = ids.group.x * WG + thread(ids); i < COLS / 4u; i += params.router_groups * WG) {
                let y = x[(first + r) * (COLS / 4u) + i] * scale * bitcast<vec4<f32>>(weights[params.norm + i]);
                let at = (first + r) * COLS + 4u * i;
                routing[at] = y.x;
                routing[at + 1u] = y.y;
                routing[at + 2u] = y.z;
                routing[at + 3u] = y.w;
            }
        }
    }
}

fn next_field(unit: u32) -> Sixteen {
    if (params.next_field == NONE) {
        let one = vec4<f32>(1.0);
        return Sixteen(one, one, one, one);
    }
    return floats16(params.next_field, min(unit, OUT_COLS / 16u - 1u));
}

@compute @workgroup_size(WG)
fn main(ids: Ids) {
    let first = ids.group.y * ROWS;
    if (ids.group.x < params.router_groups) {
        route(ids, first);
        return;
    }
    let block = (ids.group.x - params.router_groups) * BLOCK;
    // the row is asked for before the weights, which it would have to wait for otherwise
    let near = weighed(first, thread(ids), flight.rows, params.norm, params.field);
    var held = ahead(ids, params.base, block + team(ids) * WIDE, params.rows - 1u);
    var scales = stage_normed(ids, first, flight.rows, params.norm, params.field, near);
    if (!live()) {
        return;
    }
    // the field of the first units to encode, which is a row's and so every row's
    let next = next_field(block / 16u + thread(ids) % (BLOCK / 16u));
    for (var t = 0u; t < BLOCK; t += teams(ids) * WIDE) {
        let row = block + t + team(ids) * WIDE;
        if (t > 0u) {
            held = ahead(ids, params.base, row, params.rows - 1u);
        }
        let sums = products(ids, params.base, params.side, row, params.rows - 1u, held);
        for (var q = 0u; q < WIDE; q++) {
            for (var r = 0u; r < ROWS; r++) {
                if (t + team(ids) * WIDE + q < BLOCK && lane(ids) == 0u) {
                    let y = select(0.0, relu(sums[q * ROWS + r] * scales[r]), row + q < params.rows);
                    cells[r * BLOCK + t + team(ids) * WIDE + q] = y * y;
                }
            }
        }
    }
    workgroupBarrier();
    // BLOCK / 16 units a row, in whole pairs
    for (var t = 0u; t < ROWS * BLOCK / 16u; t += WG) {
        let unit = t + thread(ids);
        let r = unit / (BLOCK / 16u);
        let at = unit % (BLOCK / 16u);
        let to = block / 16u + at;
        let keep = unit < ROWS * BLOCK / 16u && first + r < flight.rows && to < OUT_COLS / 16u;
        var v = Sixteen();
        if (keep) {
            v = times(cells16(r * BLOCK + 16u * at), next);
        }
        out_encode(ids, first + r, to, v, keep);
    }
}
