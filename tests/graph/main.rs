//! The whole actor graph over the scripted device.
//!
//! `simulation`: one thread steps all actors under a simulated clock; a seed decides everything. `threaded`: the same
//! scripts on real threads. `broken`: known ways to get the protocol wrong, each of which the simulation must catch.

#[cfg(feature = "gpu")]
mod gpu;
mod host;
mod random;
mod scenario;
mod simulation;
mod threaded;
