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
use super::input::{Codes, Floats, GROUP, LANES, WIDE, quantize_body};
use super::set::{Set, by_rows};

/// Groups of a block.
const BLOCK: usize = LANES;

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
        quantize_body(x, fields, split, codes, steps, offsets);
    }
}

kernel! {
    fn scales(ladders: &[u8], codes: &[u8], groups: usize, out: &mut [f32]) {
        let width = crate::model::tensors::Codec::code_bytes(groups);
        let lanes = groups.next_multiple_of(LANES);
        let rows = ladders.as_chunks().0.iter().zip(codes.chunks_exact(width)).zip(out.chunks_exact_mut(lanes));
        for ((params, codes), out) in rows {
            let ladder = body::ladder(params);
            let ladder = ladder.as_chunks::<LANES>().0;
            let (low, high) = (floats(&ladder[0]), floats(&ladder[1]));
            for (block, out) in out.as_chunks_mut::<LANES>().0.iter_mut().enumerate() {
                let here = (groups - block * BLOCK).min(BLOCK);
                let kept = (1u32 << here).wrapping_sub(1) as u16;
                // `permutex2var` looks at the lowest five bits alone.
                let scales = _mm512_maskz_permutex2var_ps(kept, low, rungs(&codes[10 * block..]), high);
                put(out, scales);
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

    /// The first 64 bytes, zeros where there are fewer.
    fn some_bytes(x: &[i8]) -> __m512i {
        let mask = if x.len() >= 64 { u64::MAX } else { (1 << x.len()) - 1 };
        // SAFETY: the mask keeps the load inside the slice.
        unsafe { _mm512_maskz_loadu_epi8(mask, x.as_ptr()) }
    }

    /// The 16 numbers of 5 bits each at the start of `codes` (fewer where it is shorter), other bits above them.
    fn rungs(codes: &[u8]) -> __m512i {
        let mask = (1u32 << codes.len().min(16)).wrapping_sub(1) as u16;
        // SAFETY: the mask keeps the load inside the slice.
        let codes = unsafe { _mm_maskz_loadu_epi8(mask, codes.as_ptr().cast()) };
        // Number i begins at bit 5·i: in byte 5·i / 8, at bit 5·i % 8, and may go on in the next byte.
        let pairs = _mm256_setr_epi8(
            0, 1, 0, 1, 1, 2, 1, 2, 2, 3, 3, 4, 3, 4, 4, 5, 5, 6, 5, 6, 6, 7, 6, 7, 7, 8, 8, 9, 8, 9, 9, 10,
        );
        let shifts = _mm256_setr_epi16(0, 5, 2, 7, 4, 1, 6, 3, 0, 5, 2, 7, 4, 1, 6, 3);
        let words = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(codes), pairs);
        _mm512_cvtepu16_epi32(_mm256_srlv_epi16(words, shifts))
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
        crate::host::math::tree(lanes)
    }

    /// Products of one block of q8_2f with a row's codes: sums of the 16 groups, in order.
    fn q8_block(w: &[__m512i; 8], codes: &[[i8; 64]; 8]) -> __m512i {
        let zero = _mm512_setzero_si512();
        let d: [__m512i; 8] = std::array::from_fn(|j| _mm512_dpbusd_epi32(zero, w[j], bytes(&codes[j])));
        let low = fold64(fold32(d[0], d[1]), fold32(d[2], d[3]));
        let high = fold64(fold32(d[4], d[5]), fold32(d[6], d[7]));
        // Two lanes make a group: those of d[j] are groups 2·j and 2·j + 1.
        let sums = _mm512_add_epi32(
            _mm512_shuffle_i32x4::<0b10_00_10_00>(low, high),
            _mm512_shuffle_i32x4::<0b11_01_11_01>(low, high),
        );
        let order = _mm512_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
        _mm512_permutexvar_epi32(order, sums)
    }

    fn q8_codes_of<const N: usize>(w: &[i8], cols: usize, x: &Codes, first: usize, out: &mut [f32]) {
        let flip = _mm512_set1_epi8(-128);
        let blocks = x.lanes / BLOCK;
        for (w, out) in w.chunks_exact(cols).zip(out.as_chunks_mut::<N>().0) {
            let mut acc = [_mm512_setzero_ps(); N];
            let (whole, tail) = w.as_chunks::<{ 64 * 8 }>();
            for block in 0..blocks {
                let w: [__m512i; 8] = match whole.get(block) {
                    Some(w) => {
                        let w: &[[i8; 64]; 8] = bytemuck::cast_ref(w);
                        std::array::from_fn(|j| _mm512_xor_si512(bytes(&w[j]), flip))
                    }
                    None => std::array::from_fn(|j| {
                        _mm512_xor_si512(some_bytes(&tail[(64 * j).min(tail.len())..]), flip)
                    }),
                };
                for i in 0..N {
                    let (codes, steps, offsets) = block_of(x, first + i, block);
                    let sums = _mm512_sub_epi32(q8_block(&w, codes), ints(offsets));
                    acc[i] = _mm512_add_ps(acc[i], _mm512_mul_ps(floats(steps), _mm512_cvtepi32_ps(sums)));
                }
            }
            *out = acc.map(|acc| sum16(acc));
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
        let mask = _mm512_set1_epi8(15);
        let blocks = x.lanes / BLOCK;
        let rows = w.chunks_exact(groups * 16).zip(scales.chunks_exact(x.lanes));
        for ((w, scales), out) in rows.zip(out.as_chunks_mut::<N>().0) {
            let mut acc = [_mm512_setzero_ps(); N];
            let (whole, tail) = bytemuck::cast_slice::<u8, i8>(w).as_chunks::<{ 64 * 4 }>();
            for (block, scales) in scales.as_chunks::<LANES>().0.iter().enumerate().take(blocks) {
                let w: [__m512i; 4] = match whole.get(block) {
                    Some(w) => {
                        let w: &[[i8; 64]; 4] = bytemuck::cast_ref(w);
                        std::array::from_fn(|j| bytes(&w[j]))
                    }
                    None => std::array::from_fn(|j| some_bytes(&tail[(64 * j).min(tail.len())..])),
                };
                let even = w.map(|w| _mm512_and_si512(w, mask));
                let odd = w.map(|w| _mm512_and_si512(_mm512_srli_epi16::<4>(w), mask));
                for i in 0..N {
                    let (codes, steps, offsets) = block_of(x, first + i, block);
                    let sums = _mm512_sub_epi32(q4_block(&even, &odd, codes), ints(offsets));
                    let scale = _mm512_mul_ps(floats(steps), floats(scales));
                    acc[i] = _mm512_add_ps(acc[i], _mm512_mul_ps(scale, _mm512_cvtepi32_ps(sums)));
                }
            }
            *out = acc.map(|acc| sum16(acc));
        }
    }

    /// Products of one block of q4tp with a row's codes: sums of the 16 groups, in order.
    fn q4_block(even: &[__m512i; 4], odd: &[__m512i; 4], codes: &[[i8; 64]; 8]) -> __m512i {
        // A group's codes lie as 16 even ones and 16 odd ones, a vector of nibbles has four groups.
        let zero = _mm512_setzero_si512();
        let d: [__m512i; 4] = std::array::from_fn(|j| {
            let (a, b) = (bytes(&codes[2 * j]), bytes(&codes[2 * j + 1]));
            let evens = _mm512_dpbusd_epi32(zero, even[j], a);
            _mm512_dpbusd_epi32(evens, odd[j], b)
        });
        let sums = fold64(fold32(d[0], d[1]), fold32(d[2], d[3]));
        // Lane i of d[j] is group 4·j + i.
        let order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
        _mm512_permutexvar_epi32(order, sums)
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
            for (g, (w, scale)) in w.as_chunks::<16>().0.iter().zip(scales).enumerate() {
                // SAFETY: 16 bytes are read from an array of 16.
                let nibbles = _mm512_cvtepu8_epi32(unsafe { _mm_loadu_si128(w.as_ptr().cast()) });
                // `permutexvar` looks at the lowest four bits alone.
                let table = _mm512_mul_ps(values, _mm512_set1_ps(*scale));
                let even = _mm512_permutexvar_ps(nibbles, table);
                let odd = _mm512_permutexvar_ps(_mm512_srli_epi32::<4>(nibbles), table);
                for i in 0..N {
                    let x: &[[f32; 16]; 2] = x.row(first + i).as_chunks().0[2 * g..].first_chunk().expect("padded rows");
                    let acc: &mut [__m512; 2] = (&mut acc[i][2 * (g % 2)..][..2]).try_into().expect("two");
                    acc[0] = _mm512_fmadd_ps(even, floats(&x[0]), acc[0]);
                    acc[1] = _mm512_fmadd_ps(odd, floats(&x[1]), acc[1]);
                }
            }
            *out = acc.map(|acc| sum64(acc));
        }
    }

    /// The four sixteens added as everywhere.
    fn sum64(acc: [__m512; 4]) -> f32 {
        sum16(_mm512_add_ps(_mm512_add_ps(acc[0], acc[1]), _mm512_add_ps(acc[2], acc[3])))
    }

    /// Codes, steps and offsets of one block of a row.
    fn block_of(x: &Codes, row: usize, block: usize) -> (&[[i8; 64]; 8], &[f32; LANES], &[i32; LANES]) {
        let (codes, steps, offsets) = x.row(row);
        let codes = &codes.as_chunks::<BLOCK>().0[block];
        (bytemuck::cast_ref(codes), &steps.as_chunks().0[block], &offsets.as_chunks().0[block])
    }
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
            let w: [__m512; 4] = std::array::from_fn(|j| load(&w[j]));
            for i in 0..N {
                let x = x.row(first + i).as_chunks::<16>().0[4 * c..].first_chunk::<4>().expect("padded rows");
                for j in 0..4 {
                    acc[i][j] = _mm512_fmadd_ps(w[j], floats(&x[j]), acc[i][j]);
                }
            }
        }
        *out = acc.map(|acc| sum64(acc));
    }
}
