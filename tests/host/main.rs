//! The fast host path against the plain one.

#[path = "../common/mod.rs"]
mod common;
mod decoder;
mod kernels;
mod random;
