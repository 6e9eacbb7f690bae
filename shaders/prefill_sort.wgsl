// The picks of a pass sorted by place, cut into tiles of one expert; halts the slot where a pick has no place.
// Places are counted from `first` on, and with `others` what lies elsewhere is another dispatch's to sort.
//
// routes  [rows, TOP_K]: expert, place or NONE, weight, 0 (`prefill_route`)
// list    u32: tiles, resident picks, missing picks, 0; then for each tile: place, first sorted row, rows, 0;
//         from `order` on for each sorted row: row * TOP_K + pick, place
// One workgroup. The order of an expert's rows is not defined; nothing depends on it. `protocol.md` §2, Route.

struct Params {
    layer: u32,
    // word in `list`
    order: u32,
    // the first of the PLACES
    first: u32,
    // 1: picks that lie elsewhere halt nothing
    others: u32,
}

@group(0) @binding(2) var<uniform> params: Params;
@group(0) @binding(3) var<storage, read> routes: array<vec4<u32>>; // [rows, TOP_K]
@group(0) @binding(4) var<storage, read_write> list: array<u32>;

override TOP_K: u32;
override PLACES: u32;
override TILE_ROWS: u32;

var<workgroup> held: array<atomic<u32>, PLACES>;
var<workgroup> begin: array<u32, PLACES>;
var<workgroup> tiles_before: array<u32, PLACES>;
var<workgroup> missing: atomic<u32>;

@compute @workgroup_size(WG)
fn main(ids: Ids) {
    if (!live()) {
        return;
    }
    let picks = flight.rows * TOP_K;
    for (var p = thread(ids); p < PLACES; p += WG) {
        atomicStore(&held[p], 0u);
    }
    if (thread(ids) == 0u) {
        atomicStore(&missing, 0u);
    }
    workgroupBarrier();
    for (var i = thread(ids); i < picks; i += WG) {
        // what lies before the first becomes very large
        let place = routes[i].y - params.first;
        if (place < PLACES) {
            atomicAdd(&held[place], 1u);
        } else if (params.others == 0u) {
            atomicAdd(&missing, 1u);
        }
    }
    workgroupBarrier();
    for (var p = thread(ids); p < PLACES; p += WG) {
        var rows = 0u;
        var tiles = 0u;
        for (var q = 0u; q < p; q++) {
            let n = atomicLoad(&held[q]);
            rows += n;
            tiles += (n + TILE_ROWS - 1u) / TILE_ROWS;
        }
        begin[p] = rows;
        tiles_before[p] = tiles;
    }
    workgroupBarrier();
    for (var p = thread(ids); p < PLACES; p += WG) {
        let n = atomicLoad(&held[p]);
        let tiles = (n + TILE_ROWS - 1u) / TILE_ROWS;
        for (var t = 0u; t < tiles; t++) {
            let at = 4u + 4u * (tiles_before[p] + t);
            list[at] = p;
            list[at + 1u] = begin[p] + t * TILE_ROWS;
            list[at + 2u] = min(TILE_ROWS, n - t * TILE_ROWS);
            list[at + 3u] = 0u;
        }
        if (p == PLACES - 1u) {
            list[0] = tiles_before[p] + tiles;
            list[1] = begin[p] + n;
            list[2] = atomicLoad(&missing);
            list[3] = 0u;
        }
    }
    workgroupBarrier();
    for (var p = thread(ids); p < PLACES; p += WG) {
        atomicStore(&held[p], begin[p]);
    }
    workgroupBarrier();
    for (var i = thread(ids); i < picks; i += WG) {
        let place = routes[i].y - params.first;
        if (place < PLACES) {
            let at = params.order + 2u * atomicAdd(&held[place], 1u);
            list[at] = i;
            list[at + 1u] = place;
        }
    }
    if (thread(ids) == 0u && atomicLoad(&missing) > 0u) {
        control.stop_flight = flight.flight;
        control.stop_point = vec2<u32>(control.batch, 2u * params.layer);
        control.stop = STOP_MISS;
    }
}
