//! The command `leasehold lock`.

use std::fs::{File, Metadata};
use std::os::fd::AsFd as _;
use std::os::unix::fs::MetadataExt as _;
use std::{fs, io, thread};

use leasehold::{Error, ErrorKind, FencingToken, LockGuard};
use rustix::process::Signal;
use serde_json::json;
use tokio::sync::oneshot;

use crate::acquire::AcquireRequest;
use crate::args::HoldArgs;
use crate::chosen_store::ChosenStore;
use crate::exit;
use crate::grant;
use crate::output::{self, Notes};
use crate::signals::{self, Signals};

pub(crate) async fn hold(args: &HoldArgs, store: &ChosenStore, notes: Notes) -> Result<u8, Error> {
    if has_no_input() {
        return Err(Error::new(
            ErrorKind::InvalidOption,
            "the standard input is /dev/null, as of a command with & in a script, or is closed, so that the lock would be released at once; keep a pipe open there (see `leasehold lock --help`), or use `leasehold run`",
        ));
    }
    let not_due = exit::CONFLICT;
    let request = AcquireRequest {
        args: &args.acquire,
        store,
        notes,
        program: "leasehold lock",
        not_due,
        needs_asks: false,
    };
    grant::run_with_lock(request, async |guards, lock, signals| {
        guards.iter().for_each(|guard| print(guard, args.json));
        if output::is_over() {
            notes.say("the grant cannot be written, so it is released");
            return grant::release(guards, lock, exit::OUTPUT_LOST, "the hold", signals, notes).await;
        }
        tokio::select! {
            (key, reason) = guards.lost() => notes.say(&format!("lost the lock \"{key}\" ({reason})")),
            () = end_of_input() => notes.detail("standard input is closed"),
            () = end_by_signal(signals) => notes.detail("ended by a signal"),
        }
        grant::release(guards, lock, 0, "the hold", signals, notes).await
    })
    .await
}

/// Prints the grant in one line, as text or JSON.
fn print(guard: &LockGuard, as_json: bool) {
    let (key, holder) = (guard.key(), guard.holder().to_string());
    let token = guard.token();
    let text = token.map(|token| token.to_string());
    if as_json {
        let line = json!({
            "key": key.as_str(),
            "token": token.map(FencingToken::as_u64),
            "token_text": text,
            "holder": holder,
            "permit": guard.permit(),
        });
        output::line(&line.to_string());
    } else {
        // Prints the key last, because it can contain spaces.
        output::line(&format!("{} {holder} {}", output::or_dash(text), output::printable(key.as_str())));
    }
}

/// Returns whether standard input is `/dev/null`, so nothing can keep the lock held. Rust opens `/dev/null` in place of
/// a closed input.
fn has_no_input() -> bool {
    let device = |file: &Metadata| (file.mode(), file.rdev());
    let input = io::stdin().as_fd().try_clone_to_owned().and_then(|input| File::from(input).metadata());
    let null = fs::metadata("/dev/null");
    matches!((&input, &null), (Ok(input), Ok(null)) if device(input) == device(null))
}

/// Waits for the end of standard input and ignores its content. A read error counts as the end.
async fn end_of_input() {
    let (end, ended) = oneshot::channel();
    // Reads in a thread, because a read cannot be cancelled. If another event ends the hold, the thread ends with the
    // process.
    let reading = thread::Builder::new().name("stdin".to_owned()).spawn(move || {
        let _ = io::copy(&mut io::stdin().lock(), &mut io::sink());
        let _ = end.send(());
    });
    match reading {
        Ok(_) => drop(ended.await),
        Err(error) => output::problem(&format!("cannot watch standard input: {error}")),
    }
}

async fn end_by_signal(signals: &mut Signals) {
    loop {
        let signal = signals.next().await;
        if signals::is_an_end(signal) || signal == Signal::HUP {
            return;
        }
    }
}
