//! CMF files: those the peer wrote, those written here, and damaged ones.

#[path = "../common/mod.rs"]
mod common;
#[path = "../common/weights.rs"]
mod weights;

mod bundle;
mod conversions;
mod damage;
mod peer;
mod rebuilt;
mod vectors;
