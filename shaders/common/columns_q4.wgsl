// Four columns of a weight row, from c4 * 4 on: nibbles less 8; the group's scale is a rung of the row's ladder.
override SIDE_WORDS: u32; // f32 lo, f32 step, then six 5-bit rungs a word: 2 + ceil(groups / 6)

fn columns4(base: u32, row: u32, c4: u32) -> vec4<f32> {
    let word = weights[base + row * (COLS / 32u) + c4 / 8u][c4 / 2u % 4u];
    return vec4<f32>(four(word, 16u * (c4 % 2u)));
}

// The four nibbles of a word from bit `shift` on.
fn four(word: u32, shift: u32) -> vec4<i32> {
    let n = vec4<u32>(word >> shift) >> vec4<u32>(0u, 4u, 8u, 12u);
    return vec4<i32>(n & vec4<u32>(15u)) - vec4<i32>(8);
}

// 16 columns from c16 * 16 on, four codes a word.
fn codes16(base: u32, row: u32, c16: u32) -> vec4<u32> {
    let group = weights[base + row * (COLS / 32u) + c16 / 2u];
    let half = select(group.xy, group.zw, c16 % 2u == 1u);
    return vec4<u32>(
        pack4xI8(four(half.x, 0u)),
        pack4xI8(four(half.x, 16u)),
        pack4xI8(four(half.y, 0u)),
        pack4xI8(four(half.y, 16u)),
    );
}

fn group_scale(side: u32, group: u32) -> f32 {
    let rung = (words[side + 2u + group / 6u] >> (5u * (group % 6u))) & 31u;
    return exp2(bitcast<f32>(words[side]) + f32(rung) * bitcast<f32>(words[side + 1u]));
}

fn row_scale(side: u32) -> f32 {
    return 1.0;
}
