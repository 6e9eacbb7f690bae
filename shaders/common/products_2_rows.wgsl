// Products of 2 consecutive weight rows with ROWS encoded activation rows, one team; no arrays on the way, so that all of it
// stays in registers. A lane takes whole steps of CHUNK columns, `lanes` apart, four steps' weights asked for at a time and
// before they are needed; lane sums are f32, then summed over the team. Of rows that are not wanted nothing is computed.

const PRODUCTS: u32 = 2u * ROWS;
const WIDE: u32 = 2u;

struct Held {
    a0: vec4<u32>,
    a1: vec4<u32>,
    b0: vec4<u32>,
    b1: vec4<u32>,
    c0: vec4<u32>,
    c1: vec4<u32>,
    d0: vec4<u32>,
    d1: vec4<u32>,
}

// Sums of up to five rows.
struct Sums {
    a: vec2<f32>,
    b: vec2<f32>,
    c: vec2<f32>,
    d: vec2<f32>,
    e: vec2<f32>,
}

fn fetch(base: u32, first: u32, last: u32, i: u32, step: u32) -> Held {
    let n = COLS / CHUNK;
    let r0 = base + min(first, last) * n;
    let r1 = base + min(first + 1u, last) * n;
    let i0 = min(i, n - 1u);
    let i1 = min(i + 1u * step, n - 1u);
    let i2 = min(i + 2u * step, n - 1u);
    let i3 = min(i + 3u * step, n - 1u);
    return Held(
        weights[r0 + i0],
        weights[r1 + i0],
        weights[r0 + i1],
        weights[r1 + i1],
        weights[r0 + i2],
        weights[r1 + i2],
        weights[r0 + i3],
        weights[r1 + i3],
    );
}

// Asks for the first weights; may stand before the activations are staged.
fn ahead(ids: Ids, base: u32, first: u32, last: u32) -> Held {
    return fetch(base, first, last, lane(ids), lanes(ids));
}

fn add(sums: Sums, i: u32, w0: vec4<u32>, w1: vec4<u32>, sides: vec2<u32>) -> Sums {
    if (i >= COLS / CHUNK) {
        return sums;
    }
    var s = sums;
    let scale = vec2<f32>(chunk_scale(sides.x, i), chunk_scale(sides.y, i));
    if (wanted(0u)) {
        let x = part(0u, i);
        s.a += vec2<f32>(
            apply(w0, x, scale.x),
            apply(w1, x, scale.y),
        );
    }
    if (ROWS > 1u && wanted(1u)) {
        let x = part(1u, i);
        s.b += vec2<f32>(
            apply(w0, x, scale.x),
            apply(w1, x, scale.y),
        );
    }
    if (ROWS > 2u && wanted(2u)) {
        let x = part(2u, i);
        s.c += vec2<f32>(
            apply(w0, x, scale.x),
            apply(w1, x, scale.y),
        );
    }
    if (ROWS > 3u && wanted(3u)) {
        let x = part(3u, i);
        s.d += vec2<f32>(
            apply(w0, x, scale.x),
            apply(w1, x, scale.y),
        );
    }
    if (ROWS > 4u && wanted(4u)) {
        let x = part(4u, i);
        s.e += vec2<f32>(
            apply(w0, x, scale.x),
            apply(w1, x, scale.y),
        );
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
    let sides = vec2<u32>(side) + min(vec2<u32>(first) + vec2<u32>(0u, 1u), vec2<u32>(last)) * SIDE_WORDS;
    var s = Sums();
    var now = held;
    for (var t = 0u; t < COLS / CHUNK; t += 4u * lanes(ids)) {
        let i = t + lane(ids);
        let next = fetch(base, first, last, i + 4u * lanes(ids), lanes(ids));
        s = add(s, i, now.a0, now.a1, sides);
        s = add(s, i + 1u * lanes(ids), now.b0, now.b1, sides);
        s = add(s, i + 2u * lanes(ids), now.c0, now.c1, sides);
        s = add(s, i + 3u * lanes(ids), now.d0, now.d1, sides);
        now = next;
    }
    var out: array<f32, PRODUCTS>;
    out[0u * ROWS] = team_sum(ids, s.a.x) * row_scale(sides.x);
    out[1u * ROWS] = team_sum(ids, s.a.y) * row_scale(sides.y);
    if (ROWS > 1u) {
        out[min(0u * ROWS + 1u, PRODUCTS - 1u)] = team_sum(ids, s.b.x) * row_scale(sides.x);
        out[min(1u * ROWS + 1u, PRODUCTS - 1u)] = team_sum(ids, s.b.y) * row_scale(sides.y);
    }
    if (ROWS > 2u) {
        out[min(0u * ROWS + 2u, PRODUCTS - 1u)] = team_sum(ids, s.c.x) * row_scale(sides.x);
        out[min(1u * ROWS + 2u, PRODUCTS - 1u)] = team_sum(ids, s.c.y) * row_scale(sides.y);
    }
    if (ROWS > 3u) {
        out[min(0u * ROWS + 3u, PRODUCTS - 1u)] = team_sum(ids, s.d.x) * row_scale(sides.x);
        out[min(1u * ROWS + 3u, PRODUCTS - 1u)] = team_sum(ids, s.d.y) * row_scale(sides.y);
    }
    if (ROWS > 4u) {
        out[min(0u * ROWS + 4u, PRODUCTS - 1u)] = team_sum(ids, s.e.x) * row_scale(sides.x);
        out[min(1u * ROWS + 4u, PRODUCTS - 1u)] = team_sum(ids, s.e.y) * row_scale(sides.y);
    }
    return out;
}
