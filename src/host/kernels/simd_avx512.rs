//! The kernels for AVX-512 with VNNI.
//!
//! int8: `vpdpbusd` multiplies unsigned by signed bytes, exactly: an int8
//! weight has its sign bit flipped, which adds 128 to it, and 128 times the sum
//! of the codes is taken off again; a nibble is unsigned as it is and 8 times
//! the sum is taken off. The lanes are groups of columns, sixteen to a stretch:
//! a stretch of weights is woven so that a vector holds four columns of each
//! group, once for all activation rows, whose codes lie woven already.
//!
//! Only [`set`] leaves this file, and it hands the kernels out where the
//! processor has the instructions.
#![allow(unsafe_code, reason = "calls of functions compiled for this instruction set, and vector loads and stores")]

use std::arch::x86_64::*;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering, compiler_fence};

use super::body;
use super::input::{Codes, Floats, GROUP, LANES, Q8_OFFSET, Stretch, WIDE};
use super::set::{BLOCK, Line, Set, by_rows};
use crate::host::attention::{Partial, TILE, Tile, attend_body, weigh};
use crate::host::mamba::{Convolution, Head, convolve_body, scan_body};
use crate::host::math;
use crate::host::norm::gated_groups;

/// Groups of a stretch of columns.
const STRETCH: usize = LANES;
/// Which group a lane of woven q8_2f weights holds.
const Q8_GROUPS: [usize; LANES] = [0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15];
/// Which group a lane of woven q4tp weights holds.
const Q4_GROUPS: [usize; LANES] = [0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15];
/// Where the groups lie, in order.
const Q8_LANES: [i32; LANES] = lanes_of(&Q8_GROUPS);
/// Where the groups lie, in order.
const Q4_LANES: [i32; LANES] = lanes_of(&Q4_GROUPS);
/// How far ahead of its use a weight is asked for on AMD's processors: half a page.
const AHEAD: usize = 2048;
/// The same on others: beyond the page, where the processor's own foresight ends, so that its address is translated in time.
const FAR_AHEAD: usize = 3 * 4096 + 512;
/// Whether this is a processor of AMD; set before a kernel is handed out.
static AMD: AtomicBool = AtomicBool::new(false);
/// Rows of a scan whose B, C and sums stay in the nearest cache while a head's state passes.
const SCAN_ROWS: usize = 8;

/// Whether a q4tp row's last stretch has so few `groups` that they lie in one vector and are not woven.
fn is_short(groups: usize) -> bool {
    groups <= STRETCH / 4
}

/// The inverse of an order of groups.
const fn lanes_of(groups: &[usize; LANES]) -> [i32; LANES] {
    let mut lanes = [0; LANES];
    let mut lane = 0;
    while lane < LANES {
        lanes[groups[lane]] = lane as i32;
        lane += 1;
    }
    lanes
}

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
    static VENDOR: OnceLock<bool> = OnceLock::new();
    AMD.store(*VENDOR.get_or_init(is_amd), Ordering::Relaxed);
    present().then_some(&SET)
}

