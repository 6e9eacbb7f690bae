// x += partial + sum over completions w * made: what a step's closing sum lacks once the host has made the missing experts.
//
// cure     next turn, layer, completions, 0; then the pick of each completion
// made     f32 [completions, COLS]
// routes   u32: see `routes.wgsl`; weights (f32 bits) at WEIGHTS_AT
// partial  f32 [COLS]: resident and shared experts (`experts_down`)
// x        f32 [COLS], the residual
// Does nothing unless the stop is the slot's present one: `flight` carries the stop's turn and flight.
// `protocol.md` §2, Sum; `model.md` §1.5 steps 6, 7.

@group(0) @binding(2) var<storage, read> cure: array<u32>;
@group(0) @binding(3) var<storage, read> made: array<f32>; // [completions, COLS]
@group(0) @binding(4) var<storage, read> routes: array<u32>;
@group(0) @binding(5) var<storage, read> partial: array<f32>; // [COLS]
@group(0) @binding(6) var<storage, read_write> x: array<f32>; // [COLS]

override COLS: u32;
override WEIGHTS_AT: u32;

@compute @workgroup_size(WG)
fn main(ids: Ids) {
    let c = ids.group.x * WG + thread(ids);
    if (!own_miss(cure[1]) || c >= COLS) {
        return;
    }
    var sum = partial[c];
    for (var i = 0u; i < cure[2]; i++) {
        sum += bitcast<f32>(routes[WEIGHTS_AT + cure[4u + i]]) * made[i * COLS + c];
    }
    x[c] += sum;
}
