// The scan's state from chunk to chunk: s <- e^{l_last} s + what the chunk adds.
//
// steps   vec4<f32> [rows, HEADS]: dt, l and the rest of l
// states  vec4<f32> [chunks, HEADS, P, N / 4]: comes as what each chunk adds, leaves as the state before it
// state   vec4<f32> [snapshots, HEADS, P, N / 4]: read at the kept snapshot, left in snapshot 0
// An invocation has four cells, chunks in order, the next chunk on its way while this one is added. `model.md` §1.4, prefill.

struct Params {
    // vec4 from snapshot to snapshot
    snapshot: u32,
    pad_a: u32,
    pad_b: u32,
    pad_c: u32,
}

@group(0) @binding(2) var<uniform> params: Params;
@group(0) @binding(3) var<storage, read> steps: array<vec4<f32>>; // [rows, HEADS]
@group(0) @binding(4) var<storage, read_write> states: array<vec4<f32>>; // [chunks, HEADS, P, N / 4]
@group(0) @binding(5) var<storage, read_write> state: array<vec4<f32>>; // [snapshots, HEADS, P, N / 4]

override HEADS: u32;
override P: u32; // channels of a head
override N: u32; // d_state, a multiple of 4

const CHUNK: u32 = 64u; // positions

@compute @workgroup_size(WG)
fn main(ids: Ids) {
    let cells = HEADS * P * N / 4u;
    let cell = ids.group.x * WG + thread(ids);
    if (!live() || cell >= cells) {
        return;
    }
    let head = cell / (P * N / 4u);
    var s = state[control.scan_at * params.snapshot + cell];
    let chunks = (flight.rows + CHUNK - 1u) / CHUNK;
    var next = states[cell];
    for (var i = 0u; i < chunks; i++) {
        let last = steps[(min((i + 1u) * CHUNK, flight.rows) - 1u) * HEADS + head];
        let added = next;
        next = states[min(i + 1u, chunks - 1u) * cells + cell];
        states[i * cells + cell] = s;
        s = exp(last.y + last.z) * s + added;
    }
    state[cell] = s;
}
