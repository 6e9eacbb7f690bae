//! Which expert goes into which place, as decode goes on (`runtime.md` §5).
//!
//! One pool a layer. Two policies share the bookkeeping: the specification's
//! own ([`Policy::Baseline`]), and recency with decayed frequency
//! ([`Policy::RecencyFrequency`]), which keeps what was used in the last few
//! positions and otherwise compares counts of a longer memory.

use crate::ids::{ExpertIx, LayerIx, PlaceIx};

/// How experts are valued.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Policy {
    /// Scores decay by 0.98 a position and count routings, a miss adds four; an expert moves in if it beats the worst
    /// resident by half again plus one.
    Baseline,
    /// Scores decay by 0.995 and count routings, a miss adds half of one; what was used within eight positions is worth
    /// half a routing more; an expert moves in if it beats the least valuable resident by a tenth. The constants are those
    /// that replay best (`docs/partial-banks.md`).
    #[default]
    RecencyFrequency,
}

/// What the policy is told to keep to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdmissionOptions {
    /// How experts are valued.
    pub policy: Policy,
    /// Positions that pay for one upload (`CMF_NEMO_ADMIT`).
    pub positions_per_upload: u32,
    /// Uploads under way at most.
    pub at_a_time: usize,
    /// Uploads a layer after a prefill.
    pub after_prefill: usize,
}

impl Default for AdmissionOptions {
    fn default() -> Self {
        Self { policy: Policy::default(), positions_per_upload: 4, at_a_time: 8, after_prefill: 2 }
    }
}

/// An expert that shall move in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Move {
    /// The layer.
    pub layer: LayerIx,
    /// Who moves in.
    pub expert: ExpertIx,
    /// Where.
    pub place: PlaceIx,
}

/// Recency counts within this many positions.
const RECENT: f64 = 8.0;

/// Scores above this are scaled down, so that floats never overflow.
const RESCALE: f64 = 1e100;

#[derive(Clone, Debug)]
struct Pool {
    /// Routings, each weighed by the decay's inverse at its time: comparing needs no pass over all.
    score: Vec<f64>,
    /// Position of the last routing.
    used: Vec<f64>,
    owner: Vec<Option<ExpertIx>>,
    /// Place of each expert, moving ones included.
    place: Vec<Option<PlaceIx>>,
    /// A move into the place is under way.
    moving: Vec<bool>,
}

/// Expert scores and the owner of every place.
#[derive(Clone, Debug)]
pub struct Admission {
    options: AdmissionOptions,
    pools: Vec<Pool>,
    /// Positions seen.
    now: f64,
    /// What one routing weighs now, in scores' units.
    unit: f64,
    /// Positions not yet spent on uploads.
    credit: f64,
    /// Uploads that a prefill allows, by layer.
    bonus: Vec<usize>,
    moving: usize,
}

impl Admission {
    /// Banks as they are at the start: `residents[layer][place]`, `experts` a layer.
    #[must_use]
    pub fn new(options: AdmissionOptions, residents: &[Vec<Option<ExpertIx>>], experts: usize) -> Self {
        let pool = |places: &Vec<Option<ExpertIx>>| {
            let mut place = vec![None; experts];
            for (at, expert) in places.iter().enumerate() {
                if let Some(expert) = expert {
                    place[expert.index()] = Some(PlaceIx::from(at));
                }
            }
            Pool {
                score: vec![0.0; experts],
                used: vec![f64::NEG_INFINITY; experts],
                owner: places.clone(),
                place,
                moving: vec![false; places.len()],
            }
        };
        Self {
            options,
            pools: residents.iter().map(pool).collect(),
            now: 0.0,
            unit: 1.0,
            credit: 0.0,
            bonus: vec![0; residents.len()],
            moving: 0,
        }
    }

    /// `routed[layer][expert]` routings over `positions` positions; a `prefill` earns each layer its uploads at once.
    pub fn routed(&mut self, positions: u32, routed: &[Vec<u32>], prefill: bool) {
        let decay: f64 = match self.options.policy {
            Policy::Baseline => 0.98,
            Policy::RecencyFrequency => 0.995,
        };
        if prefill {
            self.bonus.fill(self.options.after_prefill);
        } else {
            self.now += f64::from(positions);
            self.unit /= decay.powi(i32::try_from(positions).unwrap_or(i32::MAX));
            self.credit += f64::from(positions) / f64::from(self.options.positions_per_upload.max(1));
            self.credit = self.credit.min(self.options.at_a_time as f64);
        }
        // A long prompt counts as a few positions: it shows what is popular, not how often to come.
        let weight = if prefill { RECENT / f64::from(positions.max(1)) } else { 1.0 };
        for (pool, counts) in self.pools.iter_mut().zip(routed) {
            for (expert, &n) in counts.iter().enumerate().filter(|(_, n)| **n > 0) {
                pool.score[expert] += self.unit * weight.min(1.0) * f64::from(n);
                pool.used[expert] = self.now;
            }
        }
        if self.unit > RESCALE {
            self.pools.iter_mut().flat_map(|pool| &mut pool.score).for_each(|score| *score /= self.unit);
            self.unit = 1.0;
        }
    }

