//! Renewing, confirming, releasing, looking: one statement each.

use std::collections::BTreeMap;
use std::hash::BuildHasherDefault;
use std::time::{Duration, SystemTime};

use fnv::FnvHashMap;
use leasehold_api::{Error, ErrorKind, HoldInfo, HoldState, HolderId, KeyInfo, LockKey, LossReason};
use leasehold_engine::{Freed, Renewed, token};
use sqlx::Row as _;
use sqlx::postgres::PgRow;
use tokio::time::Instant;

use super::db::{Bind, Db, Statement, Trouble, locked};
use super::dialect::Patient;
use super::job::{Call, Look, hand_out};
use super::registry::{Named, Process};
use super::values::HolderText;
use super::work::{Common, for_each_of};
use crate::error::store_error;

/// How many rows one statement renews, confirms or releases.
const MOST_ROWS: usize = 4096;

pub(super) async fn renew(
    db: &mut Db<'_>,
    common: &Common,
    calls: Vec<Call<(Named, i64), Renewed>>,
) -> Result<(), Error> {
    let items: Vec<&(Named, i64)> = calls.iter().flat_map(|call| &call.items).collect();
    // A statement answers each hold once; the last TTL that was asked for counts.
    let (once, which) = each_hold_once(items.iter().map(|(hold, _)| hold));
    let mut by_ttl: BTreeMap<i64, Vec<usize>> = BTreeMap::new();
    for (place, at) in once.iter().enumerate() {
        by_ttl.entry(items[*at].1).or_default().push(place);
    }
    let mut answers: Vec<Option<Result<Renewed, Error>>> = once.iter().map(|_| None).collect();
    for (ttl, places) in by_ttl {
        for part in places.chunks(MOST_ROWS) {
            let holds: Vec<&Named> = part.iter().map(|place| &items[once[*place]].0).collect();
            for (place, answer) in part.iter().zip(renew_part(db, common, &holds, ttl).await?) {
                answers[*place] = Some(answer);
            }
        }
    }
    hand_out(calls, copies(&which, &answers), |_, _| ());
    Ok(())
}

async fn renew_part(
    db: &mut Db<'_>,
    common: &Common,
    part: &[&Named],
    ttl: i64,
) -> Result<Vec<Result<Renewed, Error>>, Error> {
    let asked = Instant::now();
    let bind = |query| bind_holds(query, part).bind(ttl);
    let mut waits = true;
    if let Some(text) = &common.statements.renew_early {
        match db.rows("renew", text, &bind).await {
            Ok(rows) if count(&rows) == part.len() => {
                part.iter().for_each(|hold| common.registry.confirmed(hold.holder, asked));
                return Ok(part.iter().map(|_| Ok(Renewed::Extended)).collect());
            }
            Ok(_) | Err(Trouble::OneOf(_)) => {}
            Err(Trouble::Locked { .. }) if part.len() > 1 => waits = false,
            Err(trouble) => return Ok(for_each_of(trouble, part.len())?.into_iter().map(Err).collect()),
        }
    }
    let text = &common.statements.renew;
    let rows = patiently(db, part.len(), "renew", text, waits, &bind).await;
    let (rows, skipped) = match rows? {
        Ok(found) => found,
        Err(errors) => return Ok(errors.into_iter().map(Err).collect()),
    };
    let answer = |(row, hold): (Option<&PgRow>, &&Named)| match row {
        Some(_) => {
            common.registry.confirmed(hold.holder, asked);
            Ok(Renewed::Extended)
        }
        None if skipped => Err(locked().with_key(&hold.key)),
        None => {
            common.registry.ended(hold.holder);
            Ok(Renewed::Gone(LossReason::Gone))
        }
    };
    Ok(by_name(&rows, part).into_iter().zip(part).map(answer).collect())
}

pub(super) async fn confirm(
    db: &mut Db<'_>,
    common: &Common,
    calls: Vec<Call<Named, bool>>,
) -> Result<(), Error> {
    let items: Vec<&Named> = calls.iter().flat_map(|call| &call.items).collect();
    let mut answers = Vec::with_capacity(items.len());
    for part in items.chunks(MOST_ROWS) {
        let text = &common.statements.confirm;
        match db.rows("confirm", text, &|query| bind_holds(query, part)).await {
            Ok(rows) => answers.extend(by_name(&rows, part).into_iter().map(|row| Ok(row.is_some()))),
            Err(trouble) => answers.extend(for_each_of(trouble, part.len())?.into_iter().map(Err)),
        }
    }
    hand_out(calls, answers, |_, _| ());
    Ok(())
}

