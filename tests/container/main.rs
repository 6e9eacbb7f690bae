//! CMF files: those the peer wrote, those written here, and damaged ones.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "figures and skips, for a reader with --nocapture")]

#[path = "../common/mod.rs"]
mod common;
#[path = "../common/weights.rs"]
mod weights;

mod bundle;
mod conversions;
mod damage;
mod peer;
mod rebuilt;
mod vectors;
