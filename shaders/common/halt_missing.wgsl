// Halts the slot where a chosen expert has no place (`protocol.md` §1: the route sets the stop).
fn halt_missing() {
    var missing = false;
    for (var u = 0u; u < union_count; u++) {
        missing = missing || map[params.map + chosen[u]] == 0xffffffffu;
    }
    if (missing) {
        control.stop_flight = flight.flight;
        control.stop_point = vec2<u32>(control.batch, 2u * params.layer);
        control.stop = STOP_MISS;
    }
}

// Counts entry u of the union among what the flight chose.
fn count_choice(u: u32) {
    routes[params.counts + chosen[u]] += countOneBits(chosen_by[u]);
}
