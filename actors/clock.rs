//! The time, as the actors see it: the machine's, or a simulation's.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// A monotonic clock; clones show the same time.
#[derive(Clone, Debug)]
pub struct Clock(Kind);

#[derive(Clone, Debug)]
enum Kind {
    Machine(Instant),
    Simulated(Arc<AtomicU64>),
}

impl Clock {
    /// The machine's, from now on.
    #[must_use]
    pub fn machine() -> Self {
        Self(Kind::Machine(Instant::now()))
    }

    /// One that stands still until it is moved.
    #[must_use]
    pub fn simulated() -> Self {
        Self(Kind::Simulated(Arc::default()))
    }

    /// Time since its start.
    #[must_use]
    pub fn now(&self) -> Duration {
        match &self.0 {
            Kind::Machine(start) => start.elapsed(),
            Kind::Simulated(nanos) => Duration::from_nanos(nanos.load(Ordering::Relaxed)),
        }
    }

    /// Moves a simulated clock; the machine's moves by itself.
    pub fn advance(&self, by: Duration) {
        if let Kind::Simulated(nanos) = &self.0 {
            nanos.fetch_add(by.as_nanos() as u64, Ordering::Relaxed);
        }
    }
}
