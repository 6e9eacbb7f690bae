//! A streaming runtime for Nemotron-H mixture-of-experts models.

pub mod ids;
pub mod knobs;
pub mod model;
pub mod plan;
#[cfg(feature = "cli")]
pub mod trace;
