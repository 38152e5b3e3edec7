//! The commands `leasehold list`, `inspect` and `release`.

mod description;

use std::time::{Duration, SystemTime};

use leasehold::postgres_advisory::{SessionInfo, Sessions};
use leasehold::{Error, ErrorKind, HolderId, KeyInfo, ListQuery, Lock, LockAdmin};
use serde_json::{Value, json};

pub(crate) use self::description::in_words;
use self::description::{describe, details, listed};
use crate::args::{InspectArgs, ListArgs, ReleaseArgs};
use crate::chosen_store::ChosenStore;
use crate::output::Notes;
use crate::{exit, file_store, grant, numbered_keys, output};

pub(crate) async fn list(args: &ListArgs, store: &ChosenStore) -> Result<u8, Error> {
    let lock = store.connect_to_inspect().await?;
    let mut query = ListQuery::new().prefix(args.prefix.as_str());
    if args.all {
        query = query.include_ended();
    }
    let admin = admin(&*lock)?;
    let Some(every) = args.watch else {
        let keys = admin.list(&query).await?;
        if args.json {
            output::json(&keys.iter().map(describe).collect());
        } else {
            output::line(&listing(&keys, &*lock));
        }
        return Ok(0);
    };
    while !output::is_over() {
        match admin.list(&query).await {
            Ok(keys) if args.json => {
                output::line(&keys.iter().map(describe).collect::<Value>().to_string());
            }
            Ok(keys) => {
                output::begin_page();
                let now = output::moment(SystemTime::now());
                output::line(&format!("{lock} at {now}\n\n{}\n", listing(&keys, &*lock)));
            }
            // Reports the error and goes on, because the next query can succeed.
            Err(error) if error.is_retryable() => {
                output::error(&error);
                if args.json {
                    output::line(&output::described(&error).to_string());
                }
            }
            Err(error) => return Err(error),
        }
        tokio::time::sleep(every.max(SHORTEST)).await;
    }
    Ok(0)
}

/// The shortest interval between two queries of `list --watch`.
const SHORTEST: Duration = Duration::from_millis(100);

fn listing(keys: &[KeyInfo], lock: &dyn Lock) -> String {
    if keys.is_empty() {
        return format!("nothing is locked on {lock}{}", file_store::missing_note(lock));
    }
    listed(keys)
}

pub(crate) async fn inspect(args: &InspectArgs, store: &ChosenStore, notes: Notes) -> Result<u8, Error> {
    let lock = store.connect_to_inspect().await?;
    let admin = admin(&*lock)?;
    let seen = admin.inspect(args.key.get()).await?;
    if seen.is_free() {
        numbered_keys::note_if_held(admin, args.key.get(), notes).await;
    }
    if args.json {
        output::json(&describe(&seen));
    } else if seen.is_free() && seen.holders.is_empty() {
        output::line(&format!(
            "\"{}\" is free on {lock}{}",
            args.key.get(),
            file_store::missing_note(&*lock)
        ));
    } else {
        output::line(&details(&seen, &*lock));
    }
    Ok(if seen.is_held() { 0 } else { exit::NOT_HELD })
}

pub(crate) async fn release(args: &ReleaseArgs, store: &ChosenStore, notes: Notes) -> Result<u8, Error> {
    let lock = store.connect().await?;
    let admin = admin(&*lock)?;
    if args.ask {
        grant::needs_asks(&*lock).map_err(|error| error.with_key(args.key.get()))?;
        return ask(args, admin).await;
    }
    match args.holder {
        Some(holder) if !args.session => release_hold(args, admin, holder).await,
        _ => {
            let sessions = sessions(&*lock).ok_or_else(|| {
                Error::unsupported("sessions that could be ended")
                    .with_key(args.key.get())
                    .with_store(lock.to_string())
            })?;
            let released = release_session(args, admin, sessions).await;
            let code = released.map_err(|error| error.with_store(lock.to_string()))?;
            if code == exit::NOT_HELD {
                numbered_keys::note_if_held(admin, args.key.get(), notes).await;
            }
            Ok(code)
        }
    }
}

/// Asks the given holder, or the present one.
async fn ask(args: &ReleaseArgs, admin: &dyn LockAdmin) -> Result<u8, Error> {
    let key = args.key.get();
    let present =
        || async { admin.inspect(key).await.map(|seen| seen.holder().and_then(|hold| hold.holder)) };
    let holder = match args.holder {
        Some(holder) => Some(holder),
        None => present().await?,
    };
    let asked = match holder {
        Some(holder) => admin.ask(key, holder).await?,
        None => false,
    };
    if args.json {
        let holder = holder.map(|holder| holder.to_string());
        output::json(&json!({ "key": key.as_str(), "holder": holder, "asked": asked }));
    } else {
        match holder {
            Some(holder) if asked => {
                output::line(&format!("asked {holder} to release \"{key}\"; its program decides"));
            }
            Some(holder) => output::line(&format!("{holder} does not hold \"{key}\"; nobody was asked")),
            None => output::line(&format!("\"{key}\" has no known holder; nobody was asked")),
        }
    }
    Ok(if asked { 0 } else { exit::NOT_HELD })
}

