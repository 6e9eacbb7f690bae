//! The oracle: recorded references of other implementations, compared with every engine of ours.
//!
//! `harness` holds the comparisons and the traits an engine implements to be
//! compared; a module an engine runs them. References and what they mean:
//! `oracle/README.md` beside the clone, of which `tests/data/oracle` is a part.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "the figures of a comparison are its result")]

mod case;
mod checkpoint;
#[path = "../common/mod.rs"]
mod common;
#[cfg(feature = "gpu")]
mod gpu;
mod graph;
#[cfg(feature = "gpu")]
mod guards;
mod harness;
mod host;
mod int8;
mod plain;
mod recorded;
mod reference;
mod report;
mod tensors;
mod tolerance;
mod trained;
mod vectors;
#[path = "../common/weights.rs"]
mod weights;
mod wrong;
