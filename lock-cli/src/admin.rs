//! `leasehold list`, `inspect` and `release`.

use std::time::{Duration, SystemTime};

use leasehold::{Error, HoldInfo, HoldState, HolderId, ListQuery, Lock, LockAdmin, SessionInfo};
use serde_json::{Value, json};

use crate::args::{Inspect, List, Release};
use crate::{exit, output};

pub(crate) async fn list(args: &List, url: Option<&str>) -> Result<u8, Error> {
    let lock = crate::connect(url).await?;
    let mut query = ListQuery::new().prefix(args.prefix.as_str());
    if args.all {
        query = query.include_ended();
    }
    let holds = admin(&*lock)?.list(&query).await?;
    if args.json {
        output::json(&holds.iter().map(describe).collect());
    } else if holds.is_empty() {
        output::line(&format!("nothing is locked on {lock}"));
    } else {
        output::line(&listed(&holds));
    }
    Ok(0)
}

pub(crate) async fn inspect(args: &Inspect, url: Option<&str>) -> Result<u8, Error> {
    let lock = crate::connect(url).await?;
    let hold = admin(&*lock)?.inspect(&args.key).await?;
    match &hold {
        _ if args.json => {
            let free = || json!({ "key": args.key.as_str(), "state": "free" });
            output::json(&hold.as_ref().map_or_else(free, describe));
        }
        Some(hold) => output::line(&details(hold)),
        None => output::line(&format!("\"{}\" is free", args.key)),
    }
    Ok(if hold.is_some_and(|hold| hold.state == HoldState::Held) { 0 } else { exit::NOT_HELD })
}

pub(crate) async fn release(args: &Release, url: Option<&str>) -> Result<u8, Error> {
    let lock = crate::connect(url).await?;
    let admin = admin(&*lock)?;
    match args.holder {
        Some(holder) if !args.session => release_hold(args, admin, holder).await,
        _ => release_session(args, &*lock, admin).await,
    }
}

async fn release_hold(args: &Release, admin: &dyn LockAdmin, holder: HolderId) -> Result<u8, Error> {
    let released = admin.force_release(&args.key, holder).await?;
    if args.json {
        output::json(&json!({
            "key": args.key.as_str(),
            "holder": holder.to_string(),
            "released": released,
        }));
    } else if released {
        output::line(&format!("released \"{}\", which {holder} held", args.key));
    } else {
        output::line(&format!("{holder} does not hold \"{}\"; nothing was released", args.key));
    }
    Ok(if released { 0 } else { exit::NOT_HELD })
}

