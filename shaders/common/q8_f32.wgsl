// q8_2f with f32 activations: 16 columns a step.
const CHUNK: u32 = 16u;
const SIDE_WORDS: u32 = 1u; // f32 row scale

struct Part {
    a: vec4<f32>,
    b: vec4<f32>,
    c: vec4<f32>,
    d: vec4<f32>,
}

fn part(row: u32, i: u32) -> Part {
    return Part(
        bitcast<vec4<f32>>(act(row, 4u * i)),
        bitcast<vec4<f32>>(act(row, 4u * i + 1u)),
        bitcast<vec4<f32>>(act(row, 4u * i + 2u)),
        bitcast<vec4<f32>>(act(row, 4u * i + 3u)),
    );
}

// What a step of a row is scaled by inside `apply`.
fn chunk_scale(side: u32, i: u32) -> f32 {
    return 1.0;
}

fn apply(w: vec4<u32>, x: Part, scale: f32) -> f32 {
    return dot(vec4<f32>(unpack4xI8(w.x)), x.a) + dot(vec4<f32>(unpack4xI8(w.y)), x.b)
        + dot(vec4<f32>(unpack4xI8(w.z)), x.c) + dot(vec4<f32>(unpack4xI8(w.w)), x.d);
}

// What a whole row is scaled by, after its sum.
fn row_scale(side: u32) -> f32 {
    return bitcast<f32>(words[side]);
}
