// Cures a miss: clears the stop and begins the next turn, if the stop is the slot's present one.
//
// cure  next turn, layer
// `flight` carries the stop's turn and flight. One workgroup. `protocol.md` §1, §4.

@group(0) @binding(2) var<storage, read> cure: array<u32>;

@compute @workgroup_size(WG)
fn main(ids: Ids) {
    if (thread(ids) == 0u && own_miss(cure[1])) {
        control.turn = cure[0];
        control.stop = 0u;
    }
}
