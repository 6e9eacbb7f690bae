//! A session as its user sees it: requests in, events out. The submitter's handle opens one; the runtime's `Session` is
//! built on it.

use std::task::{Context, Poll};

use crossbeam_channel::Sender;
use tokio::sync::{OwnedSemaphorePermit, mpsc, oneshot};

use super::payload::{Event, SessionError, SessionOptions};
use crate::ids::SessionId;

/// Sessions open at a time, waiting ones included; a further `open` waits. A session holds few kilobytes beside its rows,
/// so this bounds channels rather than memory.
pub const SESSIONS_MAX: usize = 64;

/// Requests under way: an `Open`, a `Feed` and a `Decode` of every session.
pub const REQUESTS_MAX: usize = 3 * SESSIONS_MAX;

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
}

/// What the user of a session may say at any time, full request channel or not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Control {
    /// End this session now. Sent once by each session, as it is cancelled or dropped.
    Cancel {
        /// The session.
        session: SessionId,
    },
    /// End all.
    Shutdown,
}

/// Somebody took an event: there may be room for another flight. Sent without care: a full channel holds one already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Nudge;

/// One session's side of the submitter. Dropping it cancels the session.
#[derive(Debug)]
pub struct SessionHandle {
    id: SessionId,
    requests: Sender<Request>,
    control: Sender<Control>,
    nudges: Sender<Nudge>,
    events: mpsc::Receiver<Event>,
    /// No cancel is owed: one was sent, or the session's end was taken.
    over: bool,
}

impl SessionHandle {
    /// For the submitter's handle alone: callers open sessions there.
    pub(crate) fn new(
        id: SessionId,
        requests: Sender<Request>,
        control: Sender<Control>,
        nudges: Sender<Nudge>,
        events: mpsc::Receiver<Event>,
    ) -> Self {
        Self { id, requests, control, nudges, events, over: false }
    }

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
        self.start_feed(rows)?.await.unwrap_or(Err(SessionError::Gone { actor: "submitter" }))
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

    /// Ends the session; ids delivered before are still there to be taken, the last event is its end.
    pub fn cancel(&mut self) {
        if !self.over {
            self.over = true;
            // The channel has room for one from each session; an actor that is gone needs none.
            let _ = self.control.try_send(Control::Cancel { session: self.id });
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
            Some(Event::Finished(_)) => self.over = true,
            Some(Event::Token(_)) => {
                let _ = self.nudges.try_send(Nudge);
            }
            None => {}
        }
    }

    fn request(&self, request: Request) -> Result<(), SessionError> {
        self.requests.try_send(request).map_err(|error| match error {
            crossbeam_channel::TrySendError::Full(_) => SessionError::Busy { limit: REQUESTS_MAX },
            crossbeam_channel::TrySendError::Disconnected(_) => SessionError::Gone { actor: "submitter" },
        })
    }
}

impl Drop for SessionHandle {
    fn drop(&mut self) {
        self.cancel();
    }
}
