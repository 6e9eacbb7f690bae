// Rows that came from the host become the residual; nothing else may overwrite a halted slot's rows.
//
// given  f32 [rows, COLS], padded with zeros
// x      f32 [rows, COLS]

struct Params {
    // the first of the given rows
    first: u32,
    pad_a: u32,
    pad_b: u32,
    pad_c: u32,
}

@group(0) @binding(2) var<uniform> params: Params;
@group(0) @binding(3) var<storage, read> given: array<vec4<f32>>; // [rows, COLS / 4]
@group(0) @binding(4) var<storage, read_write> x: array<vec4<f32>>; // [rows, COLS / 4]

override COLS: u32;

@compute @workgroup_size(WG)
fn main(ids: Ids) {
    if (!live()) {
        return;
    }
    for (var i = thread(ids); i < COLS / 4u; i += WG) {
        x[ids.group.x * (COLS / 4u) + i] = given[(params.first + ids.group.x) * (COLS / 4u) + i];
    }
}
