// Ends a batch where drafts are made: the best id of each row, how many rows stand, and what the next batch begins with.
//
// A row stands if it is the first, or if the row before it stands and gave the id that the row embeds; none stands
// behind an end id or past the run's limit. The scan goes on from the snapshot of the last row that stands.
//
// best    [rows, groups]: logit (f32 bits) and id
// out     u32: ids of the flight at `control.out_count`; behind `room` of them a word for each round:
//         drafts that agreed, drafts offered * 2^16
// x       f32 [rows, COLS]: row 0 becomes the embedding of the last id
// next    f32 [rows, COLS]: the embedding of the id that each standing row gave
// drafts  u32 [rows - 1]: the ids that the rows behind the first embed
// rows_control, chain_control: the slot's words as the draft layer sees them. Its rows lie one behind the position that
// they stand at, as a row is made of a position and the id that follows.
// One workgroup. Ties go to the lower id. `model.md` §1.8, §2.2; `protocol.md` §2, Accept.

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
    // ids and rounds `out` has room for
    room: u32,
    rounds: u32,
    pad_a: u32,
    pad_b: u32,
    pad_c: u32,
}

@group(0) @binding(2) var<uniform> params: Params;
@group(0) @binding(3) var<storage, read> weights: array<vec4<u32>>;
@group(0) @binding(4) var<storage, read> words: array<u32>;
@group(0) @binding(5) var<storage, read> best: array<vec2<u32>>; // [rows, groups]
@group(0) @binding(6) var<storage, read_write> out: array<u32>; // [room + rounds]
@group(0) @binding(7) var<storage, read_write> x: array<vec4<f32>>; // [rows, COLS / 4]
@group(0) @binding(8) var<storage, read_write> next: array<vec4<f32>>; // [rows, COLS / 4]
@group(0) @binding(9) var<storage, read> drafts: array<u32>; // [rows - 1]
@group(0) @binding(10) var<storage, read_write> rows_control: Control;
@group(0) @binding(11) var<storage, read_write> chain_control: Control;

override COLS: u32;
override LAST_BLOCK: u32;

// rows of a batch at most
const MOST: u32 = 8u;

var<workgroup> tops: array<vec2<u32>, WG>;
var<workgroup> ids_of: array<u32, MOST>;

fn better(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
    let p = bitcast<f32>(a.x);
    let q = bitcast<f32>(b.x);
    if (q > p || (q == p && b.y < a.y)) {
        return b;
    }
    return a;
}

fn ends_text(id: u32) -> bool {
    var ends = false;
    for (var i = 0u; i < control.eos_count; i++) {
        ends = ends || control.eos[i / 4u][i % 4u] == id;
    }
    return ends;
}

fn begin_record() {
    if (any(control.out_flight != flight.flight)) {
        control.out_flight = flight.flight;
        control.out_count = 0u;
        control.round_count = 0u;
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
    let rows = min(flight.rows, MOST);
    for (var row = 0u; row < rows; row++) {
        var top = vec2<u32>(0xff7fffffu, NONE);
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
        if (me == 0u) {
            ids_of[row] = tops[0].y;
        }
        workgroupBarrier();
    }
    if (!go) {
        if (me == 0u && params.last == 1u) {
            // what follows looks at these words instead of the slot's
            rows_control.stop = STOP_RETIRED;
            chain_control.stop = STOP_RETIRED;
        }
        return;
    }
    // the run's limit cuts a batch; its first row has room always
    let most = min(rows, max(flight.limit, control.position + 1u) - control.position);
    var kept = 0u;
    var ended = false;
    if (accept == 1u) {
        while (kept < most && !ended) {
            let id = ids_of[kept];
            if (id == NONE || (kept > 0u && drafts[kept - 1u] != ids_of[kept - 1u])) {
                break;
            }
            ended = ends_text(id);
            kept += 1u;
        }
    }
    for (var row = 0u; row < kept; row++) {
        let id = ids_of[row];
        if (id >= params.first_id && id < params.first_id + params.rows) {
            for (var unit = me; unit < COLS / 16u; unit += WG) {
                let v = embed16(params.base, params.side, params.field, id - params.first_id, unit);
                let at = row * (COLS / 4u) + 4u * unit;
                next[at] = v.a;
                next[at + 1u] = v.b;
                next[at + 2u] = v.c;
                next[at + 3u] = v.d;
                if (row + 1u == kept) {
                    x[4u * unit] = v.a;
                    x[4u * unit + 1u] = v.b;
                    x[4u * unit + 2u] = v.c;
                    x[4u * unit + 3u] = v.d;
                }
            }
        }
    }
    // every invocation has read the slot's words before one of them changes
    storageBarrier();
    workgroupBarrier();
    if (me != 0u || params.last != 1u) {
        return;
    }
    begin_record();
    // without an id wanted the rows stand all the same
    let stand = max(kept, 1u);
    let position = control.position + flight.advance + stand - 1u;
    control.position = position;
    control.scan_at = stand - 1u;
    control.kept = stand;
    if (accept == 1u) {
        if (kept == 0u) {
            // no logit was a finite number
            halt(STOP_NOT_FINITE);
        } else {
            for (var row = 0u; row < kept; row++) {
                if (control.out_count < params.room) {
                    out[control.out_count] = ids_of[row];
                }
                control.out_count += 1u;
            }
            control.id = ids_of[kept - 1u];
            if (most > 1u) {
                // an end id that was drafted is a draft that stands; nothing is said of those behind it
                var offered = most - 1u;
                var agreed = kept - 1u;
                if (ended) {
                    offered = min(kept, most - 1u);
                    if (kept < most && drafts[kept - 1u] == ids_of[kept - 1u]) {
                        agreed += 1u;
                    }
                }
                if (control.round_count < params.rounds) {
                    out[params.room + control.round_count] = agreed | (offered << 16u);
                }
                control.round_count += 1u;
            }
            if (ended || position >= flight.limit) {
                halt(STOP_END);
            }
        }
    }
    control.batch += flight.ends;
    rows_control.turn = flight.turn;
    // the row that follows is not known where no id is wanted
    rows_control.stop = select(STOP_RETIRED, 0u, accept == 1u && kept > 0u);
    rows_control.position = position - stand;
    rows_control.kept = stand;
    chain_control.turn = flight.turn;
    chain_control.stop = control.stop;
    chain_control.position = position - 1u;
    chain_control.kept = 1u;
}
