//! The kernels for AVX-512 with VNNI.
//!
//! int8: a block is 16 groups, one for each lane of the sums. `vpdpbusd`
//! multiplies unsigned by signed bytes, exactly: an int8 weight has its sign bit
//! flipped, which adds 128 to it, and 128 times the sum of the codes is taken
//! off again; a nibble is unsigned as it is and 8 times the sum is taken off.
//!
//! Only [`set`] leaves this file, and it hands the kernels out where the
//! processor has the instructions.
#![allow(unsafe_code, reason = "calls of functions compiled for this instruction set, and vector loads and stores")]

use std::arch::x86_64::*;

use super::body;
use super::input::{Codes, Floats, GROUP, LANES, Q8_OFFSET, WIDE};
use super::set::{Set, by_rows};
use crate::host::attention::{Partial, Tile, attend_body};
use crate::host::mamba::{Head, scan_body};
use crate::host::math;

/// Groups of a block.
const BLOCK: usize = LANES;
/// How far ahead of its use a weight is asked for: beyond the page, so that its address is translated in time too.
const AHEAD: usize = 3 * 4096 + 512;

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

static SET: Set = Set {
    quantize,
    scales,
    q8_codes,
    q4_codes,
    q8_floats,
    q4_floats,
    f32: exact32,
    f16: exact16,
    bf16: brain16,
    dots,
    scan,
    attend,
};

