//! Perception: from a recording to the rows a decoder reads (`model.md` §4).
//!
//! ```text
//! read ─ samples ─▶ logmel ─ features ─┬─▶ tower (speech) ──┬─▶ perception ─▶ rows, chunk by chunk
//!                                      └─▶ sortformer ──────┘        └─ kept ─▶ words ─▶ times
//! ```
//!
//! Everything runs in f32 on the host, on the rayon pool it is called from. Matrices stay in the
//! mapped file and are converted a panel at a time, so a large encoder needs no second copy of its
//! weights. This part knows nothing of tokens, prompts, decoders or actors.

pub mod config;
mod ctc;
mod gelu;
mod gemm;
mod linear;
pub mod logmel;
pub mod perception;
pub mod read;
mod riff;
mod sortformer;
mod tower;
pub mod weights;
pub mod words;
