//! Admission replayed over a routing trace: what a bank of some size would have missed, moved and cost.
//!
//! Positions are decoded in flights: routes are counted and misses told when a
//! flight has landed, moves begin then, and take hold one flight later, as on
//! a device. A prompt is one pass as wide as [`ReplayOptions::pass_rows`], in
//! which each missing expert of a layer counts once.

use crate::ids::{ExpertIx, LayerIx};
use crate::policy::admission::{Admission, AdmissionOptions, Move};
use crate::policy::routes::{Routes, RoutesOf};

/// What to replay with.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ReplayOptions {
    /// The policy and what it keeps to; `None` never moves an expert.
    pub admission: Option<AdmissionOptions>,
    /// Positions of a flight.
    pub flight: usize,
    /// Rows of a prefill pass.
    pub pass_rows: usize,
}

impl Default for ReplayOptions {
    fn default() -> Self {
        Self { admission: Some(AdmissionOptions::default()), flight: 4, pass_rows: 512 }
    }
}

/// What one machine needs for a step, in microseconds (`partial_bank_model.py` of the specification: one H200 and its
/// host with the 30B model, measured).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepCosts {
    /// A layer of experts with the Mamba block before it.
    pub layer_us: f64,
    /// The part of it that runs beside the host's completion.
    pub overlap_us: f64,
    /// Attention, for each layer of experts: six blocks for 23 of them.
    pub attention_us: f64,
    /// The head.
    pub head_us: f64,
    /// From the miss to the host and back.
    pub stop_us: f64,
    /// Bytes of experts the host reads in a microsecond.
    pub host_bytes_per_us: f64,
}

impl Default for StepCosts {
    fn default() -> Self {
        Self {
            layer_us: 19.5 + 22.5,
            overlap_us: 22.5,
            attention_us: 6.0 * 18.0 / 23.0,
            head_us: 92.0,
            stop_us: 93.0,
            host_bytes_per_us: 70e3,
        }
    }
}

/// What came of it. All figures are of decoded positions unless they say otherwise.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Replayed {
    /// Positions decoded.
    pub positions: usize,
    /// Routes, `positions * layers * top_k`.
    pub routes: u64,
    /// Routes whose expert was not there.
    pub misses: u64,
    /// Layers of a position in which something missed.
    pub stops: u64,
    /// Experts moved in, after prompts too.
    pub uploads: u64,
    /// Experts that a prefill pass missed.
    pub prefill_misses: u64,
    /// Time of all positions by [`StepCosts`].
    pub time_us: f64,
}

impl Replayed {
    /// Share of routes that found their expert.
    #[must_use]
    pub fn hit_rate(&self) -> f64 {
        if self.routes == 0 { 1.0 } else { 1.0 - self.misses as f64 / self.routes as f64 }
    }

    /// Positions a second.
    #[must_use]
    pub fn tokens_per_s(&self) -> f64 {
        if self.time_us > 0.0 { self.positions as f64 * 1e6 / self.time_us } else { 0.0 }
    }

    /// A count for each position decoded.
    #[must_use]
    pub fn per_token(&self, count: u64) -> f64 {
        count as f64 / self.positions.max(1) as f64
    }
}

/// The experts of each layer's places at the start, hottest first: of the trace's own lists, else by index.
#[must_use]
pub fn residents(of: &RoutesOf, places: usize) -> Vec<Vec<Option<ExpertIx>>> {
    let by_index: Vec<ExpertIx> = (0..of.experts).map(ExpertIx::from).collect();
    let layer = |layer: usize| of.hot.get(layer).unwrap_or(&by_index).iter().take(places).copied().map(Some).collect();
    (0..of.layers).map(layer).collect()
}

/// Replays all texts of a trace, one after the other, over a bank that holds `residents[layer][place]` at the start.
#[must_use]
pub fn replay(
    routes: &Routes,
    residents: &[Vec<Option<ExpertIx>>],
    options: &ReplayOptions,
    costs: &StepCosts,
) -> Replayed {
    let of = &routes.of;
    let mut bank = Bank::new(of, residents, options.admission);
    let mut out = Replayed::default();
    for text in &routes.texts {
        let positions: Vec<&[ExpertIx]> = text.by_position(of).collect();
        let (prompt, decoded) = positions.split_at(text.prompt);
        for pass in prompt.chunks(options.pass_rows.max(1)) {
            let missed = bank.run(pass, &mut |_| {});
            out.prefill_misses += missed.len() as u64;
            let last = pass.as_ptr_range().end == prompt.as_ptr_range().end;
            bank.landed(pass, missed, last);
        }
        for flight in decoded.chunks(options.flight.max(1)) {
            let missed = bank.run(flight, &mut |misses: &[usize]| {
                out.positions += 1;
                out.time_us += costs.head_us;
                for &missing in misses {
                    out.misses += missing as u64;
                    out.stops += u64::from(missing > 0);
                    out.time_us += costs.layer_us + costs.attention_us;
                    if missing > 0 {
                        let host = missing as f64 * of.expert_bytes as f64 / costs.host_bytes_per_us;
                        out.time_us += (costs.stop_us + host - costs.overlap_us).max(0.0);
                    }
                }
            });
            bank.landed(flight, missed, false);
        }
    }
    out.routes = (out.positions * of.stride()) as u64;
    out.uploads = bank.uploads;
    out
}

/// The device's bank and who decides about it.
struct Bank<'a> {
    of: &'a RoutesOf,
    /// `[layer][expert]`
    resident: Vec<Vec<bool>>,
    admission: Option<Admission>,
    /// Moves that take hold before the next flight, with who has the place until then.
    moving: Vec<(Move, Option<ExpertIx>)>,
    uploads: u64,
}

