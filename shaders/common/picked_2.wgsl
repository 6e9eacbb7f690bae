// Sums over the picks of 2 rows of the experts' down for one row, one team; no arrays, so that all of it stays in
// registers. The picks' columns as one line, lanes in steps of CHUNK, four steps' weights asked for at a time and before
// they are needed; f32, then the team.

const WIDE: u32 = 2u;

struct Four {
    a0: vec4<u32>,
    a1: vec4<u32>,
    b0: vec4<u32>,
    b1: vec4<u32>,
    c0: vec4<u32>,
    c1: vec4<u32>,
    d0: vec4<u32>,
    d1: vec4<u32>,
}

fn weight_at(i: u32) -> u32 {
    let at = min(i, PICKS * (COLS / CHUNK) - 1u);
    let place = place_of[at / (COLS / CHUNK)];
    return select(place, 0u, place == NONE) + params.base + at % (COLS / CHUNK);
}

fn fetch(i: u32, step: u32, r0: u32, r1: u32) -> Four {
    let a = weight_at(i);
    let b = weight_at(i + step);
    let c = weight_at(i + 2u * step);
    let d = weight_at(i + 3u * step);
    return Four(
        weights[a + r0],
        weights[a + r1],
        weights[b + r0],
        weights[b + r1],
        weights[c + r0],
        weights[c + r1],
        weights[d + r0],
        weights[d + r1],
    );
}

fn step2(sums: vec2<f32>, i: u32, w0: vec4<u32>, w1: vec4<u32>, rows: vec2<u32>) -> vec2<f32> {
    let u = min(i / (COLS / CHUNK), PICKS - 1u);
    let place = place_of[u];
    if (i >= PICKS * (COLS / CHUNK) || place == NONE) {
        return sums;
    }
    let c = i % (COLS / CHUNK);
    let x = part(pick_of[u], c);
    let sides = vec2<u32>(4u * place + params.side) + rows * SIDE_WORDS;
    let weight = weight_of[u];
    return sums + vec2<f32>(
        apply(w0, x, chunk_scale(sides.x, c)) * (weight * row_scale(sides.x)),
        apply(w1, x, chunk_scale(sides.y, c)) * (weight * row_scale(sides.y)),
    );
}

fn picked_sums(ids: Ids, row: u32) -> array<f32, 2> {
    let rows = min(vec2<u32>(row, row + 1u), vec2<u32>(params.rows - 1u));
    let r0 = rows.x * (COLS / CHUNK);
    let r1 = rows.y * (COLS / CHUNK);
    var sums = vec2<f32>();
    var now = fetch(lane(ids), lanes(ids), r0, r1);
    for (var t = 0u; t < PICKS * (COLS / CHUNK); t += 4u * lanes(ids)) {
        let i = t + lane(ids);
        let next = fetch(i + 4u * lanes(ids), lanes(ids), r0, r1);
        sums = step2(sums, i, now.a0, now.a1, rows);
        sums = step2(sums, i + lanes(ids), now.b0, now.b1, rows);
        sums = step2(sums, i + 2u * lanes(ids), now.c0, now.c1, rows);
        sums = step2(sums, i + 3u * lanes(ids), now.d0, now.d1, rows);
        now = next;
    }
    return array<f32, 2>(team_sum(ids, sums.x), team_sum(ids, sums.y));
}
