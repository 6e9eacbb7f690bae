//! A thread that runs a software device's queue, in order.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::board::{Board, BoardLandings};
use super::machine::{Machine, Maths, Micro, expand};
use super::{DeviceError, Halves, Item, Queue};

struct Shared {
    board: Arc<Board>,
    queue: Mutex<Entries>,
    more: Condvar,
}

#[derive(Default)]
struct Entries {
    entries: VecDeque<Micro>,
    closed: bool,
}

/// The submitter's half. Dropping it stops the thread behind what it runs at the moment.
pub(crate) struct WorkerQueue {
    shared: Arc<Shared>,
    layers: usize,
    /// Set once it runs.
    thread: Option<JoinHandle<()>>,
}

/// Starts a thread around the machine. `pace` is called before each entry; if it says why not to go on, or panics, the
/// device is lost.
///
/// # Errors
///
/// [`DeviceError::Lost`] where the system gives no thread.
pub(crate) fn start<M: Maths + 'static>(
    machine: Machine<M>,
    layers: usize,
    name: &str,
    pace: impl FnMut(&Micro) -> Result<(), String> + Send + 'static,
) -> Result<Halves, DeviceError> {
    let (mut queue, landings, run) = assemble(machine, layers, pace);
    let spawned = std::thread::Builder::new().name(name.into()).spawn(run);
    queue.thread = Some(spawned.map_err(|error| DeviceError::Lost { why: format!("no thread for it: {error}") })?);
    Ok((Box::new(queue), Box::new(landings)))
}

/// The halves, and what the thread between them runs.
pub(crate) fn assemble<M: Maths + 'static>(
    mut machine: Machine<M>,
    layers: usize,
    mut pace: impl FnMut(&Micro) -> Result<(), String> + Send + 'static,
) -> (WorkerQueue, BoardLandings, impl FnOnce() + Send + 'static) {
    let board = Arc::new(Board::default());
    let shared = Arc::new(Shared { board: board.clone(), queue: Mutex::default(), more: Condvar::new() });
    let on_thread = shared.clone();
    machine.busy = Some(Duration::ZERO);
    let run = move || {
        while let Some(micro) = next(&on_thread) {
            let timed = matches!(micro, Micro::Op(..));
            let done = catch_unwind(AssertUnwindSafe(|| {
                pace(&micro)?;
                let (class, flight) = (micro.class(), micro.flight().map_or(0, |flight| flight.0));
                let begun = Instant::now();
                let landed = machine.execute(micro);
                let took = begun.elapsed();
                if timed && let Some(busy) = &mut machine.busy {
                    *busy += took;
                }
                // What stands in for a GPU's timestamps: a slice on the device's track.
                let dur_us = took.as_secs_f64() * 1e6;
                tracing::trace!(target: "riparian::device", class, flight, age_us = dur_us, dur_us);
                Ok(landed)
            }));
            match done.unwrap_or_else(|panic| Err(panic_text(panic.as_ref()))) {
                Ok(Some((wait, landing))) => on_thread.board.land(wait, landing),
                Ok(None) => {}
                Err(why) => return on_thread.board.lose(&why),
            }
        }
    };
    (WorkerQueue { shared, layers, thread: None }, BoardLandings(board), run)
}

/// What a panic said.
pub(crate) fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    format!("it panicked: {}", text.unwrap_or("without a word"))
}

fn next(shared: &Shared) -> Option<Micro> {
    let mut queue = shared.queue.lock();
    loop {
        if queue.closed || shared.board.lost().is_some() {
            return None;
        }
        if let Some(micro) = queue.entries.pop_front() {
            return Some(micro);
        }
        shared.more.wait(&mut queue);
    }
}

impl Queue for WorkerQueue {
    fn append(&mut self, items: Vec<Item>) -> Result<(), DeviceError> {
        if let Some(lost) = self.shared.board.lost() {
            return Err(lost);
        }
        let mut queue = self.shared.queue.lock();
        let from = queue.entries.len();
        expand(items, self.layers, &mut queue.entries);
        queue.entries.iter().skip(from).filter_map(Micro::staging).for_each(|wait| self.shared.board.own(wait));
        self.shared.more.notify_one();
        Ok(())
    }
}

impl Drop for WorkerQueue {
    fn drop(&mut self) {
        self.shared.queue.lock().closed = true;
        self.shared.more.notify_all();
        // Whoever still waits for a landing shall not wait for ever.
        self.shared.board.lose("it was closed");
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
