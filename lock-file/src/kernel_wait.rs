//! Waits in the kernel: blocking calls for file locks, each on a dedicated thread.
//!
//! A blocking call cannot be cancelled, so callers do not block on it. Its thread passes the result to a caller that
//! still wants it, or undoes it. Until the call returns, later waits for the same file join it. A process therefore has
//! at most one thread per file, even after many abandoned waits. The threads do not belong to the runtime, and a
//! process does not wait for them at its end.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;

use tokio::sync::oneshot;

/// Maximum number of files for which threads of one process wait. Further waiters poll.
const MAX_THREADS: usize = 256;

/// Stack size for a few system calls, enough even without optimisation.
const STACK: usize = 128 * 1024;

/// A blocking call. When it returns from the kernel, it checks whether the result is still wanted. If not, it undoes
/// the result and returns `None`.
type Blocking<T> = dyn Fn(&dyn Fn() -> bool) -> io::Result<Option<T>> + Send;

type AnswerSenders<T> = VecDeque<oneshot::Sender<io::Result<T>>>;

/// The files for which threads of this process wait, each with the callers that want the result. Each entry
/// has one thread.
#[derive(Debug)]
pub(crate) struct KernelWaits<T: 'static> {
    claims: Mutex<BTreeMap<PathBuf, AnswerSenders<T>>>,
}

/// The pending result. Dropping it abandons the wait.
pub(crate) type PendingWait<T> = oneshot::Receiver<io::Result<T>>;

impl<T: Send> KernelWaits<T> {
    pub(crate) const fn new() -> Self {
        Self { claims: Mutex::new(BTreeMap::new()) }
    }

    /// Waits for the file at `path` by `blocking`, or joins an existing wait. Returns `None` if no thread is available.
    pub(crate) fn wait_for(
        &'static self,
        path: &Path,
        blocking: impl Fn(&dyn Fn() -> bool) -> io::Result<Option<T>> + Send + 'static,
    ) -> Option<PendingWait<T>> {
        let (claim, answer) = oneshot::channel();
        let mut claims = self.lock();
        if let Some(waiting) = claims.get_mut(path) {
            // Removes abandoned waits, because the kernel's wait can be long and would collect them.
            waiting.retain(|claim| !claim.is_closed());
            waiting.push_back(claim);
            return Some(answer);
        }
        if claims.len() >= MAX_THREADS {
            return None;
        }
        let path = path.to_owned();
        claims.insert(path.clone(), VecDeque::from([claim]));
        drop(claims);
        let thread = thread::Builder::new().name("leasehold-wait".to_owned()).stack_size(STACK);
        let wait = {
            let path = path.clone();
            move || self.wait(&path, &blocking)
        };
        if let Err(error) = thread.spawn(wait) {
            tracing::debug!(%error, "no thread to wait on: polling");
            self.lock().remove(&path);
            return None;
        }
        Some(answer)
    }

