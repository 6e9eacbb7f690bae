//! Each scenario under many random orders, and under those with few preemptions, where most bugs are.

use riparian_interleave::{a_device_dies, a_queue_is_closed, a_wait_ends, flights_land, waits_get_their_own, team};

const ORDERS: usize = 20_000;

fn all(scenario: fn()) {
    shuttle::check_random(scenario, ORDERS);
    shuttle::check_pct(scenario, ORDERS, 3);
}

#[test]
fn a_wait_ends_with_the_landing_or_the_loss() {
    all(a_wait_ends);
}

#[test]
fn each_wait_gets_its_own() {
    all(waits_get_their_own);
}

#[test]
fn flights_land_in_order() {
    all(flights_land);
}

#[test]
fn closing_a_queue_ends_everybody() {
    all(a_queue_is_closed);
}

#[test]
fn a_dead_device_is_noticed_by_everybody() {
    all(a_device_dies);
}

#[test]
fn every_region_is_whole() {
    all(team::regions_are_whole);
}

#[test]
fn regions_within_regions() {
    all(team::regions_nest);
}

#[test]
fn nobody_sleeps_through_a_region() {
    all(team::sleepers_are_woken);
}

#[test]
fn a_team_ends_at_any_moment() {
    all(team::a_team_ends);
}

#[test]
fn a_panic_is_handed_over() {
    all(team::a_helpers_panic_reaches_its_caller);
}
