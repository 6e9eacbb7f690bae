//! The kernels for AVX2 with FMA.
//!
//! int8: `vpmaddubsw` multiplies unsigned by signed bytes and adds pairs in 16
//! bits. For q8_2f the weight's sign goes to the code, which is never −128, so
//! a pair is at most 2 · 128 · 127; for q4tp all of a lane's are 16 · 15 · 127 at
//! most. Neither leaves 16 bits: nothing saturates. The lanes are groups of
//! columns, eight to half a stretch: weights are woven so that a vector holds four
//! columns of each group, once for all activation rows, whose codes lie woven
//! already.
//!
//! Only [`set`] leaves this file, and it hands the kernels out where the
//! processor has the instructions.
#![allow(unsafe_code, reason = "calls of functions compiled for this instruction set, and vector loads and stores")]

use std::arch::x86_64::*;

use super::body;
use super::input::{Codes, Floats, GROUP, LANES, Q8_OFFSET, Stretch, WIDE};
use super::set::{Line, Set, by_rows};
use crate::host::attention::{Partial, Tile, attend_body};
use crate::host::mamba::{Convolution, Head, convolve_body, scan_body};
use crate::host::norm::gated_groups;

/// How far ahead of its use a weight is asked for: beyond the page, so that its address is translated in time too.
const AHEAD: usize = 4096 + 512;
/// Groups of a half stretch.
const EIGHT: usize = LANES / 2;
/// Where the groups of half a stretch of woven q4tp weights lie, in order.
const Q4_LANES: [usize; EIGHT] = [0, 4, 1, 5, 2, 6, 3, 7];

/// Whether the processor has the instructions.
pub(crate) fn present() -> bool {
    is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c")
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
    convolve,
    gate,
    attend,
};

