//! The faults between a client and the store that a test injects.

pub(crate) use imp::{Faults, Op, Reply};

/// The empty implementation for builds without the test double. It costs nothing.
#[cfg(not(feature = "test-util"))]
mod imp {
    use leasehold_api::{Error, ErrorKind};
    use leasehold_engine::Attempt;

    #[derive(Clone, Copy)]
    pub(crate) enum Op {
        Acquire,
        Wait,
        Renew,
        Release,
    }

    pub(crate) struct Reply;

    impl Reply {
        pub(crate) fn is_second(&self) -> bool {
            false
        }
    }

    #[derive(Clone, Copy)]
    pub(crate) enum Unsent {}

    impl Unsent {
        pub(crate) fn attempt(self) -> Result<Attempt, Error> {
            match self {}
        }

        pub(crate) fn error(self) -> Error {
            match self {}
        }
    }

    #[derive(Default)]
    pub(crate) struct Faults(());

    impl Faults {
        pub(crate) fn is_clear(&self, _: Op) -> bool {
            true
        }

        pub(crate) fn hears_hints(&self) -> bool {
            true
        }

        pub(crate) fn hears_losses(&self) -> bool {
            true
        }

        pub(crate) async fn before(&self, _: Op) -> Result<Reply, Unsent> {
            Ok(Reply)
        }

        pub(crate) async fn after(&self, Reply: Reply) -> Result<(), ErrorKind> {
            Ok(())
        }
    }
}

#[cfg(feature = "test-util")]
mod imp {
    use std::collections::VecDeque;
    use std::future::pending;
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
    use std::sync::{Mutex, MutexGuard, PoisonError};

    use leasehold_api::{Error, ErrorKind};
    use leasehold_engine::{Attempt, Fault};
    use tokio::sync::watch;

    use crate::backend::scripted_error;

    pub(crate) use leasehold_engine::Op;

    /// A call that the store did not carry out.
    #[derive(Clone, Copy)]
    pub(crate) struct Unsent {
        kind: ErrorKind,
        refused: bool,
    }

    impl Unsent {
        pub(crate) fn attempt(self) -> Result<Attempt, Error> {
            if self.refused { Ok(Attempt::Refused(self.error())) } else { Err(self.error()) }
        }

        pub(crate) fn error(self) -> Error {
            scripted_error(self.kind)
        }
    }

    /// The fault that the reply of a call still has to show.
    pub(crate) struct Reply(Option<Fault>);

    impl Reply {
        /// Returns whether the call runs twice and the second reply arrives.
        pub(crate) fn is_second(&self) -> bool {
            self.0 == Some(Fault::Twice)
        }
    }

    /// The faults of one client.
    pub(crate) struct Faults {
        script: [Mutex<VecDeque<Fault>>; Op::ALL.len()],
        calls: [AtomicU64; Op::ALL.len()],
        silent: watch::Sender<bool>,
        muted: AtomicBool,
    }

    impl Default for Faults {
        fn default() -> Self {
            Self {
                script: Default::default(),
                calls: Default::default(),
                silent: watch::Sender::new(false),
                muted: AtomicBool::new(false),
            }
        }
    }

    impl Faults {
        /// Returns whether a call of `op` passes without a fault. Counts the call if so.
        pub(crate) fn is_clear(&self, op: Op) -> bool {
            let clear = !*self.silent.borrow() && self.script(op).is_empty();
            if clear {
                self.count(op);
            }
            clear
        }

        pub(crate) fn hears_hints(&self) -> bool {
            self.hears_losses() && !self.muted.load(Ordering::Acquire)
        }

        pub(crate) fn hears_losses(&self) -> bool {
            !*self.silent.borrow()
        }

        pub(crate) async fn before(&self, op: Op) -> Result<Reply, Unsent> {
            self.count(op);
            self.not_silent().await;
            let fault = self.script(op).pop_front();
            match fault {
                None | Some(Fault::Pass) => return Ok(Reply(None)),
                Some(Fault::Error(kind)) => return Err(Unsent { kind, refused: false }),
                Some(Fault::Refuse(kind)) => return Err(Unsent { kind, refused: true }),
                Some(Fault::Delay(duration)) => tokio::time::sleep(duration).await,
                Some(Fault::Hang) => pending().await,
                Some(reply) => return Ok(Reply(Some(reply))),
            }
            Ok(Reply(None))
        }

        pub(crate) async fn after(&self, Reply(fault): Reply) -> Result<(), ErrorKind> {
            self.not_silent().await;
            match fault {
                Some(Fault::LoseReply) => Err(ErrorKind::OutcomeUnknown),
                Some(Fault::LoseReplyHang) => pending().await,
                Some(Fault::DelayReply(duration)) => {
                    tokio::time::sleep(duration).await;
                    Ok(())
                }
                _ => Ok(()),
            }
        }

        pub(crate) fn add(&self, op: Op, fault: Fault) {
            self.script(op).push_back(fault);
        }

        pub(crate) fn clear(&self) {
            for script in &self.script {
                script.lock().unwrap_or_else(PoisonError::into_inner).clear();
            }
        }

        pub(crate) fn silence(&self, silent: bool) {
            self.silent.send_replace(silent);
        }

        pub(crate) fn mute(&self, muted: bool) {
            self.muted.store(muted, Ordering::Release);
        }

        pub(crate) fn calls(&self, op: Op) -> u64 {
            self.calls[op as usize].load(Ordering::Acquire)
        }

        fn count(&self, op: Op) {
            self.calls[op as usize].fetch_add(1, Ordering::AcqRel);
        }

        async fn not_silent(&self) {
            // Waits for the end of the silence. This cannot fail, because this struct owns the sender.
            let _ = self.silent.subscribe().wait_for(|silent| !silent).await;
        }

        fn script(&self, op: Op) -> MutexGuard<'_, VecDeque<Fault>> {
            self.script[op as usize].lock().unwrap_or_else(PoisonError::into_inner)
        }
    }
}
