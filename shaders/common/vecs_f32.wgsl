// vec4<u32> that 16 encoded columns take: f32.
const IN_VECS: u32 = 4u;
