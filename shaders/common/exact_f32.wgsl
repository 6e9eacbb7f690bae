// Exact weights held as f32: 4 columns a step.
const CHUNK: u32 = 4u;
const SIDE_WORDS: u32 = 0u;

struct Part {
    x: vec4<f32>,
}

fn part(row: u32, i: u32) -> Part {
    return Part(bitcast<vec4<f32>>(act(row, i)));
}

// What a step of a row is scaled by inside `apply`.
fn chunk_scale(side: u32, i: u32) -> f32 {
    return 1.0;
}

fn apply(w: vec4<u32>, x: Part, scale: f32) -> f32 {
    return dot(bitcast<vec4<f32>>(w), x.x);
}

// What a whole row is scaled by, after its sum.
fn row_scale(side: u32) -> f32 {
    return 1.0;
}
