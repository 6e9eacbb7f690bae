// The experts of each row, their weights and places; halts the slot where one has no place.
//
// routing  f32: normed rows, then logits [rows, EXPERTS] at `logits`
// map      u32: place of each expert of each layer, or NONE
// routes   u32: see `routes.wgsl`
// One workgroup, ROWS rows at a time. w = p / (sum of the row's p + 1e-20) * scale, summed in ascending order of the experts.
// `model.md` §1.5 steps 1 to 5; `protocol.md` §2.

struct Params {
    // where logits begin in `routing`
    logits: u32,
    // word in `words` of e_score_correction_bias
    bias: u32,
    // where the layer begins in `map`
    map: u32,
    layer: u32,
    // word in `routes` where weights begin
    weights_at: u32,
    norm_topk: u32,
    scale: f32,
    // word in `routes` where the layer's counts begin, with partial banks
    counts: u32,
}

@group(0) @binding(2) var<uniform> params: Params;
@group(0) @binding(3) var<storage, read> words: array<u32>;
@group(0) @binding(4) var<storage, read> routing: array<f32>; // normed, then [rows, EXPERTS]
@group(0) @binding(5) var<storage, read> map: array<u32>; // [layers, EXPERTS]
@group(0) @binding(6) var<storage, read_write> routes: array<u32>;

override BATCHES: u32; // of ROWS rows

// What ROWS rows chose.
fn publish(ids: Ids, batch: u32) {
    let first = batch * ROWS;
    let at = batch * union_words(TOP_K);
    for (var u = thread(ids); u < union_count; u += WG) {
        let e = chosen[u];
        let place = map[params.map + e];
        let to = at + 1u + u * ENTRY;
        routes[to] = e;
        routes[to + 1u] = place;
        routes[to + 2u] = chosen_by[u];
        for (var r = 0u; r < ROWS; r++) {
            routes[to + 3u + r] = chosen_at[u * ROWS + r];
        }
        count_choice(u);
    }
    if (thread(ids) == 0u) {
        routes[at] = union_count;
        halt_missing();
    }
    for (var t = thread(ids); t < ROWS * TOP_K; t += WG) {
        let r = t / TOP_K;
        if (first + r < flight.rows) {
            // this pick's place among the row's, ascending, and the row's sum in that order
            let mine = ranked[t];
            var before = 0u;
            var sum = 0.0;
            var floor = 0u;
            for (var k = 0u; k < TOP_K; k++) {
                var next = NO_EXPERT;
                for (var j = r * TOP_K; j < (r + 1u) * TOP_K; j++) {
                    let e = ranked[j];
                    next = select(next, e, e >= floor && e < next);
                }
                floor = next + 1u;
                before += select(0u, 1u, next < mine);
                sum += chance[r * EXPERTS + next];
            }
            let factor = select(params.scale, params.scale / (sum + 1e-20), params.norm_topk == 1u);
            routes[params.weights_at + (first + r) * TOP_K + before] =
                bitcast<u32>(chance[r * EXPERTS + mine] * factor);
        }
    }
}

@compute @workgroup_size(WG)
fn main(ids: Ids) {
    // one workgroup has all rows: it alone may halt the slot, and only when every row has chosen
    let go = live();
    for (var batch = 0u; batch < BATCHES; batch++) {
        choose(ids, batch * ROWS, flight.rows);
        if (go) {
            publish(ids, batch);
        }
        workgroupBarrier();
    }
}
