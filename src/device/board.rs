//! Where a software device leaves its landings: one buffer for each number, owned from append until it is taken.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Instant;

use parking_lot::{Condvar, Mutex};

use super::{DeviceError, Landing, Landings, Wait};
use crate::check;

/// Shared by a device's halves and its driver.
#[derive(Default)]
pub(crate) struct Board {
    state: Mutex<State>,
    landed: Condvar,
}

#[derive(Default)]
struct State {
    /// Buffers named by an item and not yet taken.
    owned: HashSet<Buffer>,
    ready: HashMap<Buffer, Landing>,
    lost: Option<String>,
}

/// Landings, peeks and reads share their buffers, uploads have their own.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Buffer {
    upload: bool,
    number: u16,
}

impl From<Wait> for Buffer {
    fn from(wait: Wait) -> Self {
        match wait {
            Wait::Peek(s) | Wait::Land(s) | Wait::Read(s) => Self { upload: false, number: s.0 },
            Wait::Upload(s) => Self { upload: true, number: s.0 },
        }
    }
}

impl Board {
    /// An item that was appended will write this buffer.
    pub(crate) fn own(&self, wait: Wait) {
        let fresh = self.state.lock().owned.insert(wait.into());
        check!(Flights, fresh, "{wait:?} was given to the device before it was read");
    }

    /// It was written.
    pub(crate) fn land(&self, wait: Wait, landing: Landing) {
        let before = self.state.lock().ready.insert(wait.into(), landing);
        check!(Flights, before.is_none(), "{wait:?} was written before it was read");
        self.landed.notify_all();
    }

    /// Nothing more will land.
    pub(crate) fn lose(&self, why: &str) {
        self.state.lock().lost.get_or_insert_with(|| why.into());
        self.landed.notify_all();
    }

    /// Whether, and why, the device is lost.
    pub(crate) fn lost(&self) -> Option<DeviceError> {
        self.state.lock().lost.clone().map(|why| DeviceError::Lost { why })
    }

    /// Buffers that hold something nobody took yet.
    pub(crate) fn is_idle(&self) -> bool {
        self.state.lock().owned.is_empty()
    }
}

impl State {
    fn take(&mut self, wait: Wait) -> Result<Option<Landing>, DeviceError> {
        // What landed before the loss is there still, but nobody needs it: the sessions go on elsewhere.
        if let Some(why) = &self.lost {
            return Err(DeviceError::Lost { why: why.clone() });
        }
        let landing = self.ready.remove(&wait.into());
        if landing.is_some() {
            self.owned.remove(&wait.into());
        }
        Ok(landing)
    }
}

/// Readback's half of a software device.
pub(crate) struct BoardLandings(pub(crate) Arc<Board>);

impl Landings for BoardLandings {
    fn poll(&mut self, wait: Wait) -> Result<Option<Landing>, DeviceError> {
        self.0.state.lock().take(wait)
    }

    fn wait(&mut self, wait: Wait, deadline: Option<Instant>) -> Result<Landing, DeviceError> {
        let begun = Instant::now();
        let mut state = self.0.state.lock();
        loop {
            if let Some(landing) = state.take(wait)? {
                return Ok(landing);
            }
            match deadline {
                None => self.0.landed.wait(&mut state),
                Some(deadline) if Instant::now() < deadline => {
                    self.0.landed.wait_until(&mut state, deadline);
                }
                Some(_) => return Err(DeviceError::TimedOut { waited: begun.elapsed() }),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::device::{Staging, UploadStaging};

    #[test]
    fn a_landing_is_taken_once() {
        let board = Arc::new(Board::default());
        let mut landings = BoardLandings(board.clone());
        let wait = Wait::Upload(UploadStaging(0));
        board.own(wait);
        assert!(landings.poll(wait).unwrap().is_none() && !board.is_idle());
        board.land(wait, Landing::Uploaded);
        assert!(matches!(landings.poll(wait), Ok(Some(Landing::Uploaded))));
        assert!(board.is_idle());
    }

    #[test]
    fn waits_end_at_their_deadline_or_with_the_device() {
        let board = Arc::new(Board::default());
        let mut landings = BoardLandings(board.clone());
        let wait = Wait::Land(Staging(1));
        let soon = Instant::now() + Duration::from_millis(5);
        assert!(matches!(landings.wait(wait, Some(soon)), Err(DeviceError::TimedOut { .. })));
        let waiting = std::thread::spawn(move || landings.wait(wait, None));
        board.lose("unplugged");
        assert!(matches!(waiting.join().unwrap(), Err(DeviceError::Lost { why }) if why == "unplugged"));
    }

    #[test]
    #[cfg(debug_assertions)]
    #[should_panic(expected = "I3 Flights")]
    fn a_buffer_in_use_is_given_to_nobody() {
        let board = Board::default();
        board.own(Wait::Land(Staging(0)));
        board.own(Wait::Peek(Staging(0)));
    }
}
