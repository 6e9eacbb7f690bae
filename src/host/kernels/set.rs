//! One instruction set's versions of all kernels.

use super::input::{Codes, Floats, GROUP};
use crate::host::attention::{Partial, Tile};
use crate::host::isa::Isa;
use crate::host::mamba::Head;

/// Most activation rows one call of a kernel takes.
pub(crate) const CHUNK: usize = 4;

/// Kernels as functions that are safe to call: a set is only handed out where
/// the processor has what it needs. `first` and `n` (1 to [`CHUNK`]) choose the
/// activation rows, `out` is `[weight rows, n]`.
pub(crate) struct Set {
    /// [`super::input::quantize_body`]
    pub(crate) quantize: fn(&mut [f32], Option<&[u8]>, bool, &mut [[i8; GROUP]], &mut [f32], &mut [i32]),
    /// Ladders `[rows, 4]`, rung codes, groups, scales `[rows, lanes]`.
    pub(crate) scales: fn(&[u8], &[u8], usize, &mut [f32]),
    /// Codes `[rows, cols]`, cols.
    pub(crate) q8_codes: fn(&[i8], usize, &Codes, usize, usize, &mut [f32]),
    /// Nibbles `[rows, groups, 16]`, groups, scales.
    pub(crate) q4_codes: fn(&[u8], usize, &[f32], &Codes, usize, usize, &mut [f32]),
    /// As `q8_codes`, float activations.
    pub(crate) q8_floats: fn(&[i8], usize, &Floats, usize, usize, &mut [f32]),
    /// As `q4_codes`, float activations.
    pub(crate) q4_floats: fn(&[u8], usize, &[f32], &Floats, usize, usize, &mut [f32]),
    /// Elements `[rows, cols]`, cols.
    pub(crate) f32: fn(&[u8], usize, &Floats, usize, usize, &mut [f32]),
    /// As `f32`.
    pub(crate) f16: fn(&[u8], usize, &Floats, usize, usize, &mut [f32]),
    /// As `f32`.
    pub(crate) bf16: fn(&[u8], usize, &Floats, usize, usize, &mut [f32]),
    /// [`super::body::dots`]
    pub(crate) dots: fn(&[f32], &[f32], usize, &mut [f32]),
    /// [`crate::host::mamba::scan_body`]
    pub(crate) scan: fn(&mut Head<'_>),
    /// [`crate::host::attention::attend_body`]
    pub(crate) attend: fn(&Tile<'_>, &mut [Partial]),
}

impl Set {
    /// The kernels of a set the processor has.
    ///
    /// # Panics
    ///
    /// If it has not.
    pub(crate) fn of(isa: Isa) -> &'static Set {
        let set = match isa {
            Isa::Portable => Some(&super::portable::SET),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => super::simd_avx2::set(),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => super::simd_avx512::set(),
            #[cfg(not(target_arch = "x86_64"))]
            Isa::Avx2 | Isa::Avx512 => None,
        };
        set.unwrap_or_else(|| panic!("{isa} on a processor without it"))
    }
}

/// Calls a kernel with its number of activation rows as a constant.
macro_rules! by_rows {
    ($n:expr, $N:ident => $call:expr) => {
        match $n {
            1 => {
                const $N: usize = 1;
                $call
            }
            2 => {
                const $N: usize = 2;
                $call
            }
            3 => {
                const $N: usize = 3;
                $call
            }
            4 => {
                const $N: usize = 4;
                $call
            }
            n => unreachable!("a chunk of {n} rows"),
        }
    };
}
pub(super) use by_rows;
