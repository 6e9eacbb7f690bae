// One draft: the best of the head's groups; its embedding is the row that the verify pass reads behind those before it.
//
// best    [1, groups]: logit (f32 bits) and id
// x       f32 [rows, COLS]: row `at` + 1 becomes the embedding
// drafts  u32 [rows - 1]: entry `at` becomes the id
// given   u32 [positions]: what is drafted instead, by the position it would stand at
// `control` are the words of the chain; its position moves on by one. One workgroup. Ties go to the lower id.
// Where no logit is a finite number the draft is 0. `model.md` §2.2.

struct Params {
    groups: u32,
    // this part of the embedding: rows, first id, where it lies
    rows: u32,
    first_id: u32,
    base: u32,
    side: u32,
    field: u32,
    // 1 for the last part: it moves the chain on
    last: u32,
    at: u32,
    given: u32,
    pad_a: u32,
    pad_b: u32,
    pad_c: u32,
}

@group(0) @binding(2) var<uniform> params: Params;
@group(0) @binding(3) var<storage, read> weights: array<vec4<u32>>;
@group(0) @binding(4) var<storage, read> words: array<u32>;
@group(0) @binding(5) var<storage, read> best: array<vec2<u32>>; // [1, groups]
@group(0) @binding(6) var<storage, read_write> x: array<vec4<f32>>; // [rows, COLS / 4]
@group(0) @binding(7) var<storage, read_write> drafts: array<u32>; // [rows - 1]
@group(0) @binding(8) var<storage, read> given: array<u32>; // [positions]

override COLS: u32;

var<workgroup> tops: array<vec2<u32>, WG>;

fn better(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
    let p = bitcast<f32>(a.x);
    let q = bitcast<f32>(b.x);
    if (q > p || (q == p && b.y < a.y)) {
        return b;
    }
    return a;
}

@compute @workgroup_size(WG)
fn main(ids: Ids) {
    let me = thread(ids);
    let go = live();
    var top = vec2<u32>(0xff7fffffu, NONE);
    for (var i = me; i < params.groups; i += WG) {
        top = better(top, best[i]);
    }
    tops[me] = top;
    workgroupBarrier();
    for (var step = WG / 2u; step > 0u; step /= 2u) {
        if (me < step) {
            tops[me] = better(tops[me], tops[me + step]);
        }
        workgroupBarrier();
    }
    if (!go) {
        return;
    }
    var id = tops[0].y;
    if (id == NONE) {
        id = 0u;
    }
    // the chain stands at the row before the one whose id is known
    if (control.position + 2u < params.given) {
        id = given[control.position + 2u];
    }
    if (id >= params.first_id && id < params.first_id + params.rows) {
        for (var unit = me; unit < COLS / 16u; unit += WG) {
            let v = embed16(params.base, params.side, params.field, id - params.first_id, unit);
            let to = (params.at + 1u) * (COLS / 4u) + 4u * unit;
            x[to] = v.a;
            x[to + 1u] = v.b;
            x[to + 2u] = v.c;
            x[to + 3u] = v.d;
        }
    }
    storageBarrier();
    workgroupBarrier();
    if (me == 0u && params.last == 1u) {
        drafts[params.at] = id;
        control.position += 1u;
    }
}