/// Defines functions compiled with the instructions.
macro_rules! with_instructions {
    ($($(#[$doc:meta])* fn $name:ident $(<const $N:ident: usize>)? ($($arg:ident: $type:ty),* $(,)?) $(-> $ret:ty)? $body:block)*) => {
        $(
            $(#[$doc])*
            #[inline]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
            fn $name $(<const $N: usize>)? ($($arg: $type),*) $(-> $ret)? $body
        )*
    };
}

/// Defines a kernel that calls a function compiled with the instructions.
macro_rules! kernel {
    (fn $name:ident($($arg:ident: $type:ty),* $(,)?) $body:block) => {
        fn $name($($arg: $type),*) {
            with_instructions! { fn inner($($arg: $type),*) $body }
            // SAFETY: kernels are reached through `set` alone, which has asked `present`.
            unsafe { inner($($arg),*) }
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
        offsets: &mut [i32],
    ) {
        let x = x.as_chunks_mut::<16>().0;
        if let Some(fields) = fields {
            let (whole, tail) = fields.as_chunks::<32>();
            let mut last = [0; 32];
            last[..tail.len()].copy_from_slice(tail);
            for (x, fields) in x.iter_mut().zip(whole.iter().chain([&last])) {
                // SAFETY: 32 bytes are read from an array of 32.
                let fields = _mm512_cvtph_ps(unsafe { _mm256_loadu_si256(fields.as_ptr().cast()) });
                let folded = _mm512_mul_ps(floats(x), fields);
                put(x, folded);
            }
        }
        let factor = if split { 8 } else { Q8_OFFSET };
        let magnitude = _mm512_set1_epi32(0x7fff_ffff);
        let (least, most) = (_mm512_set1_ps(-127.0), _mm512_set1_ps(127.0));
        for (((x, codes), step), offset) in x.as_chunks::<2>().0.iter().zip(&mut *codes).zip(steps).zip(offsets) {
            let (a, b) = (floats(&x[0]), floats(&x[1]));
            // The magnitudes' bits order as the magnitudes do, with NaN above infinity.
            let largest = _mm512_max_epi32(
                _mm512_and_si512(_mm512_castps_si512(a), magnitude),
                _mm512_and_si512(_mm512_castps_si512(b), magnitude),
            );
            let d = f32::from_bits(_mm512_reduce_max_epi32(largest) as u32) / 127.0;
            let zero = d < f32::MIN_POSITIVE;
            *step = if zero { 0.0 } else { d };
            let divisor = _mm512_set1_ps(if zero { f32::INFINITY } else { d });
            let [a, b] = [a, b].map(|x| {
                let quotient = _mm512_max_ps(_mm512_min_ps(_mm512_div_ps(x, divisor), most), least);
                // Rounds to the nearest, ties to even, as the processor does unless told otherwise.
                _mm512_cvtps_epi32(quotient)
            });
            *offset = _mm512_reduce_add_epi32(_mm512_add_epi32(a, b)) * factor;
            let q = _mm256_set_m128i(_mm512_cvtepi32_epi8(b), _mm512_cvtepi32_epi8(a));
            // SAFETY: 32 bytes are written to an array of 32.
            unsafe { _mm256_storeu_si256(codes.as_mut_ptr().cast(), q) };
        }
        if split {
            let even = _mm512_set1_epi16(255);
            for four in codes.as_chunks_mut::<4>().0 {
                let halves: &mut [[i8; 64]; 2] = bytemuck::cast_mut(four);
                let [a, b] = [bytes(&halves[0]), bytes(&halves[1])];
                let narrow = |a, b| {
                    let (a, b) = (_mm512_cvtepi16_epi8(a), _mm512_cvtepi16_epi8(b));
                    _mm512_inserti64x4::<1>(_mm512_castsi256_si512(a), b)
                };
                put_bytes(&mut halves[0], narrow(_mm512_and_si512(a, even), _mm512_and_si512(b, even)));
                put_bytes(&mut halves[1], narrow(_mm512_srli_epi16::<8>(a), _mm512_srli_epi16::<8>(b)));
            }
        }
    }
}

kernel! {
    fn dots(matrix: &[f32], rows: &[f32], width: usize, out: &mut [f32]) {
        body::dots(matrix, rows, width, out);
    }
}

kernel! {
    fn scan(head: &mut Head<'_>) {
        scan_body(head);
    }
}

kernel! {
    fn attend(tile: &Tile<'_>, partials: &mut [Partial]) {
        attend_body(tile, partials);
    }
}

kernel! {
    fn scales(ladders: &[u8], codes: &[u8], groups: usize, out: &mut [f32]) {
        let width = crate::model::tensors::Codec::code_bytes(groups);
        let lanes = groups.next_multiple_of(LANES);
        let rows = ladders.as_chunks().0.iter().zip(codes.chunks_exact(width)).zip(out.chunks_exact_mut(lanes));
        for ((params, codes), out) in rows {
            // What the rows sixteen further on want of these planes.
            prefetch(codes.as_ptr().wrapping_add(16 * width).cast());
            let (low, high) = ladder(params);
            // `permutex2var` looks at the lowest five bits alone.
            let (whole, tail) = out[..lanes].split_at_mut(groups / BLOCK * BLOCK);
            for (block, out) in whole.as_chunks_mut::<LANES>().0.iter_mut().enumerate() {
                put(out, _mm512_permutex2var_ps(low, rungs(&codes[10 * block..]), high));
            }
            for out in tail.as_chunks_mut::<LANES>().0 {
                let kept = (1 << (groups % BLOCK)) - 1;
                let index = rungs(&codes[groups / BLOCK * 10..]);
                put(out, _mm512_maskz_permutex2var_ps(kept, low, index, high));
            }
        }
    }
}

kernel! {
    fn q8_codes(w: &[i8], cols: usize, x: &Codes, first: usize, n: usize, out: &mut [f32]) {
        by_rows!(n, N => q8_codes_of::<N>(w, cols, x, first, out));
    }
}

kernel! {
    fn q4_codes(w: &[u8], groups: usize, scales: &[f32], x: &Codes, first: usize, n: usize, out: &mut [f32]) {
        by_rows!(n, N => q4_codes_of::<N>(w, groups, scales, x, first, out));
    }
}

kernel! {
    fn q8_floats(w: &[i8], cols: usize, x: &Floats, first: usize, n: usize, out: &mut [f32]) {
        by_rows!(n, N => elements_of::<1, N>(bytemuck::cast_slice(w), cols, |w| {
            // SAFETY: 16 bytes are read from an array of 16.
            let codes = unsafe { _mm_loadu_si128(w.as_ptr().cast()) };
            _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes))
        }, x, first, out));
    }
}

kernel! {
    fn q4_floats(w: &[u8], groups: usize, scales: &[f32], x: &Floats, first: usize, n: usize, out: &mut [f32]) {
        by_rows!(n, N => q4_floats_of::<N>(w, groups, scales, x, first, out));
    }
}

kernel! {
    fn exact32(w: &[u8], cols: usize, x: &Floats, first: usize, n: usize, out: &mut [f32]) {
        // SAFETY: 64 bytes are read from an array of 16 times 4.
        by_rows!(n, N => elements_of::<4, N>(w, cols, |w| unsafe { _mm512_loadu_ps(w.as_ptr().cast()) }, x, first, out));
    }
}

kernel! {
    fn exact16(w: &[u8], cols: usize, x: &Floats, first: usize, n: usize, out: &mut [f32]) {
        by_rows!(n, N => elements_of::<2, N>(w, cols, |w| {
            // SAFETY: 32 bytes are read from an array of 16 times 2.
            _mm512_cvtph_ps(unsafe { _mm256_loadu_si256(w.as_ptr().cast()) })
        }, x, first, out));
    }
}

kernel! {
    fn brain16(w: &[u8], cols: usize, x: &Floats, first: usize, n: usize, out: &mut [f32]) {
        by_rows!(n, N => elements_of::<2, N>(w, cols, |w| {
            // SAFETY: 32 bytes are read from an array of 16 times 2.
            let halves = unsafe { _mm256_loadu_si256(w.as_ptr().cast()) };
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(halves)))
        }, x, first, out));
    }
}

