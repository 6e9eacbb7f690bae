// x += partial + sum over completions w * made: what the closing sum of a step or of a verify pass lacks once the host has
// made the missing experts.
//
// cure     next turn, layer, completions, word of `routes` where weights begin; then row * TOP_K + pick of each completion
// made     f32 [completions, COLS]
// routes   u32: see `routes.wgsl`
// partial  f32 [rows, COLS]: resident and shared experts (`experts_down`)
// x        f32 [rows, COLS], the residual
// Does nothing unless the stop is the slot's present one: `flight` carries the stop's turn and flight.
// `protocol.md` §2, Sum; `model.md` §1.5 steps 6, 7.

@group(0) @binding(2) var<storage, read> cure: array<u32>;
@group(0) @binding(3) var<storage, read> made: array<f32>; // [completions, COLS]
@group(0) @binding(4) var<storage, read> routes: array<u32>;
@group(0) @binding(5) var<storage, read> partial: array<f32>; // [rows, COLS]
@group(0) @binding(6) var<storage, read_write> x: array<f32>; // [rows, COLS]

override COLS: u32;
override TOP_K: u32;

@compute @workgroup_size(WG)
fn main(ids: Ids) {
    let c = ids.group.x * WG + thread(ids);
    if (!own_miss(cure[1]) || c >= COLS) {
        return;
    }
    let row = ids.group.y;
    var sum = partial[row * COLS + c];
    for (var i = 0u; i < cure[2]; i++) {
        let at = cure[4u + i];
        if (at / TOP_K == row) {
            sum += bitcast<f32>(routes[cure[3] + at]) * made[i * COLS + c];
        }
    }
    x[row * COLS + c] += sum;
}
