//! `leasehold run`.

use std::future::pending;
use std::pin::pin;
use std::process::ExitStatus;
use std::time::Duration;

use leasehold::{AcquireOptions, Error, ErrorKind, Lock, LockGuard, LockKey, OnCooldown, Scope, Validity};
use rustix::process::Signal;
use tokio::time::{sleep, timeout};

use crate::args::Run;
use crate::output::{self, Notes};
use crate::signals::{self, Signals};
use crate::{admin, child, exit, supervise};

/// How long a wait is silent.
const SILENT: Duration = Duration::from_secs(2);

/// How long to look for the holder's name, for a message.
const LOOK: Duration = Duration::from_secs(2);

pub(crate) async fn run(args: Run, url: Option<&str>, notes: Notes) -> Result<u8, Error> {
    let mut signals =
        Signals::listen().map_err(|error| output::system("cannot listen for signals", error))?;
    let lock = tokio::select! {
        lock = crate::connect(url) => lock?,
        signal = signals.next() => return Ok(exit::of_signal(signal.as_raw())),
    };
    if lock.capabilities().scope == Scope::Process {
        notes.say("this store excludes within one process only: no other command meets this one there");
    }
    let mut held = false;
    let code = run_on(&*lock, &args, &mut signals, notes, &mut held).await;
    if held {
        // They were for the command, which may have ended before they were read.
        signals.forget().await;
    }
    // Also takes back what a signal left unfinished.
    let closed = tokio::select! {
        biased;
        closed = lock.close() => closed.map_err(|error| error.to_string()),
        () = impatience(&mut signals) => Err("ended by a signal before it was answered".to_owned()),
    };
    let Err(reason) = closed else { return code };
    if !held {
        notes.say(&format!(
            "whether the attempt for \"{}\" was granted is not known: `leasehold inspect` shows who holds it ({reason})",
            args.key.get()
        ));
        return code;
    }
    // Also where notes are not wanted: what is left behind concerns whoever comes next.
    let later = if lock.capabilities().crash_release.is_none() {
        "it may stay shut: `leasehold inspect` shows whether, `leasehold release --force` opens it"
    } else {
        "it is free later, as after a crash of its holder"
    };
    output::problem(&format!(
        "the store has not confirmed that \"{}\" is free; {later} ({reason})",
        args.key.get()
    ));
    code
}

/// Somebody does not want to wait for the store to confirm.
async fn impatience(signals: &mut Signals) {
    while !signals::is_an_end(signals.next().await) {}
}

async fn run_on(
    lock: &dyn Lock,
    args: &Run,
    signals: &mut Signals,
    notes: Notes,
    held: &mut bool,
) -> Result<u8, Error> {
    let guard = match acquire(lock, args, signals, notes).await {
        Ok(Acquired::Granted(guard)) => {
            *held = true;
            guard
        }
        Ok(Acquired::Interrupted(signal)) => return Ok(exit::of_signal(signal.as_raw())),
        Err(error) if error.kind() == ErrorKind::NotDue => {
            let again = error.retry_after().map(output::left).unwrap_or_default();
            notes.say(&format!(
                "not due: \"{}\" ran less than its --once-per ago; again in {again}",
                args.key.get()
            ));
            return Ok(0);
        }
        Err(error) if error.kind() == ErrorKind::Timeout => {
            let holder = holder_of(lock, args.key.get()).await;
            notes.say(&format!("\"{}\" is locked{holder}; the command did not run", args.key.get()));
            return Ok(args.conflict_exit_code);
        }
        Err(error) => return Err(error),
    };
    let mut running = match child::start(&args.command, &guard)? {
        Ok(running) => running,
        Err(code) => return guard.release().await.map(|()| code),
    };
    let ended = supervise::until_end(&mut running, &guard, signals, args, notes).await;
    let status = ended.map_err(|error| output::system("cannot learn how the command ended", error))?;
    finish(guard, status, notes).await
}

enum Acquired {
    Granted(LockGuard),
    Interrupted(Signal),
}

async fn acquire(
    lock: &dyn Lock,
    args: &Run,
    signals: &mut Signals,
    notes: Notes,
) -> Result<Acquired, Error> {
    let options = options(args);
    let mut acquiring = pin!(lock.acquire(args.key.get(), &options));
    let mut tell = pin!(async {
        sleep(SILENT).await;
        let holder = holder_of(lock, args.key.get()).await;
        notes.say(&format!("waiting for \"{}\" on {lock}{holder}", args.key.get()));
        pending::<()>().await;
    });
    tokio::select! {
        guard = &mut acquiring => guard.map(Acquired::Granted),
        signal = signals.next() => Ok(Acquired::Interrupted(signal)),
        () = &mut tell => unreachable!("it stays pending"),
    }
}

fn options(args: &Run) -> AcquireOptions {
    let mut options = AcquireOptions::new();
    options = match args.wait {
        _ if args.no_wait => options.wait(Duration::ZERO),
        Some(budget) => options.wait(budget),
        None => options.wait_forever(),
    };
    if let Some(window) = args.once_per {
        options = options.cooldown(window).on_cooldown(OnCooldown::NotDue);
    }
    options.cooldown = options.cooldown.or(args.cooldown);
    options.max_hold = args.max_hold;
    options.ttl = args.ttl;
    options.label = args.label.as_deref().map(Into::into);
    options
}

/// `, held by ...`, as far as the store tells soon enough.
async fn holder_of(lock: &dyn Lock, key: &LockKey) -> String {
    let Some(admin) = lock.admin() else {
        return String::new();
    };
    match timeout(LOOK, admin.inspect(key)).await {
        Ok(Ok(seen)) => admin::in_words(&seen),
        _ => String::new(),
    }
}

/// Releases, and says how it all ended.
async fn finish(guard: LockGuard, status: ExitStatus, notes: Notes) -> Result<u8, Error> {
    let key = guard.key().clone();
    let (lost, watch) = (guard.validity() == Validity::Lost, guard.lost());
    let reason = match guard.release().await {
        _ if lost => watch.reason(),
        Ok(()) => return Ok(child::exit_code(status)),
        Err(error) if error.kind() == ErrorKind::Lost => error.loss(),
        Err(error) => {
            // It was held while the command ran; only when it will be free is not known.
            notes.say(&format!("the command has ended, but the release was not confirmed: {error}"));
            return Ok(child::exit_code(status));
        }
    };
    // The note of the loss may not be wanted, and there is none if the command ended first.
    let reason = reason.map(|reason| format!(" ({reason})")).unwrap_or_default();
    output::problem(&format!(
        "the lock \"{key}\" was lost before the command ended{reason}; somebody else may have run at the same time"
    ));
    Ok(exit::LOST)
}
