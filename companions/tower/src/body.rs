//! The response body that can hold the lock.

use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use http_body_util::BodyExt as _;
use http_body_util::combinators::UnsyncBoxBody;
use leasehold_api::Error;
use pin_project_lite::pin_project;

use crate::BoxError;
use crate::hold::RequestHold;

pin_project! {
    /// The body of a locked service's response: the handler's body, byte for byte, or the body of a refusal.
    ///
    /// With [`Until::BodyEnd`](crate::Until::BodyEnd) it holds the lock until it has ended, failed or was dropped. It
    /// fails if the lock is lost, because clients must not take a truncated response for a complete one.
    pub struct LockBody<B> {
        #[pin]
        state: BodyState<B>,
    }
}

pin_project! {
    #[project = BodyStateProj]
    enum BodyState<B> {
        // Rust drops the fields in this order: the body first, then the lock.
        Inner { #[pin] body: B, hold: Option<RequestHold> },
        Refusal { body: UnsyncBoxBody<Bytes, BoxError> },
        // The lock was lost, or the body has ended and released it.
        Over,
    }
}

impl<B> LockBody<B> {
    pub(crate) fn inner(body: B, hold: Option<RequestHold>) -> Self {
        Self { state: BodyState::Inner { body, hold } }
    }

    pub(crate) fn refusal(body: impl Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static) -> Self {
        Self { state: BodyState::Refusal { body: body.map_err(Into::into).boxed_unsync() } }
    }
}

impl<B> Body for LockBody<B>
where
    B: Body<Data = Bytes>,
    B::Error: Into<BoxError>,
{
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let mut state = self.project().state;
        let (mut body, hold) = match state.as_mut().project() {
            BodyStateProj::Inner { body, hold } => (body, hold),
            BodyStateProj::Refusal { body } => return Pin::new(body).poll_frame(cx),
            BodyStateProj::Over => return Poll::Ready(None),
        };
        if let Some(reason) = hold.as_ref().and_then(RequestHold::stopped) {
            state.set(BodyState::Over);
            return Poll::Ready(Some(Err(Error::lost(reason).into())));
        }
        let polled = body.as_mut().poll_frame(cx).map(|frame| frame.map(|frame| frame.map_err(Into::into)));
        // Also checks whether the body has ended, because hyper does not poll again after a frame that ends the body.
        let is_over = match &polled {
            Poll::Ready(None | Some(Err(_))) => true,
            Poll::Ready(Some(Ok(_))) => body.is_end_stream(),
            Poll::Pending => {
                if let Some(Poll::Ready(reason)) = hold.as_mut().map(|hold| hold.poll_stopped(cx)) {
                    state.set(BodyState::Over);
                    return Poll::Ready(Some(Err(Error::lost(reason).into())));
                }
                false
            }
        };
        // Drops the body before the lock, so nothing of it outlives the lock.
        if is_over && hold.is_some() {
            state.set(BodyState::Over);
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        match &self.state {
            BodyState::Inner { body, .. } => body.is_end_stream(),
            BodyState::Refusal { body } => body.is_end_stream(),
            BodyState::Over => true,
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.state {
            BodyState::Inner { body, .. } => body.size_hint(),
            BodyState::Refusal { body } => body.size_hint(),
            BodyState::Over => SizeHint::with_exact(0),
        }
    }
}

impl<B> fmt::Debug for LockBody<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match &self.state {
            BodyState::Inner { hold: Some(_), .. } => "LockBody(with the lock)",
            BodyState::Inner { hold: None, .. } => "LockBody",
            BodyState::Refusal { .. } => "LockBody(refusal)",
            BodyState::Over => "LockBody(over)",
        })
    }
}
