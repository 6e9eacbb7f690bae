//! The kernels for any processor: the bodies as the target's own baseline compiles them.

use super::body;
use super::input::{Codes, Floats, GROUP, Stretch, quantize_body};
use super::set::{Line, Set, by_rows};
use crate::host::attention::attend_body;
use crate::host::mamba::{convolve_body, scan_body};
use crate::host::math;
use crate::host::norm::gated_groups;

pub(super) static SET: Set = Set {
    quantize,
    scales,
    q8_codes,
    q4_codes,
    q8_floats,
    q4_floats,
    f32: exact32,
    f16: exact16,
    bf16: brain16,
    dots: body::dots,
    scan: scan_body,
    convolve: convolve_body,
    gate: gated_groups,
    attend: attend_body,
};

fn quantize(x: &mut [f32], fields: Option<&[u8]>, split: Option<usize>, to: &mut [Stretch]) {
    quantize_body(x, fields, split, to);
}

fn scales(ladders: &[u8], codes: &[u8], groups: usize, out: &mut [f32]) {
    body::scales(ladders, codes, groups, out);
}

fn q8_codes(w: &[i8], cols: usize, x: &Codes, first: usize, out: &mut [Line]) {
    body::q8_codes(w, cols, x, first, out);
}

fn q4_codes(w: &[u8], groups: usize, ladders: &[u8], codes: &[u8], x: &Codes, first: usize, out: &mut [Line]) {
    body::q4_codes(w, groups, ladders, codes, x, first, out);
}

fn q8_floats(w: &[i8], cols: usize, x: &Floats, first: usize, out: &mut [Line]) {
    let load = body::elements(bytemuck::cast_slice(w), cols, |[w]: [u8; 1]| f32::from(w as i8));
    by_rows!(out.len(), N => body::floats::<N, false>(w.len() / cols, cols, load, x, first, out));
}

fn q4_floats(w: &[u8], groups: usize, scales: &[f32], x: &Floats, first: usize, out: &mut [Line]) {
    let load = body::nibbles(w, groups, scales);
    by_rows!(out.len(), N => body::floats::<N, false>(w.len() / (groups * 16), groups * GROUP, load, x, first, out));
}

fn exact32(w: &[u8], cols: usize, x: &Floats, first: usize, out: &mut [Line]) {
    let load = body::elements(w, cols, f32::from_le_bytes);
    by_rows!(out.len(), N => body::floats::<N, false>(w.len() / (cols * 4), cols, load, x, first, out));
}

fn exact16(w: &[u8], cols: usize, x: &Floats, first: usize, out: &mut [Line]) {
    let load = body::elements(w, cols, |w| math::half(u16::from_le_bytes(w)));
    by_rows!(out.len(), N => body::floats::<N, false>(w.len() / (cols * 2), cols, load, x, first, out));
}

fn brain16(w: &[u8], cols: usize, x: &Floats, first: usize, out: &mut [Line]) {
    let load = body::elements(w, cols, |w| f32::from_bits(u32::from(u16::from_le_bytes(w)) << 16));
    by_rows!(out.len(), N => body::floats::<N, false>(w.len() / (cols * 2), cols, load, x, first, out));
}
