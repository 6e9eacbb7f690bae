//! How deep to draft, and when not to (`runtime.md` §6).
//!
//! A round at depth d gives `1 + a + a² + … + a^d` ids on average, `a` being
//! the share of drafts that stand, and takes a measured time. The depth with
//! the most ids a second wins. Depths that were never run are guessed from
//! their neighbours; plain decode is measured too, at the start and then now
//! and again. When no depth pays, drafting stops, and is tried again after a
//! pause that doubles each time it did not pay.

use std::time::Duration;

/// Deepest draft (`runtime.md` §6).
pub const DEPTH_MAX: usize = 4;

/// Flights that measure something before it is believed.
const TRIAL: u32 = 3;

/// First pause, in flights.
const PAUSE: u32 = 32;

/// Longest pause, in flights.
const PAUSE_MAX: u32 = 1024;

/// A change must win by this factor, so that noise changes nothing.
const MARGIN: f64 = 1.03;

/// Weight of a new measurement.
const LEARN: f64 = 0.2;

/// Share of the plain step's time that each further row is guessed to cost.
const ROW_GUESS: f64 = 0.2;

#[derive(Clone, Copy, Debug, Default)]
struct Cost {
    /// Seconds a batch.
    seconds: f64,
    flights: u32,
}

/// One session's drafting. Starts at depth one.
#[derive(Clone, Debug)]
pub struct Drafts {
    depth_max: usize,
    depth: usize,
    /// Share of drafts that stand, of those whose predecessors did.
    accepted: f64,
    /// By depth, 0 being plain decode.
    cost: [Cost; DEPTH_MAX + 1],
    /// Flights until something else is tried.
    until: u32,
    pause: u32,
    /// The depth to go back to after a trial.
    home: usize,
}

/// One flight's outcome.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FlightOutcome {
    /// Drafts a batch; 0 for plain steps.
    pub depth: usize,
    /// Batches.
    pub batches: u32,
    /// Drafts verified.
    pub offered: u32,
    /// Drafts that stood.
    pub kept: u32,
    /// Batches in which a draft was refused.
    pub refused: u32,
    /// What the flight took on the device.
    pub busy: Duration,
}

impl Drafts {
    /// Depths up to `depth_max`; 0 never drafts.
    #[must_use]
    pub fn new(depth_max: usize) -> Self {
        let depth_max = depth_max.min(DEPTH_MAX);
        Self {
            depth_max,
            depth: depth_max.min(1),
            accepted: 0.7,
            cost: [Cost::default(); DEPTH_MAX + 1],
            until: TRIAL,
            pause: PAUSE,
            home: depth_max.min(1),
        }
    }

    /// The depth of the next flight; 0 is plain decode.
    #[must_use]
    pub fn depth(&self) -> usize {
        self.depth
    }

    /// Share of drafts that stand, as observed lately.
    #[must_use]
    pub fn accepted(&self) -> f64 {
        self.accepted
    }

    /// A flight has landed whole. Returns the depth from here on.
    pub fn landed(&mut self, outcome: FlightOutcome) -> usize {
        if self.depth_max == 0 || outcome.batches == 0 {
            return self.depth;
        }
        let tried = outcome.kept + outcome.refused;
        if tried > 0 {
            let share = f64::from(outcome.kept) / f64::from(tried);
            let weight = 1.0 - (1.0 - LEARN / 2.0).powi(tried.min(64) as i32);
            self.accepted += weight * (share - self.accepted);
        }
        let cost = &mut self.cost[outcome.depth.min(DEPTH_MAX)];
        let seconds = outcome.busy.as_secs_f64() / f64::from(outcome.batches);
        if cost.flights == 0 {
            cost.seconds = seconds;
        } else if cost.flights < TRIAL {
            // the first of its kind waits for other things too: of a trial the fastest counts
            cost.seconds = cost.seconds.min(seconds);
        } else {
            cost.seconds += LEARN * (seconds - cost.seconds);
        }
        cost.flights = cost.flights.saturating_add(1);

        self.until = self.until.saturating_sub(1);
        if self.until == 0 {
            self.choose();
        }
        self.depth
    }

    /// Ids of a batch at this depth, on average.
    fn ids(&self, depth: usize) -> f64 {
        (0..=depth as i32).map(|i| self.accepted.powi(i)).sum()
    }

    /// Seconds of a batch at this depth: measured, or guessed from the nearest measured depth.
    fn seconds(&self, depth: usize) -> Option<f64> {
        let measured = |d: usize| (self.cost[d].flights > 0).then_some(self.cost[d].seconds);
        measured(depth).or_else(|| {
            let nearest = (0..=DEPTH_MAX).filter(|d| measured(*d).is_some()).min_by_key(|d| d.abs_diff(depth))?;
            let rows = |d: usize| 1.0 + ROW_GUESS * d as f64;
            Some(measured(nearest)? * rows(depth) / rows(nearest))
        })
    }

