//! The actors.

pub mod payload;
pub mod session;
