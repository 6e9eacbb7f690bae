//! A session as its user sees it: requests in, events out. The submitter's handle opens one; the runtime's `Session` is
//! built on it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};

use crossbeam_channel::{Receiver, Sender, TrySendError, bounded};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, TryAcquireError, mpsc, oneshot};

use super::payload::{Counters, Event, SessionError, SessionOptions};
use super::readback::ReadResult;
use crate::device::{Read, UNLANDED_MAX};
use crate::ids::SessionId;
use crate::policy::drafts::DEPTH_MAX;

/// Sessions open at a time, waiting ones included; a further `open` waits. A session holds few kilobytes beside its rows,
/// so this bounds channels rather than memory.
pub const SESSIONS_MAX: usize = 64;

/// Requests under way: an `Open`, a `Feed`, a `Read` and a `Decode` of every session, and a few for counters.
pub const REQUESTS_MAX: usize = 4 * SESSIONS_MAX + 8;

/// What sessions ask of the submitter.
#[derive(Debug)]
pub enum Request {
    /// A new session; it waits for a slot in the order of these.
    Open {
        /// Its id.
        session: SessionId,
        /// What it wants.
        options: SessionOptions,
        /// Where its events go: room for the ids of all flights under way, and one more for the end.
        events: mpsc::Sender<Event>,
        /// Says, or closes, when the session is to end. Its own channel, so that it cannot be overtaken by the `Open` or
        /// find no room; a [`Nudge`] goes with it.
        cancel: oneshot::Receiver<()>,
        /// Its share of [`SESSIONS_MAX`], dropped with the session's last event.
        place: OwnedSemaphorePermit,
    },
    /// Rows of the prompt. Prefill starts at once; the answer comes when there is room for more.
    Feed {
        /// The session.
        session: SessionId,
        /// `[n, hidden]`
        rows: Vec<f32>,
        /// Answered when the rows were taken, or why not.
        reply: oneshot::Sender<Result<(), SessionError>>,
    },
    /// The prompt is complete: decode from its last row.
    Decode {
        /// The session.
        session: SessionId,
        /// Ids at most; `None` is what the context leaves.
        max_new: Option<usize>,
    },
    /// A copy of the session's state or logits, taken when it has nothing under way; until then it is not decoded on.
    Read {
        /// The session.
        session: SessionId,
        /// Which.
        what: Read,
        /// The copy, or why there is none.
        reply: oneshot::Sender<Result<ReadResult, SessionError>>,
    },
    /// All counters.
    Counters {
        /// The snapshot.
        reply: oneshot::Sender<Counters>,
    },
}

/// What the graph's owner says, full request channel or not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Control {
    /// End all.
    Shutdown,
}

/// Somebody took an event, so that there may be room for another flight, or wants to end. Sent without care: a full
/// channel holds one already, and what it is about is looked at after it is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Nudge;

/// One session's side of the submitter. Dropping it cancels the session.
#[derive(Debug)]
pub struct SessionHandle {
    id: SessionId,
    requests: Requests,
    nudges: Sender<Nudge>,
    events: mpsc::Receiver<Event>,
    /// Taken when it is used, or when the session's end was taken.
    cancel: Option<oneshot::Sender<()>>,
}

impl SessionHandle {
    /// Its id, as in spans and counters.
    #[must_use]
    pub fn id(&self) -> SessionId {
        self.id
    }

    /// Hands rows `[n, hidden]` over and waits until there is room for more. Prefill has begun by then.
    ///
    /// # Errors
    ///
    /// [`SessionError::RowWidth`], [`SessionError::ContextFull`], [`SessionError::Decoding`], the session's own end, or
    /// [`SessionError::Gone`].
    pub async fn feed(&self, rows: Vec<f32>) -> Result<(), SessionError> {
        self.start_feed(rows)?.await.unwrap_or(Err(GONE))
    }

