//! Knowing that an actor has ended.
//!
//! A bounded channel keeps what lies in it for as long as a sender lives, and
//! with it the reply channels of requests that nobody will ever read. So
//! whoever waits for a reply also watches whether the actor is still there.

use std::future::Future;
use std::pin::pin;
use std::task::Poll;

use tokio::sync::watch;

/// Held by the actor; that it is dropped, also by a panic, is the message.
#[derive(Debug)]
pub struct Alive {
    _sender: watch::Sender<()>,
}

/// Tells when the actor has ended.
#[derive(Clone, Debug)]
pub struct Watch {
    receiver: watch::Receiver<()>,
}

/// The actor's half and its callers'.
#[must_use]
pub fn alive() -> (Alive, Watch) {
    let (sender, receiver) = watch::channel(());
    (Alive { _sender: sender }, Watch { receiver })
}

impl Watch {
    /// What `answer` gives, or `None` when the actor ended without giving it.
    pub async fn or_gone<T>(&self, answer: impl Future<Output = T>) -> Option<T> {
        let mut receiver = self.receiver.clone();
        let (mut answer, mut gone) = (pin!(answer), pin!(receiver.changed()));
        std::future::poll_fn(|cx| {
            if let Poll::Ready(answer) = answer.as_mut().poll(cx) {
                return Poll::Ready(Some(answer));
            }
            if gone.as_mut().poll(cx).is_pending() {
                return Poll::Pending;
            }
            // It may have answered between the two looks, as the last thing it did.
            Poll::Ready(match answer.as_mut().poll(cx) {
                Poll::Ready(answer) => Some(answer),
                Poll::Pending => None,
            })
        })
        .await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::sync::oneshot;

    #[tokio::test]
    async fn an_answer_comes_through() {
        let (_alive, watch) = alive();
        assert_eq!(watch.or_gone(async { 3 }).await, Some(3));
    }

    #[tokio::test]
    async fn the_last_answer_counts() {
        let (alive, watch) = alive();
        let (reply, answer) = oneshot::channel();
        reply.send(4).unwrap();
        drop(alive);
        assert_eq!(watch.or_gone(answer).await, Some(Ok(4)));
    }

    #[tokio::test]
    async fn a_request_that_nobody_reads_does_not_wait_for_ever() {
        let (alive, watch) = alive();
        // The sender stays, as it would in a channel whose reader has ended.
        let (_reply, answer) = oneshot::channel::<u32>();
        let waiting = tokio::spawn(async move { watch.or_gone(answer).await });
        tokio::task::yield_now().await;
        drop(alive);
        assert_eq!(waiting.await.unwrap(), None);
    }
}
