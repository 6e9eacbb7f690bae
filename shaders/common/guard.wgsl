// What every dispatch looks at first (`protocol.md` §2): the flight's stamp against the slot's turn and stop.

// The slot's own words. Only route, accept and the queue's cures write them.
struct Control {
    turn: u32,
    // 0 none, else a stop: see STOP_*
    stop: u32,
    // low and high word of the flight that met it
    stop_flight: vec2<u32>,
    // batch, layer * 2 + phase
    stop_point: vec2<u32>,
    // rows consumed
    position: u32,
    // which snapshot holds the scan state
    scan_at: u32,
    // id whose embedding is the next row
    id: u32,
    // ids in the out record
    out_count: u32,
    // flight the out record belongs to
    out_flight: vec2<u32>,
    // block whose output was not finite, for STOP_NOT_FINITE
    bad_block: u32,
    // end ids in `eos`
    eos_count: u32,
    batch: u32,
    // rows of the last batch that stand
    kept: u32,
    // rounds in the out record
    round_count: u32,
    pad_a: u32,
    pad_b: u32,
    pad_c: u32,
    eos: array<vec4<u32>, 4>,
}

// Written by the queue before each flight.
struct Flight {
    turn: u32,
    // rows of the batch that the flight carries
    rows: u32,
    flight: vec2<u32>,
    // an accept that has consumed this many rows ends the session
    limit: u32,
    // whether the last row's argmax is wanted
    accept: u32,
    // rows the batch consumes; more than `rows` where only the last of them gets this far
    advance: u32,
    // 1: the batch ends with these rows
    ends: u32,
}

const STOP_MISS: u32 = 1u;
const STOP_SHORT: u32 = 2u;
const STOP_END: u32 = 3u;
const STOP_NOT_FINITE: u32 = 4u;
const STOP_RETIRED: u32 = 5u;

@group(0) @binding(0) var<uniform> flight: Flight;
