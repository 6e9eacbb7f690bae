// The product of a weight row with one encoded activation row, one team; no arrays, so that all of it stays in registers.
// A lane takes whole steps of CHUNK columns, `lanes` apart, eight steps' weights asked for at a time and before they are
// needed; lane sums are f32, then summed over the team.

const PRODUCTS: u32 = 1u;
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

fn fetch(base: u32, row: u32, i: u32, step: u32) -> Held {
    let n = COLS / CHUNK;
    let at = base + row * n;
    return Held(
        weights[at + min(i, n - 1u)],
        weights[at + min(i + 1u * step, n - 1u)],
        weights[at + min(i + 2u * step, n - 1u)],
        weights[at + min(i + 3u * step, n - 1u)],
        weights[at + min(i + 4u * step, n - 1u)],
        weights[at + min(i + 5u * step, n - 1u)],
        weights[at + min(i + 6u * step, n - 1u)],
        weights[at + min(i + 7u * step, n - 1u)],
    );
}

// Asks for the first weights; may stand before the activations are staged.
fn ahead(ids: Ids, base: u32, first: u32, last: u32) -> Held {
    return fetch(base, min(first, last), lane(ids), lanes(ids));
}

fn step1(sum: f32, i: u32, w: vec4<u32>, side: u32) -> f32 {
    if (i >= COLS / CHUNK) {
        return sum;
    }
    return sum + apply(w, part(0u, i), chunk_scale(side, i));
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
    let row = min(first, last);
    let at = side + row * SIDE_WORDS;
    var sum = 0.0;
    var now = held;
    for (var t = 0u; t < COLS / CHUNK; t += 8u * lanes(ids)) {
        if (t > 0u) {
            now = fetch(base, row, t + lane(ids), lanes(ids));
        }
        let i = t + lane(ids);
        sum = step1(sum, i, now.a, at);
        sum = step1(sum, i + 1u * lanes(ids), now.b, at);
        sum = step1(sum, i + 2u * lanes(ids), now.c, at);
        sum = step1(sum, i + 3u * lanes(ids), now.d, at);
        sum = step1(sum, i + 4u * lanes(ids), now.e, at);
        sum = step1(sum, i + 5u * lanes(ids), now.f, at);
        sum = step1(sum, i + 6u * lanes(ids), now.g, at);
        sum = step1(sum, i + 7u * lanes(ids), now.h, at);
    }
    return array<f32, PRODUCTS>(team_sum(ids, sum) * row_scale(at));
}
