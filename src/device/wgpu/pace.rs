//! How much work one submission may hold (`CMF_NEMO_SUBMIT_MS`).
//!
//! A driver's watchdog ends a submission that runs too long. How long a step or
//! a row of a block takes is learnt from what has run; until then every batch
//! is submitted by itself.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// What is submitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// A step.
    Step,
    /// A row through a block of a pass.
    BlockRow,
}

#[derive(Debug, Default)]
struct Learnt {
    step_ns: f64,
    block_row_ns: f64,
    /// When the device was last seen to be done.
    done: Option<Instant>,
}

impl Learnt {
    fn of(&mut self, unit: Unit) -> &mut f64 {
        match unit {
            Unit::Step => &mut self.step_ns,
            Unit::BlockRow => &mut self.block_row_ns,
        }
    }

    /// Work of so many units was submitted at `begun` and seen to be done at `now`.
    fn learn(&mut self, unit: Unit, units: usize, begun: Instant, now: Instant) {
        // what was queued before had the device until it was done
        let from = self.done.map_or(begun, |done| done.max(begun));
        self.done = Some(now);
        let each = now.duration_since(from.min(now)).as_nanos() as f64 / units.max(1) as f64;
        let before = *self.of(unit);
        // slower at once, faster by and by: the watchdog forgives only one of the two mistakes
        *self.of(unit) = if each > before { each } else { 0.8 * before + 0.2 * each };
    }
}

/// Shared with the callbacks of what was submitted.
#[derive(Clone, Debug)]
pub struct Pace {
    most: Duration,
    learnt: Arc<Mutex<Learnt>>,
}

impl Pace {
    /// Submissions of at most `most`, as far as that can be estimated.
    #[must_use]
    pub fn new(most: Duration) -> Self {
        Self { most, learnt: Arc::default() }
    }

    /// Units that one submission may hold: one while nothing is known.
    #[must_use]
    pub fn at_once(&self, unit: Unit) -> usize {
        let each = *self.learnt.lock().of(unit);
        if each <= 0.0 { 1 } else { ((self.most.as_nanos() as f64 / each) as usize).max(1) }
    }

    /// Learns from all that was submitted so far, which ends with `units` of work.
    pub fn measure(&self, queue: &wgpu::Queue, unit: Unit, units: usize) {
        let (learnt, begun) = (self.learnt.clone(), Instant::now());
        queue.on_submitted_work_done(move || learnt.lock().learn(unit, units, begun, Instant::now()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_at_a_time_until_it_is_known_then_as_many_as_fit() {
        let pace = Pace::new(Duration::from_millis(100));
        assert_eq!(pace.at_once(Unit::Step), 1);
        let t = Instant::now();
        let ms = |n| t + Duration::from_millis(n);
        pace.learnt.lock().learn(Unit::Step, 16, t, ms(32));
        assert_eq!((pace.at_once(Unit::Step), pace.at_once(Unit::BlockRow)), (50, 1));
        // the next flight was queued long before it could begin
        pace.learnt.lock().learn(Unit::Step, 16, ms(1), ms(64));
        assert_eq!(pace.at_once(Unit::Step), 50);
        // a slow one counts at once
        pace.learnt.lock().learn(Unit::Step, 1, ms(64), ms(264));
        assert_eq!(pace.at_once(Unit::Step), 1);
        pace.learnt.lock().learn(Unit::BlockRow, 1000, ms(264), ms(266));
        assert_eq!(pace.at_once(Unit::BlockRow), 50_000);
    }
}