    /// As [`feed`](Self::feed), but hands the answer's receiver out instead of waiting.
    ///
    /// # Errors
    ///
    /// [`SessionError::Busy`] when callers dropped more feeds half-way than the channel holds, [`SessionError::Gone`].
    pub fn start_feed(&self, rows: Vec<f32>) -> Result<oneshot::Receiver<Result<(), SessionError>>, SessionError> {
        let (reply, answer) = oneshot::channel();
        self.request(Request::Feed { session: self.id, rows, reply })?;
        Ok(answer)
    }

    /// Begins decoding behind all that was fed; `max_new` ids at most.
    ///
    /// # Errors
    ///
    /// As [`start_feed`](Self::start_feed). That decoding cannot begin (an empty prompt) is told by the events.
    pub fn decode(&self, max_new: Option<usize>) -> Result<(), SessionError> {
        self.request(Request::Decode { session: self.id, max_new })
    }

    /// A copy of the state or the logits, taken when nothing of the session is under way.
    ///
    /// # Errors
    ///
    /// The session's own end, [`SessionError::Busy`], [`SessionError::Gone`].
    pub fn start_read(&self, what: Read) -> Result<oneshot::Receiver<Result<ReadResult, SessionError>>, SessionError> {
        let (reply, answer) = oneshot::channel();
        self.request(Request::Read { session: self.id, what, reply })?;
        Ok(answer)
    }

    /// Ends the session; ids delivered before are still there to be taken, the last event is its end.
    pub fn cancel(&mut self) {
        if let Some(cancel) = self.cancel.take() {
            // An actor that is gone needs no telling.
            let _ = cancel.send(());
            let _ = self.nudges.try_send(Nudge);
        }
    }

    /// The next event, `None` after the last.
    pub async fn next(&mut self) -> Option<Event> {
        let event = self.events.recv().await;
        self.took(event.as_ref());
        event
    }

    /// As [`next`](Self::next), for streams.
    pub fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Event>> {
        let event = self.events.poll_recv(cx);
        if let Poll::Ready(event) = &event {
            self.took(event.as_ref());
        }
        event
    }

    /// The next event if it is there already.
    pub fn try_next(&mut self) -> Option<Event> {
        let event = self.events.try_recv().ok();
        self.took(event.as_ref());
        event
    }

    /// As [`next`](Self::next), for threads without a runtime.
    pub fn blocking_next(&mut self) -> Option<Event> {
        let event = self.events.blocking_recv();
        self.took(event.as_ref());
        event
    }

    fn took(&mut self, event: Option<&Event>) {
        match event {
            Some(Event::Finished(_)) => self.cancel = None,
            Some(Event::Token(_)) => {
                let _ = self.nudges.try_send(Nudge);
            }
            None => {}
        }
    }

    fn request(&self, request: Request) -> Result<(), SessionError> {
        self.requests.send(request)
    }
}

impl Drop for SessionHandle {
    fn drop(&mut self) {
        self.cancel();
    }
}

/// The way to the submitter. What lies in a channel whose receiver is gone stays there, and with it a reply that somebody
/// waits for. So the submitter, as it ends or dies, first closes the places and then empties the channel; who sends later
/// than that finds the places closed.
#[derive(Clone, Debug)]
struct Requests {
    channel: Sender<Request>,
    places: Arc<Semaphore>,
}

impl Requests {
    fn send(&self, request: Request) -> Result<(), SessionError> {
        self.channel.try_send(request).map_err(|error| match error {
            TrySendError::Full(_) => SessionError::Busy { limit: REQUESTS_MAX },
            TrySendError::Disconnected(_) => GONE,
        })?;
        if self.places.is_closed() { Err(GONE) } else { Ok(()) }
    }
}

const GONE: SessionError = SessionError::Gone { actor: "submitter" };

/// Opens sessions. Clones open sessions of the same graph; when the last one and every session are gone, it stops.
#[derive(Clone, Debug)]
pub struct Handle {
    requests: Requests,
    control: Sender<Control>,
    nudges: Sender<Nudge>,
    next: Arc<AtomicU64>,
    events: usize,
}

