//! Makes one attempt to acquire the locks of a command: the wait, the notes during it, and why no lock was granted.

use std::cell::Cell;
use std::pin::pin;

use leasehold::{AcquireOptions, Error, ErrorKind, KeyInfo, Lock, MultiGuard, OnCooldown};
use rustix::process::Signal;
use tokio::time::Instant;

use crate::args::AcquireArgs;
use crate::chosen_store::ChosenStore;
use crate::output::{self, Notes};
use crate::signals::Signals;
use crate::wait_budget::{OutageReport, WaitBudget};
use crate::waiting::{self, EnclosingRuns, WantedKeys};
use crate::{admin, exit, identity};

/// A command's request for locks, and the store.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AcquireRequest<'a> {
    pub(crate) args: &'a AcquireArgs,
    pub(crate) store: &'a ChosenStore,
    pub(crate) notes: Notes,
    /// Name of the program to run under the lock.
    pub(crate) program: &'a str,
    /// The exit code if the window of `--once-per` is not over. The user can set another.
    pub(crate) not_due: u8,
    /// Whether the store must carry requests to release.
    pub(crate) needs_asks: bool,
}

/// The outcome of an attempt to which the store has replied.
pub(crate) enum Acquired {
    Granted(MultiGuard),
    NotGranted(NotGranted),
}

/// The reason why no lock was granted.
pub(crate) struct NotGranted {
    /// The exit code of the tool.
    pub(crate) code: u8,
    /// The note to print once the attempt is undone for certain.
    pub(crate) note: Option<String>,
    /// Whether a signal ended the wait.
    pub(crate) is_signal: bool,
}

impl NotGranted {
    fn with(code: u8, note: impl Into<Option<String>>) -> Acquired {
        Acquired::NotGranted(Self { code, note: note.into(), is_signal: false })
    }
}

/// Acquires the locks within `budget`, and reports the wait. A signal or a deadlock with other runs ends the wait.
pub(crate) async fn acquire(
    lock: &dyn Lock,
    request: AcquireRequest<'_>,
    budget: WaitBudget,
    signals: &mut Signals,
    outage: &mut OutageReport,
) -> Result<Acquired, Error> {
    let AcquireRequest { args, notes, .. } = request;
    let keys = args.keys.get();
    let options = options(request, budget);
    let started = Instant::now();
    let said = Cell::new(false);
    notes.detail(&format!("asking for {}", args.keys.named()));
    let label = options.label.as_deref().unwrap_or_default();
    let wanted = WantedKeys { lock, keys, mode: options.mode, label };
    let granted = {
        let mut acquiring = pin!(lock.acquire_all(keys, &options));
        let enclosing = EnclosingRuns::of_environment(keys);
        let mut telling = pin!(waiting::report(wanted, &enclosing, notes, outage, &said));
        tokio::select! {
            granted = &mut acquiring => granted,
            signal = signals.next() => return Ok(interrupted(signal)),
            circle = &mut telling => {
                output::problem(&circle);
                return Ok(NotGranted::with(args.conflict_exit_code, None));
            }
        }
    };
    match granted {
        Ok(guard) => {
            let granted = format!("granted after {}", output::duration(started.elapsed()));
            if said.get() {
                notes.say(&granted);
            } else {
                notes.detail(&granted);
            }
            Ok(Acquired::Granted(guard))
        }
        Err(error) if error.kind() == ErrorKind::NotDue => {
            let again = error.retry_after().map(output::left).unwrap_or_default();
            // Names the holder in the note, because a row lock also counts as not due after a crash of its holder.
            let key = error.key().unwrap_or(&keys[0]);
            let held = waiting::inspect_in_time(lock, key).await.filter(KeyInfo::is_held);
            let holder = held.as_ref().map(admin::in_words).unwrap_or_default();
            let note =
                format!("not due: \"{key}\" ran less than its --once-per ago; again in {again}{holder}");
            Ok(NotGranted::with(args.not_due_exit_code.unwrap_or(request.not_due), note))
        }
        Err(error) if error.kind() == ErrorKind::Timeout => {
            // Inspects the keys for the message. If the store was too slow, no holder is known.
            let (key, seen) = wanted.held().await;
            let holder = seen.as_ref().map(admin::in_words).unwrap_or_default();
            let why = if holder.is_empty() { "was not granted in time" } else { "is locked" };
            Ok(NotGranted::with(
                args.conflict_exit_code,
                format!("\"{key}\" {why}{holder}; nothing was done"),
            ))
        }
        Err(error) => Err(error),
    }
}

fn interrupted(signal: Signal) -> Acquired {
    Acquired::NotGranted(NotGranted { code: exit::of_signal(signal.as_raw()), note: None, is_signal: true })
}

fn options(request: AcquireRequest<'_>, budget: WaitBudget) -> AcquireOptions {
    let args = request.args;
    let mut options = AcquireOptions::new();
    options = match budget.left() {
        Some(left) => options.wait(left),
        None => options.wait_forever(),
    };
    if let Some(window) = args.once_per {
        options = options.cooldown(window).on_cooldown(OnCooldown::NotDue);
    }
    options.cooldown = options.cooldown.or(args.cooldown);
    options.max_hold = args.max_hold;
    options.ttl = args.ttl;
    options.mode = args.mode();
    let label = args.label.clone().unwrap_or_else(|| identity::label(request.program));
    options.label = Some(label.into());
    options
}
