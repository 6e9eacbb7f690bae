// Source of encoded rows: rows of f32, as they are or through an RMS norm, each times its matrix' column field.

const IN_ORDER: u32 = 0u; // the pass's rows
const BY_PICK: u32 = 1u; // sorted by expert, from the rows that picked it
const SORTED: u32 = 2u; // sorted by expert already

var<private> norm_scale: f32;
var<private> source_row: u32;
var<private> field_at: u32;

// Row of the pass that encoded row j is made of. In uniform control flow.
fn prepare(ids: Ids, j: u32) {
    source_row = j;
    field_at = params.field;
    if (params.listed != IN_ORDER) {
        // sorted by expert; each has its own column field
        let at = params.order + 2u * j;
        source_row = select(j, list[at] / TOP_K, params.listed == BY_PICK);
        field_at = select(list[at + 1u] * params.place + params.field, NONE, params.field == NONE);
    }
    if (params.norm != NONE) {
        var sum = 0.0;
        for (var c4 = thread(ids); c4 < COLS / 4u; c4 += WG) {
            let v = loaded4(c4);
            sum += dot(v, v);
        }
        let all = wide_sum(ids, sum);
        norm_scale = select(poison(all), inverseSqrt(all / f32(params.width) + params.eps), is_finite(all));
    }
}

fn encoded_rows() -> u32 {
    return select(flight.rows, list[1], params.listed != IN_ORDER);
}

fn loaded4(c4: u32) -> vec4<f32> {
    if (4u * c4 >= params.width) {
        return vec4<f32>();
    }
    let v = source[source_row * params.stride + params.offset + c4];
    return select(vec4<f32>(), v, vec4<u32>(4u * c4) + vec4<u32>(0u, 1u, 2u, 3u) < vec4<u32>(params.width));
}

fn value4(j: u32, c4: u32) -> vec4<f32> {
    var v = loaded4(c4);
    if (params.norm != NONE) {
        v = v * norm_scale * bitcast<vec4<f32>>(weights[params.norm + c4]);
    }
    if (field_at != NONE) {
        v = v * bitcast<vec4<f32>>(weights[field_at + c4]);
    }
    return v;
}
