//! The threads that host work is spread over.
//!
//! One parallel region is a queue of items; the caller and the pool's threads
//! take one at a time until none is left. A thread that the machine takes away
//! holds up its own item and nothing else, and a thread that comes late finds
//! less to do. Idle threads sleep.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use super::isa::Isa;
use super::spin::Spin;
use super::team::Team;

/// How long helpers look out beside a device: one stop follows the other within half of it.
const BESIDE_DEVICE: Duration = Duration::from_millis(1);

/// Values below which element-wise work is done before a second thread has come.
const SPREAD: usize = 1 << 14;

/// A handle on a set of threads; clones share them.
#[derive(Clone)]
pub struct Pool {
    inner: Arc<Inner>,
}

struct Inner {
    /// Threads beside the caller; none when one thread is all there is.
    helpers: Option<Team>,
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
        Self::build(threads, Isa::best(), None)
    }

    /// A pool for what a device lacks: of `threads` as many as leave cores to others ([`Spin::threads_of`]), which look out
    /// for the next region through the time that the device takes until it lacks something again.
    ///
    /// # Errors
    ///
    /// When the system refuses a thread.
    pub fn beside_device(threads: usize) -> io::Result<Self> {
        Self::build(Spin::threads_of(threads), Isa::best(), Some(BESIDE_DEVICE))
    }

    /// A pool whose kernels use `isa`; get it from [`Isa::require`].
    ///
    /// # Panics
    ///
    /// If the processor lacks the set or the system refuses a thread.
    #[must_use]
    pub fn with_isa(threads: usize, isa: Isa) -> Self {
        assert!(isa.is_present(), "{isa} on a processor without it");
        Self::build(threads, isa, None).expect("threads for the host pool")
    }

    fn build(threads: usize, isa: Isa, look_out: Option<Duration>) -> io::Result<Self> {
        let threads = threads.max(1);
        let helpers = (threads > 1).then(|| Team::new(threads - 1, look_out)).transpose()?;
        Ok(Self { inner: Arc::new(Inner { helpers, threads, isa }) })
    }

    /// As many threads as [`default_threads`] says.
    #[must_use]
    pub fn with_all_cores() -> Self {
        Self::new(default_threads())
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

    /// As [`Pool::each`], but on this thread alone where all items together touch so few `values` that it is done before
    /// another thread has come.
    pub(crate) fn each_of<T: Send>(&self, values: usize, items: Vec<T>, work: impl Fn(T) + Sync) {
        if values < SPREAD { items.into_iter().for_each(work) } else { self.each(items, work) }
    }

    /// Does `work` on each item; items are begun in order. Returns when all are done.
    pub fn each<T: Send>(&self, items: Vec<T>, work: impl Fn(T) + Sync) {
        let helpers = (self.inner.threads - 1).min(items.len().saturating_sub(1));
        let Some(team) = self.inner.helpers.as_ref().filter(|_| helpers > 0) else {
            items.into_iter().for_each(work);
            return;
        };
        let items: Vec<Mutex<Option<T>>> = items.into_iter().map(|item| Mutex::new(Some(item))).collect();
        let next = AtomicUsize::new(0);
        team.run(helpers, &|| {
            // Each place is taken once, so no lock is ever waited for.
            while let Some(item) = items.get(next.fetch_add(1, Ordering::Relaxed)) {
                if let Some(item) = item.lock().take() {
                    work(item);
                }
            }
        });
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pool({} threads, {})", self.inner.threads, self.inner.isa)
    }
}

/// Threads for host work where nobody says how many: the physical cores, less one where there are many. The actors around
/// the pool need a moment now and then, and a region's last item waits for a thread that had to give way to one of them.
#[must_use]
pub fn default_threads() -> usize {
    let cores = physical_cores();
    if cores >= 8 { cores - 1 } else { cores }
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

    /// Helpers that sleep are woken, those that look out come at once, and a region never waits for one that did not come.
    #[test]
    fn regions_follow_each_other_with_and_without_pauses() {
        let pool = Pool::new(4);
        let mut sum = 0;
        for round in 0..2000 {
            let done = AtomicUsize::new(0);
            pool.each((0..8).collect(), |i: usize| {
                done.fetch_add(i + round, Ordering::Relaxed);
            });
            sum += done.into_inner();
            if round % 500 == 0 {
                std::thread::sleep(std::time::Duration::from_millis(2));
            }
        }
        assert_eq!(sum, 2000 * 28 + 8 * (0..2000).sum::<usize>());
    }

    #[test]
    fn threads_of_many_callers_share_a_team() {
        let pool = Pool::new(3);
        std::thread::scope(|scope| {
            for _ in 0..12 {
                let pool = pool.clone();
                scope.spawn(move || {
                    for _ in 0..200 {
                        let done = AtomicUsize::new(0);
                        pool.each((0..5).collect(), |i: usize| {
                            done.fetch_add(i, Ordering::Relaxed);
                        });
                        assert_eq!(done.into_inner(), 10);
                    }
                });
            }
        });
    }

    #[test]
    fn cores_are_counted_once_each() {
        let two_threads_a_core = "physical id : 0\ncore id : 0\n\nphysical id : 0\ncore id : 1\n\n\
                                  physical id : 0\ncore id : 0\n\nphysical id : 1\ncore id : 0\n";
        assert_eq!(count_cores(two_threads_a_core), 3);
        assert_eq!(count_cores("processor : 0\nBogoMIPS : 50\n\n"), 0);
    }
}