/// The submitter's ends of its sessions' channels.
pub(crate) struct Ends {
    pub(crate) requests: Receiver<Request>,
    pub(crate) control: Receiver<Control>,
    pub(crate) nudges: Receiver<Nudge>,
    places: Arc<Semaphore>,
}

impl Drop for Ends {
    fn drop(&mut self) {
        self.places.close();
        while self.requests.try_recv().is_ok() {}
    }
}

impl Handle {
    /// For a graph whose flights hold `batches` at most.
    pub(crate) fn new(batches: u32) -> (Self, Ends) {
        let (channel, requests_end) = bounded(REQUESTS_MAX);
        // Said once, or said again to no purpose.
        let (control, control_end) = bounded(1);
        // One says as much as many.
        let (nudges, nudges_end) = bounded(1);
        // All ids of all unlanded flights, rows counted (`protocol.md` §5 rule 10), and the end. By the deepest drafts there
        // are, because another device may take over.
        let events = UNLANDED_MAX * batches as usize * (DEPTH_MAX + 1) + 1;
        let places = Arc::new(Semaphore::new(SESSIONS_MAX));
        let requests = Requests { channel, places: places.clone() };
        let handle = Self { requests, control, nudges, next: Arc::new(AtomicU64::new(1)), events };
        (handle, Ends { requests: requests_end, control: control_end, nudges: nudges_end, places })
    }

    /// Opens a session; waits while [`SESSIONS_MAX`] are open. It gets a device slot when one is free.
    ///
    /// # Errors
    ///
    /// [`SessionError::Gone`], [`SessionError::Busy`].
    pub async fn open(&self, options: SessionOptions) -> Result<SessionHandle, SessionError> {
        let place = self.requests.places.clone().acquire_owned().await.map_err(|_| GONE)?;
        self.open_in(place, options)
    }

    /// As [`open`](Self::open), but does not wait.
    ///
    /// # Errors
    ///
    /// [`SessionError::Busy`] where [`SESSIONS_MAX`] are open, [`SessionError::Gone`].
    pub fn try_open(&self, options: SessionOptions) -> Result<SessionHandle, SessionError> {
        let busy = |error| match error {
            TryAcquireError::Closed => GONE,
            TryAcquireError::NoPermits => SessionError::Busy { limit: SESSIONS_MAX },
        };
        let place = self.requests.places.clone().try_acquire_owned().map_err(busy)?;
        self.open_in(place, options)
    }

    fn open_in(&self, place: OwnedSemaphorePermit, options: SessionOptions) -> Result<SessionHandle, SessionError> {
        let id = SessionId(self.next.fetch_add(1, Ordering::Relaxed));
        let (sender, events) = mpsc::channel(self.events);
        let (cancel, cancelled) = oneshot::channel();
        self.requests.send(Request::Open { session: id, options, events: sender, cancel: cancelled, place })?;
        let (requests, nudges) = (self.requests.clone(), self.nudges.clone());
        Ok(SessionHandle { id, requests, nudges, events, cancel: Some(cancel) })
    }

    /// A snapshot of all counters.
    ///
    /// # Errors
    ///
    /// [`SessionError::Gone`], [`SessionError::Busy`].
    pub async fn counters(&self) -> Result<Counters, SessionError> {
        self.start_counters()?.await.map_err(|_| GONE)
    }

    /// As [`counters`](Self::counters), but hands the answer's receiver out.
    ///
    /// # Errors
    ///
    /// As [`counters`](Self::counters).
    pub fn start_counters(&self) -> Result<oneshot::Receiver<Counters>, SessionError> {
        let (reply, answer) = oneshot::channel();
        self.requests.send(Request::Counters { reply })?;
        Ok(answer)
    }

    /// Ends all sessions and the submitter, and with it the graph.
    pub fn shutdown(&self) {
        // Full means that somebody said so already.
        let _ = self.control.try_send(Control::Shutdown);
    }
}
