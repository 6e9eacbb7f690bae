// For full banks: every expert has a place, so the route writes no stop and what follows need not wait for one.
fn halt_missing() {
}

// Nobody asks what a full bank's rows chose.
fn count_choice(u: u32) {
}
