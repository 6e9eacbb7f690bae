//! The actors.

pub mod alive;
pub mod encoder;
pub mod loader;
pub mod payload;
pub mod session;
