//! How far a flight runs ahead of knowledge, and where it is peeked at.
//!
//! With full banks nothing misses: a flight is as many batches as asked for.
//! With a partial bank a flight runs as far as it will probably get. What lies
//! behind a miss is queued for nothing: the device steps over it, which costs
//! time, and the miss is reported only with the flight's end unless a peek
//! reports it early. So a flight ends where its chance of still running falls
//! below a threshold, right behind a route (before the sum: the report of the
//! miss is then the landing itself), and is peeked at where a miss is likely.
//!
//! Ids are read at a flight's end, so a slow device also gets shorter flights:
//! its ids shall come as a stream and not by the dozen.

use std::time::Duration;

use crate::ids::LayerIx;

/// What the decisions depend on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AheadOptions {
    /// Batches of a flight at most.
    pub batches_max: u32,
    /// Routes of a flight at most, whatever the chances.
    pub routes_max: Option<usize>,
    /// A flight ends where its chance of running on is below this.
    pub survival_min: f32,
    /// A route is peeked at where the chance of a miss there, seen from the flight's start, is at least this.
    pub peek_min: f32,
    /// Weight of a new observation of a layer.
    pub learn: f32,
    /// A flight of whole batches shall not take longer than this.
    pub flight_max: Duration,
}

impl Default for AheadOptions {
    fn default() -> Self {
        Self {
            batches_max: 16,
            routes_max: None,
            // an H200 made 149 tokens/s so and 138 with 0.35 (12 GB of experts), 94 and 89 (8 GB)
            survival_min: 0.6,
            peek_min: 0.25,
            learn: 1.0 / 32.0,
            // Two are in flight, so that ids are at most twice as old.
            flight_max: Duration::from_millis(150),
        }
    }
}

/// Where a flight ends, counted from the batch it begins in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Horizon {
    /// Batches further than the first.
    pub batches: u32,
    /// The layer there.
    pub layer: LayerIx,
    /// Whether it ends before that layer's sum (else before its route, which only happens at a batch's start).
    pub at_sum: bool,
    /// Routes to peek at: batches further than the first, and the layer.
    pub peeks: Vec<(u32, LayerIx)>,
}

/// Observed misses of one kind of work, and what follows from them.
#[derive(Clone, Debug)]
pub struct Ahead {
    options: AheadOptions,
    /// Chance that a route of the layer misses; empty for full banks or no layers.
    miss: Vec<f32>,
    layers: usize,
    /// Seconds of a batch; 0 until one was timed.
    batch_seconds: f64,
}

impl Ahead {
    /// A model with `layers` MoE layers. `start` is the assumed chance that a route misses: 0 says that none ever will.
    #[must_use]
    pub fn new(options: AheadOptions, layers: usize, start: f32) -> Self {
        let miss = if start > 0.0 { vec![start; layers] } else { Vec::new() };
        Self { options, miss, layers, batch_seconds: 0.0 }
    }

    /// A route ran.
    pub fn routed(&mut self, layer: LayerIx, missed: bool) {
        if let Some(rate) = self.miss.get_mut(layer.index()) {
            *rate += self.options.learn * (f32::from(u8::from(missed)) - *rate);
        }
    }

    /// A flight of whole batches took so long on the device.
    pub fn took(&mut self, batches: u32, busy: Duration) {
        let seconds = busy.as_secs_f64() / f64::from(batches.max(1));
        let weight = if self.batch_seconds == 0.0 { 1.0 } else { 0.2 };
        self.batch_seconds += weight * (seconds - self.batch_seconds);
    }

    /// Batches that fit the longest flight.
    fn batches_in_time(&self) -> u32 {
        if self.batch_seconds == 0.0 {
            return u32::MAX;
        }
        // A float beyond the range becomes its end.
        ((self.options.flight_max.as_secs_f64() / self.batch_seconds) as u32).max(1)
    }

    /// Chance that a route misses, averaged over the layers.
    #[must_use]
    pub fn miss_rate(&self) -> f32 {
        if self.miss.is_empty() { 0.0 } else { self.miss.iter().sum::<f32>() / self.miss.len() as f32 }
    }

