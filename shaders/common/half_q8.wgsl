// Weights of a 128 by 32 tile as halves: int8 codes are exact, the row's scale goes on the sum.
const SIDE_WORDS: u32 = 1u; // f32 row scale

struct Fetched {
    codes: vec4<u32>,
    scale: f16,
}

struct Ladder {
    lo: f32,
    step: f32,
}

fn ladder_of(side: u32) -> Ladder {
    return Ladder(0.0, 0.0);
}

// 16 columns: the half-th part of the group that begins at column k.
fn fetch(base: u32, side: u32, ladder: Ladder, row: u32, k: u32, half: u32) -> Fetched {
    return Fetched(weights[base + row * (COLS / 16u) + k / 16u + half], f16(1.0));
}

fn unfold(f: Fetched, half: u32, at: u32) {
    hold_w(at, vec4<f16>(unpack4xI8(f.codes.x)));
    hold_w(at + 1u, vec4<f16>(unpack4xI8(f.codes.y)));
    hold_w(at + 2u, vec4<f16>(unpack4xI8(f.codes.z)));
    hold_w(at + 3u, vec4<f16>(unpack4xI8(f.codes.w)));
}

fn sum_scale(side: u32) -> f32 {
    return bitcast<f32>(words[side]);
}
