//! What can be tuned (`runtime.md` §7). This file alone reads the environment.

/// Activations of the products with q8_2f and q4tp matrices (`runtime.md` §3a).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Activations {
    /// 32-bit floats.
    F32,
    /// int8 codes, a scale per 32 columns.
    #[default]
    Int8,
}
