// Logits of rms(x; norm_f), and the best of each workgroup's rows.
//
// x       f32 [rows, COLS]
// best    [rows, groups]: logit (f32 bits) and id
// logits  f32 [rows, vocab], written where asked for
// A workgroup computes BLOCK rows of the head; ties go to the lower id. A logit that is no number or +inf leaves its row
// without an id. `model.md` §1.2, §1.8.

struct Params {
    norm: u32,
    // this part of the head: its rows, the first one's id, and where it lies
    rows: u32,
    first_id: u32,
    base: u32,
    side: u32,
    field: u32,
    // of all parts together
    groups: u32,
    first_group: u32,
    vocab: u32,
    keep_logits: u32,
    pad: vec2<u32>,
}

@group(0) @binding(2) var<uniform> params: Params;
@group(0) @binding(3) var<storage, read> weights: array<vec4<u32>>;
@group(0) @binding(4) var<storage, read> words: array<u32>;
@group(0) @binding(5) var<storage, read> x: array<vec4<f32>>; // [rows, COLS / 4]
@group(0) @binding(6) var<storage, read_write> best: array<vec2<u32>>; // [rows, groups]
@group(0) @binding(7) var<storage, read_write> logits: array<f32>; // [rows, vocab]

// bits of -inf, an honest logit
const MINUS_INFINITY: u32 = 0xff800000u;
const LARGEST: f32 = 3.4028234e38;

override BLOCK: u32;
override BEST_CELLS: u32; // ROWS * WG / 4

var<workgroup> best_of: array<vec2<u32>, BEST_CELLS>;

@compute @workgroup_size(WG)
fn main(ids: Ids) {
    let first = ids.group.y * ROWS;
    let near = weighed(first, thread(ids), flight.rows, params.norm, params.field);
    var scales = stage_normed(ids, first, flight.rows, params.norm, params.field, near);
    if (!live() || flight.accept == 0u) {
        return;
    }
    let block = ids.group.x * BLOCK;
    var value: array<f32, ROWS>;
    var id: array<u32, ROWS>;
    for (var r = 0u; r < ROWS; r++) {
        value[r] = -3.4e38;
        id[r] = NONE;
    }
    for (var t = 0u; t < BLOCK; t += teams(ids) * WIDE) {
        let row = block + t + team(ids) * WIDE;
        let held = ahead(ids, params.base, row, params.rows - 1u);
        let sums = products(ids, params.base, params.side, row, params.rows - 1u, held);
        for (var q = 0u; q < WIDE; q++) {
            if (t + team(ids) * WIDE + q < BLOCK && row + q < params.rows) {
                for (var r = 0u; r < ROWS; r++) {
                    let y = sums[q * ROWS + r] * scales[r];
                    if (!is_finite(y) && bitcast<u32>(y) != MINUS_INFINITY) {
                        // no id is better than this one, which none is
                        value[r] = LARGEST;
                        id[r] = NONE;
                    } else if (y > value[r]) {
                        value[r] = y;
                        id[r] = params.first_id + row + q;
                    }
                    if (params.keep_logits == 1u && lane(ids) == 0u && first + r < flight.rows) {
                        logits[(first + r) * params.vocab + params.first_id + row + q] = y;
                    }
                }
            }
        }
    }
    for (var r = 0u; r < ROWS; r++) {
        if (lane(ids) == 0u) {
            best_of[r * (WG / 4u) + team(ids)] = vec2<u32>(bitcast<u32>(value[r]), id[r]);
        }
    }
    workgroupBarrier();
    for (var r = thread(ids); r < ROWS; r += WG) {
        if (first + r < flight.rows) {
            var top = best_of[r * (WG / 4u)];
            for (var t = 1u; t < teams(ids); t++) {
                let other = best_of[r * (WG / 4u) + t];
                let a = bitcast<f32>(top.x);
                let b = bitcast<f32>(other.x);
                if (b > a || (b == a && other.y < top.y)) {
                    top = other;
                }
            }
            best[(first + r) * params.groups + params.first_group + ids.group.x] = top;
        }
    }
}
