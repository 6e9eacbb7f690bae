// Sums over the picks of WIDE rows of the experts' down for ROWS rows, one team: the union's columns as one line, lanes in
// steps of CHUNK, f32, then the team.

const SUMS: u32 = WIDE * ROWS;

fn picked_sums(ids: Ids, row: u32) -> array<f32, SUMS> {
    var sums: array<f32, SUMS>;
    for (var i = lane(ids); i < PICKS * (COLS / CHUNK); i += lanes(ids)) {
        let u = i / (COLS / CHUNK);
        let c = i % (COLS / CHUNK);
        let place = place_of[u];
        if (place != NONE) {
            var w: array<vec4<u32>, WIDE>;
            var scale: array<f32, WIDE>;
            var factor: array<f32, WIDE>;
            for (var q = 0u; q < WIDE; q++) {
                let at = min(row + q, params.rows - 1u);
                w[q] = weights[place + params.base + at * (COLS / CHUNK) + c];
                let side = 4u * place + params.side + at * SIDE_WORDS;
                scale[q] = chunk_scale(side, c);
                factor[q] = row_scale(side);
            }
            for (var r = 0u; r < ROWS; r++) {
                let x = part(pick_of[u * ROWS + r], c);
                for (var q = 0u; q < WIDE; q++) {
                    sums[q * ROWS + r] += apply(w[q], x, scale[q]) * (weight_of[u * ROWS + r] * factor[q]);
                }
            }
        }
    }
    for (var i = 0u; i < SUMS; i++) {
        sums[i] = team_sum(ids, sums[i]);
    }
    return sums;
}
