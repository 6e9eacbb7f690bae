// The experts of each row of a pass, with their places and weights. Halts nothing: `prefill_sort` looks at all rows.
//
// routing  f32 [rows, EXPERTS]: the router's logits
// map      u32: place of each expert of each layer, or NONE
// routes   [rows, TOP_K]: expert, place or NONE, weight (f32 bits), 0; a row's picks in ascending order of the experts
// A workgroup has one row. w = p / (sum of the row's p + 1e-20) * scale, summed in ascending order.
// `model.md` §1.5 steps 2 to 5; `protocol.md` §2.

struct Params {
    // where logits begin in `routing`
    logits: u32,
    // word in `words` of e_score_correction_bias
    bias: u32,
    // where the layer begins in `map`
    map: u32,
    norm_topk: u32,
    scale: f32,
    pad_a: u32,
    pad_b: u32,
    pad_c: u32,
}

@group(0) @binding(2) var<uniform> params: Params;
@group(0) @binding(3) var<storage, read> words: array<u32>;
@group(0) @binding(4) var<storage, read> routing: array<f32>; // [rows, EXPERTS]
@group(0) @binding(5) var<storage, read> map: array<u32>; // [layers, EXPERTS]
@group(0) @binding(6) var<storage, read_write> routes: array<vec4<u32>>; // [rows, TOP_K]

@compute @workgroup_size(WG)
fn main(ids: Ids) {
    let row = ids.group.y;
    if (!live() || row >= flight.rows) {
        return;
    }
    choose(ids, row, flight.rows);
    for (var k = thread(ids); k < TOP_K; k += WG) {
        var sum = 0.0;
        for (var j = 0u; j < TOP_K; j++) {
            sum += sigmoid(logit(row, chosen[j]));
        }
        let e = chosen[k];
        var w = sigmoid(logit(row, e));
        if (params.norm_topk == 1u) {
            w = w / (sum + 1e-20);
        }
        routes[row * TOP_K + k] = vec4<u32>(e, map[params.map + e], bitcast<u32>(w * params.scale), 0u);
    }
}
