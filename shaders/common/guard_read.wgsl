@group(0) @binding(1) var<storage, read> control: Control;

// Whether the slot has the flight's turn and no stop.
fn live() -> bool {
    return control.turn == flight.turn && control.stop == 0u;
}
