// Products of a weight row with ROWS encoded activation rows, one team; no arrays on the way, so that all of it
// stays in registers. A lane takes whole steps of CHUNK columns, `lanes` apart, eight steps' weights asked for at a time and
// before they are needed; lane sums are f32, then summed over the team. Of rows that are not wanted nothing is computed.

const PRODUCTS: u32 = 1u * ROWS;
const WIDE: u32 = 1u;

struct Held {
    a: vec4<u32>,
    b: vec4<u32>,
    c: vec4<u32>,
    d: vec4<u32>,
    e: vec4<u32>,
    f: vec4<u32>,
    g: vec4<u32>,
    h: vec4<u32>,
}

// Sums of up to five rows.
struct Sums {
    a: f32,
    b: f32,
    c: f32,
    d: f32,
    e: f32,
}

fn fetch(base: u32, first: u32, last: u32, i: u32, step: u32) -> Held {
    let n = COLS / CHUNK;
    let r0 = base + min(first, last) * n;
    let i0 = min(i, n - 1u);
    let i1 = min(i + 1u * step, n - 1u);
    let i2 = min(i + 2u * step, n - 1u);
    let i3 = min(i + 3u * step, n - 1u);
    let i4 = min(i + 4u * step, n - 1u);
    let i5 = min(i + 5u * step, n - 1u);
    let i6 = min(i + 6u * step, n - 1u);
    let i7 = min(i + 7u * step, n - 1u);
    return Held(
        weights[r0 + i0],
        weights[r0 + i1],
        weights[r0 + i2],
        weights[r0 + i3],
        weights[r0 + i4],
        weights[r0 + i5],
        weights[r0 + i6],
        weights[r0 + i7],
    );
}

// Asks for the first weights; may stand before the activations are staged.
fn ahead(ids: Ids, base: u32, first: u32, last: u32) -> Held {
    return fetch(base, first, last, lane(ids), lanes(ids));
}

fn add(sums: Sums, i: u32, w0: vec4<u32>, sides: u32) -> Sums {
    if (i >= COLS / CHUNK) {
        return sums;
    }
    var s = sums;
    let scale = chunk_scale(sides, i);
    if (wanted(0u)) {
        let x = part(0u, i);
        s.a += apply(w0, x, scale);
    }
    if (ROWS > 1u && wanted(1u)) {
        let x = part(1u, i);
        s.b += apply(w0, x, scale);
    }
    if (ROWS > 2u && wanted(2u)) {
        let x = part(2u, i);
        s.c += apply(w0, x, scale);
    }
    if (ROWS > 3u && wanted(3u)) {
        let x = part(3u, i);
        s.d += apply(w0, x, scale);
    }
    if (ROWS > 4u && wanted(4u)) {
        let x = part(4u, i);
        s.e += apply(w0, x, scale);
    }
    return s;
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
    let sides = side + min(first, last) * SIDE_WORDS;
    var s = Sums();
    var now = held;
    for (var t = 0u; t < COLS / CHUNK; t += 8u * lanes(ids)) {
        let i = t + lane(ids);
        let next = fetch(base, first, last, i + 8u * lanes(ids), lanes(ids));
        s = add(s, i, now.a, sides);
        s = add(s, i + 1u * lanes(ids), now.b, sides);
        s = add(s, i + 2u * lanes(ids), now.c, sides);
        s = add(s, i + 3u * lanes(ids), now.d, sides);
        s = add(s, i + 4u * lanes(ids), now.e, sides);
        s = add(s, i + 5u * lanes(ids), now.f, sides);
        s = add(s, i + 6u * lanes(ids), now.g, sides);
        s = add(s, i + 7u * lanes(ids), now.h, sides);
        now = next;
    }
    var out: array<f32, PRODUCTS>;
    out[0u * ROWS] = team_sum(ids, s.a) * row_scale(sides);
    if (ROWS > 1u) {
        out[min(0u * ROWS + 1u, PRODUCTS - 1u)] = team_sum(ids, s.b) * row_scale(sides);
    }
    if (ROWS > 2u) {
        out[min(0u * ROWS + 2u, PRODUCTS - 1u)] = team_sum(ids, s.c) * row_scale(sides);
    }
    if (ROWS > 3u) {
        out[min(0u * ROWS + 3u, PRODUCTS - 1u)] = team_sum(ids, s.d) * row_scale(sides);
    }
    if (ROWS > 4u) {
        out[min(0u * ROWS + 4u, PRODUCTS - 1u)] = team_sum(ids, s.e) * row_scale(sides);
    }
    return out;
}
