// The scan's state from chunk to chunk: s <- e^{l_last} s + what the chunk adds.
//
// steps   vec4<f32> [rows, HEADS]: dt, l and the rest of l
// states  f32 [chunks, HEADS, P, N]: comes as what each chunk adds, leaves as the state before it
// state   f32 [snapshots, HEADS, P, N]: read at the kept snapshot, left in snapshot 0
// An invocation has one cell, chunks in order. `model.md` §1.4, prefill.

struct Params {
    // floats from snapshot to snapshot
    snapshot: u32,
    pad_a: u32,
    pad_b: u32,
    pad_c: u32,
}

@group(0) @binding(2) var<uniform> params: Params;
@group(0) @binding(3) var<storage, read> steps: array<vec4<f32>>; // [rows, HEADS]
@group(0) @binding(4) var<storage, read_write> states: array<f32>; // [chunks, HEADS, P, N]
@group(0) @binding(5) var<storage, read_write> state: array<f32>; // [snapshots, HEADS, P, N]

override HEADS: u32;
override P: u32; // channels of a head
override N: u32; // d_state

const CHUNK: u32 = 64u; // positions

@compute @workgroup_size(WG)
fn main(ids: Ids) {
    let cells = HEADS * P * N;
    let cell = ids.group.x * WG + thread(ids);
    if (!live() || cell >= cells) {
        return;
    }
    let head = cell / (P * N);
    var s = state[control.scan_at * params.snapshot + cell];
    for (var first = 0u; first < flight.rows; first += CHUNK) {
        let last = steps[(min(first + CHUNK, flight.rows) - 1u) * HEADS + head];
        let at = first / CHUNK * cells + cell;
        let added = states[at];
        states[at] = s;
        s = exp(last.y + last.z) * s + added;
    }
    state[cell] = s;
}
