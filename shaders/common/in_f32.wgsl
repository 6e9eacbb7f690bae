// Encoded activations, as this kernel's matrix reads them: f32, unchanged.
const IN_VECS: u32 = 4u; // vec4<u32> an invocation's 16 columns take

fn in_encode(ids: Ids, row: u32, unit: u32, v: Sixteen, keep: bool) {
    if (keep) {
        in_write(row, 4u * unit, bitcast<vec4<u32>>(v.a));
        in_write(row, 4u * unit + 1u, bitcast<vec4<u32>>(v.b));
        in_write(row, 4u * unit + 2u, bitcast<vec4<u32>>(v.c));
        in_write(row, 4u * unit + 3u, bitcast<vec4<u32>>(v.d));
    }
}