    /// These experts missed.
    pub fn missed(&mut self, layer: LayerIx, experts: impl IntoIterator<Item = ExpertIx>) {
        let worth = match self.options.policy {
            Policy::Baseline => 4.0,
            Policy::RecencyFrequency => 0.5,
        };
        let pool = &mut self.pools[layer.index()];
        experts.into_iter().for_each(|expert| pool.score[expert.index()] += worth * self.unit);
    }

    /// Moves to begin now, each with who had its place. Each is answered by [`placed`](Self::placed) or
    /// [`refused`](Self::refused).
    pub fn decide(&mut self) -> Vec<(Move, Option<ExpertIx>)> {
        let mut moves = Vec::new();
        for layer in 0..self.pools.len() {
            while self.bonus[layer] > 0 && self.moving < self.options.at_a_time {
                let Some((_, found)) = self.best(layer) else {
                    self.bonus[layer] = 0;
                    break;
                };
                self.bonus[layer] -= 1;
                moves.push((found, self.begin(found)));
            }
        }
        while self.credit >= 1.0 && self.moving < self.options.at_a_time {
            let all = (0..self.pools.len()).filter_map(|layer| self.best(layer));
            let Some((_, found)) = all.max_by(|a, b| a.0.total_cmp(&b.0).then(b.1.layer.cmp(&a.1.layer))) else {
                break;
            };
            self.credit -= 1.0;
            moves.push((found, self.begin(found)));
        }
        moves
    }

    /// The upload was queued: the place is the expert's.
    pub fn placed(&mut self, done: Move) {
        self.pools[done.layer.index()].moving[done.place.index()] = false;
        self.moving -= 1;
    }

    /// The move did not happen: the place is again whose it was.
    pub fn refused(&mut self, failed: Move, before: Option<ExpertIx>) {
        self.placed(failed);
        let pool = &mut self.pools[failed.layer.index()];
        pool.place[failed.expert.index()] = None;
        pool.owner[failed.place.index()] = before;
        if let Some(before) = before {
            pool.place[before.index()] = Some(failed.place);
        }
    }

    /// Who has the place, or will have it once its move is done.
    #[must_use]
    pub fn owner(&self, layer: LayerIx, place: PlaceIx) -> Option<ExpertIx> {
        self.pools[layer.index()].owner[place.index()]
    }

    /// Whether the expert is in its layer's bank.
    #[must_use]
    pub fn is_resident(&self, layer: LayerIx, expert: ExpertIx) -> bool {
        self.pools[layer.index()].place[expert.index()].is_some()
    }

    fn begin(&mut self, found: Move) -> Option<ExpertIx> {
        let pool = &mut self.pools[found.layer.index()];
        let before = pool.owner[found.place.index()].replace(found.expert);
        if let Some(out) = before {
            pool.place[out.index()] = None;
        }
        pool.place[found.expert.index()] = Some(found.place);
        pool.moving[found.place.index()] = true;
        self.moving += 1;
        before
    }

