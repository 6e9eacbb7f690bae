//! Perception and text against the oracle: `model.md` §4, tolerances of §6.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "figures for a reader with --nocapture")]

#[path = "../common/mod.rs"]
mod common;

mod audio_files;
mod checkpoint;
mod golden;
mod prompts;
mod towers;
