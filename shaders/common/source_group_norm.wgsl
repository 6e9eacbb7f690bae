// Group norm of gated rows whose sums of squares the scan left, CELLS a row (`model.md` §1.4 step 7).
override EPS: f32;
override GROUP_COLS: u32; // channels of a group, a multiple of 16
override GROUP_CELLS: u32; // sums of squares of a group
override CELLS: u32; // of a row

fn source16(row: u32, unit: u32) -> Sixteen {
    let group = 16u * unit / GROUP_COLS;
    var sum = 0.0;
    for (var i = 0u; i < GROUP_CELLS; i++) {
        sum += squares_of[row * CELLS + group * GROUP_CELLS + i];
    }
    let scale = select(poison(sum), inverseSqrt(sum / f32(GROUP_COLS) + EPS), is_finite(sum));
    return times(scaled(inner16(row, unit), scale), floats16(params.norm, unit));
}
