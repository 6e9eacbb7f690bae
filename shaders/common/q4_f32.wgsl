// q4tp with f32 activations: a group of 32 columns a step.
struct Part {
    x: array<vec4<f32>, 8>,
}

fn part(row: u32, i: u32) -> Part {
    var p: Part;
    for (var k = 0u; k < 8u; k++) {
        p.x[k] = bitcast<vec4<f32>>(act(row, 8u * i + k));
    }
    return p;
}

// Element 2k of a word's eight is the low nibble of byte k, element 2k + 1 the high one.
fn eight(w: u32, x: vec4<f32>, y: vec4<f32>) -> f32 {
    let low = vec4<f32>(unpack4xU8(w & 0x0f0f0f0fu)) - vec4<f32>(8.0);
    let high = vec4<f32>(unpack4xU8((w >> 4u) & 0x0f0f0f0fu)) - vec4<f32>(8.0);
    return dot(vec4<f32>(low.x, high.x, low.y, high.y), x) + dot(vec4<f32>(low.z, high.z, low.w, high.w), y);
}

fn apply(w: vec4<u32>, x: Part, scale: f32) -> f32 {
    return scale * (eight(w.x, x.x[0], x.x[1]) + eight(w.y, x.x[2], x.x[3]) + eight(w.z, x.x[4], x.x[5])
        + eight(w.w, x.x[6], x.x[7]));
}
