// Four columns of a weight row, from c4 * 4 on: exact f32.
const SIDE_WORDS: u32 = 0u;

fn columns4(base: u32, row: u32, c4: u32) -> vec4<f32> {
    return bitcast<vec4<f32>>(weights[base + row * (COLS / 4u) + c4]);
}

fn group_scale(side: u32, group: u32) -> f32 {
    return 1.0;
}

fn row_scale(side: u32) -> f32 {
    return 1.0;
}
