// Encoded activation rows in workgroup memory. COLS is the padded width of the matrix.
override COLS: u32;
override STAGED_VECS: u32; // ROWS * COLS / 16 * IN_VECS
override STAGED_SCALES: u32; // ROWS * COLS / 32, or 1 where no codes have scales

var<workgroup> staged: array<vec4<u32>, STAGED_VECS>;
var<workgroup> staged_scale: array<vec2<f32>, STAGED_SCALES>;

fn in_write(row: u32, at: u32, v: vec4<u32>) {
    staged[row * (COLS / 16u * IN_VECS) + at] = v;
}

fn in_write_scale(row: u32, group: u32, v: vec2<f32>) {
    staged_scale[row * (COLS / 32u) + group] = v;
}

fn act(row: u32, at: u32) -> vec4<u32> {
    return staged[row * (COLS / 16u * IN_VECS) + at];
}

fn act_scale(row: u32, group: u32) -> vec2<f32> {
    return staged_scale[row * (COLS / 32u) + group];
}
