//! Something done under a lock: connecting, waiting, releasing, and what is said of each.

use std::cell::Cell;
use std::pin::pin;

use leasehold::{
    AcquireOptions, Error, ErrorKind, KeyInfo, Lock, LockKey, LossReason, MultiGuard, OnCooldown, Scope,
    Validity,
};
use rustix::process::Signal;
use tokio::time::Instant;

use crate::args::{self, Acquire};
use crate::output::{self, Notes};
use crate::patience::{Outage, Patience};
use crate::place::Place;
use crate::signals::Signals;
use crate::waiting::{self, Around, Wanted};
use crate::{admin, exit, look, who};

/// How a lock is asked for, and by whom.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Request<'a> {
    pub(crate) args: &'a Acquire,
    pub(crate) place: &'a Place,
    pub(crate) notes: Notes,
    /// The program that the lock is for.
    pub(crate) program: &'a str,
    /// The exit code when it is not due, unless another one was asked for.
    pub(crate) not_due: u8,
}

/// Does `body` under the locks that are asked for, and answers its exit code.
pub(crate) async fn under<F>(request: Request<'_>, body: F) -> Result<u8, Error>
where
    F: AsyncFnOnce(MultiGuard, &dyn Lock, &mut Signals) -> Result<u8, Error>,
{
    let Request { args, place, notes, .. } = request;
    let mut signals =
        Signals::listen().map_err(|error| output::system("cannot listen for signals", error))?;
    let patience = Patience::new(args.budget());
    let mut outage = Outage::new(notes);
    notes.detail("connecting to the store");
    let lock = tokio::select! {
        lock = patience.connect(place, &mut outage) => lock?,
        signal = signals.next() => return Ok(exit::of_signal(signal.as_raw())),
    };
    outage.end();
    notes.detail(&format!("connected to {lock}"));
    if lock.capabilities().scope == Scope::Process {
        notes.say("this store excludes within one process only: no other command meets this one there");
    }
    for caution in look::cautions(&*lock) {
        notes.say(&caution);
    }
    match acquire(&*lock, request, patience, &mut signals, &mut outage).await {
        Ok(Acquired::Granted(guard)) => {
            let code = body(guard, &*lock, &mut signals).await;
            if let Err(reason) = close(&*lock, request, &mut signals).await {
                // Also where notes are not wanted: what is left behind concerns whoever comes next.
                let later = stays_shut(&*lock).unwrap_or("it is free later, as after a crash of its holder");
                let keys = args.keys.named();
                let are = if args.keys.get().len() > 1 { "are" } else { "is" };
                output::problem(&format!(
                    "the store has not confirmed that {keys} {are} free; {later} ({reason})"
                ));
            }
            code
        }
        Ok(Acquired::Not(refused)) => without(&*lock, request, &mut signals, Ok(refused)).await,
        Err(error) => without(&*lock, request, &mut signals, Err(error)).await,
    }
}

/// The end of an attempt that was not granted.
async fn without(
    lock: &dyn Lock,
    request: Request<'_>,
    signals: &mut Signals,
    refused: Result<Refused, Error>,
) -> Result<u8, Error> {
    let Err(reason) = close(lock, request, signals).await else {
        let Refused { code, note, .. } = refused?;
        note.iter().for_each(|note| request.notes.say(note));
        return Ok(code);
    };
    let text = left_behind(lock, request.args, &reason);
    match refused {
        Ok(Refused { code, is_signal: true, .. }) => {
            output::problem(&text);
            Ok(code)
        }
        // Not what is answered where somebody else has it: it may be this attempt that others meet from now on.
        Ok(_) => Err(Error::new(ErrorKind::OutcomeUnknown, text)),
        Err(cause) => Err(Error::new(cause.kind(), text).with_source(cause)),
    }
}

/// Closes the lock, which also takes back what was left unfinished; an error says why the store has not confirmed that.
async fn close(lock: &dyn Lock, request: Request<'_>, signals: &mut Signals) -> Result<(), String> {
    let closed = tokio::select! {
        biased;
        closed = lock.close() => closed.map_err(|error| error.to_string()),
        () = signals.impatience() => Err("ended by a signal before it was answered".to_owned()),
    };
    if closed.is_ok() {
        request.notes.detail("the lock is closed");
    }
    closed
}

/// What an attempt may have left that nobody heard of, and that the store has not confirmed to be undone.
fn left_behind(lock: &dyn Lock, args: &Acquire, reason: &str) -> String {
    let (keys, process) = (args.keys.named(), std::process::id());
    let window = args.once_per.or(args.cooldown).map_or("", |_| ", and its window has begun");
    let later = match lock.capabilities().crash_release {
        Some(_) => format!("if it was, it ends by itself, as after a crash of its holder{window}"),
        None => format!(
            "if `leasehold inspect` shows process {process} as its holder, it stays shut until `leasehold release` opens it, with the ID that is shown there{window}"
        ),
    };
    format!(
        "whether {keys} was granted to this attempt is not known, and the store has not confirmed that it is undone; {later} ({reason})"
    )
}

/// What is to be done about a key whose hold nobody has ended, where that lasts until an operator ends it.
fn stays_shut(lock: &dyn Lock) -> Option<&'static str> {
    let advice = "it may stay shut: `leasehold inspect` shows whether, and whose ID `leasehold release KEY --force --holder ID` wants to open it";
    lock.capabilities().crash_release.is_none().then_some(advice)
}

