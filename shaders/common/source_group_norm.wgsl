// Group norm of gated rows whose sums of squares the scan left, CELLS a row (`model.md` §1.4 step 7).
override EPS: f32;
override GROUP_COLS: u32; // channels of a group, a multiple of 16
override GROUP_CELLS: u32; // sums of squares of a group
override CELLS: u32; // of a row
override GROUP_SCALES: u32; // groups of ROWS rows

var<workgroup> group_scale: array<f32, GROUP_SCALES>;

fn cell(first: u32, at: u32, i: u32) -> f32 {
    let group = min(at, GROUP_SCALES - 1u);
    let groups = CELLS / GROUP_CELLS;
    return squares_of[min(first + group / groups, flight.rows - 1u) * CELLS + group % groups * GROUP_CELLS + min(i, GROUP_CELLS - 1u)];
}

// The first cell that an invocation sums, asked for early.
fn first_cell(ids: Ids, first: u32) -> f32 {
    return cell(first, team(ids), lane(ids));
}

// 1 / rms of every group of ROWS rows from `first`, a team a group. In uniform control flow; a barrier must follow.
fn prepare(ids: Ids, first: u32, near: f32) {
    for (var t = 0u; t < GROUP_SCALES; t += teams(ids)) {
        let at = t + team(ids);
        var sum = 0.0;
        for (var i = 0u; i < GROUP_CELLS; i += lanes(ids)) {
            var square = near;
            if (t > 0u || i > 0u) {
                square = cell(first, at, i + lane(ids));
            }
            sum += select(0.0, square, i + lane(ids) < GROUP_CELLS);
        }
        sum = team_sum(ids, sum);
        if (lane(ids) == 0u && at < GROUP_SCALES) {
            group_scale[at] = select(poison(sum), inverseSqrt(sum / f32(GROUP_COLS) + EPS), is_finite(sum));
        }
    }
}

// What does not wait for the group's scale.
fn source16(row: u32, unit: u32) -> Sixteen {
    return times(inner16(row, unit), floats16(params.norm, unit));
}

fn finished(r: u32, unit: u32, v: Sixteen) -> Sixteen {
    return scaled(v, group_scale[r * (CELLS / GROUP_CELLS) + 16u * unit / GROUP_COLS]);
}
