//! The host's team of threads, as `build.rs` makes it of `src/host/team.rs`: regions, sleeping, waking, the end.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use shuttle::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use shuttle::sync::{Arc, Condvar, Mutex};
use shuttle::thread;

mod time {
    use std::time::Duration;

    use shuttle::rand::{Rng, thread_rng};

    /// Shuttle has no time: whether enough of it has passed is drawn.
    pub(super) struct Instant;

    impl Instant {
        pub(super) fn now() -> Self {
            Self
        }

        pub(super) fn elapsed(&self) -> Duration {
            if thread_rng().gen_bool(0.5) { Duration::MAX } else { Duration::ZERO }
        }
    }
}

#[allow(unsafe_code, reason = "the crate's own file, whose checks are tried here")]
mod host {
    include!(concat!(env!("OUT_DIR"), "/team.rs"));
}

use host::Team;

fn team(helpers: usize) -> Team {
    Team::new(helpers, None).expect("shuttle refuses no thread")
}

/// A region as the pool makes them: items that whoever comes takes one by one. Each is done once, and nobody is in the
/// function once its caller has it back.
fn region(team: &Team, helpers: usize, items: usize) {
    let (next, over) = (AtomicUsize::new(0), AtomicBool::new(false));
    let done: Vec<AtomicUsize> = (0..items).map(|_| AtomicUsize::new(0)).collect();
    let work = || {
        assert!(!over.load(Ordering::SeqCst), "a helper came when the region was closed");
        while let Some(item) = done.get(next.fetch_add(1, Ordering::SeqCst)) {
            item.fetch_add(1, Ordering::SeqCst);
        }
        assert!(!over.load(Ordering::SeqCst), "a helper was left in a closed region");
    };
    team.run(helpers, &work);
    over.store(true, Ordering::SeqCst);
    assert!(done.iter().all(|item| item.load(Ordering::SeqCst) == 1), "an item was done twice or not at all");
    thread::yield_now();
}

/// Callers share a team, more of them than it has regions; one region follows the other.
pub fn regions_are_whole() {
    let team = Arc::new(team(2));
    let callers: Vec<_> = (0..3)
        .map(|caller| {
            let team = team.clone();
            thread::spawn(move || (0..2).for_each(|_| region(&team, 1 + caller % 2, 3)))
        })
        .collect();
    callers.into_iter().for_each(|caller| caller.join().unwrap());
}

/// A region within a region.
pub fn regions_nest() {
    let team = team(1);
    team.run(1, &|| region(&team, 1, 2));
}

/// Whatever a helper does when a region opens, it comes: this caller waits for it in its region, and would wait for ever
/// for a helper that slept through the news. Two are woken one by the other.
pub fn sleepers_are_woken() {
    let team = team(2);
    for helpers in [2, 1] {
        let (here, came) = (Mutex::new(0), Condvar::new());
        team.run(helpers, &|| {
            let mut here = here.lock().unwrap();
            *here += 1;
            came.notify_all();
            while *here < 1 + helpers {
                here = came.wait(here).unwrap();
            }
        });
        assert_eq!(*here.lock().unwrap(), 1 + helpers);
    }
}

/// The end comes at any moment: before a helper looked for the first time, in its sleep, behind a region.
pub fn a_team_ends() {
    for regions in 0..2 {
        let team = team(2);
        (0..regions).for_each(|_| region(&team, 2, 2));
        drop(team);
    }
}

/// A panic of a helper reaches the caller behind its region, and the next region is as any other.
pub fn a_helpers_panic_reaches_its_caller() {
    let team = team(2);
    let me = thread::current().id();
    let panics = AtomicUsize::new(0);
    let caught = catch_unwind(AssertUnwindSafe(|| {
        team.run(2, &|| {
            if thread::current().id() != me {
                panics.fetch_add(1, Ordering::SeqCst);
                resume_unwind(Box::new("a helper's"));
            }
        });
    }));
    assert_eq!(caught.is_err(), panics.load(Ordering::SeqCst) > 0);
    region(&team, 2, 2);
}
