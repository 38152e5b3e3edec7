//! The runtime for the tasks of an engine. A simulator also decides when they run: it pauses a client as a
//! whole, and orders the ready tasks.

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

/// Decides when the tasks of one engine run.
#[cfg(feature = "test-util")]
pub trait Turns: Debug + Send + Sync + 'static {
    /// Returns `Ready` if the task that is about to be polled can run. An implementation that returns
    /// [`Poll::Pending`] must wake the waker later.
    fn poll_turn(&self, cx: &mut Context<'_>) -> Poll<()>;
}

/// The runtime for the tasks of an engine.
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

    /// Returns whether a simulator decides when the tasks run. Then no work outlives its runtime.
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

/// A task that is polled only on its turn.
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
