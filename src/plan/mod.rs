//! What to run and where it lies, as plain data: no channel, clock, thread or device.

pub mod residency;
pub mod record;
