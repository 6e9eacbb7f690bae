//! The whole actor graph over the scripted device.
//!
//! `simulation`: one thread steps all actors under a simulated clock; a seed decides everything. `threaded`: the same
//! scripts on real threads. `broken`: known ways to get the protocol wrong, each of which the simulation must catch.
//! `faults`, `gpu_faults`: single faults, each at its worst moments.
//! `host`, `gpu`: real devices, with banks that do not hold all experts.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "figures and skips, for a reader with --nocapture")]

mod faults;
#[cfg(feature = "gpu")]
mod gpu;
#[cfg(feature = "gpu")]
mod gpu_faults;
mod host;
mod random;
mod scenario;
mod simulation;
#[cfg(feature = "gpu")]
mod streamed;
mod threaded;
