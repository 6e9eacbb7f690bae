//! The actors.

pub mod loader;
pub mod payload;
pub mod session;
