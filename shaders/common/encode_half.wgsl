// Encoded rows: halves over a power of two of the row, chosen such that the largest lies in 64..128: relu squared does
// not overflow, and what falls below the normal halves is 2^-20 of the row's largest. In int8 mode the halves are
// codes times their scales, rounded once.
override INT8: bool;

fn encode(ids: Ids, j: u32) {
    var top = 0.0;
    for (var group = thread(ids); group < COLS / 32u; group += WG) {
        top = max(top, group_top(group_of(j, group)));
    }
    top = wide_max(ids, top);
    // biased exponent of the largest; rows too small to scale are zero
    let exponent = (bitcast<u32>(top) >> 23u) & 255u;
    var factor = 0.0;
    var scale = 0.0;
    if (exponent > 8u) {
        factor = bitcast<f32>((260u - exponent) << 23u);
        scale = bitcast<f32>((exponent - 6u) << 23u);
    }
    if (thread(ids) == 0u) {
        act_scale[j] = scale;
    }
    for (var group = thread(ids); group < COLS / 32u; group += WG) {
        var v = group_of(j, group);
        var d = 0.0;
        if (INT8) {
            d = code_scale(group_top(v));
        }
        for (var eight = 0u; eight < 4u; eight++) {
            var a = v[2u * eight];
            var b = v[2u * eight + 1u];
            if (INT8) {
                a = codes4(a, d) * d;
                b = codes4(b, d) * d;
            }
            a *= factor;
            b *= factor;
            acts[j * (COLS / 8u) + 4u * group + eight] = vec4<u32>(
                pack2x16float(a.xy),
                pack2x16float(a.zw),
                pack2x16float(b.xy),
                pack2x16float(b.zw),
            );
        }
    }
}