/// Whether the processor says it is AMD's.
fn is_amd() -> bool {
    let vendor = __cpuid(0);
    [vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes).as_flattened() == b"AuthenticAMD"
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
    ($($(#[$doc:meta])* fn $name:ident $(<$(const $N:ident: $of:ty),+>)? ($($arg:ident: $type:ty),* $(,)?) $(-> $ret:ty)? $body:block)*) => {
        $(
            $(#[$doc])*
            #[inline]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
            fn $name $(<$(const $N: $of),+>)? ($($arg: $type),*) $(-> $ret)? $body
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
        let (factor, lanes) = if split.is_some() { (-8, &Q4_LANES) } else { (-Q8_OFFSET, &Q8_LANES) };
        let magnitude = _mm512_set1_epi32(0x7fff_ffff);
        let (least, most) = (_mm512_set1_ps(-127.0), _mm512_set1_ps(127.0));
        for (stretch, (x, to)) in x.as_chunks::<{ 2 * STRETCH }>().0.iter().zip(to).enumerate() {
            let groups = x.as_chunks::<2>().0.iter().zip(to.codes.as_chunks_mut::<GROUP>().0).zip(lanes);
            for ((x, codes), lane) in groups {
                let (a, b) = (floats(&x[0]), floats(&x[1]));
                // The magnitudes' bits order as the magnitudes do, with NaN above infinity.
                let largest = _mm512_max_epi32(
                    _mm512_and_si512(_mm512_castps_si512(a), magnitude),
                    _mm512_and_si512(_mm512_castps_si512(b), magnitude),
                );
                let d = f32::from_bits(_mm512_reduce_max_epi32(largest) as u32) / 127.0;
                let zero = d < f32::MIN_POSITIVE;
                to.steps[*lane as usize] = if zero { 0.0 } else { d };
                let divisor = _mm512_set1_ps(if zero { f32::INFINITY } else { d });
                let [a, b] = [a, b].map(|x| {
                    let quotient = _mm512_max_ps(_mm512_min_ps(_mm512_div_ps(x, divisor), most), least);
                    // Rounds to the nearest, ties to even, as the processor does unless told otherwise.
                    _mm512_cvtps_epi32(quotient)
                });
                to.offsets[*lane as usize] = _mm512_reduce_add_epi32(_mm512_add_epi32(a, b)) * factor;
                let q = _mm256_set_m128i(_mm512_cvtepi32_epi8(b), _mm512_cvtepi32_epi8(a));
                // SAFETY: 32 bytes are written to an array of 32.
                unsafe { _mm256_storeu_si256(codes.as_mut_ptr().cast(), q) };
            }
            let codes: &mut [[i8; 64]; 8] = bytemuck::cast_mut(&mut to.codes);
            if split.is_some_and(|groups| is_short(groups - STRETCH * stretch)) {
                // Even columns, then odd ones.
                let narrow = |a, b| {
                    let (a, b) = (_mm512_cvtepi16_epi8(a), _mm512_cvtepi16_epi8(b));
                    _mm512_inserti64x4::<1>(_mm512_castsi256_si512(a), b)
                };
                let (a, b, even) = (bytes(&codes[0]), bytes(&codes[1]), _mm512_set1_epi16(255));
                put_bytes(&mut codes[0], narrow(_mm512_and_si512(a, even), _mm512_and_si512(b, even)));
                put_bytes(&mut codes[1], narrow(_mm512_srli_epi16::<8>(a), _mm512_srli_epi16::<8>(b)));
                continue;
            }
            let mut woven = weave(&load(codes));
            if split.is_some() {
                // Eight columns of each group become their four even and their four odd ones, and the groups move to
                // the lanes where the weights' are.
                let apart = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15));
                let order = indices(&Q4_GROUPS.map(|group| Q8_LANES[group]));
                for k in 0..4 {
                    let [a, b] = [woven[2 * k], woven[2 * k + 1]].map(|x| {
                        _mm512_permutexvar_epi32(order, _mm512_shuffle_epi8(x, apart))
                    });
                    let upper = 0xaaaa_aaaa;
                    let even = _mm512_mask_blend_epi16(upper, a, _mm512_slli_epi32::<16>(b));
                    let odd = _mm512_mask_blend_epi16(upper, _mm512_srli_epi32::<16>(a), b);
                    (woven[2 * k], woven[2 * k + 1]) = (even, odd);
                }
            }
            for (to, woven) in codes.iter_mut().zip(woven) {
                put_bytes(to, woven);
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
        // Sixteen lines give a vector of outputs; as many lines at a time as registers hold.
        match (head.state.len() / head.d_state % LANES, head.d_state) {
            (0, 64) => scan_of::<4, 4>(head),
            (0, 128) => scan_of::<8, 2>(head),
            (0, 256) => scan_of::<16, 1>(head),
            _ => scan_body(head),
        }
    }
}

kernel! {
    fn attend(tile: &Tile<'_>, partials: &mut [Partial]) {
        match tile.head_dim() {
            64 => attend_of::<4>(tile, partials),
            128 => attend_of::<8>(tile, partials),
            _ => attend_body(tile, partials),
        }
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
            let (low, high) = ladder(params);
            // `permutex2var` looks at the lowest five bits alone.
            let (whole, tail) = out[..lanes].split_at_mut(groups / STRETCH * STRETCH);
            for (block, out) in whole.as_chunks_mut::<LANES>().0.iter_mut().enumerate() {
                put(out, _mm512_permutex2var_ps(low, rungs::<false>(&codes[10 * block..]), high));
            }
            for out in tail.as_chunks_mut::<LANES>().0 {
                let kept = (1 << (groups % STRETCH)) - 1;
                let index = rungs::<false>(&codes[groups / STRETCH * 10..]);
                put(out, _mm512_maskz_permutex2var_ps(kept, low, index, high));
            }
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
            // SAFETY: 16 bytes are read from an array of 16.
            let codes = unsafe { _mm_loadu_si128(w.as_ptr().cast()) };
            _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes))
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
        // SAFETY: 64 bytes are read from an array of 16 times 4.
        by_rows!(out.len(), N => elements_of::<4, N>(w, cols, |w| unsafe { _mm512_loadu_ps(w.as_ptr().cast()) }, x, first, out));
    }
}

kernel! {
    fn exact16(w: &[u8], cols: usize, x: &Floats, first: usize, out: &mut [Line]) {
        by_rows!(out.len(), N => elements_of::<2, N>(w, cols, |w| {
            // SAFETY: 32 bytes are read from an array of 16 times 2.
            _mm512_cvtph_ps(unsafe { _mm256_loadu_si256(w.as_ptr().cast()) })
        }, x, first, out));
    }
}

kernel! {
    fn brain16(w: &[u8], cols: usize, x: &Floats, first: usize, out: &mut [Line]) {
        by_rows!(out.len(), N => elements_of::<2, N>(w, cols, |w| {
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

    /// The first 64 bytes, zeros where there are fewer.
    fn some_bytes(x: &[i8]) -> __m512i {
        let mask = if x.len() >= 64 { u64::MAX } else { (1 << x.len()) - 1 };
        // SAFETY: the mask keeps the load inside the slice.
        unsafe { _mm512_maskz_loadu_epi8(mask, x.as_ptr()) }
    }

    /// Numbers for a permutation.
    fn indices(x: &[i32; LANES]) -> __m512i {
        // SAFETY: 64 bytes are read from an array of 16 integers.
        unsafe { _mm512_loadu_si512(x.as_ptr().cast()) }
    }

    /// Asks memory for the `LINES` lines some way on. On AMD for every second one, the other comes by itself, and no nearer
    /// than the second cache: a Zen 4 brings 12 GB/s where it is asked for the nearest one, 28 without.
    fn ask<const LINES: usize>(from: *const i8) {
        // A prefetch reads nothing and does not fault, wherever it points.
        if AMD.load(Ordering::Relaxed) {
            for line in (0..LINES).step_by(2) {
                _mm_prefetch::<_MM_HINT_T1>(from.wrapping_add(AHEAD + 64 * line));
            }
        } else {
            for line in 0..LINES {
                _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(FAR_AHEAD + 64 * line));
            }
        }
    }

    /// Vectors that follow each other, read in order: what the processor foresees rests on it.
    fn load<const J: usize>(codes: &[[i8; 64]; J]) -> [__m512i; J] {
        let mut vectors = [_mm512_setzero_si512(); J];
        for j in 0..J {
            vectors[j] = bytes(&codes[j]);
            compiler_fence(Ordering::SeqCst);
        }
        vectors
    }

    /// Two groups a vector become four columns of each group a vector; groups as [`Q8_GROUPS`] says.
    fn weave(x: &[__m512i; 8]) -> [__m512i; 8] {
        let (low, high) = (turn([x[0], x[1], x[2], x[3]]), turn([x[4], x[5], x[6], x[7]]));
        let mut woven = [_mm512_setzero_si512(); 8];
        for k in 0..4 {
            woven[k] = _mm512_shuffle_i32x4::<0b10_00_10_00>(low[k], high[k]);
            woven[4 + k] = _mm512_shuffle_i32x4::<0b11_01_11_01>(low[k], high[k]);
        }
        woven
    }

    /// In every 128-bit lane rows become columns; so four groups of nibbles a vector become eight columns of each group
    /// a vector, groups as [`Q4_GROUPS`] says.
    fn turn(x: [__m512i; 4]) -> [__m512i; 4] {
        let (a, b) = (_mm512_unpacklo_epi32(x[0], x[1]), _mm512_unpackhi_epi32(x[0], x[1]));
        let (c, d) = (_mm512_unpacklo_epi32(x[2], x[3]), _mm512_unpackhi_epi32(x[2], x[3]));
        [
            _mm512_unpacklo_epi64(a, c),
            _mm512_unpackhi_epi64(a, c),
            _mm512_unpacklo_epi64(b, d),
            _mm512_unpackhi_epi64(b, d),
        ]
    }

    /// The 16 numbers of 5 bits each at the start of `codes` (fewer where it is shorter), other bits above them; `WOVEN`
    /// in the order of [`Q4_GROUPS`].
    fn rungs<const WOVEN: bool>(codes: &[u8]) -> __m512i {
        let codes = match codes.first_chunk::<16>() {
            // SAFETY: 16 bytes are read from an array of 16.
            Some(codes) => unsafe { _mm_loadu_si128(codes.as_ptr().cast()) },
            // SAFETY: the mask keeps the load inside the slice.
            None => unsafe { _mm_maskz_loadu_epi8((1 << codes.len()) - 1, codes.as_ptr().cast()) },
        };
        // Number i begins at bit 5·i: in byte 5·i / 8, at bit 5·i % 8, and may go on in the next byte.
        let (pairs, shifts) = if WOVEN {
            (
                _mm256_setr_epi8(
                    0, 1, 2, 3, 5, 6, 7, 8, 0, 1, 3, 4, 5, 6, 8, 9, 1, 2, 3, 4, 6, 7, 8, 9, 1, 2, 4, 5, 6, 7, 9, 10,
                ),
                _mm256_setr_epi16(0, 4, 0, 4, 5, 1, 5, 1, 2, 6, 2, 6, 7, 3, 7, 3),
            )
        } else {
            (
                _mm256_setr_epi8(
                    0, 1, 0, 1, 1, 2, 1, 2, 2, 3, 3, 4, 3, 4, 4, 5, 5, 6, 5, 6, 6, 7, 6, 7, 7, 8, 8, 9, 8, 9, 9, 10,
                ),
                _mm256_setr_epi16(0, 5, 2, 7, 4, 1, 6, 3, 0, 5, 2, 7, 4, 1, 6, 3),
            )
        };
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

    /// The sums of the lanes of sixteen vectors, each in the order of [`math::tree`].
    fn trees(x: &[[f32; LANES]; 16]) -> __m512 {
        // Two vectors' halves, then four vectors' quarters, and so on, side by side.
        let mut eight = [_mm512_setzero_ps(); 8];
        for i in 0..8 {
            let (a, b) = (floats(&x[i]), floats(&x[i + 8]));
            eight[i] = _mm512_add_ps(
                _mm512_shuffle_f32x4::<0b01_00_01_00>(a, b),
                _mm512_shuffle_f32x4::<0b11_10_11_10>(a, b),
            );
        }
        let mut four = [_mm512_setzero_ps(); 4];
        for i in 0..4 {
            let (a, b) = (eight[i], eight[i + 4]);
            four[i] = _mm512_add_ps(
                _mm512_shuffle_f32x4::<0b10_00_10_00>(a, b),
                _mm512_shuffle_f32x4::<0b11_01_11_01>(a, b),
            );
        }
        let pair = |a: __m512, b: __m512| {
            let (a, b) = (_mm512_castps_pd(a), _mm512_castps_pd(b));
            let (low, high) = (_mm512_unpacklo_pd(a, b), _mm512_unpackhi_pd(a, b));
            _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high))
        };
        let (a, b) = (pair(four[0], four[2]), pair(four[1], four[3]));
        let sums = _mm512_add_ps(
            _mm512_shuffle_ps::<0b10_00_10_00>(a, b),
            _mm512_shuffle_ps::<0b11_01_11_01>(a, b),
        );
        // Quarter q holds vectors 0, 8, 4 or 12 on, there the third before the second.
        let order = _mm512_setr_epi32(0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15);
        _mm512_permutexvar_ps(order, sums)
    }

    /// Sums of the lanes for each activation row and weight row.
    fn give(sums: &[[[f32; LANES]; BLOCK]], out: &mut [Line]) {
        for (sums, out) in sums.iter().zip(out) {
            put(out, trees(sums));
        }
    }

    /// The activation rows of a call.
    fn rows_of<const N: usize>(x: &Codes, first: usize) -> [&[Stretch]; N] {
        std::array::from_fn(|i| x.row(first + i))
    }

    fn q8_codes_of<const N: usize>(w: &[i8], cols: usize, x: &Codes, first: usize, out: &mut [Line]) {
        let rows = rows_of::<N>(x, first);
        let lanes = indices(&Q8_LANES);
        let mut sums = [[[0.0; LANES]; BLOCK]; N];
        for (r, w) in w.chunks_exact(cols).enumerate() {
            let mut acc = [_mm512_setzero_ps(); N];
            let (whole, tail) = w.as_chunks::<{ 64 * 8 }>();
            for (stretch, w) in whole.iter().enumerate() {
                ask::<8>(w.as_ptr());
                q8_stretch(&load(bytemuck::cast_ref(w)), &rows, stretch, &mut acc);
            }
            if !tail.is_empty() {
                ask::<8>(tail.as_ptr());
                let mut vectors = [_mm512_setzero_si512(); 8];
                for (j, vector) in vectors.iter_mut().enumerate() {
                    *vector = some_bytes(&tail[(64 * j).min(tail.len())..]);
                }
                q8_stretch(&vectors, &rows, whole.len(), &mut acc);
            }
            for i in 0..N {
                put(&mut sums[i][r], _mm512_permutexvar_ps(lanes, acc[i]));
            }
        }
        give(&sums, out);
    }

    /// Adds the products of one stretch of a q8_2f row with each activation row.
    fn q8_stretch<const N: usize>(w: &[__m512i; 8], rows: &[&[Stretch]; N], stretch: usize, acc: &mut [__m512; N]) {
        let mut w = weave(w);
        for w in &mut w {
            *w = _mm512_xor_si512(*w, _mm512_set1_epi8(-128));
        }
        for i in 0..N {
            let x = &rows[i][stretch];
            let products = _mm512_mul_ps(floats(&x.steps), _mm512_cvtepi32_ps(dots_of(&w, x)));
            acc[i] = _mm512_add_ps(acc[i], products);
        }
    }

    /// Sums of the products of each group's woven codes; in two halves, so that fewer wait for each other.
    fn dots_of(w: &[__m512i; 8], x: &Stretch) -> __m512i {
        let codes: &[[i8; 64]; 8] = bytemuck::cast_ref(&x.codes);
        let (mut low, mut high) = (ints(&x.offsets), _mm512_setzero_si512());
        for k in 0..4 {
            low = _mm512_dpbusd_epi32(low, w[k], bytes(&codes[k]));
            high = _mm512_dpbusd_epi32(high, w[4 + k], bytes(&codes[4 + k]));
        }
        _mm512_add_epi32(low, high)
    }

    /// [`attend_body`] with fused multiply-adds, for heads of `V` vectors: heads that share keys read them together.
    fn attend_of<const V: usize>(tile: &Tile<'_>, partials: &mut [Partial]) {
        let mut scores = [[0.0; TILE]; 4];
        for (row, partials) in partials.chunks_mut(tile.share()).enumerate() {
            let keys = tile.keys(row);
            if keys == 0 {
                continue;
            }
            for (four, partials) in partials.chunks_mut(4).enumerate() {
                let heads = partials.len();
                by_rows!(heads, N => scores_of::<N, V>(tile, row, 4 * four, keys, &mut scores));
                for (partial, scores) in partials.iter_mut().zip(&mut scores) {
                    weigh(&mut scores[..keys], partial);
                }
                for (partials, scores) in partials.chunks_mut(2).zip(scores.chunks(2)) {
                    match partials {
                        [one, other] => values_of::<2, V>(tile, keys, [&scores[0], &scores[1]], [one, other]),
                        [one] => values_of::<1, V>(tile, keys, [&scores[0]], [one]),
                        _ => {}
                    }
                }
            }
        }
    }

    /// Scores of `N` heads of a row; those beyond `keys` are of no meaning.
    fn scores_of<const N: usize, const V: usize>(
        tile: &Tile<'_>,
        row: usize,
        first: usize,
        keys: usize,
        scores: &mut [[f32; TILE]; 4],
    ) {
        let mut queries: [&[[f32; 16]]; N] = [&[]; N];
        for (i, query) in queries.iter_mut().enumerate() {
            *query = tile.query(row, first + i).as_chunks().0;
        }
        let factor = _mm512_set1_ps(tile.factor());
        let mut sums = [[[0.0; LANES]; 16]; N];
        for block in 0..keys.div_ceil(16) {
            for k in 0..16.min(keys - 16 * block) {
                let key: &[[f32; 16]; V] = tile.key(16 * block + k).as_chunks().0.first_chunk().expect("a head's key");
                let mut acc = [_mm512_setzero_ps(); N];
                for v in 0..V {
                    let key = floats(&key[v]);
                    for i in 0..N {
                        acc[i] = _mm512_fmadd_ps(floats(&queries[i][v]), key, acc[i]);
                    }
                }
                for i in 0..N {
                    put(&mut sums[i][k], acc[i]);
                }
            }
            for i in 0..N {
                let to = &mut scores[i].as_chunks_mut::<16>().0[block];
                put(to, _mm512_mul_ps(trees(&sums[i]), factor));
            }
        }
    }

    /// Adds the weighted values to `N` heads' sums.
    fn values_of<const N: usize, const V: usize>(
        tile: &Tile<'_>,
        keys: usize,
        weights: [&[f32; TILE]; N],
        partials: [&mut Partial; N],
    ) {
        let mut acc = [[_mm512_setzero_ps(); V]; N];
        for j in 0..keys {
            let value: &[[f32; 16]; V] = tile.value(j).as_chunks().0.first_chunk().expect("a head's value");
            for v in 0..V {
                let value = floats(&value[v]);
                for i in 0..N {
                    acc[i][v] = _mm512_fmadd_ps(_mm512_set1_ps(weights[i][j]), value, acc[i][v]);
                }
            }
        }
        for (partial, acc) in partials.into_iter().zip(&acc) {
            for (to, acc) in partial.acc.as_chunks_mut::<16>().0.iter_mut().zip(acc) {
                put(to, *acc);
            }
        }
    }

    /// [`scan_body`] with fused multiply-adds, for lines of `V` vectors, `LINES` at a time.
    fn scan_of<const V: usize, const LINES: usize>(head: &mut Head<'_>) {
        let Head { state, out, after, steps, skip, convolved, channels, at, .. } = head;
        let [at_x, at_b, at_c] = *at;
        let mut sums = [[[0.0; LANES]; LANES]; SCAN_ROWS];
        for (stretch, out) in out.chunks_mut(SCAN_ROWS).enumerate() {
            let first = stretch * SCAN_ROWS;
            let row = |t: usize| &convolved[(first + t) * *channels..(first + t + 1) * *channels];
            for (block, state) in state.as_chunks_mut::<16>().0.chunks_exact_mut(V * LANES).enumerate() {
                for (few, state) in state.chunks_exact_mut(V * LINES).enumerate() {
                    let line = block * LANES + few * LINES;
                    let mut s = [[_mm512_setzero_ps(); V]; LINES];
                    for l in 0..LINES {
                        for v in 0..V {
                            s[l][v] = floats(&state[l * V + v]);
                        }
                    }
                    for t in 0..out.len() {
                        let row = row(t);
                        let (dt, decay) = steps[first + t];
                        let b: &[[f32; 16]; V] = row[at_b..].as_chunks().0.first_chunk().expect("a row has its B");
                        let c: &[[f32; 16]; V] = row[at_c..].as_chunks().0.first_chunk().expect("a row has its C");
                        let xs: &[f32; LINES] = row[at_x + line..].first_chunk().expect("a row has its x");
                        let decay = _mm512_set1_ps(decay);
                        let mut x = [decay; LINES];
                        let mut acc = [_mm512_setzero_ps(); LINES];
                        for l in 0..LINES {
                            x[l] = _mm512_set1_ps(dt * xs[l]);
                        }
                        for v in 0..V {
                            let (b, c) = (floats(&b[v]), floats(&c[v]));
                            for l in 0..LINES {
                                s[l][v] = _mm512_fmadd_ps(x[l], b, _mm512_mul_ps(decay, s[l][v]));
                                acc[l] = _mm512_fmadd_ps(s[l][v], c, acc[l]);
                            }
                        }
                        for l in 0..LINES {
                            put(&mut sums[t][few * LINES + l], acc[l]);
                        }
                        if let Some(after) = after.get_mut(first + t) {
                            let after = &mut after.as_chunks_mut::<16>().0[line * V..];
                            for l in 0..LINES {
                                for v in 0..V {
                                    put(&mut after[l * V + v], s[l][v]);
                                }
                            }
                        }
                    }
                    for l in 0..LINES {
                        for v in 0..V {
                            put(&mut state[l * V + v], s[l][v]);
                        }
                    }
                }
                for (t, out) in out.iter_mut().enumerate() {
                    let x = floats(row(t)[at_x + block * LANES..].first_chunk().expect("a row has its x"));
                    let out = out[block * LANES..].first_chunk_mut().expect("whole blocks of lines");
                    put(out, _mm512_fmadd_ps(_mm512_set1_ps(*skip), x, trees(&sums[t])));
                }
            }
        }
    }

    /// Scales are made as they are used; ladders all together, for each is a long chain of steps.
    fn q4_codes_of<const N: usize>(
        w: &[u8],
        groups: usize,
        ladders: &[[u8; 4]],
        codes: &[u8],
        x: &Codes,
        first: usize,
        out: &mut [Line],
    ) {
        let width = crate::model::tensors::Codec::code_bytes(groups);
        let rows = rows_of::<N>(x, first);
        let lanes = indices(&Q4_LANES);
        // Lanes of the last stretch that have a group.
        let kept = _mm512_cmplt_epi32_mask(
            indices(&Q4_GROUPS.map(|group| group as i32)),
            _mm512_set1_epi32((groups % STRETCH) as i32),
        );
        let mut sums = [[[0.0; LANES]; BLOCK]; N];
        let mut tables = [[[0.0; LANES]; 2]; BLOCK];
        for (table, params) in tables.iter_mut().zip(ladders) {
            let (low, high) = ladder(params);
            put(&mut table[0], low);
            put(&mut table[1], high);
        }
        let lines = w.chunks_exact(groups * 16).zip(codes.chunks_exact(width)).zip(&tables);
        for (r, ((w, codes), table)) in lines.enumerate() {
            let (low, high) = (floats(&table[0]), floats(&table[1]));
            if !AMD.load(Ordering::Relaxed) {
                // The rungs of the row sixteen further on; reads nothing and does not fault.
                _mm_prefetch::<_MM_HINT_T0>(codes.as_ptr().wrapping_add(BLOCK * width).cast());
            }
            let mut acc = [_mm512_setzero_ps(); N];
            let (whole, tail) = bytemuck::cast_slice::<u8, i8>(w).as_chunks::<{ 64 * 4 }>();
            for (stretch, w) in whole.iter().enumerate() {
                ask::<4>(w.as_ptr());
                // `permutex2var` looks at the lowest five bits alone.
                let scales = _mm512_permutex2var_ps(low, rungs::<true>(&codes[10 * stretch..]), high);
                q4_stretch(load(bytemuck::cast_ref(w)), scales, &rows, stretch, &mut acc);
            }
            if !tail.is_empty() {
                ask::<4>(tail.as_ptr());
                let stretch = whole.len();
                let scales = _mm512_maskz_permutex2var_ps(kept, low, rungs::<true>(&codes[10 * stretch..]), high);
                if is_short(groups % STRETCH) {
                    q4_short(some_bytes(tail), scales, &rows, stretch, &mut acc);
                } else {
                    let part = |j: usize| some_bytes(&tail[(64 * j).min(tail.len())..]);
                    q4_stretch([part(0), part(1), part(2), part(3)], scales, &rows, stretch, &mut acc);
                }
            }
            for i in 0..N {
                put(&mut sums[i][r], _mm512_permutexvar_ps(lanes, acc[i]));
            }
        }
        give(&sums, out);
    }

    /// Adds the products of one stretch of a q4tp row with each activation row.
    fn q4_stretch<const N: usize>(
        w: [__m512i; 4],
        scales: __m512,
        rows: &[&[Stretch]; N],
        stretch: usize,
        acc: &mut [__m512; N],
    ) {
        let (low, high) = (_mm512_set1_epi8(15), _mm512_set1_epi8(-16));
        let eights = turn(w);
        let (mut even, mut odd) = ([_mm512_setzero_si512(); 4], [_mm512_setzero_si512(); 4]);
        for k in 0..4 {
            even[k] = _mm512_and_si512(eights[k], low);
            odd[k] = _mm512_and_si512(eights[k], high);
        }
        for i in 0..N {
            let x = &rows[i][stretch];
            let codes: &[[i8; 64]; 8] = bytemuck::cast_ref(&x.codes);
            // An odd column's nibble counts sixteen times as much where it lies.
            let (mut sums, mut sixteenfold) = (ints(&x.offsets), _mm512_setzero_si512());
            for k in 0..4 {
                sums = _mm512_dpbusd_epi32(sums, even[k], bytes(&codes[2 * k]));
                sixteenfold = _mm512_dpbusd_epi32(sixteenfold, odd[k], bytes(&codes[2 * k + 1]));
            }
            let sums = _mm512_add_epi32(sums, _mm512_srai_epi32::<4>(sixteenfold));
            let scale = _mm512_mul_ps(floats(&x.steps), scales);
            acc[i] = _mm512_add_ps(acc[i], _mm512_mul_ps(scale, _mm512_cvtepi32_ps(sums)));
        }
    }

    /// As [`q4_stretch`] for up to four groups, as they lie.
    fn q4_short<const N: usize>(
        w: __m512i,
        scales: __m512,
        rows: &[&[Stretch]; N],
        stretch: usize,
        acc: &mut [__m512; N],
    ) {
        let mask = _mm512_set1_epi8(15);
        let (even, odd) = (_mm512_and_si512(w, mask), _mm512_and_si512(_mm512_srli_epi16::<4>(w), mask));
        for i in 0..N {
            let x = &rows[i][stretch];
            let codes: &[[i8; 64]; 8] = bytemuck::cast_ref(&x.codes);
            let sums = _mm512_dpbusd_epi32(_mm512_setzero_si512(), even, bytes(&codes[0]));
            let sums = _mm512_dpbusd_epi32(sums, odd, bytes(&codes[1]));
            // A group is a 128-bit lane, and its first place is where `Q4_LANES` has it; the steps of the others are zero.
            let sums = _mm512_add_epi32(sums, _mm512_shuffle_epi32::<0b10_11_00_01>(sums));
            let sums = _mm512_add_epi32(sums, _mm512_shuffle_epi32::<0b01_00_11_10>(sums));
            let products = _mm512_cvtepi32_ps(_mm512_add_epi32(sums, ints(&x.offsets)));
            let scale = _mm512_mul_ps(floats(&x.steps), scales);
            acc[i] = _mm512_add_ps(acc[i], _mm512_mul_ps(scale, products));
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
        let values = _mm512_setr_ps(-8.0, -7.0, -6.0, -5.0, -4.0, -3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0);
        let rows = w.chunks_exact(groups * 16).zip(scales.chunks_exact(lanes));
        let mut sums = [[[0.0; LANES]; BLOCK]; N];
        for (r, (w, scales)) in rows.enumerate() {
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
                put(&mut sums[i][r], sum64(acc[i]));
            }
        }
        give(&sums, out);
    }

    /// The four sixteens added as everywhere.
    fn sum64(acc: [__m512; 4]) -> __m512 {
        _mm512_add_ps(_mm512_add_ps(acc[0], acc[1]), _mm512_add_ps(acc[2], acc[3]))
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
    out: &mut [Line],
) {
    let mut sums = [[[0.0; LANES]; BLOCK]; N];
    for (r, w) in w.chunks_exact(cols * SIZE).enumerate() {
        let mut acc = [[_mm512_setzero_ps(); 4]; N];
        let w = w.as_chunks::<SIZE>().0;
        let (whole, tail) = w.as_chunks::<WIDE>();
        let mut last = [[0; SIZE]; WIDE];
        last[..tail.len()].copy_from_slice(tail);
        let chunks = whole.iter().chain((!tail.is_empty()).then_some(&last));
        for (c, w) in chunks.enumerate() {
            // One row alone a Zen 4 reads as fast as memory gives.
            if N > 1 || !AMD.load(Ordering::Relaxed) {
                ask::<SIZE>(w.as_ptr().cast());
            }
            let w = w.as_chunks::<16>().0;
            let w = [load(&w[0]), load(&w[1]), load(&w[2]), load(&w[3])];
            for i in 0..N {
                let x = x.row(first + i).as_chunks::<16>().0[4 * c..].first_chunk::<4>().expect("padded rows");
                for j in 0..4 {
                    acc[i][j] = _mm512_fmadd_ps(w[j], floats(&x[j]), acc[i][j]);
                }
            }
        }
        for i in 0..N {
            put(&mut sums[i][r], sum64(acc[i]));
        }
    }
    give(&sums, out);
}