    fn choose(&mut self) {
        let rate = |d: usize| self.seconds(d).filter(|s| *s > 0.0).map_or(0.0, |s| self.ids(d) / s);
        let mut best = self.home;
        for depth in 0..=self.depth_max {
            if rate(depth) > rate(best) * if best == self.home { MARGIN } else { 1.0 } {
                best = depth;
            }
        }
        let untried = self.cost[best].flights == 0;
        if self.cost[0].flights == 0 {
            // Plain decode has to be known to tell whether drafts pay.
            self.depth = 0;
            self.until = TRIAL;
            return;
        }
        let was = self.home;
        self.home = best;
        self.depth = best;
        self.until = if untried { TRIAL } else { self.pause };
        if best == 0 {
            if was == 0 {
                // The pause is over: one round of drafts again, at the smallest depth.
                self.depth = 1;
                self.until = TRIAL;
                self.cost[1] = Cost::default();
                self.home = 1;
                self.pause = (self.pause * 2).min(PAUSE_MAX);
            }
        } else if was == best {
            self.pause = PAUSE;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs flights of 16 batches; `a` drafts stand, a batch takes `cost(depth)` seconds. Returns the depths used.
    fn simulate(drafts: &mut Drafts, flights: usize, a: f64, cost: impl Fn(usize) -> f64) -> Vec<usize> {
        let mut draw = 1u64;
        let mut depths = Vec::new();
        for _ in 0..flights {
            let depth = drafts.depth();
            let (mut kept, mut refused) = (0, 0);
            for _ in 0..16 {
                for _ in 0..depth {
                    draw = draw.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                    if (draw >> 11) as f64 / (1u64 << 53) as f64 >= a {
                        refused += 1;
                        break;
                    }
                    kept += 1;
                }
            }
            let offered = 16 * depth as u32;
            let busy = Duration::from_secs_f64(16.0 * cost(depth));
            drafts.landed(FlightOutcome { depth, batches: 16, offered, kept, refused, busy });
            depths.push(depth);
        }
        depths
    }

    /// The first flight of each depth takes three times as long as the others: what is chosen is still what pays.
    #[test]
    fn the_first_flight_of_a_depth_says_little() {
        let mut drafts = Drafts::new(4);
        let (mut seen, mut depths) = ([0; 5], Vec::new());
        for _ in 0..200 {
            let depth = drafts.depth();
            let batch = [2.06, 3.27, 4.60, 5.90, 7.20][depth];
            let batch = if seen[depth] == 0 { 3.0 * batch } else { batch };
            seen[depth] += 1;
            depths.extend(simulate(&mut drafts, 1, 0.73, |_| 1e-3 * batch));
        }
        assert!(share(&depths, |d| d == 1) > 0.8, "{depths:?}");
    }

    fn share(depths: &[usize], of: impl Fn(usize) -> bool) -> f64 {
        depths.iter().filter(|d| of(**d)).count() as f64 / depths.len() as f64
    }

    #[test]
    fn cheap_drafts_that_stand_go_deep() {
        let mut drafts = Drafts::new(4);
        let depths = simulate(&mut drafts, 400, 0.95, |d| 1e-3 * (1.0 + 0.1 * d as f64));
        assert!(share(&depths[100..], |d| d == 4) > 0.8, "{depths:?}");
        assert!(drafts.accepted() > 0.85);
    }

    #[test]
    fn useless_drafts_cost_little() {
        let mut drafts = Drafts::new(4);
        let depths = simulate(&mut drafts, 2000, 0.0, |d| 1e-3 * (1.0 + 0.3 * d as f64));
        assert!(share(&depths[500..], |d| d > 0) < 0.03, "{}", share(&depths[500..], |d| d > 0));
        assert!(share(&depths[100..], |d| d > 0) > 0.0, "they are tried again");
    }

    #[test]
    fn drafts_that_begin_to_pay_are_found() {
        let mut drafts = Drafts::new(2);
        simulate(&mut drafts, 200, 0.0, |d| 1e-3 * (1.0 + 0.3 * d as f64));
        assert_eq!(drafts.home, 0);
        let depths = simulate(&mut drafts, 3000, 0.9, |d| 1e-3 * (1.0 + 0.2 * d as f64));
        assert!(share(&depths[2500..], |d| d > 0) > 0.9, "{depths:?}");
    }

    #[test]
    fn dear_verifies_stay_shallow() {
        let mut drafts = Drafts::new(4);
        // A second row is nearly free, further ones are not.
        let depths = simulate(&mut drafts, 400, 0.7, |d| 1e-3 * [1.0, 1.1, 2.0, 3.0, 4.0][d]);
        assert!(share(&depths[100..], |d| d == 1) > 0.8, "{depths:?}");
    }

    #[test]
    fn without_drafts_nothing_is_tried() {
        let mut drafts = Drafts::new(0);
        assert!(simulate(&mut drafts, 100, 0.9, |_| 1e-3).iter().all(|d| *d == 0));
    }
}
