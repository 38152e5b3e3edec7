//! Times at which the machine stood still.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::worker::now;

const PAUSE: Duration = Duration::from_millis(20);
/// Least delay of a wake-up that counts as a stall.
const LATE: Duration = Duration::from_millis(500);

/// A thread that only sleeps, and records each late wake-up.
#[derive(Debug)]
pub(crate) struct Stalls {
    seen: Arc<Mutex<Vec<(u64, u64)>>>,
    is_over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Stalls {
    pub(crate) fn watch() -> Self {
        let (seen, is_over) = (Arc::new(Mutex::new(Vec::new())), Arc::new(AtomicBool::new(false)));
        let (stalls, stop) = (seen.clone(), is_over.clone());
        let thread = std::thread::spawn(move || {
            let mut last = now();
            while !stop.load(Ordering::SeqCst) {
                std::thread::sleep(PAUSE);
                let woken = now();
                if Duration::from_nanos(woken - last) > LATE {
                    stalls.lock().unwrap_or_else(PoisonError::into_inner).push((last, woken));
                }
                last = woken;
            }
        });
        Self { seen, is_over, thread: Some(thread) }
    }

    /// Returns the start and the end of each stall so far.
    pub(crate) fn seen(&self) -> Vec<(u64, u64)> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Drop for Stalls {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::SeqCst);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
