// q4tp with f32 activations: a group of 32 columns a step.
struct Part {
    a: vec4<f32>,
    b: vec4<f32>,
    c: vec4<f32>,
    d: vec4<f32>,
    e: vec4<f32>,
    f: vec4<f32>,
    g: vec4<f32>,
    h: vec4<f32>,
}

fn part(row: u32, i: u32) -> Part {
    return Part(
        bitcast<vec4<f32>>(act(row, 8u * i)),
        bitcast<vec4<f32>>(act(row, 8u * i + 1u)),
        bitcast<vec4<f32>>(act(row, 8u * i + 2u)),
        bitcast<vec4<f32>>(act(row, 8u * i + 3u)),
        bitcast<vec4<f32>>(act(row, 8u * i + 4u)),
        bitcast<vec4<f32>>(act(row, 8u * i + 5u)),
        bitcast<vec4<f32>>(act(row, 8u * i + 6u)),
        bitcast<vec4<f32>>(act(row, 8u * i + 7u)),
    );
}

// Element 2k of a word's eight is the low nibble of byte k, element 2k + 1 the high one.
fn eight(w: u32, x: vec4<f32>, y: vec4<f32>) -> f32 {
    let low = vec4<f32>(unpack4xU8(w & 0x0f0f0f0fu)) - vec4<f32>(8.0);
    let high = vec4<f32>(unpack4xU8((w >> 4u) & 0x0f0f0f0fu)) - vec4<f32>(8.0);
    return dot(vec4<f32>(low.x, high.x, low.y, high.y), x) + dot(vec4<f32>(low.z, high.z, low.w, high.w), y);
}

fn apply(w: vec4<u32>, x: Part, scale: f32) -> f32 {
    return scale * (eight(w.x, x.a, x.b) + eight(w.y, x.c, x.d) + eight(w.z, x.e, x.f) + eight(w.w, x.g, x.h));
}
