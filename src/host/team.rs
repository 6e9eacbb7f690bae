//! Threads that help with one region of work after another.
//!
//! A region is a function that every thread who comes calls once; it returns
//! when nothing is left to do. Regions follow each other within microseconds
//! while a token is made, so an idle helper looks out for the next one for
//! [`LOOK_OUT`] before it sleeps; asleep it costs nothing. Sleepers are woken
//! by each other, not all by the caller. Nobody waits for a helper that has not
//! come: one whose core is taken away holds up nothing it has not begun.
//!
//! A thread of one's own is needed because rayon's workers take far longer to
//! wake than most regions last, and give way to the system between them.
#![allow(unsafe_code, reason = "a region's function is borrowed from the caller, who waits until no helper is in it")]

use std::any::Any;
use std::cell::UnsafeCell;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{self, JoinHandle, Thread};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// Regions that can be open at once: those of the device, the completer and what they nest. A further one is its caller's alone.
const REGIONS: usize = 8;
/// How long a helper that has nothing to do looks out for a region before it sleeps: the serial stretches of a token and
/// the ends of its regions are shorter, and to be woken takes as long on a virtual machine.
const LOOK_OUT: Duration = Duration::from_micros(200);
/// How long a caller looks at the last helpers in its region before it sleeps.
const LINGER: Duration = Duration::from_micros(200);
/// Looks between two glances at the clock.
const LOOKS: usize = 64;

/// Set while helpers may enter; the bits below count those inside.
const OPEN: usize = 1 << (usize::BITS - 1);
/// Set while a caller owns the region; nobody may enter for that alone.
const OWNED: usize = OPEN >> 1;

/// The threads. Dropping it ends them.
pub(super) struct Team {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

struct Shared {
    regions: [Region; REGIONS],
    /// Grows with every region that opens, and at the end.
    news: AtomicUsize,
    sleepers: Mutex<Vec<Thread>>,
    /// How many of them there are, for a look without the lock.
    asleep: AtomicUsize,
    ended: AtomicBool,
    look_out: Duration,
}

#[derive(Default)]
struct Region {
    state: AtomicUsize,
    /// Helpers that may still come.
    wanted: AtomicUsize,
    /// Written by the owner while nobody may enter.
    work: UnsafeCell<Option<Work>>,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

// SAFETY: `work` is written only by the one thread that set `OWNED`, while `OPEN` is not set, and read only by threads
// that counted themselves in while `OPEN` was set; acquire and release on `state` order the two.
unsafe impl Sync for Region {}

/// A caller's function, its lifetime forgotten.
#[derive(Clone)]
struct Work {
    function: *const (dyn Fn() + Sync),
    caller: Thread,
}

// SAFETY: the function behind the pointer is `Sync`, and the pointer is used only while its owner waits for the user.
unsafe impl Send for Work {}

impl Team {
    /// A team of `helpers` threads, which look out for so long, or for [`LOOK_OUT`], before they sleep.
    ///
    /// # Errors
    ///
    /// When the system refuses a thread; those that it gave are ended again.
    pub(super) fn new(helpers: usize, look_out: Option<Duration>) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            regions: Default::default(),
            news: AtomicUsize::new(0),
            sleepers: Mutex::default(),
            asleep: AtomicUsize::new(0),
            ended: AtomicBool::new(false),
            look_out: look_out.unwrap_or(LOOK_OUT),
        });
        let mut team = Self { shared, threads: Vec::with_capacity(helpers) };
        for i in 0..helpers {
            let shared = Arc::clone(&team.shared);
            team.threads.push(thread::Builder::new().name(format!("host-{i}")).spawn(move || shared.help())?);
        }
        Ok(team)
    }

    /// Calls `function` on this thread and on as many as `helpers` others that are free; returns when all who called it
    /// are through.
    ///
    /// # Panics
    ///
    /// Passes on the panic of whoever panicked.
    pub(super) fn run(&self, helpers: usize, function: &(dyn Fn() + Sync)) {
        let shared = &*self.shared;
        let Some(region) = shared.regions.iter().find(|region| region.own()) else {
            function();
            return;
        };
        let function: *const (dyn Fn() + Sync + '_) = function;
        // SAFETY: only the lifetime changes. `Closing` below does not let this function return or unwind before the
        // region is closed and the last helper has left it, so that nobody calls `function` after its borrow ends.
        let forgotten: *const (dyn Fn() + Sync + 'static) = unsafe { std::mem::transmute(function) };
        // SAFETY: this thread has just set `OWNED`, and `OPEN` is not set yet: nobody else touches `work`.
        unsafe { *region.work.get() = Some(Work { function: forgotten, caller: thread::current() }) };
        region.wanted.store(helpers, Ordering::Relaxed);
        region.state.store(OWNED | OPEN, Ordering::Release);
        let closing = Closing { region, unwinding: thread::panicking() };
        shared.tell();
        // SAFETY: the borrow it was made from is alive.
        unsafe { (*function)() };
        drop(closing);
        let panic = region.panic.lock().take();
        region.state.store(0, Ordering::Release);
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
    }
}

/// Closes a region and waits until it is empty, however the owner leaves.
struct Closing<'a> {
    region: &'a Region,
    /// Whether the owner was unwinding before it called its function.
    unwinding: bool,
}

