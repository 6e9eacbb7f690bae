// out[r] = W . rms(x; norm): the block's norm and up to three matrices of one codec that read it.
//
// x        f32 [rows, COLS], the residual, padded with zeros
// out      f32 [rows, stride]: a segment's outputs at its offset
// kept     f32 [positions, stride]: keys and values at the row's position
// A workgroup computes BLOCK rows of one segment for ROWS activation rows; each recomputes the norm.
// Sums: lanes in steps of CHUNK columns, f32, then the team (`products`). `model.md` §1.3, §1.4.

struct Segment {
    first_group: u32,
    rows: u32,
    // vec4 in `weights`
    base: u32,
    // word in `words`
    side: u32,
    // vec4 of the column field, or NONE
    field: u32,
    // 0: out, 1: kept at the position
    kept: u32,
    offset: u32,
    stride: u32,
}

struct Params {
    // vec4 in `weights`
    norm: u32,
    segments: u32,
    // 1: relu squared on the way out
    relu2: u32,
    pad: u32,
    segment: array<Segment, 3>,
}

@group(0) @binding(2) var<uniform> params: Params;
@group(0) @binding(3) var<storage, read> weights: array<vec4<u32>>;
@group(0) @binding(4) var<storage, read> words: array<u32>;
@group(0) @binding(5) var<storage, read> x: array<vec4<f32>>; // [rows, COLS / 4]
@group(0) @binding(6) var<storage, read_write> out: array<f32>; // [rows, stride]
@group(0) @binding(7) var<storage, read_write> kept: array<f32>; // [positions, stride]

override BLOCK: u32; // weight rows a workgroup computes

@compute @workgroup_size(WG)
fn main(ids: Ids) {
    let first = ids.group.y * ROWS;
    var at = 0u;
    for (var i = 1u; i < params.segments; i++) {
        if (ids.group.x >= params.segment[i].first_group) {
            at = i;
        }
    }
    let segment = params.segment[at];
    let block = (ids.group.x - segment.first_group) * BLOCK;
    // the row is asked for before the weights, which it would have to wait for otherwise
    let near = weighed(first, thread(ids), flight.rows, params.norm, segment.field);
    var held = ahead(ids, segment.base, block + team(ids) * WIDE, segment.rows - 1u);
    var scales = stage_normed(ids, first, flight.rows, params.norm, segment.field, near);
    if (!live()) {
        return;
    }
    for (var t = 0u; t < BLOCK; t += teams(ids) * WIDE) {
        let row = block + t + team(ids) * WIDE;
        if (t > 0u) {
            held = ahead(ids, segment.base, row, segment.rows - 1u);
        }
        let sums = products(ids, segment.base, segment.side, row, segment.rows - 1u, held);
        for (var q = 0u; q < WIDE; q++) {
            let inside = t + team(ids) * WIDE + q < BLOCK && row + q < segment.rows;
            for (var r = 0u; r < ROWS; r++) {
                if (inside && lane(ids) == 0u && first + r < flight.rows) {
                    var y = sums[q * ROWS + r] * scales[r];
                    if (params.relu2 == 1u) {
                        y = relu(y) * relu(y);
                    }
                    if (segment.kept == 1u) {
                        kept[(control.position + first + r) * segment.stride + segment.offset + row + q] = y;
                    } else {
                        out[(first + r) * segment.stride + segment.offset + row + q] = y;
                    }
                }
            }
        }
    }
}
