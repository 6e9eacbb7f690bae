// The rows of a pass that miss an expert which was just uploaded, as tiles of that expert.
//
// cure    expert, place, word of `list` where sorted rows begin, rows of a tile
// routes  [rows, TOP_K]: expert, place or NONE, weight, 0 (`prefill_route`)
// list    as `prefill_sort` leaves it, of this expert alone
// One workgroup. The order of the rows is not defined; nothing depends on it. `protocol.md` §5 rule 3.

@group(0) @binding(2) var<storage, read> cure: array<u32>;
@group(0) @binding(3) var<storage, read> routes: array<vec4<u32>>; // [rows, TOP_K]
@group(0) @binding(4) var<storage, read_write> list: array<u32>;

override TOP_K: u32;

var<workgroup> found: atomic<u32>;

@compute @workgroup_size(WG)
fn main(ids: Ids) {
    if (!live()) {
        return;
    }
    if (thread(ids) == 0u) {
        atomicStore(&found, 0u);
    }
    workgroupBarrier();
    for (var i = thread(ids); i < flight.rows * TOP_K; i += WG) {
        if (routes[i].x == cure[0] && routes[i].y == NONE) {
            let at = cure[2] + 2u * atomicAdd(&found, 1u);
            list[at] = i;
            list[at + 1u] = cure[1];
        }
    }
    workgroupBarrier();
    let n = atomicLoad(&found);
    let tiles = (n + cure[3] - 1u) / cure[3];
    for (var t = thread(ids); t < tiles; t += WG) {
        let at = 4u + 4u * t;
        list[at] = cure[1];
        list[at + 1u] = t * cure[3];
        list[at + 2u] = min(cure[3], n - t * cure[3]);
        list[at + 3u] = 0u;
    }
    if (thread(ids) == 0u) {
        list[0] = tiles;
        list[1] = n;
        list[2] = 0u;
        list[3] = 0u;
    }
}
