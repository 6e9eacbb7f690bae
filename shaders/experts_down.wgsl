// x += sum over picks w_e * down_e . a_e + shared: the closing sum of an MoE layer where nothing is missing.
//
// made     [rows, TOP_K, COLS] encoded activations of the picks
// shared   f32 [rows, stride] the shared expert's output
// x        f32 [rows, stride], the residual
// partial  f32 [rows, stride]: where the slot halted in this layer, the sum without the missing experts and the residual
// A workgroup computes BLOCK rows of the output, a team WIDE at once, over all experts of the rows' union: each weight is read once.
// Sums: the union's columns as one line, lanes in steps of CHUNK, f32, then the team. `model.md` §1.5 steps 6, 7.

struct Params {
    layer: u32,
    // vec4 a place takes, and in it: down's base (vec4), side (word)
    place: u32,
    base: u32,
    side: u32,
    // output rows, and floats from row to row of x
    rows: u32,
    stride: u32,
    // word in `routes` where weights begin
    weights_at: u32,
    pad: u32,
}

@group(0) @binding(2) var<uniform> params: Params;
@group(0) @binding(3) var<storage, read> weights: array<vec4<u32>>; // the layer's bank
@group(0) @binding(4) var<storage, read> words: array<u32>; // the same
@group(0) @binding(5) var<storage, read> made: array<vec4<u32>>; // [rows, TOP_K, COLS / 16 * IN_VECS]
@group(0) @binding(6) var<storage, read> made_scale: array<vec2<f32>>; // [rows, TOP_K, COLS / 32]
@group(0) @binding(7) var<storage, read> routes: array<u32>;
@group(0) @binding(8) var<storage, read> shared_out: array<f32>; // [rows, stride]
@group(0) @binding(9) var<storage, read_write> x: array<f32>; // [rows, stride]
@group(0) @binding(10) var<storage, read_write> partial: array<f32>; // [rows, stride]

override COLS: u32; // padded width of an expert
override TOP_K: u32;
override BLOCK: u32; // rows a workgroup computes
override PICKS: u32; // ROWS * TOP_K
override WEIGHTS: u32; // ROWS * PICKS
override BY_PICK: bool; // the tables' entries are the rows' picks, [ROWS, TOP_K], instead of the union's experts

var<workgroup> place_of: array<u32, PICKS>; // [union] first vec4 of the place, or NONE
var<workgroup> pick_of: array<u32, WEIGHTS>; // [union, ROWS] row of `made`
var<workgroup> weight_of: array<f32, WEIGHTS>; // [union, ROWS], 0 where the row did not choose it

fn act(row: u32, at: u32) -> vec4<u32> {
    return made[row * (COLS / 16u * IN_VECS) + at];
}

fn act_scale(row: u32, group: u32) -> vec2<f32> {
    return made_scale[row * (COLS / 32u) + group];
}

@compute @workgroup_size(WG)
fn main(ids: Ids) {
    let first = ids.group.z * ROWS;
    let at = ids.group.z * union_words(TOP_K);
    let go = live();
    let runs = go || own_miss(params.layer);
    if (BY_PICK) {
        for (var t = thread(ids); t < PICKS; t += WG) {
            place_of[t] = NONE;
        }
        workgroupBarrier();
    }
    for (var t = thread(ids); t < ROWS * PICKS; t += WG) {
        let u = t / ROWS;
        let r = t % ROWS;
        let entry = at + 1u + u * ENTRY;
        // all at once: a word that no expert wrote is never used
        let count = routes[at];
        let place = routes[entry + 1u];
        let by = routes[entry + 2u];
        let pick = routes[entry + 3u + r];
        let used = u < count && place != NONE && (by >> r & 1u) == 1u;
        let row = (first + r) * TOP_K + select(0u, pick, used);
        let weight = select(0.0, bitcast<f32>(routes[params.weights_at + row]), used);
        if (BY_PICK) {
            if (used) {
                let j = r * TOP_K + pick;
                place_of[j] = place * params.place;
                pick_of[j] = row;
                weight_of[j] = weight;
            }
        } else {
            pick_of[t] = row;
            weight_of[t] = weight;
            if (r == 0u) {
                place_of[u] = select(NONE, place * params.place, u < count && place != NONE);
            }
        }
    }
    workgroupBarrier();
    if (!runs) {
        return;
    }
    for (var t = 0u; t < BLOCK; t += teams(ids) * WIDE) {
        let row = ids.group.x * BLOCK + t + team(ids) * WIDE;
        let sums = picked_sums(ids, row);
        for (var q = 0u; q < WIDE; q++) {
            let inside = t + team(ids) * WIDE + q < BLOCK && row + q < params.rows;
            for (var r = 0u; r < ROWS; r++) {
                let sum = sums[q * ROWS + r];
                if (lane(ids) == 0u && inside && first + r < flight.rows) {
                    let to = (first + r) * params.stride + row + q;
                    let total = sum + shared_out[to];
                    if (go) {
                        x[to] += total;
                    } else {
                        partial[to] = total;
                    }
                }
            }
        }
    }
}
