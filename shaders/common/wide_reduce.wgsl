// Sum and maximum over the workgroup, in every invocation. In uniform control flow; WG is a power of two.
var<workgroup> wide_cells: array<f32, WG>;

fn wide_sum(ids: Ids, v: f32) -> f32 {
    wide_cells[ids.local] = v;
    workgroupBarrier();
    for (var step = WG / 2u; step > 0u; step /= 2u) {
        if (ids.local < step) {
            wide_cells[ids.local] += wide_cells[ids.local + step];
        }
        workgroupBarrier();
    }
    let sum = wide_cells[0];
    workgroupBarrier();
    return sum;
}

fn wide_max(ids: Ids, v: f32) -> f32 {
    wide_cells[ids.local] = v;
    workgroupBarrier();
    for (var step = WG / 2u; step > 0u; step /= 2u) {
        if (ids.local < step) {
            wide_cells[ids.local] = max(wide_cells[ids.local], wide_cells[ids.local + step]);
        }
        workgroupBarrier();
    }
    let top = wide_cells[0];
    workgroupBarrier();
    return top;
}