enum Acquired {
    Granted(MultiGuard),
    Not(Refused),
}

/// Why it was not granted: the exit code, and what is said once it is certain that nothing is left of the attempt.
struct Refused {
    code: u8,
    note: Option<String>,
    is_signal: bool,
}

impl Refused {
    fn with(code: u8, note: impl Into<Option<String>>) -> Acquired {
        Acquired::Not(Self { code, note: note.into(), is_signal: false })
    }
}

async fn acquire(
    lock: &dyn Lock,
    request: Request<'_>,
    patience: Patience,
    signals: &mut Signals,
    outage: &mut Outage,
) -> Result<Acquired, Error> {
    let Request { args, notes, .. } = request;
    let keys = args.keys.get();
    let options = options(request, patience);
    let started = Instant::now();
    let said = Cell::new(false);
    notes.detail(&format!("asking for {}", args.keys.named()));
    let label = options.label.as_deref().unwrap_or_default();
    let wanted = Wanted { lock, keys, label };
    let granted = {
        let mut acquiring = pin!(lock.acquire_all(keys, &options));
        let around = Around::of_environment(keys);
        let mut telling = pin!(waiting::tell(wanted, &around, notes, outage, &said));
        tokio::select! {
            granted = &mut acquiring => granted,
            signal = signals.next() => return Ok(interrupted(signal)),
            circle = &mut telling => {
                output::problem(&circle);
                return Ok(Refused::with(args.conflict_exit_code, None));
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
            // A mutex row that a crash has left shut reads as not due, too: say who holds it.
            let key = error.key().unwrap_or(&keys[0]);
            let held = waiting::seen(lock, key).await.filter(KeyInfo::is_held);
            let holder = held.as_ref().map(admin::in_words).unwrap_or_default();
            let note =
                format!("not due: \"{key}\" ran less than its --once-per ago; again in {again}{holder}");
            Ok(Refused::with(args.not_due_exit_code.unwrap_or(request.not_due), note))
        }
        Err(error) if error.kind() == ErrorKind::Timeout => {
            // Also of a store that was too slow: then nobody is seen.
            let (key, seen) = wanted.held().await;
            let holder = seen.as_ref().map(admin::in_words).unwrap_or_default();
            let why = if holder.is_empty() { "was not granted in time" } else { "is locked" };
            Ok(Refused::with(args.conflict_exit_code, format!("\"{key}\" {why}{holder}; nothing was done")))
        }
        Err(error) => Err(error),
    }
}

fn interrupted(signal: Signal) -> Acquired {
    Acquired::Not(Refused { code: exit::of_signal(signal.as_raw()), note: None, is_signal: true })
}

fn options(request: Request<'_>, patience: Patience) -> AcquireOptions {
    let args = request.args;
    let mut options = AcquireOptions::new();
    options = match patience.left() {
        Some(left) => options.wait(left),
        None => options.wait_forever(),
    };
    if let Some(window) = args.once_per {
        options = options.cooldown(window).on_cooldown(OnCooldown::NotDue);
    }
    options.cooldown = options.cooldown.or(args.cooldown);
    options.max_hold = args.max_hold;
    options.ttl = args.ttl;
    let label = args.label.clone().unwrap_or_else(|| who::label(request.program));
    options.label = Some(label.into());
    options
}

/// Releases, and says how it all ended: with `code`, if the locks were held until then.
pub(crate) async fn finish(
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
    // They were for what has ended, which may have done so before they were read.
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
            // It was held until then; only when it will be free is not known.
            notes.say(&format!("{what_ended} has ended, but the release was not confirmed: {error}"));
            return Ok(code);
        }
    };
    let unconfirmed = reason == Some(LossReason::Expired);
    let after = stays_shut(lock).filter(|_| unconfirmed);
    let after = after.unwrap_or("somebody else may have run at the same time");
    // The note of the loss may not be wanted, and there is none if the end came first.
    let reason = reason.map(|reason| format!(" ({reason})")).unwrap_or_default();
    output::problem(&format!("the lock \"{key}\" was lost before {what_ended} ended{reason}; {after}"));
    Ok(exit::LOST)
}
