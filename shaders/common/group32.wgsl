// Groups of 32 columns of an encoded row, an invocation each (`runtime.md` §3a).

alias Group = array<vec4<f32>, 8>;

fn group_of(j: u32, group: u32) -> Group {
    var v: Group;
    for (var i = 0u; i < 8u; i++) {
        v[i] = value4(j, 8u * group + i);
    }
    return v;
}

// The largest magnitude, found by its bits: they order as the magnitudes do, with NaN above all.
fn group_top(group: Group) -> f32 {
    var v = group;
    var top = vec4<u32>();
    for (var i = 0u; i < 8u; i++) {
        top = max(top, bitcast<vec4<u32>>(v[i]) & vec4<u32>(0x7fffffffu));
    }
    return bitcast<f32>(max(max(top.x, top.y), max(top.z, top.w)));
}

// max|a| / 127, or 0 where that is zero or subnormal; NaN where a is.
fn code_scale(top: f32) -> f32 {
    let d = top / 127.0;
    return select(d, 0.0, d < 1.1754944e-38);
}

// Codes of four columns. A true division: the product with 1 / d moves codes that lie half way.
fn codes4(v: vec4<f32>, d: f32) -> vec4<f32> {
    if (d == 0.0) {
        return vec4<f32>();
    }
    return clamp(round(v / d), vec4<f32>(-127.0), vec4<f32>(127.0));
}
