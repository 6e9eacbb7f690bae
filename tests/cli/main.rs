//! The program as a user meets it: arguments in, stdout, stderr and exit code out.
//!
//! `golden` holds the transcripts of the tiny model against its reference,
//! `input` what happens with recordings and files that are not as they should
//! be, `starved` too few threads, `gpu` the program on an adapter, `commands`
//! every command once, `trace` what `--trace` writes, `progress` how long
//! operations tell how far they are, `usage` what is refused and how.

#![allow(clippy::print_stderr, reason = "a test that lacks its data says so")]

#[path = "../common/mod.rs"]
mod common;
#[path = "../common/weights.rs"]
mod weights;

mod commands;
mod golden;
#[cfg(feature = "gpu")]
mod gpu;
mod input;
mod progress;
mod starved;
mod support;
mod trace;
mod twins;
mod usage;
