// The parts of a softmax put together: out = sum_s e^{m_s - m} o_s / sum_s e^{m_s - m} l_s.
//
// parts  f32 [rows, heads, SPLITS, D + 2]
// out    f32 [rows, heads * D]
// A workgroup has one head of one row. Parts in order, f32.

@group(0) @binding(2) var<storage, read> parts: array<f32>; // [rows, heads, SPLITS, D + 2]
@group(0) @binding(3) var<storage, read_write> out: array<f32>; // [rows, heads * D]

override D: u32;
override HEADS: u32;
override SPLITS: u32;

@compute @workgroup_size(WG)
fn main(ids: Ids) {
    let row = ids.group.y;
    let used = used_parts(row);
    if (!live() || row >= flight.rows) {
        return;
    }
    let at = (row * HEADS + ids.group.x) * SPLITS;
    var top = -3.0e38;
    for (var s = 0u; s < used; s++) {
        top = max(top, parts[(at + s) * (D + 2u) + D]);
    }
    for (var d = thread(ids); d < D; d += WG) {
        var sum = 0.0;
        var total = 0.0;
        for (var s = 0u; s < used; s++) {
            let part = (at + s) * (D + 2u);
            let some = parts[part + D + 1u];
            // loads do not wait for each other: an empty part is read and left out
            let weight = select(0.0, exp(parts[part + D] - top), some > 0.0);
            sum += select(0.0, weight * parts[part + d], some > 0.0);
            total += weight * some;
        }
        out[(row * HEADS + ids.group.x) * D + d] = sum / total;
    }
}
