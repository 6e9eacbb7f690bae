// One part of the positions for one key/value head: softmax over them, unnormalised, for all its query heads.
//
// q      f32 [rows, heads * D]
// kv     f32 [positions, 2, kv_heads * D]: keys, then values
// parts  f32 [rows, heads, SPLITS, D + 2]: weighted values, then the maximum and the sum of exponentials
// Parts have whole tiles of TILE positions; those past the row's own position are not written.
// Within a part tiles in order, online softmax; scores in f32. `model.md` §1.3.

struct Params {
    // floats from row to row of q, and where q begins in it
    stride: u32,
    offset: u32,
    scale: f32,
    pad: u32,
}

@group(0) @binding(2) var<uniform> params: Params;
@group(0) @binding(3) var<storage, read> q: array<f32>; // [rows, stride]
@group(0) @binding(4) var<storage, read> kv: array<vec4<f32>>; // [positions, 2, KV_HEADS * D / 4]
@group(0) @binding(5) var<storage, read_write> parts: array<f32>; // [rows, heads, SPLITS, D + 2]

override D: u32; // a multiple of 4
override KV_HEADS: u32;
override QUERIES: u32; // query heads of a key/value head
override SPLITS: u32;
override TILE: u32; // positions at once
override Q_CELLS: u32; // QUERIES * (D / 4 + 1)
override S_CELLS: u32; // QUERIES * TILE
override O_CELLS: u32; // QUERIES * D / 4
override K_CELLS: u32; // TILE * (D / 4 + 1)

var<workgroup> query: array<vec4<f32>, Q_CELLS>;
var<workgroup> keys: array<vec4<f32>, K_CELLS>;
var<workgroup> score: array<f32, S_CELLS>;
var<workgroup> top: array<f32, QUERIES>;
var<workgroup> fade: array<f32, QUERIES>;
var<workgroup> total: array<f32, QUERIES>;
var<workgroup> sum: array<vec4<f32>, O_CELLS>;

const LOWEST: f32 = -3.0e38;

@compute @workgroup_size(WG)
fn main(ids: Ids) {
    let head = ids.group.x;
    let part = ids.group.y;
    let row = ids.group.z;
    let length = control.position + row + 1u;
    let per = (length + SPLITS * TILE - 1u) / (SPLITS * TILE) * TILE;
    let begin = part * per;
    let end = min(begin + per, length);
    if (!live() || row >= flight.rows || begin >= end) {
        return;
    }
    let me = thread(ids);
    for (var t = me; t < QUERIES * (D / 4u); t += WG) {
        let h = t / (D / 4u);
        let d = t % (D / 4u);
        let at = row * params.stride + params.offset + (head * QUERIES + h) * D + 4u * d;
        query[h * (D / 4u + 1u) + d] = vec4<f32>(q[at], q[at + 1u], q[at + 2u], q[at + 3u]) * params.scale;
        sum[t] = vec4<f32>();
    }
    for (var h = me; h < QUERIES; h += WG) {
        top[h] = LOWEST;
        total[h] = 0.0;
    }
    workgroupBarrier();
    for (var tile = begin; tile < end; tile += TILE) {
        for (var t = me; t < TILE * (D / 4u); t += WG) {
            let j = min(tile + t / (D / 4u), end - 1u);
            keys[t / (D / 4u) * (D / 4u + 1u) + t % (D / 4u)] = kv[(j * 2u * KV_HEADS + head) * (D / 4u) + t % (D / 4u)];
        }
        workgroupBarrier();
        for (var t = me; t < QUERIES * TILE; t += WG) {
            let h = t % QUERIES;
            let j = t / QUERIES;
            var dots = vec4<f32>();
            for (var d = 0u; d < D / 4u; d++) {
                dots += query[h * (D / 4u + 1u) + d] * keys[j * (D / 4u + 1u) + d];
            }
            score[h * TILE + j] = select(LOWEST, dots.x + dots.y + dots.z + dots.w, tile + j < end);
        }
        workgroupBarrier();
        for (var h = me; h < QUERIES; h += WG) {
            var most = top[h];
            for (var j = 0u; j < TILE; j++) {
                most = max(most, score[h * TILE + j]);
            }
            fade[h] = exp(top[h] - most);
            top[h] = most;
        }
        workgroupBarrier();
        for (var t = me; t < QUERIES * TILE; t += WG) {
            let h = t % QUERIES;
            let j = t / QUERIES;
            score[h * TILE + j] = select(0.0, exp(score[h * TILE + j] - top[h]), tile + j < end);
        }
        workgroupBarrier();
        for (var h = me; h < QUERIES; h += WG) {
            var more = 0.0;
            for (var j = 0u; j < TILE; j++) {
                more += score[h * TILE + j];
            }
            total[h] = total[h] * fade[h] + more;
        }
        for (var t = me; t < QUERIES * (D / 4u); t += WG) {
            let h = t / (D / 4u);
            let d = t % (D / 4u);
            var o = sum[t] * fade[h];
            // as many each time, so that all are asked for at once; past the end the last one again, which counts nothing
            for (var j = 0u; j < TILE; j++) {
                let at = min(tile + j, end - 1u);
                o += score[h * TILE + j] * kv[(at * 2u * KV_HEADS + KV_HEADS + head) * (D / 4u) + d];
            }
            sum[t] = o;
        }
        workgroupBarrier();
    }
    for (var t = me; t < QUERIES * (D / 4u); t += WG) {
        let h = t / (D / 4u);
        let d = t % (D / 4u);
        let at = ((row * KV_HEADS + head) * QUERIES + h) * SPLITS + part;
        let o = sum[t];
        parts[at * (D + 2u) + 4u * d] = o.x;
        parts[at * (D + 2u) + 4u * d + 1u] = o.y;
        parts[at * (D + 2u) + 4u * d + 2u] = o.z;
        parts[at * (D + 2u) + 4u * d + 3u] = o.w;
        if (d == 0u) {
            parts[at * (D + 2u) + D] = top[h];
            parts[at * (D + 2u) + D + 1u] = total[h];
        }
    }
}
