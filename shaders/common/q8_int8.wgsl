// q8_2f with int8 activations: 16 columns a step, inner sums exact in i32.
const CHUNK: u32 = 16u;
const SIDE_WORDS: u32 = 1u; // f32 row scale

struct Part {
    x: vec4<u32>,
    d: f32,
}

fn part(row: u32, i: u32) -> Part {
    return Part(act(row, i), act_scale(row, i / 2u).x);
}

// What a step of a row is scaled by inside `apply`.
fn chunk_scale(side: u32, i: u32) -> f32 {
    return 1.0;
}

fn apply(w: vec4<u32>, x: Part, scale: f32) -> f32 {
    let sum = dot4I8Packed(w.x, x.x.x) + dot4I8Packed(w.y, x.x.y) + dot4I8Packed(w.z, x.x.z)
        + dot4I8Packed(w.w, x.x.w);
    return f32(sum) * x.d;
}

// What a whole row is scaled by, after its sum.
fn row_scale(side: u32) -> f32 {
    return bitcast<f32>(words[side]);
}