impl Drop for Closing<'_> {
    fn drop(&mut self) {
        let state = &self.region.state;
        state.fetch_and(!OPEN, Ordering::AcqRel);
        let begun = Instant::now();
        let mut looks = 0;
        while state.load(Ordering::Acquire) != OWNED {
            looks += 1;
            if looks % LOOKS != 0 || begun.elapsed() < LINGER {
                std::hint::spin_loop();
            } else {
                // Who leaves last unparks; a wake-up meant for something else does no harm.
                thread::park();
            }
        }
        if thread::panicking() && !self.unwinding {
            *self.region.panic.lock() = None;
            state.store(0, Ordering::Release);
        }
    }
}

impl Region {
    /// Takes the region for this thread, if nobody has it.
    fn own(&self) -> bool {
        self.state.load(Ordering::Relaxed) == 0
            && self.state.compare_exchange(0, OWNED, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    /// Helps, if there is something to help with.
    fn help(&self, shared: &Shared) -> bool {
        let mut state = self.state.load(Ordering::Relaxed);
        loop {
            if state & OPEN == 0 || self.wanted.load(Ordering::Relaxed) == 0 {
                return false;
            }
            match self.state.compare_exchange_weak(state, state + 1, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => break,
                Err(now) => state = now,
            }
        }
        let taken = self.wanted.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| n.checked_sub(1));
        // SAFETY: this thread is counted in, so the owner has written `work` and waits before it writes again.
        let work = unsafe { (*self.work.get()).clone() }.expect("an open region has work");
        if let Ok(wanted) = taken {
            if wanted > 1 {
                shared.wake(2);
            }
            // SAFETY: the owner waits until this thread has counted itself out.
            let done = catch_unwind(AssertUnwindSafe(|| unsafe { (*work.function)() }));
            if let Err(panic) = done {
                *self.panic.lock() = Some(panic);
            }
        }
        // The last one out of a closed region may find its caller asleep.
        if self.state.fetch_sub(1, Ordering::AcqRel) == OWNED + 1 {
            work.caller.unpark();
        }
        taken.is_ok()
    }
}

impl Shared {
    /// A region has opened.
    fn tell(&self) {
        self.news.fetch_add(1, Ordering::SeqCst);
        if self.asleep.load(Ordering::SeqCst) > 0 {
            self.wake(1);
        }
    }

    fn wake(&self, count: usize) {
        for _ in 0..count {
            if self.asleep.load(Ordering::Relaxed) == 0 {
                return;
            }
            let mut sleepers = self.sleepers.lock();
            let Some(sleeper) = sleepers.pop() else { return };
            self.asleep.store(sleepers.len(), Ordering::SeqCst);
            drop(sleepers);
            sleeper.unpark();
        }
    }

    fn help(&self) {
        loop {
            let news = self.news.load(Ordering::SeqCst);
            if self.ended.load(Ordering::Acquire) {
                return;
            }
            if !self.regions.iter().any(|region| region.help(self)) {
                self.wait(news);
            }
        }
    }

    /// Waits for a region that opens after `news` was read: awake for a while, then asleep.
    fn wait(&self, news: usize) {
        let begun = Instant::now();
        let mut looks = 0;
        while self.news.load(Ordering::Acquire) == news {
            looks += 1;
            if looks % LOOKS == 0 && begun.elapsed() > self.look_out {
                return self.sleep(news);
            }
            std::hint::spin_loop();
        }
    }

    fn sleep(&self, news: usize) {
        let me = thread::current();
        {
            let mut sleepers = self.sleepers.lock();
            sleepers.push(me.clone());
            self.asleep.store(sleepers.len(), Ordering::SeqCst);
        }
        // Either this sees the news, or who brought them sees a sleeper: all four accesses are in one order.
        loop {
            let listed = |sleepers: &Vec<Thread>| sleepers.iter().position(|sleeper| sleeper.id() == me.id());
            if self.news.load(Ordering::SeqCst) != news {
                let mut sleepers = self.sleepers.lock();
                if let Some(at) = listed(&sleepers) {
                    sleepers.swap_remove(at);
                    self.asleep.store(sleepers.len(), Ordering::SeqCst);
                }
                return;
            }
            thread::park();
            if listed(&self.sleepers.lock()).is_none() {
                return;
            }
        }
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        self.shared.ended.store(true, Ordering::Release);
        self.shared.news.fetch_add(1, Ordering::SeqCst);
        let sleepers = std::mem::take(&mut *self.shared.sleepers.lock());
        self.shared.asleep.store(0, Ordering::SeqCst);
        sleepers.iter().for_each(Thread::unpark);
        for thread in self.threads.drain(..) {
            // The last handle may be let go by a helper's own caller, never by a helper: it can wait.
            let _ = thread.join();
        }
    }
}