/// Defines functions compiled with the instructions.
macro_rules! with_instructions {
    ($($(#[$doc:meta])* fn $name:ident $(<const $N:ident: $of:ty>)? ($($arg:ident: $type:ty),* $(,)?) $(-> $ret:ty)? $body:block)*) => {
        $(
            $(#[$doc])*
            #[inline]
            #[target_feature(enable = "avx2,fma,f16c")]
            fn $name $(<const $N: $of>)? ($($arg: $type),*) $(-> $ret)? $body
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
    fn quantize(x: &mut [f32], fields: Option<&[u8]>, split: Option<usize>, to: &mut [Stretch]) {
        let x = x.as_chunks_mut::<8>().0;
        if let Some(fields) = fields {
            let (whole, tail) = fields.as_chunks::<16>();
            let mut last = [0; 16];
            last[..tail.len()].copy_from_slice(tail);
            for (x, fields) in x.iter_mut().zip(whole.iter().chain([&last])) {
                // SAFETY: 16 bytes are read from an array of 16.
                let fields = _mm256_cvtph_ps(unsafe { _mm_loadu_si128(fields.as_ptr().cast()) });
                let folded = _mm256_mul_ps(floats(x), fields);
                put(x, folded);
            }
        }
        let split = split.is_some();
        let factor = if split { -8 } else { -Q8_OFFSET };
        let magnitude = _mm256_set1_epi32(0x7fff_ffff);
        let (least, most) = (_mm256_set1_ps(-127.0), _mm256_set1_ps(127.0));
        for (x, to) in x.as_chunks::<{ 4 * LANES }>().0.iter().zip(to) {
            let codes: &mut [[i8; GROUP]; LANES] = bytemuck::cast_mut(&mut to.codes);
            for (g, (x, codes)) in x.as_chunks::<4>().0.iter().zip(&mut *codes).enumerate() {
                let x = [floats(&x[0]), floats(&x[1]), floats(&x[2]), floats(&x[3])];
                // The magnitudes' bits order as the magnitudes do, with NaN above infinity.
                let bits = x.map(|x| _mm256_and_si256(_mm256_castps_si256(x), magnitude));
                let eight = _mm256_max_epi32(_mm256_max_epi32(bits[0], bits[1]), _mm256_max_epi32(bits[2], bits[3]));
                let four = _mm_max_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256::<1>(eight));
                let two = _mm_max_epi32(four, _mm_shuffle_epi32::<0b01_00_11_10>(four));
                let one = _mm_max_epi32(two, _mm_shuffle_epi32::<0b10_11_00_01>(two));
                let d = f32::from_bits(_mm_cvtsi128_si32(one) as u32) / 127.0;
                let zero = d < f32::MIN_POSITIVE;
                let lane = if split { g / EIGHT * EIGHT + Q4_LANES[g % EIGHT] } else { g };
                to.steps[lane] = if zero { 0.0 } else { d };
                let divisor = _mm256_set1_ps(if zero { f32::INFINITY } else { d });
                let q = x.map(|x| {
                    let quotient = _mm256_max_ps(_mm256_min_ps(_mm256_div_ps(x, divisor), most), least);
                    // Rounds to the nearest, ties to even, as the processor does unless told otherwise.
                    _mm256_cvtps_epi32(quotient)
                });
                // Packing goes lane by lane: the order is put right after.
                let q = _mm256_packs_epi16(_mm256_packs_epi32(q[0], q[1]), _mm256_packs_epi32(q[2], q[3]));
                let q = _mm256_permutevar8x32_epi32(q, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
                let sums = widen(_mm256_maddubs_epi16(_mm256_set1_epi8(1), q));
                let four = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256::<1>(sums));
                let two = _mm_add_epi32(four, _mm_shuffle_epi32::<0b01_00_11_10>(four));
                let one = _mm_add_epi32(two, _mm_shuffle_epi32::<0b10_11_00_01>(two));
                to.offsets[lane] = _mm_cvtsi128_si32(one) * factor;
                put_bytes(codes, q);
            }
            for codes in codes.as_chunks_mut::<EIGHT>().0 {
                let mut woven = weave(&load(codes));
                if split {
                    // Eight columns of each group become their four even and their four odd ones, and the groups move
                    // to the lanes where the weights' are.
                    let apart = _mm256_broadcastsi128_si256(
                        _mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15),
                    );
                    let order = _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7);
                    for k in 0..4 {
                        let [a, b] = [woven[2 * k], woven[2 * k + 1]].map(|x| {
                            _mm256_permutevar8x32_epi32(_mm256_shuffle_epi8(x, apart), order)
                        });
                        let even = _mm256_blend_epi16::<0xaa>(a, _mm256_slli_epi32::<16>(b));
                        let odd = _mm256_blend_epi16::<0xaa>(_mm256_srli_epi32::<16>(a), b);
                        (woven[2 * k], woven[2 * k + 1]) = (even, odd);
                    }
                }
                for (to, woven) in codes.iter_mut().zip(woven) {
                    put_bytes(to, woven);
                }
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
    fn convolve(row: &mut Convolution<'_>) {
        convolve_body(row);
    }
}

kernel! {
    fn gate(o: &mut [f32], z: &[f32], w: &[f32], groups: usize, eps: f32) {
        gated_groups(o, z, w, groups, eps);
    }
}

kernel! {
    fn scales(ladders: &[u8], codes: &[u8], groups: usize, out: &mut [f32]) {
        let width = crate::model::tensors::Codec::code_bytes(groups);
        let lanes = groups.next_multiple_of(LANES);
        let rows = ladders.as_chunks().0.iter().zip(codes.chunks_exact(width)).zip(out.chunks_exact_mut(lanes));
        for ((params, codes), out) in rows {
            let table = ladder(params);
            let (whole, tail) = out[..groups].as_chunks_mut::<8>();
            for (eight, out) in whole.iter_mut().enumerate() {
                put(out, look_up::<false>(&table, eight_codes(&codes[5 * eight..])));
            }
            if !tail.is_empty() {
                let mut scales = [0.0; 8];
                put(&mut scales, look_up::<false>(&table, eight_codes(&codes[5 * whole.len()..])));
                tail.copy_from_slice(&scales[..tail.len()]);
            }
            out[groups..].fill(0.0);
        }
    }
}

kernel! {
    fn q8_codes(w: &[i8], cols: usize, x: &Codes, first: usize, out: &mut [Line]) {
        by_rows!(out.len(), N in [1 2 3 4] => q8_codes_of::<N>(w, cols, x, first, out));
    }
}

kernel! {
    fn q4_codes(w: &[u8], groups: usize, ladders: &[u8], codes: &[u8], x: &Codes, first: usize, out: &mut [Line]) {
        let ladders = ladders.as_chunks().0;
        by_rows!(out.len(), N in [1 2 3 4] => q4_codes_of::<N>(w, groups, ladders, codes, x, first, out));
    }
}

kernel! {
    fn q8_floats(w: &[i8], cols: usize, x: &Floats, first: usize, out: &mut [Line]) {
        by_rows!(out.len(), N => elements_of::<1, N>(bytemuck::cast_slice(w), cols, |w| {
            // SAFETY: 8 bytes are read from an array of 8.
            let codes = unsafe { _mm_loadl_epi64(w.as_ptr().cast()) };
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(codes))
        }, x, first, out));
    }
}

kernel! {
    fn q4_floats(w: &[u8], groups: usize, scales: &[f32], x: &Floats, first: usize, out: &mut [Line]) {
        by_rows!(out.len(), N => q4_floats_of::<N>(w, groups, scales, x, first, out));
    }
}

kernel! {
    fn exact32(w: &[u8], cols: usize, x: &Floats, first: usize, out: &mut [Line]) {
        // SAFETY: 32 bytes are read from an array of 8 times 4.
        by_rows!(out.len(), N => elements_of::<4, N>(w, cols, |w| unsafe { _mm256_loadu_ps(w.as_ptr().cast()) }, x, first, out));
    }
}

kernel! {
    fn exact16(w: &[u8], cols: usize, x: &Floats, first: usize, out: &mut [Line]) {
        by_rows!(out.len(), N => elements_of::<2, N>(w, cols, |w| {
            // SAFETY: 16 bytes are read from an array of 8 times 2.
            _mm256_cvtph_ps(unsafe { _mm_loadu_si128(w.as_ptr().cast()) })
        }, x, first, out));
    }
}

kernel! {
    fn brain16(w: &[u8], cols: usize, x: &Floats, first: usize, out: &mut [Line]) {
        by_rows!(out.len(), N => elements_of::<2, N>(w, cols, |w| {
            // SAFETY: 16 bytes are read from an array of 8 times 2.
            let halves = unsafe { _mm_loadu_si128(w.as_ptr().cast()) };
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(halves)))
        }, x, first, out));
    }
}

with_instructions! {
    fn floats(x: &[f32; 8]) -> __m256 {
        // SAFETY: 32 bytes are read from an array of 8 floats.
        unsafe { _mm256_loadu_ps(x.as_ptr()) }
    }

    fn put(out: &mut [f32; 8], x: __m256) {
        // SAFETY: 32 bytes are written to an array of 8 floats.
        unsafe { _mm256_storeu_ps(out.as_mut_ptr(), x) }
    }

    fn ints(x: &[i32; 8]) -> __m256i {
        // SAFETY: 32 bytes are read from an array of 8 integers.
        unsafe { _mm256_loadu_si256(x.as_ptr().cast()) }
    }

    fn bytes(x: &[i8; 32]) -> __m256i {
        // SAFETY: 32 bytes are read from an array of 32.
        unsafe { _mm256_loadu_si256(x.as_ptr().cast()) }
    }

    fn put_bytes(out: &mut [i8; 32], x: __m256i) {
        // SAFETY: 32 bytes are written to an array of 32.
        unsafe { _mm256_storeu_si256(out.as_mut_ptr().cast(), x) }
    }

    /// Asks memory for the `LINES` lines that lie [`AHEAD`] bytes on: the processor's own foresight ends with a page.
    fn ask<const LINES: usize>(from: *const i8) {
        for line in 0..LINES {
            // A prefetch reads nothing and does not fault, wherever it points.
            _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(AHEAD + 64 * line));
        }
    }

    /// Eight groups of codes.
    fn load(codes: &[[i8; GROUP]; EIGHT]) -> [__m256i; 8] {
        let mut vectors = [_mm256_setzero_si256(); 8];
        for j in 0..8 {
            vectors[j] = bytes(&codes[j]);
        }
        vectors
    }

    /// A group a vector becomes four columns of each group a vector.
    fn weave(x: &[__m256i; 8]) -> [__m256i; 8] {
        let (low, high) = (turn([x[0], x[1], x[2], x[3]]), turn([x[4], x[5], x[6], x[7]]));
        let mut woven = [_mm256_setzero_si256(); 8];
        for k in 0..4 {
            woven[k] = _mm256_permute2x128_si256::<0x20>(low[k], high[k]);
            woven[4 + k] = _mm256_permute2x128_si256::<0x31>(low[k], high[k]);
        }
        woven
    }

    /// In each half rows become columns; so two groups of nibbles a vector become eight columns of each group a vector,
    /// groups where [`Q4_LANES`] says.
    fn turn(x: [__m256i; 4]) -> [__m256i; 4] {
        let (a, b) = (_mm256_unpacklo_epi32(x[0], x[1]), _mm256_unpackhi_epi32(x[0], x[1]));
        let (c, d) = (_mm256_unpacklo_epi32(x[2], x[3]), _mm256_unpackhi_epi32(x[2], x[3]));
        [
            _mm256_unpacklo_epi64(a, c),
            _mm256_unpackhi_epi64(a, c),
            _mm256_unpacklo_epi64(b, d),
            _mm256_unpackhi_epi64(b, d),
        ]
    }

    /// The rungs of a q4tp row.
    fn ladder(params: &[u8; 4]) -> [__m256; 4] {
        let ladder = body::ladder(params);
        let ladder: &[[f32; 8]; 4] = bytemuck::cast_ref(&ladder);
        [floats(&ladder[0]), floats(&ladder[1]), floats(&ladder[2]), floats(&ladder[3])]
    }

    /// Eight numbers of 5 bits each at the start of `codes` (fewer where it is shorter), other bits above them.
    fn eight_codes(codes: &[u8]) -> u64 {
        if let Some(word) = codes.first_chunk() {
            return u64::from_le_bytes(*word);
        }
        codes.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte))
    }

    /// Entries of a table of 32 at eight numbers of 5 bits each; `WOVEN` where [`Q4_LANES`] says.
    fn look_up<const WOVEN: bool>(table: &[__m256; 4], codes: u64) -> __m256 {
        let (low, high) = (codes as i32, (codes >> 20) as i32);
        let (words, shifts) = if WOVEN {
            (_mm_setr_epi32(low, low, high, high), _mm256_setr_epi32(0, 10, 0, 10, 5, 15, 5, 15))
        } else {
            (_mm_setr_epi32(low, low, low, low), _mm256_setr_epi32(0, 5, 10, 15, 0, 5, 10, 15))
        };
        let words = match WOVEN {
            true => _mm256_broadcastsi128_si256(words),
            false => _mm256_set_m128i(_mm_set1_epi32(high), words),
        };
        let index = _mm256_srlv_epi32(words, shifts);
        // `permutevar8x32` looks at the lowest three bits, `blendv` at the sign bit: bits 3 and 4 go there in turn.
        let bit3 = _mm256_castsi256_ps(_mm256_slli_epi32::<28>(index));
        let bit4 = _mm256_castsi256_ps(_mm256_slli_epi32::<27>(index));
        let [a, b, c, d] = table.map(|eight| _mm256_permutevar8x32_ps(eight, index));
        _mm256_blendv_ps(_mm256_blendv_ps(a, b, bit3), _mm256_blendv_ps(c, d, bit3), bit4)
    }

    /// Sum of 16 lanes in the order of all.
    fn sum16(low: __m256, high: __m256) -> f32 {
        let mut lanes = [[0.0; 8]; 2];
        put(&mut lanes[0], low);
        put(&mut lanes[1], high);
        crate::host::math::tree(bytemuck::cast(lanes))
    }

    /// Adds pairs of 16-bit sums.
    fn widen(x: __m256i) -> __m256i {
        _mm256_madd_epi16(x, _mm256_set1_epi16(1))
    }

    /// The activation rows of a call.
    fn rows_of<const N: usize>(x: &Codes, first: usize) -> [&[Stretch]; N] {
        std::array::from_fn(|i| x.row(first + i))
    }

    fn q8_codes_of<const N: usize>(w: &[i8], cols: usize, x: &Codes, first: usize, out: &mut [Line]) {
        let rows = rows_of::<N>(x, first);
        for (r, w) in w.chunks_exact(cols).enumerate() {
            let mut acc = [[_mm256_setzero_ps(); 2]; N];
            let (whole, tail) = w.as_chunks::<{ EIGHT * GROUP }>();
            let mut last = [0; EIGHT * GROUP];
            last[..tail.len()].copy_from_slice(tail);
            let eights = whole.iter().chain((!tail.is_empty()).then_some(&last));
            for (eight, w) in eights.enumerate() {
                ask::<4>(w.as_ptr());
                let w = weave(&load(bytemuck::cast_ref(w)));
                let magnitudes = w.map(|w| _mm256_abs_epi8(w));
                for i in 0..N {
                    let (codes, steps, _) = half_of(&rows[i][eight / 2], eight % 2);
                    let mut sums = _mm256_setzero_si256();
                    for k in 0..8 {
                        let signed = _mm256_sign_epi8(bytes(&codes[k]), w[k]);
                        sums = _mm256_add_epi32(sums, widen(_mm256_maddubs_epi16(magnitudes[k], signed)));
                    }
                    let products = _mm256_mul_ps(floats(steps), _mm256_cvtepi32_ps(sums));
                    acc[i][eight % 2] = _mm256_add_ps(acc[i][eight % 2], products);
                }
            }
            for i in 0..N {
                out[i][r] = sum16(acc[i][0], acc[i][1]);
            }
        }
    }

    fn q4_codes_of<const N: usize>(
        w: &[u8],
        groups: usize,
        ladders: &[[u8; 4]],
        codes: &[u8],
        x: &Codes,
        first: usize,
        out: &mut [Line],
    ) {
        let rows = rows_of::<N>(x, first);
        let mask = _mm256_set1_epi8(15);
        let codes = codes.chunks_exact(crate::model::tensors::Codec::code_bytes(groups));
        for (r, ((w, params), codes)) in w.chunks_exact(groups * 16).zip(ladders).zip(codes).enumerate() {
            let table = ladder(params);
            let mut acc = [[_mm256_setzero_ps(); 2]; N];
            let (whole, tail) = bytemuck::cast_slice::<u8, i8>(w).as_chunks::<{ EIGHT * 16 }>();
            let mut last = [0; EIGHT * 16];
            last[..tail.len()].copy_from_slice(tail);
            let eights = whole.iter().chain((!tail.is_empty()).then_some(&last));
            for (eight, w) in eights.enumerate() {
                let mut scales = look_up::<true>(&table, eight_codes(&codes[5 * eight..]));
                if eight == whole.len() {
                    let mut lanes = [0.0; EIGHT];
                    put(&mut lanes, scales);
                    Q4_LANES[groups % EIGHT..].iter().for_each(|lane| lanes[*lane] = 0.0);
                    scales = floats(&lanes);
                }
                ask::<2>(w.as_ptr());
                let w: &[[i8; 32]; 4] = bytemuck::cast_ref(w);
                let eights = turn([bytes(&w[0]), bytes(&w[1]), bytes(&w[2]), bytes(&w[3])]);
                let even = eights.map(|w| _mm256_and_si256(w, mask));
                let odd = eights.map(|w| _mm256_and_si256(_mm256_srli_epi16::<4>(w), mask));
                for i in 0..N {
                    let (codes, steps, offsets) = half_of(&rows[i][eight / 2], eight % 2);
                    let mut sums = _mm256_setzero_si256();
                    for k in 0..4 {
                        sums = _mm256_add_epi16(sums, _mm256_maddubs_epi16(even[k], bytes(&codes[2 * k])));
                        sums = _mm256_add_epi16(sums, _mm256_maddubs_epi16(odd[k], bytes(&codes[2 * k + 1])));
                    }
                    let sums = _mm256_add_epi32(widen(sums), ints(offsets));
                    let scale = _mm256_mul_ps(floats(steps), scales);
                    let products = _mm256_mul_ps(scale, _mm256_cvtepi32_ps(sums));
                    acc[i][eight % 2] = _mm256_add_ps(acc[i][eight % 2], products);
                }
            }
            let order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
            for i in 0..N {
                let [low, high] = acc[i].map(|acc| _mm256_permutevar8x32_ps(acc, order));
                out[i][r] = sum16(low, high);
            }
        }
    }

    fn q4_floats_of<const N: usize>(
        w: &[u8],
        groups: usize,
        scales: &[f32],
        x: &Floats,
        first: usize,
        out: &mut [Line],
    ) {
        let lanes = groups.next_multiple_of(LANES);
        let (mask, zero) = (_mm_set1_epi8(15), _mm256_set1_epi32(8));
        let rows = w.chunks_exact(groups * 16).zip(scales.chunks_exact(lanes));
        for (r, (w, scales)) in rows.enumerate() {
            let mut acc = [[_mm256_setzero_ps(); 8]; N];
            let (pairs, odd) = w.as_chunks::<32>();
            let mut last = [0x88; 32];
            last[..odd.len()].copy_from_slice(odd);
            let pairs = pairs.iter().chain((!odd.is_empty()).then_some(&last));
            for (pair, (w, scales)) in pairs.zip(scales.as_chunks::<2>().0).enumerate() {
                for g in 0..2 {
                    // SAFETY: 16 bytes are read from 32, from 0 or from 16 on.
                    let nibbles = unsafe { _mm_loadu_si128(w[16 * g..].as_ptr().cast()) };
                    let even = _mm_and_si128(nibbles, mask);
                    let odd = _mm_and_si128(_mm_srli_epi16::<4>(nibbles), mask);
                    let scale = _mm256_set1_ps(scales[g]);
                    let eight = |codes: __m128i| {
                        let values = _mm256_sub_epi32(_mm256_cvtepu8_epi32(codes), zero);
                        _mm256_mul_ps(_mm256_cvtepi32_ps(values), scale)
                    };
                    let w = [
                        eight(even),
                        eight(_mm_srli_si128::<8>(even)),
                        eight(odd),
                        eight(_mm_srli_si128::<8>(odd)),
                    ];
                    for i in 0..N {
                        let x = x.row(first + i).as_chunks::<8>().0[8 * pair + 4 * g..].first_chunk::<4>();
                        let x = x.expect("padded rows");
                        for j in 0..4 {
                            acc[i][4 * g + j] = _mm256_fmadd_ps(w[j], floats(&x[j]), acc[i][4 * g + j]);
                        }
                    }
                }
            }
            for i in 0..N {
                out[i][r] = sum64(&acc[i]);
            }
        }
    }

    /// The four sixteens added as everywhere.
    fn sum64(acc: &[__m256; 8]) -> f32 {
        let half = |h: usize| {
            _mm256_add_ps(_mm256_add_ps(acc[h], acc[2 + h]), _mm256_add_ps(acc[4 + h], acc[6 + h]))
        };
        sum16(half(0), half(1))
    }

    /// Codes, steps and offsets of half a stretch.
    fn half_of(x: &Stretch, half: usize) -> (&[[i8; GROUP]; EIGHT], &[f32; EIGHT], &[i32; EIGHT]) {
        let codes: &[[[i8; GROUP]; EIGHT]; 2] = bytemuck::cast_ref(&x.codes);
        let steps: &[[f32; EIGHT]; 2] = bytemuck::cast_ref(&x.steps);
        let offsets: &[[i32; EIGHT]; 2] = bytemuck::cast_ref(&x.offsets);
        (&codes[half], &steps[half], &offsets[half])
    }
}

