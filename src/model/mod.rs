//! The model on disk and in memory: container, codecs, geometry, weights, import.
//!
//! Knows nothing of kernels, devices or actors.

pub mod config;
pub mod container;
pub mod dtype;
pub mod geometry;
pub mod hash;
pub mod layout;
pub mod mmap;
pub mod open;
pub mod quant;
pub mod state;
pub mod tensors;
pub mod weights;

pub use open::{Model, ModelError, OpenOptions, open};
