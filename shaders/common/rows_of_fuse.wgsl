// Source of encoded rows: what the draft layer's first projection reads (`model.md` §2.1).
// Row j stands at position - 1 + j: the norm of the row that the decoder reads next to it, and the norm of its own
// hidden row, one behind the other. The hidden row of j = 0 was kept from the pass before.

var<private> norm_scale: f32;
var<private> other_scale: f32;

fn following4(j: u32, c4: u32) -> vec4<f32> {
    return source[j * params.stride + c4];
}

fn hidden4(j: u32, c4: u32) -> vec4<f32> {
    return hidden[j * params.stride + c4];
}

// In uniform control flow.
fn prepare(ids: Ids, j: u32) {
    var sum = 0.0;
    var other = 0.0;
    for (var c4 = thread(ids); c4 < params.stride; c4 += WG) {
        let v = following4(j, c4);
        let w = hidden4(j, c4);
        sum += dot(v, v);
        other += dot(w, w);
    }
    norm_scale = inverseSqrt(wide_sum(ids, sum) / f32(params.width) + params.eps);
    other_scale = inverseSqrt(wide_sum(ids, other) / f32(params.width) + params.eps);
}

fn encoded_rows() -> u32 {
    return flight.rows;
}

// Columns past the second half are padding. Both halves begin at a multiple of four.
fn value4(j: u32, c4: u32) -> vec4<f32> {
    let half = params.width / 4u;
    let first = c4 < half;
    if (c4 >= 2u * half) {
        return vec4<f32>();
    }
    let c = select(c4 - half, c4, first);
    var v: vec4<f32>;
    if (first != (params.hidden_first == 1u)) {
        v = following4(j, c) * norm_scale * bitcast<vec4<f32>>(weights[params.norm + c]);
    } else {
        v = hidden4(j, c) * other_scale * bitcast<vec4<f32>>(weights[params.other_norm + c]);
    }
    if (params.field != NONE) {
        v = v * bitcast<vec4<f32>>(weights[params.field + c4]);
    }
    return v;
}
