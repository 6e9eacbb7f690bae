//! Which instruction set the kernels use.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

/// An instruction set the kernels have a version for.
///
/// Products in int8 mode give the same bits on all of them; products with
/// float activations use fused multiply-adds where the set has them, so they
/// differ between [`Isa::Portable`] and the others by rounding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Isa {
    /// Whatever the target has by default; the compiler vectorises.
    Portable,
    /// AVX2, FMA and F16C.
    Avx2,
    /// AVX-512 F, BW, DQ, VL and VNNI.
    Avx512,
}

/// An instruction set was named that cannot be used.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum IsaError {
    /// The processor lacks it.
    #[error("this processor has no {wanted}; it has {present}")]
    Absent {
        /// What was asked for.
        wanted: Isa,
        /// The best there is.
        present: Isa,
    },
    /// No such name.
    #[error("unknown instruction set {seen:?}; accepted are portable, avx2 and avx512")]
    Unknown {
        /// What was given.
        seen: String,
    },
}

impl Isa {
    /// All sets, narrowest first.
    pub const ALL: [Isa; 3] = [Isa::Portable, Isa::Avx2, Isa::Avx512];

    /// Whether this processor has it.
    #[must_use]
    pub fn is_present(self) -> bool {
        match self {
            Isa::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => super::kernels::simd_avx2::present(),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => super::kernels::simd_avx512::present(),
            #[cfg(not(target_arch = "x86_64"))]
            Isa::Avx2 | Isa::Avx512 => false,
        }
    }

    /// The sets this processor has, narrowest first.
    pub fn present() -> impl Iterator<Item = Isa> {
        Self::ALL.into_iter().filter(|isa| isa.is_present())
    }

    /// The widest set this processor has.
    #[must_use]
    pub fn best() -> Isa {
        Self::present().last().unwrap_or(Isa::Portable)
    }

    /// This set, if the processor has it.
    ///
    /// # Errors
    ///
    /// [`IsaError::Absent`] otherwise.
    pub fn require(self) -> Result<Self, IsaError> {
        if self.is_present() { Ok(self) } else { Err(IsaError::Absent { wanted: self, present: Self::best() }) }
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Isa::Portable => "portable",
            Isa::Avx2 => "avx2",
            Isa::Avx512 => "avx512",
        })
    }
}

impl FromStr for Isa {
    type Err = IsaError;

    fn from_str(text: &str) -> Result<Self, IsaError> {
        (Self::ALL.into_iter().find(|isa| isa.to_string() == text))
            .ok_or_else(|| IsaError::Unknown { seen: text.to_owned() })
    }
}
