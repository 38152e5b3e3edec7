//! Statements for operators and upkeep: list, change a label, force or request a release, end sessions, purge old rows.
//! Each reads a bounded number of rows, even in a large table.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use leasehold_api::{Error, ErrorKind, HoldInfo, HoldState, HolderId, KeyInfo, LockKey};
use leasehold_engine::token;
use sqlx::postgres::PgRow;
use sqlx::{AssertSqlSafe, Executor as _, Row as _, raw_sql};
use tokio::time::timeout;

use super::common::Common;
use super::db::{Db, Statement, StatementFailure};
use super::job::{ListPage, ListRequest, PendingCall, PurgeRequest, PurgedPage};
use super::parts;
use super::registry::{HoldId, Process};
use super::sql;
use super::values::HolderText;
use crate::error::{ends_session, store_error};
use crate::upkeep::{Note, Progress};

/// Maximum length of a key in the tables, in bytes.
const MOST_BYTES: usize = 1024;

/// Number of rows that one statement of a purge reads. It is small enough not to delay other statements.
pub(super) const PAGE: i64 = 1000;

/// The same of a list. It is larger, because a list only reads, and a statement alone costs the time of hundreds of
/// rows.
pub(super) const LIST_PAGE: i64 = 4000;

pub(super) async fn list(
    db: &mut Db<'_>,
    common: &Common,
    call: PendingCall<ListRequest, ListPage>,
) -> Result<(), Error> {
    let bind = |list: &ListRequest, query: Statement| {
        query.bind(list.from.clone()).bind(list.to.clone()).bind(list.ended).bind(list.rows)
    };
    one_by_one(db, "list", &[&common.statements.list], call, bind, page).await
}

pub(super) async fn force(
    db: &mut Db<'_>,
    common: &Common,
    call: PendingCall<HoldId, bool>,
) -> Result<(), Error> {
    let part = common.statements.parts.as_ref().map(|parts| &parts.force);
    let texts: Vec<_> = std::iter::once(&common.statements.force).chain(part).collect();
    one_by_one(db, "force a release", &texts, call, bind_hold, |rows| Ok(!rows.is_empty())).await
}

pub(super) async fn ask(
    db: &mut Db<'_>,
    common: &Common,
    call: PendingCall<HoldId, bool>,
) -> Result<(), Error> {
    let part = common.statements.parts.as_ref().map(|parts| &parts.ask);
    let texts: Vec<_> = std::iter::once(&common.statements.ask).chain(part).collect();
    one_by_one(db, "ask for a release", &texts, call, bind_hold, |rows| Ok(!rows.is_empty())).await
}

fn bind_hold(hold: &HoldId, query: Statement) -> Statement {
    query.bind(hold.key.to_string()).bind(HolderText(hold.holder))
}

pub(super) async fn relabel(
    db: &mut Db<'_>,
    common: &Common,
    call: PendingCall<(HoldId, Arc<str>), bool>,
) -> Result<(), Error> {
    let bind = |(hold, label): &(HoldId, Arc<str>), query: Statement| {
        query.bind(hold.key.to_string()).bind(HolderText(hold.holder)).bind(label.to_string())
    };
    let read = |rows: Vec<PgRow>| Ok(!rows.is_empty());
    let texts = [false, true].map(|in_parts| &common.statements.of_holds(in_parts).relabel);
    let texts = if common.statements.parts.is_some() { &texts[..] } else { &texts[..1] };
    one_by_one(db, "change a label", texts, call, bind, read).await
}

/// Renews holds and marks them as given out.
pub(super) async fn give_out(
    db: &mut Db<'_>,
    common: &Common,
    call: PendingCall<(HoldId, i64), bool>,
) -> Result<(), Error> {
    let Some(text) = &common.statements.give_out else {
        call.fail(&Error::unsupported("hold that another process can adopt"));
        return Ok(());
    };
    let bind = |(hold, ttl): &(HoldId, i64), query: Statement| bind_hold(hold, query).bind(*ttl);
    one_by_one(db, "give a hold out", &[text], call, bind, |rows| Ok(!rows.is_empty())).await
}

/// Ends this client's abandoned sessions. Replies for each whether it is gone.
pub(super) async fn end(db: &mut Db<'_>, call: PendingCall<Process, bool>) -> Result<(), Error> {
    const DOING: &str = "end a session in doubt";
    let mut answers = Vec::with_capacity(call.items.len());
    for process in &call.items {
        let (pid, started) = (process.pid.to_string(), process.started.to_string());
        let text = sql::END.replace("{pid}", &pid).replace("{started}", &started);
        let asked = timeout(db.limit, db.connection.fetch_all(raw_sql(AssertSqlSafe(text)))).await;
        answers.push(match asked.unwrap_or_else(|elapsed| Err(sqlx::Error::Io(elapsed.into()))) {
            Ok(rows) => Ok(rows.is_empty()),
            Err(error) if ends_session(&error) => return Err(store_error(error, DOING)),
            Err(error) => Err(store_error(error, DOING)),
        });
    }
    let _ = call.answer(answers);
    Ok(())
}

