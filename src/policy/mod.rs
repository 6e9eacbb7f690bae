//! Decisions, as pure state machines: event and time in, effects out. No channel, clock, thread or device.

pub mod admission;
pub mod ahead;
pub mod drafts;
pub mod replay;
pub mod routes;
pub mod serve;
