//! Runs the work under the locks of a command: connects, runs, releases, and reports each step.

use std::future::{Future as _, poll_fn};
use std::sync::Arc;
use std::task::Poll;

use leasehold::{Error, ErrorKind, Lock, LockGuard, LockKey, LossReason, MultiGuard, Scope, Validity};

use crate::acquire::{AcquireRequest, Acquired, NotGranted, acquire};
use crate::args::{self, AcquireArgs};
use crate::chosen_store::ChosenStore;
use crate::output::{self, Notes};
use crate::signals::Signals;
use crate::wait_budget::{OutageReport, WaitBudget};
use crate::{exit, file_store};

/// Acquires the locks of `request`, runs `body` under them and closes the store. Returns the exit code of `body`, or
/// the code for a lock that was not granted.
pub(crate) async fn run_with_lock<F>(request: AcquireRequest<'_>, body: F) -> Result<u8, Error>
where
    F: AsyncFnOnce(MultiGuard, &dyn Lock, &mut Signals) -> Result<u8, Error>,
{
    let AcquireRequest { args, store, notes, .. } = request;
    let mut signals =
        Signals::listen().map_err(|error| output::system("cannot listen for signals", error))?;
    let budget = WaitBudget::new(args.budget());
    let mut outage = OutageReport::new(notes);
    let lock = match connect(store, budget, &mut signals, &mut outage, notes).await? {
        Ok(lock) => lock,
        Err(code) => return Ok(code),
    };
    if request.needs_asks {
        needs_asks(&*lock)?;
    }
    let guard = match acquire(&*lock, request, budget, &mut signals, &mut outage).await {
        Ok(Acquired::Granted(guard)) => guard,
        Ok(Acquired::NotGranted(not_granted)) => {
            return close_without_grant(&*lock, request, &mut signals, Ok(not_granted)).await;
        }
        Err(error) => return close_without_grant(&*lock, request, &mut signals, Err(error)).await,
    };
    let code = body(guard, &*lock, &mut signals).await;
    if let Err(reason) = close(&*lock, request.notes, &mut signals).await {
        // Prints an error, which `--quiet` does not suppress, because a key that stays locked concerns the next caller.
        let later =
            manual_release_advice(&*lock).unwrap_or("it is free later, as after a crash of its holder");
        let keys = args.keys.named();
        let are = if args.keys.get().len() > 1 { "are" } else { "is" };
        output::problem(&format!("the store has not confirmed that {keys} {are} free; {later} ({reason})"));
    }
    code
}

/// Connects to the store and reports its limits. The inner error is the exit code of a signal that ended the wait.
pub(crate) async fn connect(
    store: &ChosenStore,
    budget: WaitBudget,
    signals: &mut Signals,
    outage: &mut OutageReport,
    notes: Notes,
) -> Result<Result<Arc<dyn Lock>, u8>, Error> {
    notes.detail("connecting to the store");
    let lock = tokio::select! {
        lock = budget.connect(store, outage) => lock?,
        signal = signals.next() => return Ok(Err(exit::of_signal(signal.as_raw()))),
    };
    outage.end();
    notes.detail(&format!("connected to {lock}"));
    if lock.capabilities().scope == Scope::Process {
        notes.say("this store excludes within one process only: no other command meets this one there");
    }
    for caution in file_store::cautions(&*lock) {
        notes.say(&caution);
    }
    Ok(Ok(lock))
}

/// Closes the store after an attempt without a grant. Returns the exit code once the attempt is undone for certain.
async fn close_without_grant(
    lock: &dyn Lock,
    request: AcquireRequest<'_>,
    signals: &mut Signals,
    attempt: Result<NotGranted, Error>,
) -> Result<u8, Error> {
    let Err(reason) = close(lock, request.notes, signals).await else {
        let NotGranted { code, note, .. } = attempt?;
        note.iter().for_each(|note| request.notes.say(note));
        return Ok(code);
    };
    let text = unconfirmed_undo(lock, request.args, &reason);
    match attempt {
        Ok(NotGranted { code, is_signal: true, .. }) => {
            output::problem(&text);
            Ok(code)
        }
        // Returns this error and not the code for a lock held by another client, because this attempt might hold the
        // lock.
        Ok(_) => Err(Error::new(ErrorKind::OutcomeUnknown, text)),
        Err(cause) => Err(Error::new(cause.kind(), text).with_source(cause)),
    }
}

/// Closes the store, which also undoes unfinished attempts. Returns the reason as an error if the store has not
/// confirmed that.
pub(crate) async fn close(lock: &dyn Lock, notes: Notes, signals: &mut Signals) -> Result<(), String> {
    let closed = tokio::select! {
        biased;
        closed = lock.close() => closed.map_err(|error| error.to_string()),
        () = signals.impatience() => Err("ended by a signal before it was answered".to_owned()),
    };
    if closed.is_ok() {
        notes.detail("the lock is closed");
    }
    closed
}

/// Returns the message for an attempt whose undo the store has not confirmed.
fn unconfirmed_undo(lock: &dyn Lock, args: &AcquireArgs, reason: &str) -> String {
    let (keys, process) = (args.keys.named(), std::process::id());
    let window = args.once_per.or(args.cooldown).map_or("", |_| ", and its window has begun");
    let later = match lock.capabilities().crash_release {
        Some(_) => format!("if it was, it ends by itself, as after a crash of its holder{window}"),
        None => format!(
            "if `leasehold inspect` shows process {process} as its holder, it stays locked until `leasehold release KEY --force --holder ID`, with the ID that is shown there{window}"
        ),
    };
    format!(
        "whether {keys} was granted to this attempt is not known, and the store has not confirmed that it is undone; {later} ({reason})"
    )
}

/// Returns advice for an operator on ending a hold that was not released. `None` if the store ends it by itself.
fn manual_release_advice(lock: &dyn Lock) -> Option<&'static str> {
    let advice = "it might stay locked: if `leasehold inspect` shows a holder, run `leasehold release KEY --force --holder ID` with the holder's ID";
    lock.capabilities().crash_release.is_none().then_some(advice)
}

