// Exact weights held as bf16: 8 columns a step, the even column in a word's low half.
const CHUNK: u32 = 8u;
const SIDE_WORDS: u32 = 0u;

struct Part {
    a: vec4<f32>,
    b: vec4<f32>,
}

fn part(row: u32, i: u32) -> Part {
    return Part(bitcast<vec4<f32>>(act(row, 2u * i)), bitcast<vec4<f32>>(act(row, 2u * i + 1u)));
}

// What a step of a row is scaled by inside `apply`.
fn chunk_scale(side: u32, i: u32) -> f32 {
    return 1.0;
}

fn apply(w: vec4<u32>, x: Part, scale: f32) -> f32 {
    let even = bitcast<vec4<f32>>(w << vec4<u32>(16u));
    let odd = bitcast<vec4<f32>>(w & vec4<u32>(0xffff0000u));
    return dot(vec4<f32>(even.x, odd.x, even.y, odd.y), x.a) + dot(vec4<f32>(even.z, odd.z, even.w, odd.w), x.b);
}

// What a whole row is scaled by, after its sum.
fn row_scale(side: u32) -> f32 {
    return 1.0;
}
