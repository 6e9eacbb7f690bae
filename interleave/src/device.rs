//! The device's own files, over the stand-in's locks.

#[path = "../../src/device/board.rs"]
pub(crate) mod board;
#[path = "../../src/device/machine.rs"]
pub(crate) mod machine;
#[path = "../../src/device/worker.rs"]
pub(crate) mod worker;

pub use riparian::device::*;
