// An exact embedding row held as f32.
fn embed16(base: u32, side: u32, field: u32, row: u32, unit: u32) -> Sixteen {
    return floats16(base + row * (COLS / 4u), unit);
}
