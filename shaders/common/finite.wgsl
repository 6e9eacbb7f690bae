// What is infinite or no number, by its bits: a driver may assume of floats that none is.
fn is_finite(x: f32) -> bool {
    return (bitcast<u32>(x) & 0x7f800000u) != 0x7f800000u;
}

// NaN, of a value that is not finite.
fn poison(x: f32) -> f32 {
    return bitcast<f32>(bitcast<u32>(x) | 0x7fc00000u);
}
