// Encoded rows: int8 codes in column order, a scale a group.

fn encode(ids: Ids, j: u32) {
    for (var group = thread(ids); group < COLS / 32u; group += WG) {
        var v = group_of(j, group);
        let d = code_scale(group_top(v));
        act_scale[j * (COLS / 32u) + group] = d;
        for (var half = 0u; half < 2u; half++) {
            var packed = vec4<u32>();
            for (var i = 0u; i < 4u; i++) {
                packed[i] = pack4xI8(vec4<i32>(codes4(v[4u * half + i], d)));
            }
            acts[j * (COLS / 16u) + 2u * group + half] = packed;
        }
    }
}
