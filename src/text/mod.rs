//! Text around a decoder: ids and pieces, prompts, transcripts (`model.md` §4.6).
//!
//! Knows the tokenizer and the layouts, nothing of audio, kernels or actors.

pub mod prompt;
pub mod tokenizer;
pub mod transcript;