pub(super) async fn release(
    db: &mut Db<'_>,
    common: &Common,
    calls: Vec<Call<Named, Freed>>,
) -> Result<(), Error> {
    let items: Vec<&Named> = calls.iter().flat_map(|call| &call.items).collect();
    if let [hold] = items[..] {
        let answer = release_one(db, common, hold).await?;
        hand_out(calls, [answer], |_, _| ());
        return Ok(());
    }
    let (once, which) = each_hold_once(items.iter().copied());
    let holds: Vec<&Named> = once.iter().map(|at| items[*at]).collect();
    let answers: Vec<_> = free(db, common, &holds).await?.into_iter().map(Some).collect();
    hand_out(calls, copies(&which, &answers), |_, _| ());
    Ok(())
}

/// Releases grants that nobody heard of.
pub(super) async fn undo(db: &mut Db<'_>, common: &Common, holds: &[Named]) -> Result<(), Error> {
    let asked = Instant::now();
    let answers = free(db, common, &holds.iter().collect::<Vec<_>>()).await?;
    let freed = holds.iter().zip(answers).filter(|(_, answer)| answer.is_ok());
    common.registry.settle(&freed.map(|(hold, _)| hold.clone()).collect::<Vec<_>>(), asked, &[]);
    Ok(())
}

/// Releases holds that are all different.
async fn free(
    db: &mut Db<'_>,
    common: &Common,
    holds: &[&Named],
) -> Result<Vec<Result<Freed, Error>>, Error> {
    let mut answers = Vec::with_capacity(holds.len());
    for part in holds.chunks(MOST_ROWS) {
        match part {
            [hold] => answers.push(release_one(db, common, hold).await?),
            _ => answers.extend(release_many(db, common, part).await?),
        }
    }
    Ok(answers)
}

/// One statement, or two if somebody has begun to wait since it was known that nobody did, or it is not held.
async fn release_one(db: &mut Db<'_>, common: &Common, hold: &Named) -> Result<Result<Freed, Error>, Error> {
    match release_alone(db, common, hold).await {
        Ok(freed) => Ok(Ok(freed)),
        Err(Trouble::Dead(error)) => Err(error),
        Err(trouble) => Ok(Err(trouble.into_error().with_key(&hold.key))),
    }
}

async fn release_alone(db: &mut Db<'_>, common: &Common, hold: &Named) -> Result<Freed, Trouble> {
    let bind = |query: Statement| query.bind(hold.key.as_str()).bind(HolderText(hold.holder));
    if !common.awaited.has(&hold.key)
        && db.written("release", &common.statements.release_unawaited, &bind).await? > 0
    {
        common.registry.ended(hold.holder);
        return Ok(Freed::new(true));
    }
    let row = db.lone("release", &common.statements.release_one, &bind).await?;
    freed(common, hold, row.as_ref(), 0).map_err(Trouble::Unknown)
}

async fn release_many(
    db: &mut Db<'_>,
    common: &Common,
    part: &[&Named],
) -> Result<Vec<Result<Freed, Error>>, Error> {
    let text = &common.statements.release;
    let bind = |query| bind_holds(query, part);
    let (rows, skipped) = match patiently(db, part.len(), "release", text, true, &bind).await? {
        Ok(found) => found,
        Err(errors) => return Ok(errors.into_iter().map(Err).collect()),
    };
    let numbered = |row| Some((holder_at(row, 0)?, row));
    let found: FnvHashMap<HolderId, &PgRow> = rows.iter().filter_map(numbered).collect();
    let answer = |hold: &&Named| match found.get(&hold.holder) {
        None if skipped => Err(locked().with_key(&hold.key)),
        row => freed(common, hold, row.copied(), 1),
    };
    Ok(part.iter().map(answer).collect())
}

