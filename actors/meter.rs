//! Where the time of flights and of missing experts goes (`CMF_NEMO_PROF`).
//!
//! Each actor notes what it measures of its own part; nobody waits for
//! anybody. A lap keeps a histogram with eight steps an octave, so its
//! figures are right within a tenth, and memory does not grow.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

/// What is measured, in the order in which a missing expert meets it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lap {
    /// The submitter: encoding and submitting one append.
    Append,
    /// From a flight's append to a peek at it, read.
    Peek,
    /// From a miss read to the completer's beginning.
    Handover,
    /// The completer: computing a stop's missing experts.
    Complete,
    /// From the answer to the submitter's taking it.
    Answer,
    /// The submitter: from the answer taken to the cure submitted.
    Cure,
    /// From a miss read to its cure submitted: the four before, together.
    Stop,
    /// From a flight's append to its landing, read.
    Flight,
    /// From an admission taken to its upload submitted.
    Admit,
}

impl Lap {
    /// All, in order.
    pub const ALL: [Lap; 9] = [
        Lap::Append,
        Lap::Peek,
        Lap::Handover,
        Lap::Complete,
        Lap::Answer,
        Lap::Cure,
        Lap::Stop,
        Lap::Flight,
        Lap::Admit,
    ];

    fn name(self) -> &'static str {
        match self {
            Lap::Append => "append",
            Lap::Peek => "peek",
            Lap::Handover => "handover",
            Lap::Complete => "complete",
            Lap::Answer => "answer",
            Lap::Cure => "cure",
            Lap::Stop => "stop",
            Lap::Flight => "flight",
            Lap::Admit => "admit",
        }
    }
}

/// Steps of an octave.
const STEPS: f64 = 8.0;
/// From a nanosecond to about 18 minutes.
const BUCKETS: usize = 40 * STEPS as usize;

struct Histogram {
    count: AtomicU64,
    total_ns: AtomicU64,
    most_ns: AtomicU64,
    buckets: [AtomicU32; BUCKETS],
}

impl Histogram {
    fn new() -> Self {
        Self {
            count: AtomicU64::new(0),
            total_ns: AtomicU64::new(0),
            most_ns: AtomicU64::new(0),
            buckets: [const { AtomicU32::new(0) }; BUCKETS],
        }
    }

    fn note(&self, took: Duration) {
        let ns = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        self.count.fetch_add(1, Ordering::Relaxed);
        self.total_ns.fetch_add(ns, Ordering::Relaxed);
        self.most_ns.fetch_max(ns, Ordering::Relaxed);
        let bucket = ((ns.max(1) as f64).log2() * STEPS) as usize;
        self.buckets[bucket.min(BUCKETS - 1)].fetch_add(1, Ordering::Relaxed);
    }

    /// The time that `share` of all stayed below.
    fn quantile(&self, share: f64) -> Duration {
        let wanted = (self.count.load(Ordering::Relaxed) as f64 * share).ceil() as u64;
        let mut seen = 0;
        for (bucket, count) in self.buckets.iter().enumerate() {
            seen += u64::from(count.load(Ordering::Relaxed));
            if seen >= wanted {
                return Duration::from_nanos(((bucket as f64 + 0.5) / STEPS).exp2() as u64);
            }
        }
        Duration::ZERO
    }
}

/// What all actors of a graph measure; clones share it.
#[derive(Clone)]
pub struct Meter(Arc<[Histogram; Lap::ALL.len()]>);

impl Default for Meter {
    fn default() -> Self {
        Self(Arc::new(std::array::from_fn(|_| Histogram::new())))
    }
}

impl fmt::Debug for Meter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.times()).finish()
    }
}

impl Meter {
    /// A lap took so long once.
    pub fn note(&self, lap: Lap, took: Duration) {
        self.0[lap as usize].note(took);
    }

    /// What was measured so far, of the laps that came up.
    #[must_use]
    pub fn times(&self) -> Vec<LapTimes> {
        let all = Lap::ALL.into_iter().zip(self.0.iter());
        all.filter(|(_, seen)| seen.count.load(Ordering::Relaxed) > 0)
            .map(|(lap, seen)| LapTimes {
                lap: lap.name(),
                count: seen.count.load(Ordering::Relaxed),
                total: Duration::from_nanos(seen.total_ns.load(Ordering::Relaxed)),
                median: seen.quantile(0.5),
                high: seen.quantile(0.95),
                most: Duration::from_nanos(seen.most_ns.load(Ordering::Relaxed)),
            })
            .collect()
    }
}

/// What was measured of one lap.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LapTimes {
    /// Its name.
    pub lap: &'static str,
    /// How often it came up.
    pub count: u64,
    /// All together.
    pub total: Duration,
    /// Half took no longer.
    pub median: Duration,
    /// All but a twentieth took no longer.
    pub high: Duration,
    /// The longest.
    pub most: Duration,
}

impl fmt::Display for LapTimes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let us = |time: Duration| time.as_secs_f64() * 1e6;
        write!(
            f,
            "{:<9}{:>9} times, median {:>9.1} µs, 95 % {:>9.1}, most {:>10.1}, in all {:>10.3} ms",
            self.lap,
            self.count,
            us(self.median),
            us(self.high),
            us(self.most),
            us(self.total) / 1e3
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_right_within_a_tenth() {
        let meter = Meter::default();
        (1..=1000).for_each(|us| meter.note(Lap::Complete, Duration::from_micros(us)));
        meter.clone().note(Lap::Append, Duration::ZERO);
        let [append, complete] = &meter.times()[..] else { panic!("two laps came up") };
        assert_eq!((append.lap, append.count, append.most), ("append", 1, Duration::ZERO));
        assert_eq!((complete.lap, complete.count), ("complete", 1000));
        assert_eq!((complete.total, complete.most), (Duration::from_micros(500_500), Duration::from_millis(1)));
        for (seen, right) in [(complete.median, 500.0), (complete.high, 950.0)] {
            let seen = seen.as_secs_f64() * 1e6;
            assert!((seen / right - 1.0).abs() < 0.1, "{seen} for {right}");
        }
        assert!(complete.to_string().contains("1000 times"));
    }

    #[test]
    fn what_takes_for_ever_has_a_place() {
        let meter = Meter::default();
        meter.note(Lap::Flight, Duration::MAX);
        assert_eq!(meter.times()[0].count, 1);
    }
}
