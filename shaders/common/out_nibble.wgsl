// Encoded activations, as the next kernel's matrix reads them: int8 codes in nibble order, the scale beside eight times the group's sum.
const OUT_VECS: u32 = 1u; // vec4<u32> an invocation's 16 columns take

// In uniform control flow.
fn out_encode(ids: Ids, row: u32, unit: u32, v: Sixteen, keep: bool) {
    let q = quantize(ids, v);
    let sum = group_sum8(ids, q);
    if (keep) {
        out_write(row, unit, pack_nibble(q));
        if (unit % 2u == 0u) {
            out_write_scale(row, unit / 2u, vec2<f32>(q.scale, sum));
        }
    }
}