/// What the number says that is at column `at` of a release's row; no row: it was not held.
fn freed(common: &Common, hold: &Named, row: Option<&PgRow>, at: usize) -> Result<Freed, Error> {
    let number: Result<i32, _> = row.map_or(Ok(0), |row| row.try_get(at));
    common.registry.ended(hold.holder);
    let number = number.map_err(|error| store_error(error, "release"))?;
    let awaited = number & 2 != 0;
    if awaited {
        common.awaited.note(&hold.key);
    } else {
        common.awaited.forget(&hold.key);
    }
    Ok(Freed::new(number & 1 != 0).waiters(awaited))
}

pub(super) async fn force(db: &mut Db<'_>, common: &Common, call: Call<Named, bool>) -> Result<(), Error> {
    let mut answers = Vec::with_capacity(call.items.len());
    for hold in &call.items {
        let rows = db
            .rows("force a release", &common.statements.force, &|query| {
                query.bind(hold.key.as_str()).bind(HolderText(hold.holder))
            })
            .await;
        answers.push(match rows {
            Ok(rows) => Ok(!rows.is_empty()),
            Err(Trouble::Dead(error)) => return Err(error),
            Err(trouble) => Err(trouble.into_error()),
        });
    }
    let _ = call.answer(answers);
    Ok(())
}

pub(super) async fn purge(db: &mut Db<'_>, common: &Common, call: Call<i64, u64>) -> Result<(), Error> {
    let mut answers = Vec::with_capacity(call.items.len());
    for after in &call.items {
        let rows = db
            .rows("remove old rows", &common.statements.purge, &|query| query.bind(*after).bind(PURGED))
            .await;
        answers.push(match rows {
            Ok(rows) => Ok(rows.len() as u64),
            Err(Trouble::Dead(error)) => return Err(error),
            Err(trouble) => Err(trouble.into_error()),
        });
    }
    let _ = call.answer(answers);
    Ok(())
}

/// Ends sessions that are in doubt; answers which are gone.
pub(super) async fn end(db: &mut Db<'_>, common: &Common, call: Call<Process, bool>) -> Result<(), Error> {
    let mut answers = Vec::with_capacity(call.items.len());
    for Process { pid, started } in &call.items {
        let rows = db
            .rows("end a session in doubt", &common.statements.end, &|query| query.bind(*pid).bind(*started))
            .await;
        answers.push(match rows {
            Ok(rows) => Ok(rows.is_empty()),
            Err(Trouble::Dead(error)) => return Err(error),
            Err(trouble) => Err(trouble.into_error()),
        });
    }
    let _ = call.answer(answers);
    Ok(())
}

/// How many rows one purge removes: few enough to delay nobody.
pub(super) const PURGED: i64 = 500;

pub(super) async fn look(
    db: &mut Db<'_>,
    common: &Common,
    call: Call<Look, Vec<KeyInfo>>,
) -> Result<(), Error> {
    let mut answers = Vec::with_capacity(call.items.len());
    for look in &call.items {
        let rows = db
            .rows("list", &common.statements.list, &|query| {
                query.bind(&look.from).bind(&look.to).bind(look.ended).bind(&look.prefix).bind(look.limit)
            })
            .await;
        answers.push(match rows {
            Ok(rows) => rows.iter().map(info).collect(),
            Err(Trouble::Dead(error)) => return Err(error),
            Err(trouble) => Err(trouble.into_error()),
        });
    }
    let _ = call.answer(answers);
    Ok(())
}

/// One row: who has the key or had it last, and the cooldown that this grant asked for.
fn info(row: &PgRow) -> Result<KeyInfo, Error> {
    let read = || -> Result<_, sqlx::Error> {
        let micros = |at| -> Result<Option<Duration>, sqlx::Error> {
            let micros: Option<i64> = row.try_get(at)?;
            Ok(micros.map(|m| Duration::from_micros(u64::try_from(m).unwrap_or(0))))
        };
        let texts: (String, String) = (row.try_get(0)?, row.try_get(1)?);
        let (token, state): (i64, i16) = (row.try_get(2)?, row.try_get(6)?);
        let notes: (Option<String>, Option<String>) = (row.try_get(3)?, row.try_get(4)?);
        Ok((texts, token, notes, micros(5)?, state, micros(7)?, micros(8)?))
    };
    let ((key, holder), token, (label, owner), since, state, expires_in, cooldown) =
        read().map_err(|error| store_error(error, "list"))?;
    let mut info = KeyInfo::free(LockKey::new(key).map_err(|error| corrupt().with_source(error))?);
    info.cooldown = cooldown;
    let state = match state {
        0 => HoldState::Held,
        1 => HoldState::Expired,
        // Released: nobody holds it, and its cooldown lasts.
        _ => return Ok(info),
    };
    let mut hold = HoldInfo::new();
    hold.state = state;
    // A row that was written by hand may have any holder; it is shown all the same.
    hold.holder = holder.parse::<HolderId>().ok();
    hold.token = u64::try_from(token).ok().and_then(token::from_store_number);
    hold.label = label.map(Into::into);
    hold.owner = owner;
    hold.since = since.and_then(|since| SystemTime::UNIX_EPOCH.checked_add(since));
    hold.expires_in = expires_in;
    info.holders.push(hold);
    Ok(info)
}

