// Encoded activations, as the next kernel's matrix reads them: f32, unchanged.
const OUT_VECS: u32 = 4u; // vec4<u32> an invocation's 16 columns take

fn out_encode(ids: Ids, row: u32, unit: u32, v: Sixteen, keep: bool) {
    if (keep) {
        out_write(row, 4u * unit, bitcast<vec4<u32>>(v.a));
        out_write(row, 4u * unit + 1u, bitcast<vec4<u32>>(v.b));
        out_write(row, 4u * unit + 2u, bitcast<vec4<u32>>(v.c));
        out_write(row, 4u * unit + 3u, bitcast<vec4<u32>>(v.d));
    }
}