async fn release_session(args: &Release, lock: &dyn Lock, admin: &dyn LockAdmin) -> Result<u8, Error> {
    let session = admin.session_of(&args.key).await?;
    // The hold that was looked at before, if one was named. What keeps the key may not show its name yet.
    let is_meant = |session: &SessionInfo| {
        args.holder.is_none_or(|holder| session.holds.iter().any(|hold| hold.holder == Some(holder)))
    };
    let Some(session) = session.filter(is_meant) else {
        if args.json {
            output::json(&json!({ "key": args.key.as_str(), "session": null, "released": false }));
        } else {
            let held = admin
                .inspect(&args.key)
                .await?
                .filter(|hold| args.holder.is_none_or(|holder| hold.holder == Some(holder)));
            output::line(&match held {
                Some(hold) => format!(
                    "\"{}\" is held{}, but by no session that can be ended from here: that takes the privileges pg_read_all_stats and pg_signal_backend, and a prepared transaction has none; nothing was released",
                    args.key,
                    in_words(&hold),
                ),
                None => format!("nobody has this hold of \"{}\"; nothing was released", args.key),
            });
        }
        return Ok(exit::NOT_HELD);
    };
    let others = session.holds.len().saturating_sub(1);
    if others > 0 && !args.yes {
        output::problem(&format!(
            "the session {}{} keeps {others} more; --yes ends it with all of them:\n{}",
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
    let ended = admin.end_session(&session).await.map_err(|error| error.with_store(lock.to_string()))?;
    if args.json {
        output::json(&describe_session(args, &session, ended));
    } else if ended {
        output::line(&format!("ended the session {}, and with it:\n{}", session.id, listed(&session.holds)));
    } else {
        output::line(&format!("the session {} had ended before; nothing was released", session.id));
    }
    Ok(if ended { 0 } else { exit::NOT_HELD })
}

fn describe_session(args: &Release, session: &SessionInfo, released: bool) -> Value {
    json!({
        "key": args.key.as_str(),
        "session": {
            "id": session.id,
            "owner": session.owner,
            "holds": session.holds.iter().map(describe).collect::<Value>(),
        },
        "released": released,
    })
}

/// `, held by ... since ...`, for a sentence about the key.
pub(crate) fn in_words(hold: &HoldInfo) -> String {
    if hold.state == HoldState::Cooling {
        return hold
            .cooling_for
            .map(|time| format!(", pausing for {}", output::duration(time)))
            .unwrap_or_default();
    }
    let since = hold.since.map(|since| format!(" since {}", output::local(since))).unwrap_or_default();
    format!(", held by {}{since}", who(hold))
}

fn admin(lock: &dyn Lock) -> Result<&dyn LockAdmin, Error> {
    lock.admin().ok_or_else(|| Error::unsupported("view for operators").with_store(lock.to_string()))
}

/// The shape that machines read. All fields are always there.
fn describe(hold: &HoldInfo) -> Value {
    json!({
        "key": hold.key.as_str(),
        "named": hold.named,
        "state": state(hold.state),
        "holder": hold.holder.map(|holder| holder.to_string()),
        "token": hold.token.map(leasehold::FencingToken::as_u64),
        "label": hold.label.as_deref(),
        "owner": hold.owner,
        "since": hold.since.and_then(output::utc),
        "held_for_ms": held_for(hold).map(output::millis),
        "expires_in_ms": hold.expires_in.map(output::millis),
        "cooling_for_ms": hold.cooling_for.map(output::millis),
        "waiters": hold.waiters,
    })
}

/// A table, with the number of waiters where the store knows of any.
fn listed(holds: &[HoldInfo]) -> String {
    let with_waiters = holds.iter().any(|hold| hold.waiters.is_some());
    let names = ["KEY", "STATE", "WHO", "SINCE", "FOR", "TOKEN", "WAITERS", "LABEL"];
    let is_shown = |column: &usize| with_waiters || names[*column] != "WAITERS";
    let columns: Vec<usize> = (0..names.len()).filter(is_shown).collect();
    let header: Vec<&str> = columns.iter().map(|column| names[*column]).collect();
    let rows = holds.iter().map(|hold| {
        let mut cells = row(hold);
        columns.iter().map(|column| std::mem::take(&mut cells[*column])).collect::<Vec<_>>()
    });
    output::table(&header, rows)
}

fn row(hold: &HoldInfo) -> [String; 8] {
    [
        hold.key.to_string(),
        state(hold.state).to_owned(),
        who(hold),
        output::or_dash(hold.since.map(output::local)),
        output::or_dash(held_for(hold).map(output::duration)),
        output::or_dash(hold.token.map(|token| token.to_string())),
        output::or_dash(hold.waiters.map(|waiters| waiters.to_string())),
        output::or_dash(hold.label.as_deref().map(output::printable)),
    ]
}

fn details(hold: &HoldInfo) -> String {
    let known = [
        (if hold.named { "key" } else { "number" }, Some(hold.key.to_string())),
        ("state", Some(state(hold.state).to_owned())),
        ("who", hold.owner.as_deref().map(output::printable)),
        ("holder", hold.holder.map(|holder| holder.to_string())),
        ("since", hold.since.map(output::local)),
        ("for", held_for(hold).map(output::duration)),
        ("token", hold.token.map(|token| token.to_string())),
        ("label", hold.label.as_deref().map(output::printable)),
        ("expires in", hold.expires_in.map(output::duration)),
        ("pause lasts", hold.cooling_for.map(output::duration)),
        ("waiters", hold.waiters.map(|waiters| waiters.to_string())),
    ];
    let lines = known.into_iter().filter_map(|(name, value)| Some(format!("{name:<12}{}", value?)));
    lines.collect::<Vec<_>>().join("\n")
}

fn state(state: HoldState) -> &'static str {
    match state {
        HoldState::Held => "held",
        HoldState::Expired => "expired",
        HoldState::Cooling => "cooling",
        _ => "unknown",
    }
}

/// The owner where the store knows it, else the holder id.
fn who(hold: &HoldInfo) -> String {
    let holder = || hold.holder.map(|holder| holder.to_string());
    hold.owner.as_deref().map(output::printable).or_else(holder).unwrap_or_else(|| "somebody".to_owned())
}

fn held_for(hold: &HoldInfo) -> Option<Duration> {
    // A clock that was set back makes it a time that has not begun.
    hold.since.map(|since| SystemTime::now().duration_since(since).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;
    use leasehold::{FencingToken, LockKey};

    fn hold() -> HoldInfo {
        let mut hold = HoldInfo::new(LockKey::new("a\x1b[31mb").unwrap());
        hold.holder = Some(HolderId::from_parts(1, 2));
        hold.token = Some(FencingToken::from_u64(1024));
        hold.label = Some("la\x07bel".into());
        hold.since = Some(SystemTime::UNIX_EPOCH);
        hold
    }

    #[test]
    fn nothing_that_people_see_has_control_characters() {
        let hold = hold();
        for text in row(&hold).into_iter().chain([details(&hold).replace('\n', " "), in_words(&hold)]) {
            assert!(!text.chars().any(char::is_control), "{text:?}");
        }
    }

    #[test]
    fn machines_get_the_exact_text_and_every_field() {
        let value = describe(&hold());
        assert_eq!(value["key"], "a\x1b[31mb");
        assert_eq!(value["token"], 1024);
        assert_eq!(value["since"], "1970-01-01T00:00:00Z");
        assert_eq!(value["expires_in_ms"], Value::Null);
        assert_eq!(value.as_object().unwrap().len(), 12);
    }

    #[test]
    fn waiters_have_a_column_where_the_store_counts_them() {
        let mut hold = hold();
        assert!(!listed(&[hold.clone()]).contains("WAITERS"));
        hold.waiters = Some(3);
        let text = listed(&[hold]);
        let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!((lines[0][6], *lines[1].iter().rev().nth(1).unwrap()), ("WAITERS", "3"), "{text}");
    }

    #[test]
    fn a_clock_set_back_is_not_a_negative_time() {
        let mut hold = hold();
        hold.since = Some(SystemTime::now() + Duration::from_secs(3600));
        assert_eq!(held_for(&hold), Some(Duration::ZERO));
    }
}
