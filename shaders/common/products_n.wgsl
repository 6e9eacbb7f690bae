// Products of WIDE consecutive weight rows with ROWS encoded activation rows, one team.
// A lane takes whole steps of CHUNK columns, `lanes` apart; lane sums are f32, then summed over the team.

const PRODUCTS: u32 = WIDE * ROWS;

// Weights asked for before the activations are staged: none here.
struct Held {
    none: u32,
}

fn ahead(ids: Ids, base: u32, first: u32, last: u32) -> Held {
    return Held(0u);
}

// base: where the matrix begins in `weights`; side: in `words`; rows past `last` repeat it.
fn products(
    ids: Ids,
    base: u32,
    side: u32,
    first: u32,
    last: u32,
    held: Held,
) -> array<f32, PRODUCTS> {
    var sums: array<f32, PRODUCTS>;
    for (var i = lane(ids); i < COLS / CHUNK; i += lanes(ids)) {
        var w: array<vec4<u32>, WIDE>;
        var scale: array<f32, WIDE>;
        for (var q = 0u; q < WIDE; q++) {
            w[q] = weights[base + min(first + q, last) * (COLS / CHUNK) + i];
            scale[q] = chunk_scale(side + min(first + q, last) * SIDE_WORDS, i);
        }
        for (var r = 0u; r < ROWS; r++) {
            let x = part(r, i);
            for (var q = 0u; q < WIDE; q++) {
                sums[q * ROWS + r] += apply(w[q], x, scale[q]);
            }
        }
    }
    for (var q = 0u; q < WIDE; q++) {
        let scale = row_scale(side + min(first + q, last) * SIDE_WORDS);
        for (var r = 0u; r < ROWS; r++) {
            sums[q * ROWS + r] = team_sum(ids, sums[q * ROWS + r]) * scale;
        }
    }
    return sums;
}
