//! Perception and text against the oracle: `model.md` §4, tolerances of §6.

#[path = "../common/mod.rs"]
mod common;

mod audio_files;
mod checkpoint;
mod golden;
mod prompts;
mod towers;
