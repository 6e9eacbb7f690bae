// Groups of 32 columns of an encoded row, an invocation each (`runtime.md` §3a).

fn group_top(j: u32, group: u32) -> f32 {
    var top = 0.0;
    for (var i = 0u; i < 8u; i++) {
        let v = abs(value4(j, 8u * group + i));
        top = max(top, max(max(v.x, v.y), max(v.z, v.w)));
    }
    return top;
}

// max|a| / 127, or 0 where that is zero or subnormal.
fn code_scale(top: f32) -> f32 {
    let d = top / 127.0;
    return select(0.0, d, d >= 1.1754944e-38);
}

// Codes of four columns. A true division: the product with 1 / d moves codes that lie half way.
fn codes4(v: vec4<f32>, d: f32) -> vec4<f32> {
    if (d == 0.0) {
        return vec4<f32>();
    }
    return clamp(round(v / d), vec4<f32>(-127.0), vec4<f32>(127.0));
}
