// Completions of a pass's missing experts, each to its pick, where the closing sum finds it.
//
// cure  next turn, layer, completions, 0; then row * TOP_K + pick of each completion
// made  f32 [completions, COLS]
// out   f32 [rows, TOP_K, COLS]
// Does nothing unless the stop is the slot's present one: `flight` carries the stop's turn and flight.
// `protocol.md` §2, Sum.

@group(0) @binding(2) var<storage, read> cure: array<u32>;
@group(0) @binding(3) var<storage, read> made: array<f32>; // [completions, COLS]
@group(0) @binding(4) var<storage, read_write> out: array<f32>; // [rows, TOP_K, COLS]

override COLS: u32;

@compute @workgroup_size(WG)
fn main(ids: Ids) {
    let i = ids.group.x;
    if (!own_miss(cure[1]) || i >= cure[2]) {
        return;
    }
    for (var c = thread(ids); c < COLS; c += WG) {
        out[cure[4u + i] * COLS + c] = made[i * COLS + c];
    }
}
