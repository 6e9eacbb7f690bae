// Four columns of a weight row, from c4 * 4 on: bf16 pairs, the even column in a word's low half.
const SIDE_WORDS: u32 = 0u;

fn columns4(base: u32, row: u32, c4: u32) -> vec4<f32> {
    let v = weights[base + row * (COLS / 8u) + c4 / 2u];
    let w = select(v.xy, v.zw, c4 % 2u == 1u);
    return bitcast<vec4<f32>>(vec4<u32>(w.x << 16u, w.x & 0xffff0000u, w.y << 16u, w.y & 0xffff0000u));
}

fn group_scale(side: u32, group: u32) -> f32 {
    return 1.0;
}

fn row_scale(side: u32) -> f32 {
    return 1.0;
}
