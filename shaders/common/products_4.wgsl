// Products of 4 consecutive weight rows with one encoded activation row, one team; no arrays, so that all of it stays in
// registers. A lane takes whole steps of CHUNK columns, `lanes` apart, two steps' weights asked for at a time and before
// they are needed; lane sums are f32, then summed over the team.

const PRODUCTS: u32 = 4u;
const WIDE: u32 = 4u;

struct Held {
    a0: vec4<u32>,
    a1: vec4<u32>,
    a2: vec4<u32>,
    a3: vec4<u32>,
    b0: vec4<u32>,
    b1: vec4<u32>,
    b2: vec4<u32>,
    b3: vec4<u32>,
}

fn fetch(base: u32, first: u32, last: u32, i: u32, step: u32) -> Held {
    let n = COLS / CHUNK;
    let a = base + min(i, n - 1u);
    let b = base + min(i + step, n - 1u);
    let r0 = min(first, last) * n;
    let r1 = min(first + 1u, last) * n;
    let r2 = min(first + 2u, last) * n;
    let r3 = min(first + 3u, last) * n;
    return Held(
        weights[a + r0],
        weights[a + r1],
        weights[a + r2],
        weights[a + r3],
        weights[b + r0],
        weights[b + r1],
        weights[b + r2],
        weights[b + r3],
    );
}

// Asks for the first weights; may stand before the activations are staged.
fn ahead(ids: Ids, base: u32, first: u32, last: u32) -> Held {
    return fetch(base, first, last, lane(ids), lanes(ids));
}

fn step4(
    sums: vec4<f32>,
    i: u32,
    w0: vec4<u32>,
    w1: vec4<u32>,
    w2: vec4<u32>,
    w3: vec4<u32>,
    sides: vec4<u32>,
) -> vec4<f32> {
    if (i >= COLS / CHUNK) {
        return sums;
    }
    let x = part(0u, i);
    return sums + vec4<f32>(
        apply(w0, x, chunk_scale(sides.x, i)),
        apply(w1, x, chunk_scale(sides.y, i)),
        apply(w2, x, chunk_scale(sides.z, i)),
        apply(w3, x, chunk_scale(sides.w, i)),
    );
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
    let sides = vec4<u32>(side) + min(vec4<u32>(first) + vec4<u32>(0u, 1u, 2u, 3u), vec4<u32>(last)) * SIDE_WORDS;
    var sums = vec4<f32>();
    var now = held;
    for (var t = 0u; t < COLS / CHUNK; t += 2u * lanes(ids)) {
        let i = t + lane(ids);
        let next = fetch(base, first, last, i + 2u * lanes(ids), lanes(ids));
        sums = step4(sums, i, now.a0, now.a1, now.a2, now.a3, sides);
        sums = step4(sums, i + lanes(ids), now.b0, now.b1, now.b2, now.b3, sides);
        now = next;
    }
    return array<f32, PRODUCTS>(
        team_sum(ids, sums.x) * row_scale(sides.x),
        team_sum(ids, sums.y) * row_scale(sides.y),
        team_sum(ids, sums.z) * row_scale(sides.z),
        team_sum(ids, sums.w) * row_scale(sides.w),
    );
}