    /// The layer's best move and by how much it wins, in routings.
    fn best(&self, layer: usize) -> Option<(f64, Move)> {
        let pool = &self.pools[layer];
        let value = |e: usize| {
            let recent = self.options.policy == Policy::RecencyFrequency && self.now - pool.used[e] < RECENT;
            pool.score[e] / self.unit + if recent { 0.5 } else { 0.0 }
        };
        let absent = (0..pool.score.len()).filter(|&e| pool.place[e].is_none());
        let (expert, score) =
            absent.map(|e| (e, pool.score[e] / self.unit)).max_by(|a, b| a.1.total_cmp(&b.1).then(b.0.cmp(&a.0)))?;
        let places = (0..pool.owner.len()).filter(|&p| !pool.moving[p]);
        let (place, worst) = places
            .map(|p| (p, pool.owner[p].map_or(f64::NEG_INFINITY, |e| value(e.index()))))
            .min_by(|a, b| a.1.total_cmp(&b.1).then(a.0.cmp(&b.0)))?;
        let wins = match self.options.policy {
            _ if worst == f64::NEG_INFINITY => score > 0.0,
            Policy::Baseline => score > 1.5 * worst + 1.0,
            Policy::RecencyFrequency => score > 1.1 * worst,
        };
        let found = Move { layer: LayerIx::from(layer), expert: ExpertIx::from(expert), place: PlaceIx::from(place) };
        wins.then_some((if worst.is_finite() { score - worst } else { score }, found))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const POLICIES: [Policy; 2] = [Policy::Baseline, Policy::RecencyFrequency];

    fn residents(layers: usize, places: usize) -> Vec<Vec<Option<ExpertIx>>> {
        vec![(0..places).map(|p| Some(ExpertIx::from(p))).collect(); layers]
    }

    fn one(policy: Policy) -> Admission {
        let options = AdmissionOptions { policy, positions_per_upload: 1, ..AdmissionOptions::default() };
        Admission::new(options, &residents(1, 2), 4)
    }

    #[test]
    fn nothing_moves_before_an_expert_earns_it() {
        for policy in POLICIES {
            let mut admission = one(policy);
            assert!(admission.decide().is_empty());
            admission.routed(1, &[vec![1, 1, 0, 0]], false);
            assert!(admission.decide().is_empty(), "{policy:?}");
        }
    }

    #[test]
    fn the_best_absent_takes_the_worst_place() {
        for policy in POLICIES {
            let mut admission = one(policy);
            for _ in 0..20 {
                admission.routed(1, &[vec![1, 0, 0, 1]], false);
                admission.missed(LayerIx(0), [ExpertIx(3)]);
            }
            let found = admission.decide();
            let want = Move { layer: LayerIx(0), expert: ExpertIx(3), place: PlaceIx(1) };
            assert_eq!(found, [(want, Some(ExpertIx(1)))], "{policy:?}");
            assert!(!admission.is_resident(LayerIx(0), ExpertIx(1)));
            admission.placed(want);
            assert_eq!(admission.owner(LayerIx(0), PlaceIx(1)), Some(ExpertIx(3)));
        }
    }

    #[test]
    fn a_refused_move_leaves_all_as_it_was() {
        let mut admission = one(Policy::Baseline);
        admission.routed(1, &[vec![0, 0, 9, 0]], false);
        let (found, before) = admission.decide()[0];
        assert_eq!((found.place, before), (PlaceIx(0), Some(ExpertIx(0))));
        admission.refused(found, before);
        assert_eq!(admission.owner(LayerIx(0), found.place), before);
        assert!(admission.is_resident(LayerIx(0), ExpertIx(0)) && !admission.is_resident(LayerIx(0), ExpertIx(2)));
    }

    #[test]
    fn uploads_are_paid_for_by_positions_and_bounded() {
        let options = AdmissionOptions { positions_per_upload: 4, at_a_time: 3, ..AdmissionOptions::default() };
        let mut admission = Admission::new(options, &residents(5, 2), 8);
        let routed = vec![vec![0, 0, 5, 5, 5, 0, 0, 0]; 5];
        admission.routed(3, &routed, false);
        assert!(admission.decide().is_empty(), "three positions pay for nothing");
        admission.routed(1, &routed, false);
        assert_eq!(admission.decide().len(), 1);
        admission.routed(400, &routed, false);
        assert_eq!(admission.decide().len(), 2, "three at a time, one is under way");
    }

    #[test]
    fn a_prefill_earns_two_a_layer() {
        let mut admission = Admission::new(AdmissionOptions::default(), &residents(3, 2), 8);
        admission.routed(100, &vec![vec![0, 0, 50, 60, 70, 0, 0, 0]; 3], true);
        let found = admission.decide();
        assert_eq!(found.len(), 6);
        assert!(found.iter().all(|(m, _)| m.expert == ExpertIx(4) || m.expert == ExpertIx(3)));
        assert!(admission.decide().is_empty());
    }

    #[test]
    fn an_empty_place_is_taken_first() {
        let mut admission = Admission::new(
            AdmissionOptions { positions_per_upload: 1, ..AdmissionOptions::default() },
            &[vec![Some(ExpertIx(0)), None]],
            3,
        );
        admission.routed(1, &[vec![0, 1, 0]], false);
        let want = Move { layer: LayerIx(0), expert: ExpertIx(1), place: PlaceIx(1) };
        assert_eq!(admission.decide(), [(want, None)]);
    }

    #[test]
    fn scores_stay_finite_over_a_long_run() {
        for policy in POLICIES {
            let mut admission = one(policy);
            for _ in 0..200 {
                admission.routed(1000, &[vec![3, 1, 0, 2]], false);
                admission.missed(LayerIx(0), [ExpertIx(3)]);
                for (m, _) in admission.decide() {
                    admission.placed(m);
                }
            }
            assert!(admission.pools[0].score.iter().all(|s| s.is_finite()), "{policy:?}");
            assert!(admission.is_resident(LayerIx(0), ExpertIx(3)));
        }
    }
}
