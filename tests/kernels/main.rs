//! Kernels against their twins, on whatever adapter the environment names (lavapipe in CI).
#![cfg(feature = "gpu")]

mod drafts;
mod gpu;
mod prefill;
mod selftest;
mod weights;