pub(super) async fn purge(
    db: &mut Db<'_>,
    common: &Common,
    call: PendingCall<PurgeRequest, PurgedPage>,
) -> Result<(), Error> {
    let mut answers = Vec::with_capacity(call.items.len());
    for purge in &call.items {
        answers.push(match purge_page(db, common, purge).await {
            Ok(page) => Ok(page),
            Err(StatementFailure::ConnectionUnusable(error)) => return Err(error),
            Err(failure) => Err(failure.into_error()),
        });
    }
    let _ = call.answer(answers);
    Ok(())
}

async fn purge_page(
    db: &mut Db<'_>,
    common: &Common,
    purge: &PurgeRequest,
) -> Result<PurgedPage, StatementFailure> {
    let parts = common.statements.parts.as_ref();
    // Leaves the rest of a page to another job, because renewals wait for the session.
    let again = || Some(purge.after.clone());
    if let Some(parts) = parts
        && parts::open_idle(db, common, parts, purge).await?
    {
        return Ok(PurgedPage { removed: 0, next: again() });
    }
    let bind = |query: Statement| query.bind(purge.age).bind(purge.after.as_str()).bind(PAGE);
    let mut page = PurgedPage { removed: 0, next: None };
    if let Some(row) = db.row(REMOVE, &common.statements.purge, &bind).await? {
        let read = || Ok((row.try_get::<i64, _>(0)?, row.try_get(1)?));
        let (removed, next) =
            read().map_err(|error| StatementFailure::OutcomeUnknown(store_error(error, REMOVE)))?;
        page = PurgedPage { removed: removed.unsigned_abs(), next };
    }
    if let Some(parts) = parts {
        let (removed, has_more) = parts::purge(db, parts, purge, page.next.as_deref()).await?;
        page.removed += removed;
        if has_more {
            page.next = again();
        }
    }
    Ok(page)
}

pub(super) async fn claim_upkeep(
    db: &mut Db<'_>,
    common: &Common,
    call: PendingCall<(), Option<Progress>>,
) -> Result<(), Error> {
    let bind = |(): &(), query: Statement| query.bind(common.statements.kind);
    let read = |rows: Vec<PgRow>| {
        let progress = rows.first().map(Progress::read).transpose();
        progress.map_err(|error| store_error(error, REMOVE))
    };
    one_by_one(db, REMOVE, &[&common.statements.claim_upkeep], call, bind, read).await
}

pub(super) async fn note_upkeep(
    db: &mut Db<'_>,
    common: &Common,
    call: PendingCall<Note, ()>,
) -> Result<(), Error> {
    let bind = |note: &Note, query: Statement| {
        query.bind(common.statements.kind).bind(note.after.clone()).bind(note.pause_micros())
    };
    one_by_one(db, REMOVE, &[&common.statements.note_upkeep], call, bind, |_| Ok(())).await
}

const REMOVE: &str = "remove old rows";

/// Runs one statement for each item of `call`, and the next of `texts` if it returned no row.
async fn one_by_one<Q, A>(
    db: &mut Db<'_>,
    doing: &str,
    texts: &[&Arc<str>],
    call: PendingCall<Q, A>,
    bind: impl Fn(&Q, Statement) -> Statement + Sync,
    read: impl Fn(Vec<PgRow>) -> Result<A, Error>,
) -> Result<(), Error>
where
    Q: Sync,
{
    let mut answers = Vec::with_capacity(call.items.len());
    for item in &call.items {
        let mut outcome = Ok(Vec::new());
        for text in texts {
            outcome = db.rows(doing, text, &|query| bind(item, query)).await;
            if !matches!(&outcome, Ok(rows) if rows.is_empty()) {
                break;
            }
        }
        answers.push(match outcome {
            Ok(rows) => read(rows),
            Err(StatementFailure::ConnectionUnusable(error)) => return Err(error),
            Err(failure) => Err(failure.into_error()),
        });
    }
    let _ = call.answer(answers);
    Ok(())
}

/// Reads the shown rows. The last row might only mark the position of the next page.
fn page(rows: Vec<PgRow>) -> Result<ListPage, Error> {
    let failed = |error| store_error(error, "list");
    let mut page = ListPage::default();
    for row in &rows {
        if row.try_get(9).map_err(failed)? {
            add(&mut page.keys, info(row)?);
        }
        if row.try_get(10).map_err(failed)? {
            let last: String = row.try_get(0).map_err(failed)?;
            page.next = Some(behind(&last));
        }
    }
    Ok(page)
}

