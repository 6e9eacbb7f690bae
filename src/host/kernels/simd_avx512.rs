//! The kernels for AVX-512 with VNNI.
//!
//! Only [`set`] leaves this file, and it hands the kernels out where the
//! processor has the instructions.
#![allow(unsafe_code, reason = "calls of functions compiled for this instruction set")]

use super::body;
use super::input::{Codes, Floats, GROUP, quantize_body};
use super::set::{Set, by_rows};
use crate::host::math;

/// Whether the processor has the instructions.
pub(crate) fn present() -> bool {
    super::simd_avx2::present()
        && is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512vnni")
}

/// The kernels, where the processor has the instructions.
pub(super) fn set() -> Option<&'static Set> {
    present().then_some(&SET)
}

static SET: Set =
    Set { quantize, scales, q8_codes, q4_codes, q8_floats, q4_floats, f32: exact32, f16: exact16, bf16: brain16 };

/// Defines a kernel as a function compiled with the instructions and one that calls it.
macro_rules! kernel {
    (fn $name:ident($($arg:ident: $type:ty),* $(,)?) $body:block) => {
        fn $name($($arg: $type),*) {
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
            fn with_instructions($($arg: $type),*) $body
            // SAFETY: the kernel is reached through `set` alone, which has asked `present`.
            unsafe { with_instructions($($arg),*) }
        }
    };
}

kernel! {
    fn quantize(
        x: &mut [f32],
        fields: Option<&[u8]>,
        split: bool,
        codes: &mut [[i8; GROUP]],
        steps: &mut [f32],
        sums: &mut [i32],
    ) {
        quantize_body(x, fields, split, codes, steps, sums);
    }
}

kernel! {
    fn scales(ladders: &[u8], codes: &[u8], groups: usize, out: &mut [f32]) {
        body::scales(ladders, codes, groups, out);
    }
}

kernel! {
    fn q8_codes(w: &[i8], cols: usize, x: &Codes, first: usize, n: usize, out: &mut [f32]) {
        by_rows!(n, N => body::q8_codes::<N>(w, cols, x, first, out));
    }
}

kernel! {
    fn q4_codes(w: &[u8], groups: usize, scales: &[f32], x: &Codes, first: usize, n: usize, out: &mut [f32]) {
        by_rows!(n, N => body::q4_codes::<N>(w, groups, scales, x, first, out));
    }
}

kernel! {
    fn q8_floats(w: &[i8], cols: usize, x: &Floats, first: usize, n: usize, out: &mut [f32]) {
        let load = body::elements(bytemuck::cast_slice(w), cols, |[w]: [u8; 1]| f32::from(w as i8));
        by_rows!(n, N => body::floats::<N, true>(cols, load, x, first, out));
    }
}

kernel! {
    fn q4_floats(w: &[u8], groups: usize, scales: &[f32], x: &Floats, first: usize, n: usize, out: &mut [f32]) {
        let load = body::nibbles(w, groups, scales);
        by_rows!(n, N => body::floats::<N, true>(groups * GROUP, load, x, first, out));
    }
}

kernel! {
    fn exact32(w: &[u8], cols: usize, x: &Floats, first: usize, n: usize, out: &mut [f32]) {
        let load = body::elements(w, cols, f32::from_le_bytes);
        by_rows!(n, N => body::floats::<N, true>(cols, load, x, first, out));
    }
}

kernel! {
    fn exact16(w: &[u8], cols: usize, x: &Floats, first: usize, n: usize, out: &mut [f32]) {
        let load = body::elements(w, cols, |w| math::half(u16::from_le_bytes(w)));
        by_rows!(n, N => body::floats::<N, true>(cols, load, x, first, out));
    }
}

kernel! {
    fn brain16(w: &[u8], cols: usize, x: &Floats, first: usize, n: usize, out: &mut [f32]) {
        let load = body::elements(w, cols, |w| f32::from_bits(u32::from(u16::from_le_bytes(w)) << 16));
        by_rows!(n, N => body::floats::<N, true>(cols, load, x, first, out));
    }
}
