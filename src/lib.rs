//! A streaming runtime for Nemotron-H mixture-of-experts models.
//!
//! Start with [`runtime`], the embedding API; `docs/embedding.md` has worked examples and `docs/architecture.md` a map. From the ground
//! up:
//!
//! | module | what |
//! |---|---|
//! | [`ids`], [`knobs`], [`invariants`] | indices, what can be tuned, what must hold |
//! | [`model`] | files, codecs, conversion |
//! | [`mod@reference`] | one plain twin for each kernel |
//! | [`host`] | the fast CPU kernels |
//! | [`audio`], [`text`] | recordings to rows, tokens to text |
//! | [`plan`], [`policy`] | who is resident, what is admitted, drafted, submitted ahead: decisions as plain data |
//! | [`device`] | what computes: host, GPU, scripted |
//! | [`actors`] | who owns what, and what crosses between them |

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

/// The examples of the embedding guide, compiled and run with the tests.
#[cfg(doctest)]
#[doc = include_str!("../docs/embedding.md")]
pub struct EmbeddingGuide;
