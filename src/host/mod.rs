//! The decoder on the CPU: kernels, threads and block after block.
//!
//! Weights are read where they lie in the mapped file; nothing is kept
//! dequantised. Knows nothing of devices, flights or actors.

mod attention;
mod decoder;
mod draft;
mod head;
mod isa;
pub(crate) mod kernels;
mod mamba;
pub(crate) mod math;
mod mlp;
mod moe;
mod norm;
mod pool;
mod routes;
mod sequence;
mod spin;
mod team;

pub use decoder::{Decoder, NotFinite, Observer, Place, Snapshots};
pub use draft::DraftConventions;
pub use head::Pick;
pub use isa::{Isa, IsaError};
pub use kernels::{matmul, regions_run, row};
pub use moe::{ExpertRows, Routes};
pub use pool::{Pool, default_threads, physical_cores};
pub use routes::routes_of;
pub use sequence::{HostSequence, Round, SequenceError};
pub use spin::Spin;
