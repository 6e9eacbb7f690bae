//! The threads that host work is spread over.
//!
//! One parallel region is a queue of items; the caller and the pool's threads
//! take one at a time until none is left. A thread that the machine takes away
//! holds up its own item and nothing else, and a thread that comes late finds
//! less to do. Idle threads sleep.

use std::fmt;
use std::io;
use std::sync::Arc;

use parking_lot::Mutex;
use rayon::{Scope, ThreadPool};

use super::isa::Isa;

/// A handle on a set of threads; clones share them.
#[derive(Clone)]
pub struct Pool {
    inner: Arc<Inner>,
}

struct Inner {
    /// Threads beside the caller; none when one thread is all there is.
    helpers: Option<ThreadPool>,
    threads: usize,
    isa: Isa,
}

impl Pool {
    /// A pool in which `threads` work on a region, its caller among them (at least one).
    ///
    /// # Panics
    ///
    /// If the system refuses a thread.
    #[must_use]
    pub fn new(threads: usize) -> Self {
        Self::with_isa(threads, Isa::best())
    }

    /// As [`Pool::new`], for those who can do without.
    ///
    /// # Errors
    ///
    /// When the system refuses a thread.
    pub fn try_new(threads: usize) -> io::Result<Self> {
        Self::build(threads, Isa::best()).map_err(io::Error::other)
    }

    /// A pool whose kernels use `isa`; get it from [`Isa::require`].
    ///
    /// # Panics
    ///
    /// If the processor lacks the set or the system refuses a thread.
    #[must_use]
    pub fn with_isa(threads: usize, isa: Isa) -> Self {
        assert!(isa.is_present(), "{isa} on a processor without it");
        Self::build(threads, isa).expect("threads for the host pool")
    }

    fn build(threads: usize, isa: Isa) -> Result<Self, rayon::ThreadPoolBuildError> {
        let threads = threads.max(1);
        let builder = || rayon::ThreadPoolBuilder::new().num_threads(threads - 1).thread_name(|i| format!("host-{i}"));
        let helpers = if threads > 1 { Some(builder().build()?) } else { None };
        Ok(Self { inner: Arc::new(Inner { helpers, threads, isa }) })
    }

    /// One thread for each physical core this process may use.
    #[must_use]
    pub fn with_all_cores() -> Self {
        Self::new(physical_cores())
    }

    /// Threads that work on a region.
    #[must_use]
    pub fn threads(&self) -> usize {
        self.inner.threads
    }

    /// The instruction set of the kernels.
    #[must_use]
    pub fn isa(&self) -> Isa {
        self.inner.isa
    }

    /// Does `work` on each item; items are begun in order. Returns when all are done.
    pub fn each<T: Send>(&self, items: Vec<T>, work: impl Fn(T) + Sync) {
        let helpers = (self.inner.threads - 1).min(items.len().saturating_sub(1));
        let Some(pool) = self.inner.helpers.as_ref().filter(|_| helpers > 0) else {
            items.into_iter().for_each(work);
            return;
        };
        let queue = Mutex::new(items.into_iter());
        let drain = || {
            loop {
                let item = queue.lock().next();
                match item {
                    Some(item) => work(item),
                    None => break,
                }
            }
        };
        pool.in_place_scope(|scope| {
            wake(scope, helpers, &drain);
            drain();
        });
    }
}

/// Sets `helpers` threads to work, each of which wakes half of those still to come: the caller is held up by one.
fn wake<'scope>(scope: &Scope<'scope>, helpers: usize, drain: &'scope (impl Fn() + Sync)) {
    if let Some(others) = helpers.checked_sub(1) {
        scope.spawn(move |scope| {
            wake(scope, others.div_ceil(2), drain);
            wake(scope, others / 2, drain);
            drain();
        });
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pool({} threads, {})", self.inner.threads, self.inner.isa)
    }
}

/// Physical cores this process may use: two threads of one core share its
/// memory ports, so a second one adds nothing to work bound by memory.
#[must_use]
pub fn physical_cores() -> usize {
    let logical = std::thread::available_parallelism().map_or(1, usize::from);
    let Ok(text) = std::fs::read_to_string("/proc/cpuinfo") else { return logical };
    let cores = count_cores(&text);
    if cores == 0 { logical } else { cores.min(logical) }
}

/// Distinct (package, core) pairs of a `/proc/cpuinfo`; 0 where it does not name them.
fn count_cores(cpuinfo: &str) -> usize {
    let mut seen = std::collections::BTreeSet::new();
    let (mut package, mut core) = ("", "");
    for line in cpuinfo.lines().chain([""]) {
        match line.split_once(':').map(|(key, value)| (key.trim(), value.trim())) {
            Some(("physical id", value)) => package = value,
            Some(("core id", value)) => core = value,
            Some(_) => {}
            None if !core.is_empty() => {
                seen.insert((package, core));
                (package, core) = ("", "");
            }
            None => {}
        }
    }
    seen.len()
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn every_item_is_done_once() {
        for threads in [1, 2, 5] {
            let pool = Pool::new(threads);
            for items in [0, 1, 2, 3, 1000] {
                let done: Vec<AtomicUsize> = (0..items).map(|_| AtomicUsize::new(0)).collect();
                pool.each((0..items).collect(), |i: usize| {
                    done[i].fetch_add(1, Ordering::Relaxed);
                });
                assert!(done.iter().all(|n| n.load(Ordering::Relaxed) == 1), "{threads} threads, {items} items");
            }
        }
    }

    #[test]
    fn items_may_borrow_and_regions_may_nest() {
        let pool = Pool::new(3);
        let mut rows = vec![0usize; 64];
        pool.each(rows.chunks_mut(8).collect(), |chunk| {
            pool.each(chunk.iter_mut().collect(), |x: &mut usize| *x += 1);
        });
        assert!(rows.iter().all(|x| *x == 1));
    }

    #[test]
    fn a_panic_reaches_the_caller() {
        let pool = Pool::new(2);
        let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            pool.each((0..16).collect(), |i: i32| assert_ne!(i, 9, "seen"));
        }));
        assert!(caught.is_err());
        pool.each(vec![1], |_| {});
    }

    #[test]
    fn cores_are_counted_once_each() {
        let two_threads_a_core = "physical id : 0\ncore id : 0\n\nphysical id : 0\ncore id : 1\n\n\
                                  physical id : 0\ncore id : 0\n\nphysical id : 1\ncore id : 0\n";
        assert_eq!(count_cores(two_threads_a_core), 3);
        assert_eq!(count_cores("processor : 0\nBogoMIPS : 50\n\n"), 0);
    }
}
