//! A streaming runtime for Nemotron-H mixture-of-experts models.

#[path = "../actors/mod.rs"]
pub mod actors;
pub mod audio;
pub mod device;
pub mod host;
pub mod ids;
pub mod invariants;
pub mod knobs;
pub mod model;
pub mod plan;
pub mod policy;
pub mod reference;
pub mod runtime;
pub mod text;
#[cfg(feature = "cli")]
pub mod trace;

pub use runtime::{Error, Runtime};
