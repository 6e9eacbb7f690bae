// int8 codes of a row, groups of 32 columns with a scale each (`runtime.md` §3a).
// An invocation has 16 consecutive columns, so two neighbours share a group.

struct Codes {
    a: vec4<i32>,
    b: vec4<i32>,
    c: vec4<i32>,
    d: vec4<i32>,
    // max|a| / 127 of the group, 0 where that is zero or subnormal
    scale: f32,
}

// Bits of the largest magnitude. They order as the magnitudes do, with NaN above all: what is not finite stays seen.
fn largest(v: vec4<f32>) -> u32 {
    let bits = bitcast<vec4<u32>>(v) & vec4<u32>(0x7fffffffu);
    return max(max(bits.x, bits.y), max(bits.z, bits.w));
}

// In uniform control flow.
fn quantize(ids: Ids, v: Sixteen) -> Codes {
    let top = pair_max(ids, max(max(largest(v.a), largest(v.b)), max(largest(v.c), largest(v.d))));
    var scale = bitcast<f32>(top) / 127.0;
    var inverse = 1.0 / scale;
    // not so for NaN
    if (scale < 1.1754944e-38) {
        scale = 0.0;
        inverse = 0.0;
    }
    let most = vec4<f32>(127.0);
    return Codes(
        vec4<i32>(clamp(round(v.a * inverse), -most, most)),
        vec4<i32>(clamp(round(v.b * inverse), -most, most)),
        vec4<i32>(clamp(round(v.c * inverse), -most, most)),
        vec4<i32>(clamp(round(v.d * inverse), -most, most)),
        scale,
    );
}

// Codes in column order.
fn pack_linear(q: Codes) -> vec4<u32> {
    return vec4<u32>(pack4xI8(q.a), pack4xI8(q.b), pack4xI8(q.c), pack4xI8(q.d));
}

// Codes as the nibbles of q4tp want them: of each eight columns the even ones, then the odd ones.
fn pack_nibble(q: Codes) -> vec4<u32> {
    return vec4<u32>(
        pack4xI8(vec4<i32>(q.a.xz, q.b.xz)),
        pack4xI8(vec4<i32>(q.a.yw, q.b.yw)),
        pack4xI8(vec4<i32>(q.c.xz, q.d.xz)),
        pack4xI8(vec4<i32>(q.c.yw, q.d.yw)),
    );
}

// Eight times the sum of the group's codes: what `nibble - 8` takes off. In uniform control flow.
fn group_sum8(ids: Ids, q: Codes) -> f32 {
    let s = q.a + q.b + q.c + q.d;
    return pair_add(ids, f32((s.x + s.y + s.z + s.w) * 8));
}
