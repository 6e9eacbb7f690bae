//! One instruction set's versions of all kernels.

use super::input::{Codes, Floats, Stretch};
use crate::host::attention::{Partial, Tile};
use crate::host::isa::Isa;
use crate::host::mamba::{Convolution, Head};

/// Most activation rows one call of a float kernel takes.
pub(crate) const CHUNK: usize = 4;
/// Most activation rows one call of an int8 kernel takes.
pub(crate) const CODES_MAX: usize = 4;
/// Most weight rows one call of a kernel takes: they stay in the nearest cache while the activation rows pass.
pub(crate) const BLOCK: usize = 16;

/// One activation row's products with the weight rows of a call; what lies beyond the last row is of no meaning.
pub(crate) type Line = [f32; BLOCK];

/// Kernels as functions that are safe to call: a set is only handed out where
/// the processor has what it needs. A number and the output's length (1 to [`CHUNK`]
/// or [`CODES_MAX`] lines) choose the activation rows.
pub(crate) struct Set {
    /// [`super::input::quantize_body`]
    pub(crate) quantize: fn(&mut [f32], Option<&[u8]>, Option<usize>, &mut [Stretch]),
    /// Ladders `[rows, 4]`, rung codes, groups, scales `[rows, lanes]`.
    pub(crate) scales: fn(&[u8], &[u8], usize, &mut [f32]),
    /// Codes `[rows, cols]`, cols.
    pub(crate) q8_codes: fn(&[i8], usize, &Codes, usize, &mut [Line]),
    /// Nibbles `[rows, groups, 16]`, groups, ladders `[rows, 4]`, rung codes.
    pub(crate) q4_codes: fn(&[u8], usize, &[u8], &[u8], &Codes, usize, &mut [Line]),
    /// As `q8_codes`, float activations.
    pub(crate) q8_floats: fn(&[i8], usize, &Floats, usize, &mut [Line]),
    /// Nibbles `[rows, groups, 16]`, groups, scales `[rows, lanes]`, float activations.
    pub(crate) q4_floats: fn(&[u8], usize, &[f32], &Floats, usize, &mut [Line]),
    /// Elements `[rows, cols]`, cols.
    pub(crate) f32: fn(&[u8], usize, &Floats, usize, &mut [Line]),
    /// As `f32`.
    pub(crate) f16: fn(&[u8], usize, &Floats, usize, &mut [Line]),
    /// As `f32`.
    pub(crate) bf16: fn(&[u8], usize, &Floats, usize, &mut [Line]),
    /// [`super::body::dots`]
    pub(crate) dots: fn(&[f32], &[f32], usize, &mut [f32]),
    /// [`crate::host::mamba::scan_body`]
    pub(crate) scan: fn(&mut Head<'_>),
    /// [`crate::host::mamba::convolve_body`]
    pub(crate) convolve: fn(&mut Convolution<'_>),
    /// [`crate::host::norm::gated_groups`]
    pub(crate) gate: fn(&mut [f32], &[f32], &[f32], usize, f32),
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
    ($n:expr, $N:ident in [$($number:literal)+] => $call:expr) => {
        match $n {
            $($number => {
                const $N: usize = $number;
                $call
            })+
            n => unreachable!("a chunk of {n} rows"),
        }
    };
    ($n:expr, $N:ident => $call:expr) => { by_rows!($n, $N in [1 2 3 4] => $call) };
}
pub(super) use by_rows;
