// Encoded rows: f32.

fn encode(ids: Ids, j: u32) {
    for (var c4 = thread(ids); c4 < COLS / 4u; c4 += WG) {
        acts[j * (COLS / 4u) + c4] = bitcast<vec4<u32>>(value4(j, c4));
    }
}
