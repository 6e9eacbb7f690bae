//! The whole actor graph over the scripted device.
//!
//! `simulation`: one thread steps all actors under a simulated clock; a seed decides everything. `threaded`: the same
//! scripts on real threads. `broken`: known ways to get the protocol wrong, each of which the simulation must catch.
//! `host`, `gpu`: real devices, with banks that do not hold all experts.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "figures and skips, for a reader with --nocapture")]

#[cfg(feature = "gpu")]
mod gpu;
mod host;
mod random;
mod scenario;
mod simulation;
mod threaded;
