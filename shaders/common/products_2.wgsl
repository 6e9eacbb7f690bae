// Products of 2 consecutive weight rows with one encoded activation row, one team; no arrays, so that all of it stays in
// registers. A lane takes whole steps of CHUNK columns, `lanes` apart, four steps' weights asked for at a time and before
// they are needed; lane sums are f32, then summed over the team.

const PRODUCTS: u32 = 2u;
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

fn fetch(base: u32, first: u32, last: u32, i: u32, step: u32) -> Held {
    let n = COLS / CHUNK;
    let a = base + min(i, n - 1u);
    let b = base + min(i + step, n - 1u);
    let c = base + min(i + 2u * step, n - 1u);
    let d = base + min(i + 3u * step, n - 1u);
    let r0 = min(first, last) * n;
    let r1 = min(first + 1u, last) * n;
    return Held(
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

// Asks for the first weights; may stand before the activations are staged.
fn ahead(ids: Ids, base: u32, first: u32, last: u32) -> Held {
    return fetch(base, first, last, lane(ids), lanes(ids));
}

fn step2(sums: vec2<f32>, i: u32, w0: vec4<u32>, w1: vec4<u32>, sides: vec2<u32>) -> vec2<f32> {
    if (i >= COLS / CHUNK) {
        return sums;
    }
    let x = part(0u, i);
    return sums + vec2<f32>(apply(w0, x, chunk_scale(sides.x, i)), apply(w1, x, chunk_scale(sides.y, i)));
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
    let sides = vec2<u32>(side) + min(vec2<u32>(first, first + 1u), vec2<u32>(last)) * SIDE_WORDS;
    var sums = vec2<f32>();
    var now = held;
    for (var t = 0u; t < COLS / CHUNK; t += 4u * lanes(ids)) {
        let i = t + lane(ids);
        let next = fetch(base, first, last, i + 4u * lanes(ids), lanes(ids));
        sums = step2(sums, i, now.a0, now.a1, sides);
        sums = step2(sums, i + lanes(ids), now.b0, now.b1, sides);
        sums = step2(sums, i + 2u * lanes(ids), now.c0, now.c1, sides);
        sums = step2(sums, i + 3u * lanes(ids), now.d0, now.d1, sides);
        now = next;
    }
    return array<f32, PRODUCTS>(team_sum(ids, sums.x) * row_scale(sides.x), team_sum(ids, sums.y) * row_scale(sides.y));
}
