//! Device time by dispatch class, where timestamps are asked for (`CMF_NEMO_TS`).

use std::collections::BTreeMap;
use std::time::Duration;

use parking_lot::Mutex;

use crate::knobs::DispatchClass;

/// Sums since the start, for whoever asks.
#[derive(Debug, Default)]
pub struct ClassTimes {
    /// By kind, and the class's place in [`DispatchClass::ALL`].
    sums: Mutex<BTreeMap<(WorkKind, usize), (u64, Duration)>>,
}

/// One device's sums are its own.
impl PartialEq for ClassTimes {
    fn eq(&self, other: &Self) -> bool {
        std::ptr::eq(self, other)
    }
}

/// What a dispatch was for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum WorkKind {
    /// Steps of one row.
    Decode,
    /// Rows of a prompt, in passes of many or one by one.
    Prefill,
    /// The drafts of a round.
    Draft,
    /// The pass that checks a round's drafts.
    Verify,
}

impl WorkKind {
    /// The name reports use.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Decode => "decode",
            Self::Prefill => "prefill",
            Self::Draft => "draft",
            Self::Verify => "verify",
        }
    }
}

/// What one class took.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClassTime {
    /// What for.
    pub kind: WorkKind,
    /// The class.
    pub class: DispatchClass,
    /// Dispatches measured.
    pub dispatches: u64,
    /// All of them together. A timestamp behind each dispatch keeps them from running side by side, so that the sum is more
    /// than what they take without.
    pub took: Duration,
}

impl ClassTimes {
    /// Adds one dispatch.
    pub fn add(&self, kind: WorkKind, class: DispatchClass, took: Duration) {
        let place = DispatchClass::ALL.iter().position(|one| *one == class).unwrap_or(0);
        let mut sums = self.sums.lock();
        let (dispatches, sum) = sums.entry((kind, place)).or_default();
        *dispatches += 1;
        *sum += took;
    }

    /// What was measured so far: decode, prefill, drafts, verify passes; classes in the order of a step.
    #[must_use]
    pub fn list(&self) -> Vec<ClassTime> {
        let sums = self.sums.lock();
        let each = |(&(kind, place), &(dispatches, took)): (&(WorkKind, usize), &(u64, Duration))| ClassTime {
            kind,
            class: DispatchClass::ALL[place],
            dispatches,
            took,
        };
        sums.iter().map(each).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_are_kept_by_class_and_kind() {
        let times = ClassTimes::default();
        times.add(WorkKind::Prefill, DispatchClass::Head, Duration::from_micros(5));
        times.add(WorkKind::Decode, DispatchClass::Scan, Duration::from_micros(3));
        times.add(WorkKind::Decode, DispatchClass::InProj, Duration::from_micros(2));
        times.add(WorkKind::Decode, DispatchClass::Scan, Duration::from_micros(4));
        let seen: Vec<_> =
            times.list().into_iter().map(|t| (t.kind, t.class, t.dispatches, t.took.as_micros())).collect();
        let wanted = [
            (WorkKind::Decode, DispatchClass::InProj, 1, 2),
            (WorkKind::Decode, DispatchClass::Scan, 2, 7),
            (WorkKind::Prefill, DispatchClass::Head, 1, 5),
        ];
        assert_eq!(seen, wanted);
    }
}
