//! What the times at which ids arrive say of prefill and decode.
//!
//! Ids come in flights: all ids of one arrive together. So the first ids end
//! the prefill and as many steps as there are of them, and what arrives later
//! was made in the time since.

/// Ids closer together than this came in one flight, unless ids are made faster than that.
const TOGETHER_S: f64 = 0.4e-3;

/// Arrivals of a run's ids, in seconds since the first row was fed.
#[derive(Clone, Debug, Default)]
pub(super) struct Arrivals {
    times: Vec<f64>,
    /// Ids of the first flight.
    first: usize,
}

impl Arrivals {
    pub(super) fn new(times: Vec<f64>) -> Self {
        let mean = match &times[..] {
            [first, .., last] => (last - first) / times.len() as f64,
            _ => 0.0,
        };
        let together = TOGETHER_S.min(mean / 2.0);
        let gap = times.windows(2).position(|pair| pair[1] - pair[0] > together);
        let first = gap.map_or(times.len(), |gap| gap + 1);
        Self { times, first }
    }

    /// Until the first ids were there.
    pub(super) fn first_s(&self) -> f64 {
        self.times.first().copied().unwrap_or(0.0)
    }

    /// From the first ids to the last.
    pub(super) fn decode_s(&self) -> f64 {
        self.times.last().map_or(0.0, |last| last - self.first_s())
    }

    /// Ids a second behind the first flight; where all came in one, nothing is known and it is 0.
    pub(super) fn decode_per_s(&self) -> f64 {
        let ids = self.times.len() - self.first;
        if ids > 0 && self.decode_s() > 0.0 { ids as f64 / self.decode_s() } else { 0.0 }
    }

    /// The first ids' time without the steps that made them.
    pub(super) fn prefill_s(&self) -> f64 {
        let rate = self.decode_per_s();
        let steps = if rate > 0.0 { self.first as f64 / rate } else { 0.0 };
        // A first step that is slower than those behind it must not make the prefill's time vanish.
        (self.first_s() - steps).max(self.first_s() / 10.0)
    }

    /// Positions a second of a prompt but for its last row, which is the first step's.
    pub(super) fn prefill_per_s(&self, prompt: usize) -> f64 {
        let seconds = self.prefill_s();
        if seconds > 0.0 { (prompt - 1) as f64 / seconds } else { 0.0 }
    }
}

/// Median, lowest and highest of some figures.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Spread {
    pub(super) median: f64,
    pub(super) low: f64,
    pub(super) high: f64,
}

impl Spread {
    pub(super) fn of(mut figures: Vec<f64>) -> Self {
        figures.sort_by(f64::total_cmp);
        let (Some(&low), Some(&high)) = (figures.first(), figures.last()) else { return Self::default() };
        let middle = figures.len() / 2;
        let median =
            if figures.len() % 2 == 1 { figures[middle] } else { 0.5 * (figures[middle - 1] + figures[middle]) };
        Self { median, low, high }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flights_are_told_apart() {
        // 100 positions in 0.5 s, then flights of four steps of 10 ms.
        let times = (0..40).map(|i| 0.5 + f64::from(i / 4 + 1) * 0.04 + f64::from(i % 4) * 2e-6).collect();
        let seen = Arrivals::new(times);
        assert!((seen.decode_per_s() - 100.0).abs() < 0.1, "{}", seen.decode_per_s());
        assert!((seen.prefill_s() - 0.5).abs() < 0.001, "{}", seen.prefill_s());
        assert!((seen.prefill_per_s(101) - 200.0).abs() < 1.0);
    }

    #[test]
    fn single_steps_faster_than_the_gap_are_no_flight() {
        let seen = Arrivals::new((0..100).map(|i| 0.01 + f64::from(i) * 1e-4).collect());
        assert!((seen.decode_per_s() - 1e4).abs() < 1.0 && (seen.prefill_s() - 0.0099).abs() < 1e-6);
    }

    #[test]
    fn few_ids_say_little_and_break_nothing() {
        for times in [vec![], vec![0.2], vec![0.2, 0.2]] {
            let seen = Arrivals::new(times);
            assert_eq!(seen.decode_per_s(), 0.0);
            assert!(seen.prefill_per_s(5).is_finite());
        }
    }

    #[test]
    fn the_median_is_in_the_middle() {
        assert_eq!(Spread::of(vec![3.0, 1.0, 2.0]), Spread { median: 2.0, low: 1.0, high: 3.0 });
        assert_eq!(Spread::of(vec![4.0, 1.0]).median, 2.5);
        assert_eq!(Spread::of(vec![]), Spread::default());
    }
}
