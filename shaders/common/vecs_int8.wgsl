// vec4<u32> that 16 encoded columns take: int8 codes.
const IN_VECS: u32 = 1u;
