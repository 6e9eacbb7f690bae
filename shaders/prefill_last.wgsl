// The last row of a pass goes on alone: through the head, or as what the next batch begins with.
//
// wide  f32 [rows, COLS]
// x     f32 [1, COLS]

@group(0) @binding(2) var<storage, read> wide: array<vec4<f32>>; // [rows, COLS / 4]
@group(0) @binding(3) var<storage, read_write> x: array<vec4<f32>>; // [1, COLS / 4]

override COLS: u32;

@compute @workgroup_size(WG)
fn main(ids: Ids) {
    if (!live()) {
        return;
    }
    for (var i = thread(ids); i < COLS / 4u; i += WG) {
        x[i] = wide[(flight.rows - 1u) * (COLS / 4u) + i];
    }
}