/// Float products with rows of elements of `SIZE` bytes, eight of which `load` makes floats.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn elements_of<const SIZE: usize, const N: usize>(
    w: &[u8],
    cols: usize,
    load: impl Fn(&[[u8; SIZE]; 8]) -> __m256,
    x: &Floats,
    first: usize,
    out: &mut [Line],
) {
    for (r, w) in w.chunks_exact(cols * SIZE).enumerate() {
        let mut acc = [[_mm256_setzero_ps(); 8]; N];
        let w = w.as_chunks::<SIZE>().0;
        let (whole, tail) = w.as_chunks::<WIDE>();
        let mut last = [[0; SIZE]; WIDE];
        last[..tail.len()].copy_from_slice(tail);
        let chunks = whole.iter().chain((!tail.is_empty()).then_some(&last));
        for (c, w) in chunks.enumerate() {
            // One row alone is read as fast as memory gives.
            if N > 1 {
                ask::<SIZE>(w.as_ptr().cast());
            }
            let w = w.as_chunks::<8>().0;
            for i in 0..N {
                let x = x.row(first + i).as_chunks::<8>().0[8 * c..].first_chunk::<8>().expect("padded rows");
                for j in 0..8 {
                    acc[i][j] = _mm256_fmadd_ps(load(&w[j]), floats(&x[j]), acc[i][j]);
                }
            }
        }
        for i in 0..N {
            out[i][r] = sum64(&acc[i]);
        }
    }
}
