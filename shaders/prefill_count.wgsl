// How often the rows of a pass chose each expert, added to the flight's counts. For partial banks.
//
// routes  [rows, TOP_K]: expert, place or NONE, weight, 0 (`prefill_route`)
// counts  u32: the layer's [EXPERTS] at `at`
// One workgroup. Runs before the route can halt the slot (`prefill_sort`). `runtime.md` §5, admission.

struct Params {
    // word in `counts`
    at: u32,
    pad_a: u32,
    pad_b: u32,
    pad_c: u32,
}

@group(0) @binding(2) var<uniform> params: Params;
@group(0) @binding(3) var<storage, read> routes: array<vec4<u32>>; // [rows, TOP_K]
@group(0) @binding(4) var<storage, read_write> counts: array<u32>;

override TOP_K: u32;
override EXPERTS: u32;

var<workgroup> chosen: array<atomic<u32>, EXPERTS>;

@compute @workgroup_size(WG)
fn main(ids: Ids) {
    if (!live()) {
        return;
    }
    for (var e = thread(ids); e < EXPERTS; e += WG) {
        atomicStore(&chosen[e], 0u);
    }
    workgroupBarrier();
    for (var i = thread(ids); i < flight.rows * TOP_K; i += WG) {
        if (routes[i].x < EXPERTS) {
            atomicAdd(&chosen[routes[i].x], 1u);
        }
    }
    workgroupBarrier();
    for (var e = thread(ids); e < EXPERTS; e += WG) {
        counts[params.at + e] += atomicLoad(&chosen[e]);
    }
}