    /// A flight that begins at `layer`, at its sum if `at_sum`, and may hold `batches` more accepts and `peeks` peeks.
    ///
    /// # Panics
    ///
    /// If `batches` is 0.
    #[must_use]
    pub fn plan(&self, layer: LayerIx, at_sum: bool, batches: u32, peeks: usize) -> Horizon {
        assert!(batches > 0, "a flight of no batches");
        let batches = batches.min(self.options.batches_max.max(1)).min(self.batches_in_time());
        let whole = Horizon { batches, layer: LayerIx(0), at_sum: false, peeks: Vec::new() };
        if self.layers == 0 || self.miss.is_empty() && self.options.routes_max.is_none() {
            return whole;
        }
        let (mut batch, mut at, mut survival, mut found) = (0, layer.index() + usize::from(at_sum), 1.0, Vec::new());
        for routes in 1.. {
            if at >= self.layers {
                (batch, at) = (batch + 1, 0);
            }
            if batch >= batches {
                break;
            }
            let layer = LayerIx::from(at);
            let miss = self.miss.get(at).copied().unwrap_or(0.0);
            if survival * miss >= self.options.peek_min && found.len() < peeks {
                found.push((batch, layer));
            }
            survival *= 1.0 - miss;
            if survival < self.options.survival_min || self.options.routes_max.is_some_and(|most| routes >= most) {
                return Horizon { batches: batch, layer, at_sum: true, peeks: found };
            }
            at += 1;
        }
        Horizon { peeks: found, ..whole }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn full_banks_run_whole_batches_without_peeks() {
        let ahead = Ahead::new(AheadOptions::default(), 23, 0.0);
        let want = Horizon { batches: 16, layer: LayerIx(0), at_sum: false, peeks: vec![] };
        assert_eq!(ahead.plan(LayerIx(0), false, 99, 8), want);
        assert_eq!(ahead.plan(LayerIx(7), true, 3, 8).batches, 3);
        assert_eq!(ahead.miss_rate(), 0.0);
    }

    #[test]
    fn certain_misses_end_the_flight_at_its_first_route() {
        let mut ahead = Ahead::new(AheadOptions::default(), 4, 1.0);
        let want = Horizon { batches: 0, layer: LayerIx(0), at_sum: true, peeks: vec![(0, LayerIx(0))] };
        assert_eq!(ahead.plan(LayerIx(0), false, 5, 8), want);
        assert_eq!(
            ahead.plan(LayerIx(3), true, 5, 8).batches,
            1,
            "past the last sum lies the next batch's first route"
        );
        assert_eq!(
            ahead.plan(LayerIx(3), true, 1, 0),
            Horizon { batches: 1, layer: LayerIx(0), at_sum: false, peeks: vec![] }
        );
        for _ in 0..500 {
            (0..4).for_each(|l| ahead.routed(LayerIx(l), false));
        }
        assert!(ahead.miss_rate() < 1e-4);
        assert_eq!(ahead.plan(LayerIx(0), false, 5, 8).batches, 5, "what never misses runs whole batches");
    }

    #[test]
    fn rare_misses_let_a_flight_run_on() {
        let ahead = Ahead::new(AheadOptions::default(), 10, 0.05);
        let horizon = ahead.plan(LayerIx(0), false, 16, 8);
        // 0.95^9 = 0.630, 0.95^10 = 0.599
        assert_eq!((horizon.batches, horizon.layer, horizon.at_sum), (0, LayerIx(9), true));
        assert!(horizon.peeks.is_empty());
    }

    #[test]
    fn slow_devices_get_short_flights() {
        let options = AheadOptions { flight_max: Duration::from_millis(100), ..AheadOptions::default() };
        let mut ahead = Ahead::new(options, 3, 0.0);
        let batches = |ahead: &Ahead| ahead.plan(LayerIx(0), false, 99, 8).batches;
        assert_eq!(batches(&ahead), 16, "nothing is known yet");
        ahead.took(16, Duration::from_millis(160));
        assert_eq!(batches(&ahead), 10);
        (0..50).for_each(|_| ahead.took(1, Duration::from_secs(2)));
        assert_eq!(batches(&ahead), 1);
        (0..200).for_each(|_| ahead.took(4, Duration::from_micros(10)));
        assert_eq!(batches(&ahead), 16);
    }

    #[test]
    fn routes_are_capped() {
        let options = AheadOptions { routes_max: Some(3), ..AheadOptions::default() };
        let horizon = Ahead::new(options, 2, 0.0).plan(LayerIx(0), true, 16, 8);
        assert_eq!((horizon.batches, horizon.layer, horizon.at_sum), (1, LayerIx(1), true));
    }
}