with_instructions! {
    fn floats(x: &[f32; 16]) -> __m512 {
        // SAFETY: 64 bytes are read from an array of 16 floats.
        unsafe { _mm512_loadu_ps(x.as_ptr()) }
    }

    fn put(out: &mut [f32; 16], x: __m512) {
        // SAFETY: 64 bytes are written to an array of 16 floats.
        unsafe { _mm512_storeu_ps(out.as_mut_ptr(), x) }
    }

    fn ints(x: &[i32; 16]) -> __m512i {
        // SAFETY: 64 bytes are read from an array of 16 integers.
        unsafe { _mm512_loadu_si512(x.as_ptr().cast()) }
    }

    fn bytes(x: &[i8; 64]) -> __m512i {
        // SAFETY: 64 bytes are read from an array of 64.
        unsafe { _mm512_loadu_si512(x.as_ptr().cast()) }
    }

    fn put_bytes(out: &mut [i8; 64], x: __m512i) {
        // SAFETY: 64 bytes are written to an array of 64.
        unsafe { _mm512_storeu_si512(out.as_mut_ptr().cast(), x) }
    }

    /// Asks memory for the `LINES` lines that lie [`AHEAD`] bytes on: the processor's own foresight ends with a page.
    fn ask<const LINES: usize>(from: *const i8) {
        for line in 0..LINES {
            prefetch(from.wrapping_add(AHEAD + 64 * line));
        }
    }

    /// Reads nothing and does not fault, wherever it points.
    fn prefetch(from: *const i8) {
        _mm_prefetch::<_MM_HINT_T0>(from);
    }

    /// The first 64 bytes, zeros where there are fewer.
    fn some_bytes(x: &[i8]) -> __m512i {
        let mask = if x.len() >= 64 { u64::MAX } else { (1 << x.len()) - 1 };
        // SAFETY: the mask keeps the load inside the slice.
        unsafe { _mm512_maskz_loadu_epi8(mask, x.as_ptr()) }
    }

    /// The 16 numbers of 5 bits each at the start of `codes` (fewer where it is shorter), other bits above them.
    fn rungs(codes: &[u8]) -> __m512i {
        let codes = match codes.first_chunk::<16>() {
            // SAFETY: 16 bytes are read from an array of 16.
            Some(codes) => unsafe { _mm_loadu_si128(codes.as_ptr().cast()) },
            // SAFETY: the mask keeps the load inside the slice.
            None => unsafe { _mm_maskz_loadu_epi8((1 << codes.len()) - 1, codes.as_ptr().cast()) },
        };
        // Number i begins at bit 5·i: in byte 5·i / 8, at bit 5·i % 8, and may go on in the next byte.
        let pairs = _mm256_setr_epi8(
            0, 1, 0, 1, 1, 2, 1, 2, 2, 3, 3, 4, 3, 4, 4, 5, 5, 6, 5, 6, 6, 7, 6, 7, 7, 8, 8, 9, 8, 9, 9, 10,
        );
        let shifts = _mm256_setr_epi16(0, 5, 2, 7, 4, 1, 6, 3, 0, 5, 2, 7, 4, 1, 6, 3);
        let words = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(codes), pairs);
        _mm512_cvtepu16_epi32(_mm256_srlv_epi16(words, shifts))
    }

    /// The 32 rungs of a q4tp row, as [`body::ladder`] makes them, bit for bit.
    fn ladder(params: &[u8; 4]) -> (__m512, __m512) {
        let halves = _mm_cvtph_ps(_mm_cvtsi32_si128(i32::from_le_bytes(*params)));
        let lo = _mm512_broadcastss_ps(halves);
        let step = _mm512_broadcastss_ps(_mm_movehdup_ps(halves));
        let [of_lo, of_step] = body::PARTS;
        let x = _mm512_add_ps(_mm512_mul_ps(lo, floats(&of_lo)), _mm512_mul_ps(step, floats(&of_step)));
        let parts = exp2(x);
        let rungs = |fourths, factors| {
            _mm512_mul_ps(_mm512_permutexvar_ps(fourths, parts), _mm512_permutexvar_ps(factors, parts))
        };
        let factors = _mm512_setr_epi32(8, 9, 10, 11, 8, 9, 10, 11, 8, 9, 10, 11, 8, 9, 10, 11);
        (
            rungs(_mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3), factors),
            rungs(_mm512_setr_epi32(4, 4, 4, 4, 5, 5, 5, 5, 6, 6, 6, 6, 7, 7, 7, 7), factors),
        )
    }

    /// [`math::exp2`], bit for bit.
    fn exp2(x: __m512) -> __m512 {
        let x = _mm512_min_ps(_mm512_max_ps(x, _mm512_set1_ps(-250.0)), _mm512_set1_ps(250.0));
        let n = _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x);
        let r = _mm512_mul_ps(_mm512_sub_ps(x, n), _mm512_set1_ps(std::f32::consts::LN_2));
        let mut p = _mm512_set1_ps(math::EXP_FIRST);
        for c in math::EXP_REST {
            p = _mm512_add_ps(_mm512_mul_ps(p, r), _mm512_set1_ps(c));
        }
        let p = _mm512_add_ps(_mm512_mul_ps(_mm512_mul_ps(p, r), r), r);
        _mm512_scalef_ps(_mm512_add_ps(p, _mm512_set1_ps(1.0)), n)
    }

    /// In every 128-bit lane `[a0 + a2, b0 + b2, a1 + a3, b1 + b3]`.
    fn fold32(a: __m512i, b: __m512i) -> __m512i {
        _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b))
    }

    /// In every 128-bit lane the sums of the lanes of the four that `a` and `b` were folded from.
    fn fold64(a: __m512i, b: __m512i) -> __m512i {
        _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b))
    }

    fn sum16(x: __m512) -> f32 {
        let mut lanes = [0.0; 16];
        put(&mut lanes, x);
        math::tree(lanes)
    }

    /// The activation rows of a call.
    fn rows_of<const N: usize>(x: &Codes, first: usize) -> [Blocks<'_>; N] {
        let mut rows = [Blocks { codes: &[], steps: &[], offsets: &[] }; N];
        for (i, row) in rows.iter_mut().enumerate() {
            let (codes, steps, offsets) = x.row(first + i);
            let codes = bytemuck::cast_slice(codes);
            *row = Blocks { codes, steps: steps.as_chunks().0, offsets: offsets.as_chunks().0 };
        }
        rows
    }

    fn q8_codes_of<const N: usize>(w: &[i8], cols: usize, x: &Codes, first: usize, out: &mut [f32]) {
        let rows = rows_of::<N>(x, first);
        for (w, out) in w.chunks_exact(cols).zip(out.as_chunks_mut::<N>().0) {
            let mut acc = [_mm512_setzero_ps(); N];
            let (whole, tail) = w.as_chunks::<{ 64 * 8 }>();
            let mut vectors = [_mm512_setzero_si512(); 8];
            for (block, w) in whole.iter().enumerate() {
                ask::<8>(w.as_ptr());
                let w: &[[i8; 64]; 8] = bytemuck::cast_ref(w);
                for j in 0..8 {
                    vectors[j] = bytes(&w[j]);
                }
                q8_block(&vectors, &rows, block, &mut acc);
            }
            if !tail.is_empty() {
                for (j, vector) in vectors.iter_mut().enumerate() {
                    *vector = some_bytes(&tail[(64 * j).min(tail.len())..]);
                }
                q8_block(&vectors, &rows, whole.len(), &mut acc);
            }
            for i in 0..N {
                out[i] = sum16(acc[i]);
            }
        }
    }

    /// Adds the products of one block of a q8_2f row with each activation row.
    fn q8_block<const N: usize>(w: &[__m512i; 8], rows: &[Blocks<'_>; N], block: usize, acc: &mut [__m512; N]) {
        let (zero, flip) = (_mm512_setzero_si512(), _mm512_set1_epi8(-128));
        let mut unsigned = [zero; 8];
        for j in 0..8 {
            unsigned[j] = _mm512_xor_si512(w[j], flip);
        }
        for i in 0..N {
            let codes = &rows[i].codes[block];
            let mut d = [zero; 8];
            for j in 0..8 {
                d[j] = _mm512_dpbusd_epi32(zero, unsigned[j], bytes(&codes[j]));
            }
            let low = fold64(fold32(d[0], d[1]), fold32(d[2], d[3]));
            let high = fold64(fold32(d[4], d[5]), fold32(d[6], d[7]));
            // Two lanes make a group: those of d[j] are groups 2·j and 2·j + 1.
            let sums = _mm512_add_epi32(
                _mm512_shuffle_i32x4::<0b10_00_10_00>(low, high),
                _mm512_shuffle_i32x4::<0b11_01_11_01>(low, high),
            );
            let order = _mm512_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
            let sums = _mm512_sub_epi32(_mm512_permutexvar_epi32(order, sums), ints(&rows[i].offsets[block]));
            let products = _mm512_mul_ps(floats(&rows[i].steps[block]), _mm512_cvtepi32_ps(sums));
            acc[i] = _mm512_add_ps(acc[i], products);
        }
    }

    fn q4_codes_of<const N: usize>(
        w: &[u8],
        groups: usize,
        scales: &[f32],
        x: &Codes,
        first: usize,
        out: &mut [f32],
    ) {
        let rows = rows_of::<N>(x, first);
        let lines = w.chunks_exact(groups * 16).zip(scales.chunks_exact(x.lanes));
        for ((w, scales), out) in lines.zip(out.as_chunks_mut::<N>().0) {
            let mut acc = [_mm512_setzero_ps(); N];
            let scales = scales.as_chunks::<LANES>().0;
            let (whole, tail) = bytemuck::cast_slice::<u8, i8>(w).as_chunks::<{ 64 * 4 }>();
            let mut vectors = [_mm512_setzero_si512(); 4];
            for (block, (w, scales)) in whole.iter().zip(scales).enumerate() {
                ask::<4>(w.as_ptr());
                let w: &[[i8; 64]; 4] = bytemuck::cast_ref(w);
                for j in 0..4 {
                    vectors[j] = bytes(&w[j]);
                }
                q4_block(&vectors, floats(scales), &rows, block, &mut acc);
            }
            if !tail.is_empty() {
                for (j, vector) in vectors.iter_mut().enumerate() {
                    *vector = some_bytes(&tail[(64 * j).min(tail.len())..]);
                }
                q4_block(&vectors, floats(&scales[whole.len()]), &rows, whole.len(), &mut acc);
            }
            for i in 0..N {
                out[i] = sum16(acc[i]);
            }
        }
    }

    /// Adds the products of one block of a q4tp row with each activation row.
    fn q4_block<const N: usize>(
        w: &[__m512i; 4],
        scales: __m512,
        rows: &[Blocks<'_>; N],
        block: usize,
        acc: &mut [__m512; N],
    ) {
        let (zero, mask) = (_mm512_setzero_si512(), _mm512_set1_epi8(15));
        let (mut even, mut odd) = ([zero; 4], [zero; 4]);
        for j in 0..4 {
            even[j] = _mm512_and_si512(w[j], mask);
            odd[j] = _mm512_and_si512(_mm512_srli_epi16::<4>(w[j]), mask);
        }
        for i in 0..N {
            // Of four groups the 64 even codes come first, then the odd ones; a vector of nibbles has four groups.
            let codes = &rows[i].codes[block];
            let mut d = [zero; 4];
            for j in 0..4 {
                d[j] = _mm512_dpbusd_epi32(zero, even[j], bytes(&codes[2 * j]));
                d[j] = _mm512_dpbusd_epi32(d[j], odd[j], bytes(&codes[2 * j + 1]));
            }
            let sums = fold64(fold32(d[0], d[1]), fold32(d[2], d[3]));
            // Lane i of d[j] is group 4·j + i.
            let order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
            let sums = _mm512_sub_epi32(_mm512_permutexvar_epi32(order, sums), ints(&rows[i].offsets[block]));
            let scale = _mm512_mul_ps(floats(&rows[i].steps[block]), scales);
            acc[i] = _mm512_add_ps(acc[i], _mm512_mul_ps(scale, _mm512_cvtepi32_ps(sums)));
        }
    }

    fn q4_floats_of<const N: usize>(
        w: &[u8],
        groups: usize,
        scales: &[f32],
        x: &Floats,
        first: usize,
        out: &mut [f32],
    ) {
        let lanes = groups.next_multiple_of(LANES);
        let values = _mm512_setr_ps(-8.0, -7.0, -6.0, -5.0, -4.0, -3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0);
        let rows = w.chunks_exact(groups * 16).zip(scales.chunks_exact(lanes));
        for ((w, scales), out) in rows.zip(out.as_chunks_mut::<N>().0) {
            let mut acc = [[_mm512_setzero_ps(); 4]; N];
            let (pairs, odd) = w.as_chunks::<32>();
            let mut last = [0x88; 32];
            last[..odd.len()].copy_from_slice(odd);
            let pairs = pairs.iter().chain((!odd.is_empty()).then_some(&last));
            for (pair, (w, scales)) in pairs.zip(scales.as_chunks::<2>().0).enumerate() {
                let group = |g: usize| {
                    // SAFETY: 16 bytes are read from 32, from 0 or from 16 on.
                    let nibbles = _mm512_cvtepu8_epi32(unsafe { _mm_loadu_si128(w[16 * g..].as_ptr().cast()) });
                    // `permutexvar` looks at the lowest four bits alone.
                    let table = _mm512_mul_ps(values, _mm512_set1_ps(scales[g]));
                    let even = _mm512_permutexvar_ps(nibbles, table);
                    [even, _mm512_permutexvar_ps(_mm512_srli_epi32::<4>(nibbles), table)]
                };
                let [[a, b], [c, d]] = [group(0), group(1)];
                for i in 0..N {
                    let x = x.row(first + i).as_chunks::<16>().0[4 * pair..].first_chunk::<4>().expect("padded rows");
                    acc[i][0] = _mm512_fmadd_ps(a, floats(&x[0]), acc[i][0]);
                    acc[i][1] = _mm512_fmadd_ps(b, floats(&x[1]), acc[i][1]);
                    acc[i][2] = _mm512_fmadd_ps(c, floats(&x[2]), acc[i][2]);
                    acc[i][3] = _mm512_fmadd_ps(d, floats(&x[3]), acc[i][3]);
                }
            }
            for i in 0..N {
                out[i] = sum64(acc[i]);
            }
        }
    }

    /// The four sixteens added as everywhere.
    fn sum64(acc: [__m512; 4]) -> f32 {
        sum16(_mm512_add_ps(_mm512_add_ps(acc[0], acc[1]), _mm512_add_ps(acc[2], acc[3])))
    }
}

/// An activation row, block by block.
#[derive(Clone, Copy)]
struct Blocks<'a> {
    codes: &'a [[[i8; 64]; 8]],
    steps: &'a [[f32; LANES]],
    offsets: &'a [[i32; LANES]],
}

