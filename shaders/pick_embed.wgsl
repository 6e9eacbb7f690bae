// The step's id: the best of the head's groups; its embedding is the next row, and the slot moves on by one position.
//
// best       [rows, groups]: logit (f32 bits) and id
// out        u32: ids of the flight, at `control.out_count`
// x          f32 [rows, COLS]: row 0 becomes the embedding, row 0 of `weights` being id `first_id`
// One workgroup. Ties go to the lower id. An end id or the run's limit stops the slot. `model.md` §1.8; `protocol.md` §2.

struct Params {
    groups: u32,
    // this part of the embedding: rows, first id, where it lies
    rows: u32,
    first_id: u32,
    base: u32,
    side: u32,
    field: u32,
    // 1 for the last part: it moves the slot on
    last: u32,
    // ids `out` has room for
    room: u32,
}

@group(0) @binding(2) var<uniform> params: Params;
@group(0) @binding(3) var<storage, read> weights: array<vec4<u32>>;
@group(0) @binding(4) var<storage, read> words: array<u32>;
@group(0) @binding(5) var<storage, read> best: array<vec2<u32>>; // [rows, groups]
@group(0) @binding(6) var<storage, read_write> out: array<u32>; // [room]
@group(0) @binding(7) var<storage, read_write> x: array<vec4<f32>>; // [rows, COLS / 4]

override COLS: u32;
override LAST_BLOCK: u32;

var<workgroup> tops: array<vec2<u32>, WG>;

fn better(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
    let p = bitcast<f32>(a.x);
    let q = bitcast<f32>(b.x);
    if (q > p || (q == p && b.y < a.y)) {
        return b;
    }
    return a;
}

fn begin_record() {
    if (any(control.out_flight != flight.flight)) {
        control.out_flight = flight.flight;
        control.out_count = 0u;
    }
}

fn halt(kind: u32) {
    control.stop_flight = flight.flight;
    control.stop_point = vec2<u32>(control.batch, LAST_BLOCK);
    control.stop = kind;
}

@compute @workgroup_size(WG)
fn main(ids: Ids) {
    let me = thread(ids);
    let go = live();
    let accept = flight.accept;
    let row = flight.rows - 1u;
    var top = vec2<u32>(0xff7fffffu, 0xffffffffu);
    for (var i = me; i < params.groups; i += WG) {
        top = better(top, best[row * params.groups + i]);
    }
    tops[me] = top;
    workgroupBarrier();
    for (var step = WG / 2u; step > 0u; step /= 2u) {
        if (me < step) {
            tops[me] = better(tops[me], tops[me + step]);
        }
        workgroupBarrier();
    }
    if (!go) {
        return;
    }
    let id = tops[0].y;
    if (accept == 1u && id != 0xffffffffu && id >= params.first_id && id < params.first_id + params.rows) {
        for (var unit = me; unit < COLS / 16u; unit += WG) {
            let v = embed16(params.base, params.side, params.field, id - params.first_id, unit);
            x[4u * unit] = v.a;
            x[4u * unit + 1u] = v.b;
            x[4u * unit + 2u] = v.c;
            x[4u * unit + 3u] = v.d;
        }
    }
    storageBarrier();
    if (me == 0u && params.last == 1u) {
        begin_record();
        control.position += flight.advance;
        control.scan_at = flight.rows - 1u;
        if (accept == 1u) {
            if (id == 0xffffffffu) {
                // no logit was a finite number
                halt(STOP_NOT_FINITE);
            } else {
                if (control.out_count < params.room) {
                    out[control.out_count] = id;
                }
                control.out_count += 1u;
                control.id = id;
                var ends = control.position >= flight.limit;
                for (var i = 0u; i < control.eos_count; i++) {
                    if (control.eos[i / 4u][i % 4u] == id) {
                        ends = true;
                    }
                }
                if (ends) {
                    halt(STOP_END);
                }
            }
        }
        control.batch += flight.ends;
    }
}
