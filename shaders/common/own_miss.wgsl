// Whether the slot halted in this very layer of this very flight: its resident experts still run.
fn own_miss(layer: u32) -> bool {
    return control.turn == flight.turn && control.stop == STOP_MISS && all(control.stop_flight == flight.flight)
        && control.stop_point.y == 2u * layer && control.stop_point.x == control.batch;
}