impl<'a> Bank<'a> {
    fn new(of: &'a RoutesOf, residents: &[Vec<Option<ExpertIx>>], options: Option<AdmissionOptions>) -> Self {
        let mut resident = vec![vec![false; of.experts]; of.layers];
        for (layer, places) in resident.iter_mut().zip(residents) {
            places.iter().flatten().for_each(|expert| layer[expert.index()] = true);
        }
        let admission = options.map(|options| Admission::new(options, residents, of.experts));
        Self { of, resident, admission, moving: Vec::new(), uploads: 0 }
    }

    /// Runs positions over the bank as it is; tells each position's misses by layer, and returns every expert missed once.
    fn run(&self, positions: &[&[ExpertIx]], each: &mut dyn FnMut(&[usize])) -> Vec<(LayerIx, ExpertIx)> {
        let mut missed = Vec::new();
        for picks in positions {
            let misses = picks.chunks_exact(self.of.top_k).enumerate().map(|(layer, picks)| {
                let absent = picks.iter().filter(|expert| !self.resident[layer][expert.index()]);
                let before = missed.len();
                missed.extend(absent.map(|expert| (LayerIx::from(layer), *expert)));
                missed.len() - before
            });
            let misses: Vec<usize> = misses.collect();
            each(&misses);
        }
        missed.sort_unstable();
        missed.dedup();
        missed
    }

    /// Moves of the flight before take hold; what this one saw begins others. `prefill` ends a prompt.
    fn landed(&mut self, positions: &[&[ExpertIx]], missed: Vec<(LayerIx, ExpertIx)>, prefill: bool) {
        let Some(admission) = &mut self.admission else { return };
        for (done, before) in self.moving.drain(..) {
            let layer = &mut self.resident[done.layer.index()];
            if let Some(before) = before {
                layer[before.index()] = false;
            }
            layer[done.expert.index()] = true;
            admission.placed(done);
        }
        let mut counts = vec![vec![0u32; self.of.experts]; self.of.layers];
        for picks in positions {
            for (counts, picks) in counts.iter_mut().zip(picks.chunks_exact(self.of.top_k)) {
                picks.iter().for_each(|expert| counts[expert.index()] += 1);
            }
        }
        admission.routed(positions.len() as u32, &counts, prefill);
        missed.into_iter().for_each(|(layer, expert)| admission.missed(layer, [expert]));
        self.moving = admission.decide();
        self.uploads += self.moving.len() as u64;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::admission::Policy;
    use crate::policy::routes::RoutedText;

    const POLICIES: [Policy; 2] = [Policy::Baseline, Policy::RecencyFrequency];

    /// A text whose favourites change half-way: experts 0 to 3, then 4 to 7.
    fn drifting() -> Routes {
        let of = RoutesOf { layers: 2, experts: 8, top_k: 2, expert_bytes: 5_205_000, hot: Vec::new() };
        let favourite = |position: usize| if position < 200 { 0 } else { 4 };
        let pick = |i: usize| ExpertIx::from(favourite(i / 4) + (i / 4 * 3 + i % 2 * 2) % 4);
        Routes { of, texts: vec![RoutedText { prompt: 20, picks: (0..400 * 4).map(pick).collect() }] }
    }

    fn options(policy: Option<Policy>) -> ReplayOptions {
        let admission = policy.map(|policy| AdmissionOptions { policy, ..AdmissionOptions::default() });
        ReplayOptions { admission, ..ReplayOptions::default() }
    }

    fn with(routes: &Routes, places: usize, policy: Option<Policy>) -> Replayed {
        replay(routes, &residents(&routes.of, places), &options(policy), &StepCosts::default())
    }

    #[test]
    fn a_full_bank_never_misses_and_a_fixed_one_misses_what_it_lacks() {
        let routes = drifting();
        for policy in [None, Some(Policy::Baseline), Some(Policy::RecencyFrequency)] {
            let full = with(&routes, 8, policy);
            assert_eq!((full.misses, full.stops, full.uploads, full.prefill_misses), (0, 0, 0, 0));
            assert_eq!((full.positions, full.routes, full.hit_rate()), (380, 380 * 4, 1.0));
            let step = 2.0 * (42.0 + 108.0 / 23.0) + 92.0;
            assert!((full.time_us - 380.0 * step).abs() < 1e-6);
        }
        let fixed = with(&routes, 4, None);
        assert_eq!((fixed.misses, fixed.stops, fixed.uploads), (200 * 4, 200 * 2, 0));
        let step = 2.0 * (42.0 + 108.0 / 23.0) + 92.0;
        let stop = 93.0 + 2.0 * 5_205_000.0 / 70e3 - 22.5;
        assert!((fixed.time_us - 380.0 * step - 400.0 * stop).abs() < 1e-6);
    }

    #[test]
    fn policies_follow_what_drifts_and_repeat_themselves() {
        let routes = drifting();
        let fixed = with(&routes, 4, None);
        for policy in POLICIES {
            let moved = with(&routes, 4, Some(policy));
            assert!(moved.misses < fixed.misses / 2, "{policy:?}: {} misses", moved.misses);
            assert!(moved.uploads >= 8 && moved.time_us < fixed.time_us);
            assert_eq!(moved, with(&routes, 4, Some(policy)));
        }
    }

    #[test]
    fn a_prompt_counts_each_missing_expert_of_a_pass_once() {
        let mut routes = drifting();
        routes.texts[0].prompt = 400;
        let seen = with(&routes, 2, None);
        assert_eq!((seen.positions, seen.routes, seen.prefill_misses, seen.hit_rate()), (0, 0, 2 * 6, 1.0));
    }
}
