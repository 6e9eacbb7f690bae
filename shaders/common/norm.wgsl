// RMS norm of the residual rows, recomputed by each workgroup (`model.md` §1.2).
override EPS: f32;
override HIDDEN: u32; // columns that count; COLS is its padded width
override NORM_CELLS: u32; // ROWS * WG / 4: a partial sum a row and team, teams of 4 at least

var<workgroup> norm_cells: array<f32, NORM_CELLS>;

fn residual16(row: u32, unit: u32) -> Sixteen {
    let at = row * (COLS / 4u) + 4u * unit;
    return Sixteen(x[at], x[at + 1u], x[at + 2u], x[at + 3u]);
}

// 1 / rms of ROWS rows from `first`; rows past `rows` give 0, those whose squares overflow or are no numbers NaN, which
// has to reach the head: 1 / sqrt of infinity would be 0, and the row a plausible one. In uniform control flow.
fn norm_scales(ids: Ids, first: u32, rows: u32) -> array<f32, ROWS> {
    var out: array<f32, ROWS>;
    for (var r = 0u; r < ROWS; r++) {
        var sum = 0.0;
        if (first + r < rows) {
            for (var unit = thread(ids); unit < COLS / 16u; unit += WG) {
                sum += squares(residual16(first + r, unit));
            }
        }
        sum = team_sum(ids, sum);
        if (lane(ids) == 0u) {
            norm_cells[r * (WG / 4u) + team(ids)] = sum;
        }
    }
    workgroupBarrier();
    for (var r = 0u; r < ROWS; r++) {
        var sum = 0.0;
        for (var t = 0u; t < teams(ids); t++) {
            sum += norm_cells[r * (WG / 4u) + t];
        }
        let scale = select(poison(sum), inverseSqrt(sum / f32(HIDDEN) + EPS), is_finite(sum));
        out[r] = select(0.0, scale, first + r < rows);
    }
    return out;
}

// Encodes the normed rows, times the matrix's column field where it has one. In uniform control flow.
fn stage_normed(ids: Ids, first: u32, rows: u32, scales: array<f32, ROWS>, norm: u32, field: u32) {
    var scale = scales;
    for (var r = 0u; r < ROWS; r++) {
        for (var t = 0u; t < COLS / 16u; t += WG) {
            let unit = t + thread(ids);
            var v = Sixteen();
            if (unit < COLS / 16u && first + r < rows) {
                v = times(scaled(residual16(first + r, unit), scale[r]), floats16(norm, unit));
                if (field != NONE) {
                    v = times(v, floats16(field, unit));
                }
            }
            in_encode(ids, r, unit, v, unit < COLS / 16u);
        }
    }
    workgroupBarrier();
}
