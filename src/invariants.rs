//! What must always hold (`runtime.md` §3, `protocol.md` §7), by name.
//!
//! [`check!`](crate::check) asserts in debug builds; in release it counts and
//! logs instead, and [`violations`] tells. Tests and docs cite the same names.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

/// A promise the code makes to itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Invariant {
    /// I1: a session's ids are a prefix of plain decode's, in order, each once (`runtime.md` §3.1, §3.4).
    Ids,
    /// I2: a slot's state and residual are plain decode's (`runtime.md` §3.2).
    State,
    /// I3: two live flights, four unlanded, no staging buffer written before it was read (`runtime.md` §3.3).
    Flights,
    /// I4: a cure meets the stop it was made for and no other.
    Cure,
    /// I5: an expert is computed from the place that the route recorded, and lies there.
    Place,
    /// I6: every session ends and every slot becomes free (`runtime.md` §3.6).
    End,
    /// I7: no channel goes over its bound (`runtime.md` §3.5).
    Bound,
    /// I8: a slot is reused only when nothing queued names it.
    Reuse,
}

impl Invariant {
    /// All, in order.
    pub const ALL: [Invariant; 8] =
        [Self::Ids, Self::State, Self::Flights, Self::Cure, Self::Place, Self::End, Self::Bound, Self::Reuse];
}

impl fmt::Display for Invariant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "I{} {self:?}", *self as usize + 1)
    }
}

static VIOLATIONS: AtomicU64 = AtomicU64::new(0);

/// Promises broken in this process since its start. Anything but 0 is a bug.
#[must_use]
pub fn violations() -> u64 {
    VIOLATIONS.load(Ordering::Relaxed)
}

/// For [`check!`](crate::check): a promise was broken.
///
/// # Panics
///
/// In debug builds.
#[cold]
#[track_caller]
pub fn broken(invariant: Invariant, what: fmt::Arguments<'_>) {
    VIOLATIONS.fetch_add(1, Ordering::Relaxed);
    if cfg!(debug_assertions) {
        panic!("{invariant}: {what}");
    }
    tracing::error!(target: "riparian::invariants", %invariant, "{what}");
}

/// Checks a promise: panics in debug builds, counts and logs in release.
#[macro_export]
macro_rules! check {
    ($invariant:ident, $holds:expr, $($what:tt)+) => {
        if !$holds {
            $crate::invariants::broken($crate::invariants::Invariant::$invariant, format_args!($($what)+));
        }
    };
}

/// A known way to get the protocol wrong (`protocol.md` §7), for tests that must catch it. Works in debug builds alone;
/// nothing but `tests/graph` names another than `No`.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are the checked model's")]
pub enum Broken {
    #[default]
    No,
    // the device
    DropStamp,
    StampWithoutTurn,
    StopAtSum,
    SumReadsMap,
    SharedScratch,
    AcceptWithoutRollback,
    NoEndStop,
    NoShortStop,
    AdmitInsideLayer,
    NoDeviceCheck,
    UploadStagingEarly,
    // readback
    UnstampedRecords,
    NoDedupe,
    // the completer
    PanicWithoutAnswer,
    // the submitter
    UnstampedIds,
    DropIdsOfOldTurn,
    NoTokenCredit,
    StagingRoundRobin,
    ClearOnMissed,
    ResumeAfterCancel,
    RequeueForgotten,
    FreeBeforeLanded,
    LandedAfterLoss,
    EvictBeforeFill,
    NoHostCheck,
}

impl Broken {
    /// Whether this is the broken way in force. Always false in release builds.
    #[must_use]
    pub fn is(self, way: Broken) -> bool {
        cfg!(debug_assertions) && self == way
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_the_protocols() {
        let names: Vec<String> = Invariant::ALL.iter().map(ToString::to_string).collect();
        assert_eq!(names[0], "I1 Ids");
        assert_eq!(names[7], "I8 Reuse");
    }

    #[test]
    #[cfg(debug_assertions)]
    fn a_broken_promise_panics_and_counts() {
        let before = violations();
        let broken = std::panic::catch_unwind(|| check!(Bound, 3 < 2, "{} in a channel for {}", 3, 2));
        assert_eq!(*broken.unwrap_err().downcast::<String>().unwrap(), "I7 Bound: 3 in a channel for 2");
        assert!(violations() > before);
        check!(Bound, 1 < 2, "fine");
    }
}
