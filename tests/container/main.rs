//! CMF files: those the peer wrote, those written here, and damaged ones.

#[path = "../common/mod.rs"]
mod common;

mod peer;
mod vectors;