/// Waits for a request to release one of the locks. Returns its key.
pub(crate) async fn asked(guards: &[LockGuard]) -> LockKey {
    let mut asked: Vec<_> = guards.iter().map(|guard| Box::pin(guard.asked())).collect();
    poll_fn(|cx| {
        for (guard, asked) in guards.iter().zip(&mut asked) {
            if asked.as_mut().poll(cx).is_ready() {
                return Poll::Ready(guard.key().clone());
            }
        }
        Poll::Pending
    })
    .await
}

/// Refuses to wait for requests on a store without them.
pub(crate) fn needs_asks(lock: &dyn Lock) -> Result<(), Error> {
    if lock.capabilities().admin.ask {
        return Ok(());
    }
    Err(Error::unsupported("requests to release a lock").with_store(lock.to_string()))
}

/// Releases the locks and reports how they ended. Returns `code` if they were held until now, otherwise the code for a
/// lost lock.
pub(crate) async fn release(
    guards: MultiGuard,
    lock: &dyn Lock,
    code: u8,
    what_ended: &str,
    signals: &mut Signals,
    notes: Notes,
) -> Result<u8, Error> {
    let watches: Vec<_> = guards.iter().map(|guard| (guard.key().clone(), guard.lost())).collect();
    let keys = || watches.iter().map(|(key, _)| key);
    let lost =
        guards.iter().find(|guard| guard.validity() == Validity::Lost).map(|guard| guard.key().clone());
    // Discards the signals that were meant for the work, which might have ended before they were read.
    drop(signals.drain().await);
    let released = tokio::select! {
        biased;
        released = guards.release() => released,
        () = signals.impatience() => {
            let ended = "ended by a signal before it was answered";
            Err(Error::new(ErrorKind::OutcomeUnknown, ended).with_key(&watches[0].0))
        }
    };
    let reason_of = |lost: &LockKey| watches.iter().find(|(key, _)| key == lost)?.1.reason();
    let (key, reason) = match (lost, released) {
        (Some(key), _) => {
            let reason = reason_of(&key);
            (key, reason)
        }
        (None, Ok(())) => {
            notes.detail(&format!("released {}", args::named(keys())));
            return Ok(code);
        }
        (None, Err(error)) if error.kind() == ErrorKind::Lost => {
            (error.key().unwrap_or(&watches[0].0).clone(), error.loss())
        }
        (None, Err(error)) => {
            // Only prints a note, because the lock was held until the end of the work. Only the time of its release is
            // unknown.
            notes.say(&format!("{what_ended} has ended, but the release was not confirmed: {error}"));
            return Ok(code);
        }
    };
    report_lost(lock, &key, reason, what_ended);
    Ok(exit::LOST)
}

/// Reports a lock that was lost before `what_ended` ended. The supervisor has already reported the loss as a note,
/// unless the work ended first or the user wants no notes.
fn report_lost(lock: &dyn Lock, key: &LockKey, reason: Option<LossReason>, what_ended: &str) {
    let is_unconfirmed = reason == Some(LossReason::Expired);
    let advice = manual_release_advice(lock).filter(|_| is_unconfirmed);
    let advice = advice.unwrap_or("another client might have run at the same time");
    let reason = reason.map(|reason| format!(" ({reason})")).unwrap_or_default();
    output::problem(&format!("the lock \"{key}\" was lost before {what_ended} ended{reason}; {advice}"));
}
