// Gives a missing expert of a step or of a verify pass the place it was uploaded to, and takes all others out of the record, so that the
// layer's expert kernels compute this one alone.
//
// cure    expert, place
// routes  u32: see `routes.wgsl`
// An expert that had a place is marked, so that a later fill does not find it missing. A workgroup
// has the choices of ROWS rows.
// `protocol.md` §5 rule 3.

@group(0) @binding(2) var<storage, read> cure: array<u32>;
@group(0) @binding(3) var<storage, read_write> routes: array<u32>;

override TOP_K: u32;

const DONE: u32 = 0x80000000u;

@compute @workgroup_size(WG)
fn main(ids: Ids) {
    if (thread(ids) != 0u || !live()) {
        return;
    }
    let first = ids.group.y * union_words(TOP_K);
    for (var u = 0u; u < routes[first]; u++) {
        let entry = first + 1u + u * ENTRY;
        if (routes[entry + 1u] != NONE) {
            routes[entry] |= DONE;
        }
        routes[entry + 1u] = select(NONE, cure[1], routes[entry] == cure[0]);
    }
}