/// Float products with rows of elements of `SIZE` bytes, sixteen of which `load` makes floats.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
fn elements_of<const SIZE: usize, const N: usize>(
    w: &[u8],
    cols: usize,
    load: impl Fn(&[[u8; SIZE]; 16]) -> __m512,
    x: &Floats,
    first: usize,
    out: &mut [f32],
) {
    for (w, out) in w.chunks_exact(cols * SIZE).zip(out.as_chunks_mut::<N>().0) {
        let mut acc = [[_mm512_setzero_ps(); 4]; N];
        let w = w.as_chunks::<SIZE>().0;
        let (whole, tail) = w.as_chunks::<WIDE>();
        let mut last = [[0; SIZE]; WIDE];
        last[..tail.len()].copy_from_slice(tail);
        let chunks = whole.iter().chain((!tail.is_empty()).then_some(&last));
        for (c, w) in chunks.enumerate() {
            let w = w.as_chunks::<16>().0;
            ask::<SIZE>(w.as_ptr().cast());
            let w = [load(&w[0]), load(&w[1]), load(&w[2]), load(&w[3])];
            for i in 0..N {
                let x = x.row(first + i).as_chunks::<16>().0[4 * c..].first_chunk::<4>().expect("padded rows");
                for j in 0..4 {
                    acc[i][j] = _mm512_fmadd_ps(w[j], floats(&x[j]), acc[i][j]);
                }
            }
        }
        for i in 0..N {
            out[i] = sum64(acc[i]);
        }
    }
}
