// Weights of a 128 by 32 tile as halves: (nibble - 8) times the group's scale over the row's top rung, rounded once;
// the top rung goes on the sum.
override SIDE_WORDS: u32; // f32 lo, f32 step, then six 5-bit rungs a word: 2 + ceil(groups / 6)

struct Fetched {
    codes: vec4<u32>,
    scale: f16,
}

struct Ladder {
    // log2 of the scale over the top rung at rung 0, and a rung's step
    lo: f32,
    step: f32,
}

// The row's largest scale, as a power of two, in log2.
fn top_of(lo: f32, step: f32) -> f32 {
    return ceil(max(lo, lo + 31.0 * step));
}

fn ladder_of(side: u32) -> Ladder {
    let lo = bitcast<f32>(words[side]);
    let step = bitcast<f32>(words[side + 1u]);
    return Ladder(lo - top_of(lo, step), step);
}

// 16 columns: the half-th part of the group that begins at column k.
fn fetch(base: u32, side: u32, ladder: Ladder, row: u32, k: u32, half: u32) -> Fetched {
    let group = k / 32u;
    let rung = (words[side + 2u + group / 6u] >> (5u * (group % 6u))) & 31u;
    return Fetched(weights[base + row * (COLS / 32u) + group], f16(exp2(ladder.lo + f32(rung) * ladder.step)));
}

fn four(word: u32, shift: u32, scale: f16) -> vec4<f16> {
    let n = vec4<u32>(word >> shift) >> vec4<u32>(0u, 4u, 8u, 12u);
    return vec4<f16>(vec4<i32>(n & vec4<u32>(15u)) - vec4<i32>(8)) * scale;
}

fn unfold(f: Fetched, half: u32, at: u32) {
    let codes = select(f.codes.xy, f.codes.zw, half == 1u);
    hold_w(at, four(codes.x, 0u, f.scale));
    hold_w(at + 1u, four(codes.x, 16u, f.scale));
    hold_w(at + 2u, four(codes.y, 0u, f.scale));
    hold_w(at + 3u, four(codes.y, 16u, f.scale));
}

fn sum_scale(side: u32) -> f32 {
    return exp2(top_of(bitcast<f32>(words[side]), bitcast<f32>(words[side + 1u])));
}
