// Source of encoded rows: the scan's outputs, gated and normalised in groups (`model.md` §1.4 step 7).
// v = o * silu(z); per group v / sqrt(mean(v^2) + eps) * weight

override GROUPS: u32; // at most WG

var<workgroup> group_scale_of: array<f32, GROUPS>;

fn gated(j: u32, c: u32) -> f32 {
    let z = gate[j * params.gate_stride + c];
    return plain[j * params.width + c] * (z / (1.0 + exp(-z)));
}

// In uniform control flow.
fn prepare(ids: Ids, j: u32) {
    // each group has its share of the invocations
    let width = params.width / GROUPS;
    let share = WG / GROUPS;
    let group = ids.local / share;
    var sum = 0.0;
    if (group < GROUPS) {
        for (var c = ids.local % share; c < width; c += share) {
            let v = gated(j, group * width + c);
            sum += v * v;
        }
    }
    wide_cells[ids.local] = sum;
    workgroupBarrier();
    if (ids.local < GROUPS) {
        sum = 0.0;
        for (var i = 0u; i < share; i++) {
            sum += wide_cells[ids.local * share + i];
        }
        group_scale_of[ids.local] = select(poison(sum), inverseSqrt(sum / f32(width) + params.eps), is_finite(sum));
    }
    workgroupBarrier();
}

fn encoded_rows() -> u32 {
    return flight.rows;
}

fn value4(j: u32, c4: u32) -> vec4<f32> {
    var v = vec4<f32>();
    for (var i = 0u; i < 4u; i++) {
        let c = 4u * c4 + i;
        if (c < params.width) {
            v[i] = gated(j, c) * group_scale_of[c / (params.width / GROUPS)];
        }
    }
    v = v * bitcast<vec4<f32>>(weights[params.norm + c4]);
    if (params.field != NONE) {
        v = v * bitcast<vec4<f32>>(weights[params.field + c4]);
    }
    return v;
}