    /// Waits for the file at `path`, once for each caller, until no caller wants it.
    fn wait(&self, path: &Path, blocking: &Blocking<T>) {
        let is_wanted = || self.lock().get(path).is_some_and(|all| all.iter().any(|c| !c.is_closed()));
        loop {
            let mut left = blocking(&is_wanted).transpose();
            let mut claims = self.lock();
            let Some(waiting) = claims.get_mut(path) else { return };
            while let Some(answer) = left.take() {
                let Some(claim) = waiting.pop_front() else {
                    left = Some(answer);
                    break;
                };
                left = claim.send(answer).err();
            }
            waiting.retain(|claim| !claim.is_closed());
            let is_over = waiting.is_empty();
            if is_over {
                claims.remove(path);
            }
            drop(claims);
            // Drops an unwanted result, which undoes it, outside the mutex.
            drop(left);
            if is_over {
                return;
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<PathBuf, AnswerSenders<T>>> {
        // Ignores poisoning, because a panic under the mutex leaves no partial change.
        self.claims.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Arc, mpsc};

    const PATH: &str = "/a/file";

    /// A blocking call that returns once per message, and reports unwanted results.
    struct Gate {
        open: mpsc::Sender<u32>,
        began: mpsc::Receiver<()>,
        unwanted: mpsc::Receiver<u32>,
    }

    fn gate() -> (Gate, Box<Blocking<u32>>) {
        let (open, opened) = mpsc::channel();
        let (begin, began) = mpsc::channel();
        let (refuse, unwanted) = mpsc::channel();
        let blocking = move |is_wanted: &dyn Fn() -> bool| {
            begin.send(()).unwrap();
            let number = opened.recv().unwrap();
            if is_wanted() {
                return Ok(Some(number));
            }
            refuse.send(number).unwrap();
            Ok(None)
        };
        (Gate { open, began, unwanted }, Box::new(blocking))
    }

    fn waits() -> &'static KernelWaits<u32> {
        Box::leak(Box::new(KernelWaits::new()))
    }

    #[test]
    fn one_thread_serves_all_in_their_order() {
        let waits = waits();
        let (gate, blocking) = gate();
        let first = waits.wait_for(Path::new(PATH), blocking).unwrap();
        let others: Vec<_> = (0..3)
            .map(|_| waits.wait_for(Path::new(PATH), |_| panic!("a second thread for one file")).unwrap())
            .collect();
        for number in 0..4 {
            gate.open.send(number).unwrap();
        }
        for (number, claim) in (0..).zip([first].into_iter().chain(others)) {
            assert_eq!(claim.blocking_recv().unwrap().unwrap(), number);
        }
    }

    #[test]
    fn what_was_given_up_is_taken_over_by_the_next() {
        let waits = waits();
        let (gate, blocking) = gate();
        drop(waits.wait_for(Path::new(PATH), blocking).unwrap());
        gate.began.recv().unwrap();
        for _ in 0..100 {
            drop(waits.wait_for(Path::new(PATH), |_| panic!("a second thread for one file")).unwrap());
        }
        let next = waits.wait_for(Path::new(PATH), |_| panic!("a second thread for one file")).unwrap();
        assert_eq!(waits.lock()[Path::new(PATH)].len(), 1, "those who gave up are forgotten");
        gate.open.send(7).unwrap();
        assert_eq!(next.blocking_recv().unwrap().unwrap(), 7);
    }

    #[test]
    fn what_nobody_wants_is_given_back_and_the_thread_ends() {
        let waits = waits();
        let (gate, blocking) = gate();
        drop(waits.wait_for(Path::new(PATH), blocking).unwrap());
        gate.open.send(7).unwrap();
        assert_eq!(gate.unwanted.recv().unwrap(), 7);
        // Waits until the thread has ended and dropped its call.
        gate.began.recv().unwrap();
        assert!(gate.began.recv().is_err());
        assert!(waits.lock().is_empty());
    }

    #[test]
    fn an_answer_that_its_claimant_does_not_take_is_dropped() {
        let waits: &'static KernelWaits<Arc<()>> = Box::leak(Box::new(KernelWaits::new()));
        let (sender, opened) = mpsc::channel::<Arc<()>>();
        // This wait is abandoned just after the thread has checked that it is wanted.
        let claim = waits.wait_for(Path::new(PATH), move |_| Ok(Some(opened.recv().unwrap()))).unwrap();
        drop(claim);
        let answer = Arc::new(());
        sender.send(Arc::clone(&answer)).unwrap();
        assert!(sender_is_gone(&sender), "the thread has ended");
        assert_eq!(Arc::strong_count(&answer), 1);
    }

    fn sender_is_gone(sender: &mpsc::Sender<Arc<()>>) -> bool {
        (0..60_000).any(|_| {
            thread::sleep(std::time::Duration::from_millis(1));
            sender.send(Arc::new(())).is_err()
        })
    }

    #[test]
    fn threads_are_limited_and_who_finds_none_is_told() {
        let waits = waits();
        let claims: Vec<_> = (0..MAX_THREADS)
            .map(|i| {
                let (gate, blocking) = gate();
                (waits.wait_for(Path::new(&format!("/a/{i}")), blocking).unwrap(), gate)
            })
            .collect();
        assert!(waits.wait_for(Path::new("/a/one/more"), |_| Ok(Some(1))).is_none());
        assert!(waits.wait_for(Path::new("/a/0"), |_| Ok(Some(1))).is_some(), "its file has a thread");
        for (number, (claim, gate)) in (0..).zip(claims) {
            gate.open.send(number).unwrap();
            assert_eq!(claim.blocking_recv().unwrap().unwrap(), number);
        }
    }
}
