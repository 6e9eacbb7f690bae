//! The fast host path against the plain one.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "what a comparison ran on and measured is its result")]

#[path = "../common/mod.rs"]
mod common;
mod decoder;
mod kernels;
mod random;
