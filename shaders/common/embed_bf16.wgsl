// An exact embedding row held as bf16, the even column in a word's low half.
fn two(w: u32) -> vec2<f32> {
    return vec2<f32>(bitcast<f32>(w << 16u), bitcast<f32>(w & 0xffff0000u));
}

fn embed16(base: u32, side: u32, field: u32, row: u32, unit: u32) -> Sixteen {
    let a = weights[base + row * (COLS / 8u) + 2u * unit];
    let b = weights[base + row * (COLS / 8u) + 2u * unit + 1u];
    return Sixteen(
        vec4<f32>(two(a.x), two(a.y)),
        vec4<f32>(two(a.z), two(a.w)),
        vec4<f32>(two(b.x), two(b.y)),
        vec4<f32>(two(b.z), two(b.w)),
    );
}
