//! How far an engine may be from a reference, each figure with its reason.

/// Bounds for one arithmetic. All are relative to the largest magnitude of the reference tensor they are compared
/// with ("the peak"), except where said otherwise.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tolerance {
    /// Residual rows, normed rows, router logits and logits.
    pub(crate) rows: f32,
    /// Conv rings, scan states, keys and values.
    pub(crate) states: f32,
    /// Rows of the draft layer, which read the decoder's rows.
    pub(crate) draft: f32,
    /// Router weights, absolute; they sum to the routed scale, 2.5 in every case.
    pub(crate) weights: f32,
    /// A different id is excused where the reference's best logit leads by less, absolute.
    pub(crate) margin: f32,
    /// A different expert is excused where the reference's router gap is smaller, absolute; and so is an id behind it.
    pub(crate) router_gap: f32,
}

/// f32 activations, f32 or f64 sums, any order.
///
/// The references are f32 themselves: transformers is 1.4e-6 of the peak from its own float64 evaluation in the rows,
/// 1.2e-6 in the logits and 1.7e-6 in the states (`case.json`, `agreement`). Another f32 evaluation in another order
/// is as far on the other side, and the largest of thousands of values lies above the typical case: hence three times
/// the figure. A logit of 13 may so be off by 6.5e-5 and a margin, the difference of two, by 1.3e-4; selection scores
/// are sigmoids of router logits of up to 5, whose slope is at most 1/4, and a gap is the difference of two.
pub(crate) const F32: Tolerance =
    Tolerance { rows: 5e-6, states: 5e-6, draft: 1e-5, weights: 1e-5, margin: 1.3e-4, router_gap: 1.3e-5 };

/// f32 activations over a q4tp file, for an engine that evaluates the ladder as `exp2(lo + code * step)`.
///
/// A scale is then up to 5e-6 from the reference's (`runtime.md` §3a). With the plain decoder's ladder evaluated that
/// way the peer's q4tp files came out at most 3.1e-6 of the peak apart in rows and logits, 2.3e-6 in states, 2.6e-6
/// in draft rows, instead of 1.9e-6; three times that, as above.
pub(crate) const F32_OTHER_LADDER: Tolerance =
    Tolerance { rows: 1e-5, states: 1e-5, draft: 1e-5, weights: 2e-5, margin: 2.6e-4, router_gap: 2.6e-5 };

/// int8 activations against f32 ones, one block at a time: the error of the arithmetic itself.
///
/// A code is within half a step of its value and a step is 1/127 of the largest of 32, 0.4 % at most each; sums of many
/// such errors stay near that. Measured on the peer's q4tp files: 1.1e-2 of the peak in rows, 9.2e-3 in states; three
/// times that. The router is never quantised.
pub(crate) const INT8_ERROR: Tolerance = Tolerance { rows: 3e-2, states: 3e-2, draft: 3e-2, ..F32 };

/// int8 activations against the plain decoder's int8, one block at a time from the same rows.
///
/// Rounding elsewhere moves a code at a rounding edge by one step now and then. With the rows nudged by up to four units
/// in the last place: 9.6e-4 of the peak in rows, 7.9e-4 in states; three times that. The router is never quantised.
pub(crate) const INT8_BLOCK: Tolerance = Tolerance { rows: 3e-3, states: 3e-3, draft: 3e-3, ..F32 };

/// int8 activations against the plain decoder's int8 over whole passes: what excuses an id there. Rows are not compared.
///
/// A moved code at the bottom moves more codes above it, and in these small random models an expert somewhere, so that
/// two right engines come to lie as far apart as int8 lies from f32. Nudged as above, before the first other expert:
/// logits 2.1e-2 of the peak, margins 0.13, and two chosen experts 0.022 apart changed order; about three times that.
/// How many ids may so differ is bounded besides ([`INT8_EXCUSED_MAX`]).
pub(crate) const INT8: Tolerance = Tolerance { margin: 0.4, router_gap: 0.05, ..INT8_BLOCK };

/// Largest share of ids that may be excused in int8: wrong arithmetic changes most of them.
pub(crate) const INT8_EXCUSED_MAX: f32 = 0.25;
