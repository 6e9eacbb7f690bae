// What the products of a pass have in common: parameters, buffers, and where a value goes.
//
// acts       encoded rows (`prefill_encode`)
// list       the pass's rows by expert (`prefill_sort`); bound and not read where the rows are in order
// out        f32 [.., stride]

struct Params {
    // rows of the matrix: columns of the output
    rows: u32,
    // vec4 in `weights`, word in `words`; inside the place where experts are
    base: u32,
    side: u32,
    // vec4 from place to place
    place: u32,
    // floats from row to row of `out`, and where in a row the matrix begins
    stride: u32,
    offset: u32,
    // TO_*
    to: u32,
    // 1: relu squared on the way out
    relu2: u32,
    // MoE layer whose own miss does not halt it, or NONE
    layer: u32,
    // word in `list` where the sorted rows begin
    order: u32,
    pad: vec2<u32>,
}

const TO_ROW: u32 = 0u; // out[row] = y
const TO_SUM: u32 = 1u; // out[row] += y
const TO_POSITION: u32 = 2u; // out[position + row] = y
const TO_BEFORE: u32 = 3u; // out[position + row - 1] = y
const TO_PICK: u32 = 4u; // out[row * top_k + pick] = y

@group(0) @binding(2) var<uniform> params: Params;
@group(0) @binding(3) var<storage, read> weights: array<vec4<u32>>;
@group(0) @binding(4) var<storage, read> words: array<u32>;
@group(0) @binding(6) var<storage, read> act_scale: array<f32>; // int8 [rows, COLS / 32]; half [rows]
@group(0) @binding(7) var<storage, read> list: array<u32>;
@group(0) @binding(8) var<storage, read_write> out: array<f32>;

override COLS: u32; // padded width, a multiple of 32

fn put(row: u32, column: u32, value: f32) {
    var y = value;
    if (params.relu2 == 1u) {
        y = relu(y) * relu(y);
    }
    var to = row;
    switch params.to {
        case TO_POSITION: {
            to = control.position + row;
        }
        case TO_BEFORE: {
            to = control.position + row - 1u;
            if (control.position + row == 0u) {
                return;
            }
        }
        case TO_PICK: {
            to = pick_at(row);
        }
        default: {}
    }
    let at = to * params.stride + params.offset + column;
    if (params.to == TO_SUM) {
        y += out[at];
    }
    out[at] = y;
}
