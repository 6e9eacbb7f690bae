// An embedding row held as q8_2f: code * row scale * column field (`cmf.md` §5).
fn embed16(base: u32, side: u32, field: u32, row: u32, unit: u32) -> Sixteen {
    let w = weights[base + row * (COLS / 16u) + unit];
    let codes = Sixteen(
        vec4<f32>(unpack4xI8(w.x)),
        vec4<f32>(unpack4xI8(w.y)),
        vec4<f32>(unpack4xI8(w.z)),
        vec4<f32>(unpack4xI8(w.w)),
    );
    return times(scaled(codes, bitcast<f32>(words[side + row])), floats16(field, unit));
}
