// q4tp with int8 activations: a group of 32 columns a step, inner sums exact in i32.
struct Part {
    a: vec4<u32>,
    b: vec4<u32>,
    d: vec2<f32>,
}

fn part(row: u32, i: u32) -> Part {
    return Part(act(row, 2u * i), act(row, 2u * i + 1u), act_scale(row, i));
}

fn apply(w: vec4<u32>, x: Part, scale: f32) -> f32 {
    let low = w & vec4<u32>(0x0f0f0f0fu);
    let high = (w >> vec4<u32>(4u)) & vec4<u32>(0x0f0f0f0fu);
    let sum = dot4I8Packed(low.x, x.a.x) + dot4I8Packed(high.x, x.a.y)
        + dot4I8Packed(low.y, x.a.z) + dot4I8Packed(high.y, x.a.w)
        + dot4I8Packed(low.z, x.b.x) + dot4I8Packed(high.z, x.b.y)
        + dot4I8Packed(low.w, x.b.z) + dot4I8Packed(high.w, x.b.w);
    return (f32(sum) - x.d.y) * (x.d.x * scale);
}
