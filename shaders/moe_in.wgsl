// Everything of an MoE layer that reads only the normed row: router logits, and the shared expert's up with relu².
//
// x        f32 [rows, COLS]
// routing  f32: normed [rows, COLS], then logits [rows, EXPERTS]
// made     the shared expert's activations, encoded as its down matrix reads them: [rows, OUT_COLS]
// The first groups compute ROUTER_BLOCK experts' logits each, in f32; the others BLOCK rows of the shared up.
// Sums: lanes in steps, f32, then the team. `model.md` §1.5 steps 1 and 7.

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
override ROUTER_BLOCK: u32; // experts a router workgroup computes
override EXPERTS: u32;
override OUT_COLS: u32; // padded width of the shared expert
override OUT_CELLS: u32; // ROWS * BLOCK

var<workgroup> cells: array<f32, OUT_CELLS>;

fn out_write(row: u32, at: u32, v: vec4<u32>) {
    made[row * (OUT_COLS / 16u * OUT_VECS) + at] = v;
}

fn out_write_scale(row: u32, group: u32, v: vec2<f32>) {
    made_scale[row * (OUT_COLS / 32u) + group] = v;
}

fn route(ids: Ids, first: u32, scales: array<f32, ROWS>) {
    var scale = scales;
    for (var t = 0u; t < ROUTER_BLOCK; t += teams(ids)) {
        let expert = ids.group.x * ROUTER_BLOCK + t + team(ids);
        let inside = t + team(ids) < ROUTER_BLOCK && expert < EXPERTS;
        for (var r = 0u; r < ROWS; r++) {
            var sum = 0.0;
            if (inside && first + r < flight.rows) {
                for (var i = lane(ids); i < COLS / 4u; i += lanes(ids)) {
                    let y = x[(first + r) * (COLS / 4u) + i] * scale[r] * bitcast<vec4<f32>>(weights[params.norm + i]);
                    sum += dot(y, bitcast<vec4<f32>>(weights[params.gate + expert * (COLS / 4u) + i]));
                }
            }
            sum = team_sum(ids, sum);
            if (inside && lane(ids) == 0u && first + r < flight.rows) {
                routing[params.logits + (first + r) * EXPERTS + expert] = sum;
            }
        }
    }
}

fn publish(ids: Ids, first: u32, scales: array<f32, ROWS>) {
    var scale = scales;
    for (var r = 0u; r < ROWS; r++) {
        if (first + r < flight.rows) {
            for (var i = thread(ids); i < COLS / 4u; i += WG) {
                let y = x[(first + r) * (COLS / 4u) + i] * scale[r] * bitcast<vec4<f32>>(weights[params.norm + i]);
                let at = (first + r) * COLS + 4u * i;
                routing[at] = y.x;
                routing[at + 1u] = y.y;
                routing[at + 2u] = y.z;
                routing[at + 3u] = y.w;
            }
        }
    }
}

@compute @workgroup_size(WG)
fn main(ids: Ids) {
    let first = ids.group.y * ROWS;
    let block = (max(ids.group.x, params.router_groups) - params.router_groups) * BLOCK;
    var held = ahead(ids, params.base, block + team(ids) * WIDE, params.rows - 1u);
    let scales = norm_scales(ids, first, flight.rows);
    if (ids.group.x < params.router_groups) {
        if (live()) {
            route(ids, first, scales);
            if (ids.group.x == 0u) {
                publish(ids, first, scales);
            }
        }
        return;
    }
    stage_normed(ids, first, flight.rows, scales, params.norm, params.field);
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
                if (t + team(ids) * WIDE + q < BLOCK && lane(ids) == 0u) {
                    let y = select(0.0, relu(sums[q * ROWS + r]), row + q < params.rows);
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
            v = cells16(r * BLOCK + 16u * at);
            if (params.next_field != NONE) {
                v = times(v, floats16(params.next_field, to));
            }
        }
        out_encode(ids, first + r, to, v, keep);
    }
}
