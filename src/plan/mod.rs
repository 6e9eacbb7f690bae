//! What to run and where it lies, as plain data: no channel, clock, thread or device.

pub mod record;
pub mod residency;
