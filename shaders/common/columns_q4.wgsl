// Four columns of a weight row, from c4 * 4 on: nibbles less 8; the group's scale is a rung of the row's ladder.
override SIDE_WORDS: u32; // f32 lo, f32 step, then six 5-bit rungs a word: 2 + ceil(groups / 6)

fn columns4(base: u32, row: u32, c4: u32) -> vec4<f32> {
    return vec4<f32>(nibbles4(base, row, c4));
}

fn nibbles4(base: u32, row: u32, c4: u32) -> vec4<i32> {
    let word = weights[base + row * (COLS / 32u) + c4 / 8u][c4 / 2u % 4u];
    let n = vec4<u32>(word >> (16u * (c4 % 2u))) >> vec4<u32>(0u, 4u, 8u, 12u);
    return vec4<i32>(n & vec4<u32>(15u)) - vec4<i32>(8);
}

fn codes4(base: u32, row: u32, c4: u32) -> u32 {
    return pack4xI8(nibbles4(base, row, c4));
}

fn group_scale(side: u32, group: u32) -> f32 {
    let rung = (words[side + 2u + group / 6u] >> (5u * (group % 6u))) & 31u;
    return exp2(bitcast<f32>(words[side]) + f32(rung) * bitcast<f32>(words[side + 1u]));
}

fn row_scale(side: u32) -> f32 {
    return 1.0;
}
