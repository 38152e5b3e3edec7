//! Where the tasks of an engine run. For a simulator also when: it pauses a client as a whole, and orders the
//! tasks that are ready.

use std::future::Future;

use tokio::runtime::Handle;
use tokio::task::{JoinHandle, JoinSet};

#[cfg(feature = "test-util")]
use std::{
    fmt::Debug,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

/// Decides when the tasks of one engine go on.
#[cfg(feature = "test-util")]
pub trait Turns: Debug + Send + Sync + 'static {
    /// Asked before each poll of a task, which goes on when this is ready. Whoever answers
    /// [`Poll::Pending`] sees to it that the waker is called.
    fn poll_turn(&self, cx: &mut Context<'_>) -> Poll<()>;
}

/// Where the tasks of an engine run.
#[derive(Clone, Debug)]
pub(crate) struct Tasks {
    handle: Handle,
    #[cfg(feature = "test-util")]
    turns: Option<Arc<dyn Turns>>,
}

impl Tasks {
    pub(crate) fn on(handle: Handle) -> Self {
        Self {
            handle,
            #[cfg(feature = "test-util")]
            turns: None,
        }
    }

    #[cfg(feature = "test-util")]
    pub(crate) fn taking(mut self, turns: Option<Arc<dyn Turns>>) -> Self {
        self.turns = turns;
        self
    }

    /// Whether a simulator decides when the tasks go on. Nothing outlives its runtime then.
    pub(crate) fn is_simulated(&self) -> bool {
        #[cfg(feature = "test-util")]
        return self.turns.is_some();
        #[cfg(not(feature = "test-util"))]
        false
    }

    pub(crate) fn handle(&self) -> &Handle {
        &self.handle
    }

    pub(crate) fn spawn<F>(&self, task: F) -> JoinHandle<F::Output>
    where
        F: Future<Output: Send> + Send + 'static,
    {
        #[cfg(feature = "test-util")]
        if let Some(turns) = &self.turns {
            return self.handle.spawn(InTurn::new(turns, task));
        }
        self.handle.spawn(task)
    }

    pub(crate) fn spawn_into<F>(&self, set: &mut JoinSet<F::Output>, task: F)
    where
        F: Future<Output: Send> + Send + 'static,
    {
        #[cfg(feature = "test-util")]
        if let Some(turns) = &self.turns {
            set.spawn_on(InTurn::new(turns, task), &self.handle);
            return;
        }
        set.spawn_on(task, &self.handle);
    }
}

/// A task that is polled when it is its turn.
#[cfg(feature = "test-util")]
struct InTurn<F> {
    turns: Arc<dyn Turns>,
    task: Pin<Box<F>>,
}

#[cfg(feature = "test-util")]
impl<F> InTurn<F> {
    fn new(turns: &Arc<dyn Turns>, task: F) -> Self {
        Self { turns: Arc::clone(turns), task: Box::pin(task) }
    }
}

#[cfg(feature = "test-util")]
impl<F: Future> Future for InTurn<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        ready!(self.turns.poll_turn(cx));
        self.task.as_mut().poll(cx)
    }
}
