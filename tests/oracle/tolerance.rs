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
#[allow(dead_code, reason = "the plain decoder evaluates the ladder as the reference does")]
pub(crate) const F32_OTHER_LADDER: Tolerance =
    Tolerance { rows: 1e-5, states: 1e-5, draft: 1e-5, weights: 2e-5, margin: 2.6e-4, router_gap: 2.6e-5 };
