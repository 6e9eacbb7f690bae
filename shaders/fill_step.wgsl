// Gives a missing expert of a step the place it was uploaded to, and takes all others out of the record, so that the
// layer's expert kernels compute this one alone.
//
// cure    expert, place
// routes  u32: see `routes.wgsl`
// An expert that had a place is marked, so that a later fill does not find it missing. One workgroup.
// `protocol.md` §5 rule 3.

@group(0) @binding(2) var<storage, read> cure: array<u32>;
@group(0) @binding(3) var<storage, read_write> routes: array<u32>;

const DONE: u32 = 0x80000000u;

@compute @workgroup_size(WG)
fn main(ids: Ids) {
    if (thread(ids) != 0u || !live()) {
        return;
    }
    for (var u = 0u; u < routes[0]; u++) {
        let entry = 1u + u * ENTRY;
        if (routes[entry + 1u] != NONE) {
            routes[entry] |= DONE;
        }
        routes[entry + 1u] = select(NONE, cure[1], routes[entry] == cure[0]);
    }
}
