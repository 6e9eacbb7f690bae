//! The model on disk and in memory: container, codecs, geometry, weights, import.
//!
//! Knows nothing of kernels, devices or actors.

pub mod config;
pub mod container;
pub mod convert;
pub mod dtype;
pub mod geometry;
pub mod hash;
pub mod import;
pub mod layout;
pub mod mmap;
pub mod open;
pub mod popularity;
pub mod quant;
pub mod state;
pub mod summary;
pub mod synth;
pub mod tensors;
pub mod verify;
pub mod weights;
pub mod writer;

pub use convert::{ConvertOptions, Quant, convert};
pub use open::{Model, ModelError, OpenOptions, open};
pub use summary::Summary;
pub use synth::{SynthOptions, synth};
pub use verify::verify;
