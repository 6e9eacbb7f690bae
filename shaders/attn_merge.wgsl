// The parts of a softmax put together: out = sum_s e^{m_s - m} o_s / sum_s e^{m_s - m} l_s.
//
// parts  f32 [rows, heads, SPLITS, D + 2]
// out    f32 [rows, heads * D]
// A workgroup has one head of one row; WG / D groups of invocations take every so-manieth part, eight asked for at a time.
// Sums: the parts of a group in order, then the groups, f32.

@group(0) @binding(2) var<storage, read> parts: array<f32>; // [rows, heads, SPLITS, D + 2]
@group(0) @binding(3) var<storage, read_write> out: array<f32>; // [rows, heads * D]

override D: u32; // at most WG
override HEADS: u32;
override SPLITS: u32;

const LOWEST: f32 = -3.0e38;

var<workgroup> top_of: array<f32, SPLITS>;
var<workgroup> total_of: array<f32, SPLITS>;
var<workgroup> weight_of: array<f32, SPLITS>;
var<workgroup> sum_of: array<f32, WG>;

// Column d of a part, weighed; a part that is empty or past the last counts nothing, whatever lies there.
fn weighed(at: u32, s: u32, used: u32, d: u32) -> f32 {
    let near = min(s, used - 1u);
    let v = parts[(at + near) * (D + 2u) + d];
    return select(0.0, weight_of[near] * v, s < used && total_of[near] > 0.0);
}

@compute @workgroup_size(WG)
fn main(ids: Ids) {
    let row = ids.group.y;
    let used = used_parts(row);
    if (!live() || row >= flight.rows) {
        return;
    }
    let at = (row * HEADS + ids.group.x) * SPLITS;
    for (var s = thread(ids); s < used; s += WG) {
        let total = parts[(at + s) * (D + 2u) + D + 1u];
        let top = parts[(at + s) * (D + 2u) + D];
        top_of[s] = select(LOWEST, top, total > 0.0);
        total_of[s] = total;
    }
    workgroupBarrier();
    var top = LOWEST;
    for (var s = 0u; s < used; s++) {
        top = max(top, top_of[s]);
    }
    for (var s = thread(ids); s < used; s += WG) {
        weight_of[s] = exp(top_of[s] - top);
    }
    workgroupBarrier();
    let groups = WG / D;
    let group = thread(ids) / D;
    let d = thread(ids) % D;
    var sum = 0.0;
    if (group < groups) {
        for (var s = group; s < used; s += 8u * groups) {
            let a = weighed(at, s, used, d);
            let b = weighed(at, s + groups, used, d);
            let c = weighed(at, s + 2u * groups, used, d);
            let e = weighed(at, s + 3u * groups, used, d);
            let f = weighed(at, s + 4u * groups, used, d);
            let g = weighed(at, s + 5u * groups, used, d);
            let h = weighed(at, s + 6u * groups, used, d);
            let i = weighed(at, s + 7u * groups, used, d);
            sum += ((a + b) + (c + e)) + ((f + g) + (h + i));
        }
    }
    sum_of[thread(ids)] = sum;
    workgroupBarrier();
    if (thread(ids) < D) {
        var all = 0.0;
        for (var k = 0u; k < groups; k++) {
            all += sum_of[k * D + d];
        }
        var total = 0.0;
        for (var s = 0u; s < used; s++) {
            total += select(0.0, weight_of[s] * total_of[s], total_of[s] > 0.0);
        }
        out[(row * HEADS + ids.group.x) * D + d] = all / total;
    }
}