fn corrupt() -> Error {
    Error::new(
        ErrorKind::Corrupt,
        "a row of the table has a key that is no key of ours; somebody else wrote it",
    )
}

/// Sends a statement that `waits` for locked rows; if one stays locked, the one that leaves those out.
/// Answers the rows and whether some may have been left out.
async fn patiently(
    db: &mut Db<'_>,
    count: usize,
    doing: &str,
    text: &Patient,
    waits: bool,
    bind: Bind<'_>,
) -> Result<Result<(Vec<PgRow>, bool), Vec<Error>>, Error> {
    let mut skips = !waits;
    let mut outcome = db.rows(doing, text.text(skips), bind).await;
    if count > 1 && !skips && matches!(outcome, Err(Trouble::Locked { .. })) {
        skips = true;
        outcome = db.rows(doing, text.text(skips), bind).await;
    }
    let outcome = outcome.map(|rows| (rows, skips));
    match outcome {
        Ok(found) => Ok(Ok(found)),
        Err(trouble) => for_each_of(trouble, count).map(Err),
    }
}

/// The one number that a statement answers.
fn count(rows: &[PgRow]) -> usize {
    let count: Option<i64> = rows.first().and_then(|row| row.try_get(0).ok());
    count.and_then(|count| usize::try_from(count).ok()).unwrap_or(0)
}

/// Gives a statement the keys and the holders of `holds`.
fn bind_holds(query: Statement, holds: &[&Named]) -> Statement {
    query
        .bind(holds.iter().map(|hold| hold.key.as_str()).collect::<Vec<_>>())
        .bind(holds.iter().map(|hold| HolderText(hold.holder)).collect::<Vec<_>>())
}

/// The row of each of `holds`, which rows name by their first two columns. A row that says anything else
/// is nobody's.
fn by_name<'r>(rows: &'r [PgRow], holds: &[&Named]) -> Vec<Option<&'r PgRow>> {
    let name = |row: &'r PgRow| Some(((row.try_get(0).ok()?, holder_at(row, 1)?), row));
    let found: FnvHashMap<(&str, HolderId), &PgRow> = rows.iter().filter_map(name).collect();
    holds.iter().map(|hold| found.get(&(hold.key.as_str(), hold.holder)).copied()).collect()
}

fn holder_at(row: &PgRow, at: usize) -> Option<HolderId> {
    row.try_get::<&str, _>(at).ok()?.parse().ok()
}

/// Where each hold is named last, and for each name which of these holds it means.
fn each_hold_once<'h>(holds: impl Iterator<Item = &'h Named>) -> (Vec<usize>, Vec<usize>) {
    let least = holds.size_hint().0;
    let (mut once, mut which) = (Vec::with_capacity(least), Vec::with_capacity(least));
    let mut places: FnvHashMap<&Named, usize> =
        FnvHashMap::with_capacity_and_hasher(least, BuildHasherDefault::default());
    for (at, hold) in holds.enumerate() {
        let place = *places.entry(hold).or_insert_with(|| {
            once.push(at);
            once.len() - 1
        });
        once[place] = at;
        which.push(place);
    }
    (once, which)
}

/// The answer of each item; all that mean one hold get the same.
fn copies<A: Clone>(which: &[usize], answers: &[Option<Result<A, Error>>]) -> Vec<Result<A, Error>> {
    let missing =
        || Error::new(ErrorKind::OutcomeUnknown, "the server was not asked; this is a bug to report");
    let answer = |place: &usize| answers[*place].clone().unwrap_or_else(|| Err(missing()));
    which.iter().map(answer).collect()
}
