// Four columns of a weight row, from c4 * 4 on: int8 codes; the row's scale is applied at the end.
const SIDE_WORDS: u32 = 1u; // f32 row scale

// 16 columns from c16 * 16 on, four codes a word.
fn codes16(base: u32, row: u32, c16: u32) -> vec4<u32> {
    return weights[base + row * (COLS / 16u) + c16];
}

fn columns4(base: u32, row: u32, c4: u32) -> vec4<f32> {
    return vec4<f32>(unpack4xI8(weights[base + row * (COLS / 16u) + c4 / 4u][c4 % 4u]));
}

fn group_scale(side: u32, group: u32) -> f32 {
    return 1.0;
}

fn row_scale(side: u32) -> f32 {
    return bitcast<f32>(words[side]);
}
