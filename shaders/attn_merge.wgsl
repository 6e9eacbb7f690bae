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
    if (!live() || row >= flight.rows) {
        return;
    }
    let at = (row * HEADS + ids.group.x) * SPLITS;
    var top = -3.0e38;
    for (var s = 0u; s < SPLITS; s++) {
        top = max(top, parts[(at + s) * (D + 2u) + D]);
    }
    for (var d = thread(ids); d < D; d += WG) {
        var sum = 0.0;
        var total = 0.0;
        for (var s = 0u; s < SPLITS; s++) {
            let part = (at + s) * (D + 2u);
            if (parts[part + D + 1u] > 0.0) {
                let weight = exp(parts[part + D] - top);
                sum += weight * parts[part + d];
                total += weight * parts[part + D + 1u];
            }
        }
        out[(row * HEADS + ids.group.x) * D + d] = sum / total;
    }
}
