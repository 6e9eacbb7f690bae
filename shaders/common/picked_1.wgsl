// Sums over the picks of a row of the experts' down for one row, one team; no arrays, so that all of it stays in
// registers. The picks' columns as one line, lanes in steps of CHUNK, four steps' weights asked for at a time and before
// they are needed; f32, then the team.

const WIDE: u32 = 1u;

struct Four {
    a: vec4<u32>,
    b: vec4<u32>,
    c: vec4<u32>,
    d: vec4<u32>,
}

fn weight_at(i: u32) -> u32 {
    let at = min(i, PICKS * (COLS / CHUNK) - 1u);
    let place = place_of[at / (COLS / CHUNK)];
    return select(place, 0u, place == NONE) + params.base + at % (COLS / CHUNK);
}

fn fetch(i: u32, step: u32, row: u32) -> Four {
    return Four(
        weights[weight_at(i) + row],
        weights[weight_at(i + 1u * step) + row],
        weights[weight_at(i + 2u * step) + row],
        weights[weight_at(i + 3u * step) + row],
    );
}

fn step1(sum: f32, i: u32, w: vec4<u32>, row: u32) -> f32 {
    let u = min(i / (COLS / CHUNK), PICKS - 1u);
    let place = place_of[u];
    if (i >= PICKS * (COLS / CHUNK) || place == NONE) {
        return sum;
    }
    let c = i % (COLS / CHUNK);
    let side = 4u * place + params.side + row * SIDE_WORDS;
    return sum + apply(w, part(pick_of[u], c), chunk_scale(side, c)) * (weight_of[u] * row_scale(side));
}

fn picked_sums(ids: Ids, first: u32) -> array<f32, 1> {
    let row = min(first, params.rows - 1u);
    let at = row * (COLS / CHUNK);
    var sum = 0.0;
    var now = fetch(lane(ids), lanes(ids), at);
    for (var t = 0u; t < PICKS * (COLS / CHUNK); t += 4u * lanes(ids)) {
        let i = t + lane(ids);
        let next = fetch(i + 4u * lanes(ids), lanes(ids), at);
        sum = step1(sum, i, now.a, row);
        sum = step1(sum, i + 1u * lanes(ids), now.b, row);
        sum = step1(sum, i + 2u * lanes(ids), now.c, row);
        sum = step1(sum, i + 3u * lanes(ids), now.d, row);
        now = next;
    }
    return array<f32, 1>(team_sum(ids, sum));
}
