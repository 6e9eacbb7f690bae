//! The one product everything here is made of, behind a safe function.
#![allow(unsafe_code, reason = "the gemm crate's entry point takes raw pointers")]

use gemm::Parallelism;

/// A row-major matrix inside a slice: row `i` starts at `i * stride`.
#[derive(Clone, Copy)]
pub(crate) struct View<'a> {
    pub data: &'a [f32],
    pub rows: usize,
    pub cols: usize,
    pub stride: usize,
}

impl<'a> View<'a> {
    /// Rows one after the other.
    pub(crate) fn dense(data: &'a [f32], cols: usize) -> Self {
        Self { data, rows: data.len().checked_div(cols).unwrap_or(0), cols, stride: cols }
    }
}

/// How a product is spread.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Spread {
    /// On the calling thread.
    One,
    /// On the rayon pool of the calling thread, if the product is large enough.
    Pool,
}

/// Multiplications below which a product stays on its thread: about 0.2 ms, many times what waking others costs.
const SPREAD_WORK: usize = 1 << 23;

/// The second factor of a product.
#[derive(Clone, Copy)]
pub(crate) enum Factor<'a> {
    /// `W [n, k]`, used as its transpose.
    Transposed(View<'a>),
    /// `B [k, n]`, used as it is.
    Plain(View<'a>),
}

/// `out[i, j] = keep * out[i, j] + scale * sum_k a[i, k] * b[k, j]`, where `keep` is 0 or 1.
///
/// `a` is `[m, k]`; `out` holds `m` rows of `n` values, row `i` at `i * out_stride`. Sums are f32.
///
/// # Panics
///
/// If a shape does not fit its slice or the shapes do not fit each other.
pub(crate) fn product(
    a: View<'_>,
    b: Factor<'_>,
    scale: f32,
    keep: bool,
    out: &mut [f32],
    out_stride: usize,
    spread: Spread,
) {
    let (m, k) = (a.rows, a.cols);
    let (b, n, depth, across, down) = match b {
        Factor::Transposed(w) => (w, w.rows, w.cols, w.stride, 1),
        Factor::Plain(w) => (w, w.cols, w.rows, 1, w.stride),
    };
    assert_eq!(k, depth, "inner sides of a product");
    let inside = |len: usize, rows: usize, cols: usize, stride: usize| {
        rows == 0
            || cols == 0
            || (rows - 1).checked_mul(stride).and_then(|x| x.checked_add(cols)).is_some_and(|end| end <= len)
    };
    assert!(inside(a.data.len(), a.rows, a.cols, a.stride), "first factor inside its slice");
    assert!(inside(b.data.len(), b.rows, b.cols, b.stride), "second factor inside its slice");
    assert!(inside(out.len(), m, n, out_stride) && out_stride >= n, "product inside its slice, rows apart");
    if m == 0 || n == 0 {
        return;
    }
    let parallelism = match spread {
        Spread::One => Parallelism::None,
        Spread::Pool if m.saturating_mul(n).saturating_mul(k) < SPREAD_WORK => Parallelism::None,
        Spread::Pool => match rayon::current_num_threads() {
            0 | 1 => Parallelism::None,
            threads => Parallelism::Rayon(threads),
        },
    };
    // SAFETY: the three assertions above keep every element of the m x k, k x n and m x n index
    // ranges inside its slice, `out` is borrowed exclusively and its rows do not overlap.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            out.as_mut_ptr(),
            1,
            out_stride as isize,
            keep,
            a.data.as_ptr(),
            1,
            a.stride as isize,
            b.data.as_ptr(),
            across as isize,
            down as isize,
            1.0,
            scale,
            false,
            false,
            false,
            parallelism,
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values that are exact in f32 sums, so that order does not matter.
    fn fill(len: usize, seed: usize) -> Vec<f32> {
        (0..len).map(|i| ((i * 7 + seed * 13) % 17) as f32 - 8.0).collect()
    }

    #[test]
    fn product_equals_loops() {
        for (m, n, k) in
            [(1, 1, 1), (3, 5, 7), (17, 33, 65), (8, 1, 300), (1, 70, 129), (130, 260, 257), (40, 64, 0), (0, 3, 4)]
        {
            for keep in [false, true] {
                for spread in [Spread::One, Spread::Pool] {
                    let (sa, sb, so) = (k + 3, k + 1, n + 2);
                    let a = fill(m * sa, 1);
                    let w = fill(n * sb, 2);
                    let start = fill(m * so, 3);
                    let mut out = start.clone();
                    let view = |data, rows, cols, stride| View { data, rows, cols, stride };
                    let factor = Factor::Transposed(view(&w, n, k, sb));
                    product(view(&a, m, k, sa), factor, 0.5, keep, &mut out, so, spread);
                    for i in 0..m {
                        for j in 0..so {
                            let was = start[i * so + j];
                            let sum: f32 = (0..k).map(|c| a[i * sa + c] * w[j.min(n - 1) * sb + c]).sum();
                            let want = if j >= n { was } else { f32::from(u8::from(keep)) * was + 0.5 * sum };
                            assert_eq!(out[i * so + j], want, "{m} {n} {k} at {i} {j}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn plain_factor_is_not_transposed() {
        let (a, b) = (fill(6 * 5, 4), fill(5 * 9, 5));
        let mut out = vec![f32::NAN; 6 * 9];
        product(View::dense(&a, 5), Factor::Plain(View::dense(&b, 9)), 1.0, false, &mut out, 9, Spread::One);
        for i in 0..6 {
            for j in 0..9 {
                let want: f32 = (0..5).map(|c| a[i * 5 + c] * b[c * 9 + j]).sum();
                assert_eq!(out[i * 9 + j], want);
            }
        }
    }

    #[test]
    #[should_panic(expected = "first factor inside its slice")]
    fn a_short_slice_is_refused() {
        let view = View { data: &[0.0; 5], rows: 2, cols: 3, stride: 3 };
        product(view, Factor::Plain(View::dense(&[0.0; 3], 1)), 1.0, false, &mut [0.0; 2], 1, Spread::One);
    }
}