async fn release_hold(args: &ReleaseArgs, admin: &dyn LockAdmin, holder: HolderId) -> Result<u8, Error> {
    let released = admin.force_release(args.key.get(), holder).await?;
    if args.json {
        output::json(&json!({
            "key": args.key.get().as_str(),
            "holder": holder.to_string(),
            "released": released,
        }));
    } else if released {
        output::line(&format!("released \"{}\", which {holder} held", args.key.get()));
    } else {
        output::line(&format!("{holder} does not hold \"{}\"; nothing was released", args.key.get()));
    }
    Ok(if released { 0 } else { exit::NOT_HELD })
}

/// Advice which roles can end a session, for a role that cannot.
const MAY_END: &str = "use the role of that session, or one with pg_read_all_stats and pg_signal_backend; a session of a superuser is ended by a superuser alone";

async fn release_session(
    args: &ReleaseArgs,
    admin: &dyn LockAdmin,
    sessions: &Sessions,
) -> Result<u8, Error> {
    let session = sessions.session_of(args.key.get()).await?;
    // Checks the hold that `--holder` names, if set. The session might not show its name yet.
    let is_of = |seen: &KeyInfo, holder| seen.holders.iter().any(|hold| hold.holder == Some(holder));
    let is_meant = |session: &SessionInfo| {
        args.holder.is_none_or(|holder| session.holds.iter().any(|seen| is_of(seen, holder)))
    };
    let Some(session) = session.filter(is_meant) else {
        let seen = admin.inspect(args.key.get()).await?;
        if seen.is_held() && args.holder.is_none_or(|holder| is_of(&seen, holder)) {
            let message = format!(
                "no session that this role can see holds it{}; nothing was released: {MAY_END}",
                in_words(&seen),
            );
            return Err(Error::new(ErrorKind::PermissionDenied, message).with_key(args.key.get()));
        }
        if args.json {
            output::json(&json!({ "key": args.key.get().as_str(), "session": null, "released": false }));
        } else {
            output::line(&format!(
                "no session has this hold of \"{}\"; nothing was released",
                args.key.get()
            ));
        }
        return Ok(exit::NOT_HELD);
    };
    let others = session.holds.len().saturating_sub(1);
    if others > 0 && !args.yes {
        output::problem(&format!(
            "the session {}{} holds {others} more; --yes ends it with all of them:\n{}",
            session.id,
            session
                .owner
                .as_deref()
                .map(|owner| format!(" of {}", output::printable(owner)))
                .unwrap_or_default(),
            listed(&session.holds),
        ));
        if args.json {
            output::json(&describe_session(args, &session, false));
        }
        return Ok(exit::USAGE);
    }
    let ended = sessions.end_session(&session).await.map_err(|error| match error.kind() {
        ErrorKind::PermissionDenied => {
            let message = format!(
                "the session {} may not be ended by this role; nothing was released: {MAY_END}",
                session.id
            );
            Error::new(ErrorKind::PermissionDenied, message).with_key(args.key.get()).with_source(error)
        }
        _ => error,
    })?;
    if args.json {
        output::json(&describe_session(args, &session, ended));
    } else if ended {
        output::line(&format!("ended the session {}, and with it:\n{}", session.id, listed(&session.holds)));
    } else {
        output::line(&format!("the session {} had ended before; nothing was released", session.id));
    }
    Ok(if ended { 0 } else { exit::NOT_HELD })
}

fn describe_session(args: &ReleaseArgs, session: &SessionInfo, released: bool) -> Value {
    json!({
        "key": args.key.get().as_str(),
        "session": {
            "id": session.id,
            "owner": session.owner,
            "holds": session.holds.iter().map(describe).collect::<Value>(),
        },
        "released": released,
    })
}

fn admin(lock: &dyn Lock) -> Result<&dyn LockAdmin, Error> {
    lock.admin().ok_or_else(|| Error::unsupported("view for operators").with_store(lock.to_string()))
}

/// Returns access to the sessions behind the locks, if the store has any.
pub(crate) fn sessions(lock: &dyn Lock) -> Option<&Sessions> {
    lock.admin()?.extension()
}
