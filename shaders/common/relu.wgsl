// max(x, 0), but for NaN, which `max` may drop: it has to reach the head, which ends the flight.
fn relu(x: f32) -> f32 {
    return select(x, 0.0, x < 0.0);
}
