// RMS norm of the residual rows, recomputed by each workgroup (`model.md` §1.2).
override EPS: f32;
override HIDDEN: u32; // columns that count; COLS is its padded width
override NORM_CELLS: u32; // ROWS * WG / 4: a partial sum a row and team, teams of 4 at least

var<workgroup> norm_cells: array<f32, NORM_CELLS>;

fn residual16(row: u32, unit: u32) -> Sixteen {
    let at = row * (COLS / 4u) + 4u * unit;
    return Sixteen(x[at], x[at + 1u], x[at + 2u], x[at + 3u]);
}

// 1 / rms of a row from its partial sums, 0 where it is not inside; NaN where its squares overflow or are no numbers, which
// has to reach the head: 1 / sqrt of infinity would be 0, and the row a plausible one.
fn rms_of(ids: Ids, r: u32, inside: bool) -> f32 {
    var sum = 0.0;
    for (var t = 0u; t < teams(ids); t++) {
        sum += norm_cells[r * (WG / 4u) + t];
    }
    let scale = select(poison(sum), inverseSqrt(sum / f32(HIDDEN) + EPS), is_finite(sum));
    return select(0.0, scale, inside);
}

// A row's columns times the norm's weight and the matrix's column field where it has one; past the rows and columns, the
// last ones again. Its scale comes later: codes do not depend on it.
fn weighed(row: u32, unit: u32, rows: u32, norm: u32, field: u32) -> Raw {
    let last = min(unit, COLS / 16u - 1u);
    var raw = Raw(residual16(min(row, rows - 1u), last), floats16(norm, last));
    if (field != NONE) {
        raw.w = times(raw.w, floats16(field, last));
    }
    return raw;
}

struct Raw {
    x: Sixteen,
    w: Sixteen,
}

// Encodes the rows times the norm's weight and the field, and finds 1 / rms of each, by which products of the codes are to
// be multiplied; rows past `rows` give 0. `near` is the first row's `weighed` unit of this invocation. In uniform control flow.
fn stage_normed(ids: Ids, first: u32, rows: u32, norm: u32, field: u32, near: Raw) -> array<f32, ROWS> {
    var out: array<f32, ROWS>;
    for (var r = 0u; r < ROWS; r++) {
        var sum = 0.0;
        for (var t = 0u; t < COLS / 16u; t += WG) {
            let unit = t + thread(ids);
            var raw = near;
            if (r > 0u || t > 0u) {
                raw = weighed(first + r, unit, rows, norm, field);
            }
            in_encode(ids, r, unit, times(raw.x, raw.w), unit < COLS / 16u);
            sum += select(0.0, squares(raw.x), unit < COLS / 16u);
        }
        sum = team_sum(ids, sum);
        if (lane(ids) == 0u) {
            norm_cells[r * (WG / 4u) + team(ids)] = sum;
        }
    }
    workgroupBarrier();
    for (var r = 0u; r < ROWS; r++) {
        out[r] = rms_of(ids, r, first + r < rows);
    }
    return out;
}