/// Adds the holder of a row to its key, which can have several.
fn add(keys: &mut Vec<KeyInfo>, info: KeyInfo) {
    match keys.last_mut().filter(|last| last.key == info.key) {
        Some(last) => last.holders.extend(info.holders),
        None => keys.push(info),
    }
}

/// Returns the first text after `key` in byte order, because the server refuses NUL and no key contains it.
pub(super) fn behind(key: &str) -> String {
    [key, "\u{1}"].concat()
}

/// Returns the first text after all texts that begin with `prefix`.
pub(super) fn behind_prefix(prefix: &str) -> String {
    let mut text = prefix.to_owned();
    while let Some(last) = text.pop() {
        // Skips the surrogates, which are not characters, so these two characters are adjacent.
        let next = if last == '\u{d7ff}' { Some('\u{e000}') } else { char::from_u32(u32::from(last) + 1) };
        if let Some(next) = next {
            text.push(next);
            return text;
        }
    }
    // Returns a text behind every key: longer than any key, and made of the last character.
    "\u{10ffff}".repeat(MOST_BYTES / 4 + 1)
}

/// Reads one row: the current or last holder of the key, and the cooldown of its grant.
fn info(row: &PgRow) -> Result<KeyInfo, Error> {
    let read = || -> Result<_, sqlx::Error> {
        let micros = |at| -> Result<Option<Duration>, sqlx::Error> {
            let micros: Option<i64> = row.try_get(at)?;
            Ok(micros.map(|m| Duration::from_micros(u64::try_from(m).unwrap_or(0))))
        };
        let texts: (String, String) = (row.try_get(0)?, row.try_get(1)?);
        let (token, state): (i64, i16) = (row.try_get(2)?, row.try_get(6)?);
        let notes: (Option<String>, Option<String>, bool) =
            (row.try_get(3)?, row.try_get(4)?, row.try_get(11)?);
        let part = row.try_get::<Option<i32>, _>(12)?.zip(row.try_get::<Option<i32>, _>(13)?);
        Ok((texts, token, notes, micros(5)?, state, micros(7)?, micros(8)?, part))
    };
    let ((key, holder), token, (label, owner, asked), since, state, expires_in, cooldown, part) =
        read().map_err(|error| store_error(error, "list"))?;
    let mut info = KeyInfo::free(LockKey::new(key).map_err(|error| corrupt().with_source(error))?);
    info.cooldown = cooldown;
    let state = match state {
        0 => HoldState::Held,
        1 => HoldState::Expired,
        // The hold was released, and only its cooldown lasts.
        _ => return Ok(info),
    };
    let mut hold = HoldInfo::new();
    hold.state = state;
    // Leaves out a holder that cannot be parsed, because the row may be written by hand.
    hold.holder = holder.parse::<HolderId>().ok();
    hold.token = u64::try_from(token).ok().and_then(token::from_store_number);
    hold.label = label.map(Into::into);
    hold.owner = owner;
    hold.asked = asked;
    hold.since = since.and_then(|since| SystemTime::UNIX_EPOCH.checked_add(since));
    hold.expires_in = expires_in;
    if let Some((of, part)) = part {
        (hold.mode, hold.permit) = parts::mode(of, part);
    }
    info.holders.push(hold);
    Ok(info)
}

fn corrupt() -> Error {
    Error::new(
        ErrorKind::Corrupt,
        "a row of the table has a key that is no key of ours; somebody else wrote it",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prefix_ends_where_no_text_begins_with_it_any_more() {
        for (prefix, behind) in [
            ("order:", "order;"),
            ("a\u{10ffff}", "b"),
            ("\u{d7ff}", "\u{e000}"),
            ("\u{7f}", "\u{80}"),
            ("x\u{ffff}", "x\u{10000}"),
        ] {
            assert_eq!(behind_prefix(prefix), behind, "{prefix:?}");
            let longest = format!("{prefix}\u{10ffff}\u{10ffff}");
            assert!(longest.as_str() < behind, "{prefix:?}");
        }
        for endless in ["", "\u{10ffff}\u{10ffff}"] {
            assert!(behind_prefix(endless).len() > MOST_BYTES, "{endless:?}");
        }
    }

    #[test]
    fn nothing_comes_between_a_text_and_what_is_behind_it() {
        assert_eq!(behind("a"), "a\u{1}");
        assert!("a" < behind("a").as_str() && behind("a").as_str() < "a\u{1}\u{1}");
    }
}
