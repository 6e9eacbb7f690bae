// f32 vectors in the weights' buffer, padded with zeros to the width of the rows they multiply.
fn floats16(base: u32, unit: u32) -> Sixteen {
    let at = base + 4u * unit;
    return Sixteen(
        bitcast<vec4<f32>>(weights[at]),
        bitcast<vec4<f32>>(weights[at + 1u]),
        bitcast<vec4<f32>>(weights[at + 2u]),
        bitcast<vec4<f32>>(weights[at + 3u]),
    );
}

fn times(v: Sixteen, w: Sixteen) -> Sixteen {
    return Sixteen(v.a * w.a, v.b * w.b, v.c * w.c, v.d * w.d);
}

fn scaled(v: Sixteen, s: f32) -> Sixteen {
    return Sixteen(v.a * s, v.b * s, v.c * s, v.d * s);
}

fn squares(v: Sixteen) -> f32 {
    return dot(v.a, v.a) + dot(v.b, v.b) + dot(v.c, v.c) + dot(v.d, v.d);
}
