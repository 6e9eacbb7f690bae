// Sums over the picks of a row of the experts' down for ROWS rows, one team; no arrays on the way, so that all of it stays in
// registers. All rows' picks as one line, a weight that two rows want read twice but kept near; lanes in steps of CHUNK. What
// six steps need is asked for at a time and before it is needed; f32, then the team.

const WIDE: u32 = 1u;

struct Step {
    w: vec4<u32>,
}

struct Held {
    a: Step,
    b: Step,
    c: Step,
    d: Step,
    e: Step,
    f: Step,
}

// Sums of up to five rows.
struct Sums {
    a: f32,
    b: f32,
    c: f32,
    d: f32,
    e: f32,
}

fn fetch_step(i: u32, row: u32) -> Step {
    let at = min(i, PICKS * (COLS / CHUNK) - 1u);
    let c = at % (COLS / CHUNK);
    let held_at = place_of[at / (COLS / CHUNK)];
    // what an expert without a place reads is never used
    let place = select(held_at, 0u, held_at == NONE);
    return Step(weights[place + params.base + row * (COLS / CHUNK) + c]);
}

fn fetch(i: u32, step: u32, row: u32) -> Held {
    return Held(
        fetch_step(i, row),
        fetch_step(i + step, row),
        fetch_step(i + 2u * step, row),
        fetch_step(i + 3u * step, row),
        fetch_step(i + 4u * step, row),
        fetch_step(i + 5u * step, row),
    );
}

fn add(sums: Sums, i: u32, s: Step, row: u32) -> Sums {
    let at = min(i, PICKS * (COLS / CHUNK) - 1u);
    let j = at / (COLS / CHUNK);
    let c = at % (COLS / CHUNK);
    let held_at = place_of[j];
    let side = 4u * select(held_at, 0u, held_at == NONE) + params.side + row * SIDE_WORDS;
    let scale = chunk_scale(side, c);
    let factor = weight_of[j] * row_scale(side);
    let counts = i < PICKS * (COLS / CHUNK) && held_at != NONE;
    let more = select(0.0, apply(s.w, part(select(0u, pick_of[j], counts), c), scale) * factor, counts);
    var to = sums;
    let r = j / TOP_K;
    to.a += select(0.0, more, r == 0u);
    if (ROWS > 1u) {
        to.b += select(0.0, more, r == 1u);
    }
    if (ROWS > 2u) {
        to.c += select(0.0, more, r == 2u);
    }
    if (ROWS > 3u) {
        to.d += select(0.0, more, r == 3u);
    }
    if (ROWS > 4u) {
        to.e += select(0.0, more, r == 4u);
    }
    return to;
}

fn picked_sums(ids: Ids, first: u32) -> array<f32, ROWS> {
    let row = min(first, params.rows - 1u);
    var sums = Sums();
    var now = fetch(lane(ids), lanes(ids), row);
    for (var t = 0u; t < PICKS * (COLS / CHUNK); t += 6u * lanes(ids)) {
        let i = t + lane(ids);
        var next = now;
        if (t + 6u * lanes(ids) < PICKS * (COLS / CHUNK)) {
            next = fetch(i + 6u * lanes(ids), lanes(ids), row);
        }
        sums = add(sums, i, now.a, row);
        if (t + lanes(ids) < PICKS * (COLS / CHUNK)) {
            sums = add(sums, i + lanes(ids), now.b, row);
        }
        if (t + 2u * lanes(ids) < PICKS * (COLS / CHUNK)) {
            sums = add(sums, i + 2u * lanes(ids), now.c, row);
        }
        if (t + 3u * lanes(ids) < PICKS * (COLS / CHUNK)) {
            sums = add(sums, i + 3u * lanes(ids), now.d, row);
        }
        if (t + 4u * lanes(ids) < PICKS * (COLS / CHUNK)) {
            sums = add(sums, i + 4u * lanes(ids), now.e, row);
        }
        if (t + 5u * lanes(ids) < PICKS * (COLS / CHUNK)) {
            sums = add(sums, i + 5u * lanes(ids), now.f, row);
        }
        now = next;
    }
    var out: array<f32, ROWS>;
    out[0] = team_sum(ids, sums.a);
    if (ROWS > 1u) {
        out[min(1u, ROWS - 1u)] = team_sum(ids, sums.b);
    }
    if (ROWS > 2u) {
        out[min(2u, ROWS - 1u)] = team_sum(ids, sums.c);
    }
    if (ROWS > 3u) {
        out[min(3u, ROWS - 1u)] = team_sum(ids, sums.d);
    }
    if (ROWS > 4u) {
        out[min(4u, ROWS - 1u)] = team_sum(ids, sums.e);
    }
    return out;
}
