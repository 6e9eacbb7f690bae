//! The model on disk and in memory: container, codecs, geometry, weights, import.
//!
//! Knows nothing of kernels, devices or actors.

pub mod geometry;
pub mod state;
pub mod tensors;
pub mod weights;
