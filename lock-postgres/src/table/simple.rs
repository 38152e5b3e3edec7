//! Renewing, confirming, releasing, looking: one statement each.

use std::time::{Duration, SystemTime};

use leasehold_api::{Error, ErrorKind, FencingToken, HoldInfo, HoldState, HolderId, LockKey, LossReason};
use leasehold_engine::{Freed, Renewed};
use sqlx::Row as _;
use sqlx::postgres::PgRow;

use super::db::{Bind, Db, Trouble, locked};
use super::dialect::Patient;
use super::job::{Call, Look, hand_out};
use super::registry::Named;
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
    let mut answers = Vec::with_capacity(items.len());
    for part in items.chunks(MOST_ROWS) {
        let rows = patiently(db, part.len(), "renew", &common.statements.renew, &|query| {
            query
                .bind(part.iter().map(|(hold, _)| hold.key.as_str().to_owned()).collect::<Vec<_>>())
                .bind(part.iter().map(|(hold, _)| hold.holder.to_string()).collect::<Vec<_>>())
                .bind(part.iter().map(|(_, ttl)| *ttl).collect::<Vec<_>>())
        })
        .await;
        answers.extend(match rows? {
            Ok((rows, skipped)) => {
                let answer = |(row, (hold, _)): (Option<&PgRow>, &&(Named, i64))| match row {
                    Some(_) => Ok(Renewed::Extended),
                    None if skipped => Err(locked().with_key(&hold.key)),
                    None => {
                        common.registry.ended(hold.holder);
                        Ok(Renewed::Gone(LossReason::Gone))
                    }
                };
                by_place(&rows, part.len()).into_iter().zip(part).map(answer).collect::<Vec<_>>()
            }
            Err(errors) => errors.into_iter().map(Err).collect(),
        });
    }
    hand_out(calls, answers, |_, _| ());
    Ok(())
}

pub(super) async fn confirm(
    db: &mut Db<'_>,
    common: &Common,
    calls: Vec<Call<Named, bool>>,
) -> Result<(), Error> {
    let items: Vec<&Named> = calls.iter().flat_map(|call| &call.items).collect();
    let mut answers = Vec::with_capacity(items.len());
    for part in items.chunks(MOST_ROWS) {
        let rows = db
            .rows("confirm", &common.statements.confirm, &|query| {
                query
                    .bind(part.iter().map(|hold| hold.key.as_str().to_owned()).collect::<Vec<_>>())
                    .bind(part.iter().map(|hold| hold.holder.to_string()).collect::<Vec<_>>())
            })
            .await;
        match rows {
            Ok(rows) => answers.extend(by_place(&rows, part.len()).into_iter().map(|row| Ok(row.is_some()))),
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
    let mut answers: Vec<Result<Freed, Error>> = Vec::with_capacity(items.len());
    for part in items.chunks(MOST_ROWS) {
        answers.extend(match part {
            [hold] => vec![release_one(db, common, hold).await?],
            _ => release_many(db, common, part).await?,
        });
    }
    for (hold, answer) in items.iter().zip(&answers) {
        if answer.is_ok() {
            common.registry.ended(hold.holder);
        }
    }
    hand_out(calls, answers, |_, _| ());
    Ok(())
}

async fn release_one(db: &mut Db<'_>, common: &Common, hold: &Named) -> Result<Result<Freed, Error>, Error> {
    let rows = db
        .rows("release", &common.statements.release_one, &|query| {
            query
                .bind(hold.key.as_str().to_owned())
                .bind(hold.holder.to_string())
                .bind(common.channel.clone())
        })
        .await;
    let freed = |row: &PgRow| Ok(Freed::new(row.try_get(0)?).waiters(row.try_get(1)?));
    match rows {
        Ok(rows) => match rows.first().map(freed).transpose() {
            Ok(found) => Ok(Ok(found.unwrap_or(Freed::new(false)))),
            Err(error) => Ok(Err(store_error(error, "release"))),
        },
        Err(Trouble::Dead(error)) => Err(error),
        Err(trouble) => Ok(Err(trouble.into_error().with_key(&hold.key))),
    }
}

async fn release_many(
    db: &mut Db<'_>,
    common: &Common,
    part: &[&Named],
) -> Result<Vec<Result<Freed, Error>>, Error> {
    let rows = patiently(db, part.len(), "release", &common.statements.release, &|query| {
        query
            .bind(part.iter().map(|hold| hold.key.as_str().to_owned()).collect::<Vec<_>>())
            .bind(part.iter().map(|hold| hold.holder.to_string()).collect::<Vec<_>>())
            .bind(common.channel.clone())
    })
    .await;
    let (rows, skipped) = match rows? {
        Ok(found) => found,
        Err(errors) => return Ok(errors.into_iter().map(Err).collect()),
    };
    let answer = |(row, hold): (Option<&PgRow>, &&Named)| match row {
        Some(row) => match (row.try_get(1), row.try_get(2)) {
            (Ok(held), Ok(waited)) => Ok(Freed::new(held).waiters(waited)),
            (Err(error), _) | (_, Err(error)) => Err(store_error(error, "release")),
        },
        None if skipped => Err(locked().with_key(&hold.key)),
        None => Ok(Freed::new(false)),
    };
    Ok(by_place(&rows, part.len()).into_iter().zip(part).map(answer).collect())
}

pub(super) async fn force(db: &mut Db<'_>, common: &Common, call: Call<Named, bool>) -> Result<(), Error> {
    let mut answers = Vec::with_capacity(call.items.len());
    for hold in &call.items {
        let rows = db
            .rows("force a release", &common.statements.force, &|query| {
                query
                    .bind(hold.key.as_str().to_owned())
                    .bind(hold.holder.to_string())
                    .bind(common.channel.clone())
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

/// How many rows one purge removes: few enough to delay nobody.
pub(super) const PURGED: i64 = 500;

pub(super) async fn look(
    db: &mut Db<'_>,
    common: &Common,
    call: Call<Look, Vec<HoldInfo>>,
) -> Result<(), Error> {
    let mut answers = Vec::with_capacity(call.items.len());
    for look in &call.items {
        let rows = db
            .rows("list", &common.statements.list, &|query| {
                query
                    .bind(look.from.clone())
                    .bind(look.to.clone())
                    .bind(look.ended)
                    .bind(look.prefix.clone())
                    .bind(look.limit)
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

fn info(row: &PgRow) -> Result<HoldInfo, Error> {
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
    let ((key, holder), token, (label, owner), since, state, expires_in, cooling_for) =
        read().map_err(|error| store_error(error, "list"))?;
    let mut info = HoldInfo::new(LockKey::new(key).map_err(|error| corrupt().with_source(error))?);
    info.state = match state {
        0 => HoldState::Held,
        1 => HoldState::Expired,
        _ => HoldState::Cooling,
    };
    // A row that was written by hand may have any holder; it is shown all the same.
    info.holder = holder.parse::<HolderId>().ok();
    info.token = u64::try_from(token).ok().and_then(FencingToken::from_store_number);
    info.label = label.map(Into::into);
    info.owner = owner;
    info.since = since.and_then(|since| SystemTime::UNIX_EPOCH.checked_add(since));
    info.expires_in = expires_in;
    info.cooling_for = cooling_for;
    Ok(info)
}

fn corrupt() -> Error {
    Error::new(
        ErrorKind::Corrupt,
        "a row of the table has a key that is no key of ours; somebody else wrote it",
    )
}

/// Sends a statement that waits for locked rows; if one stays locked, the one that leaves those out.
/// Answers the rows and whether some may have been left out.
async fn patiently(
    db: &mut Db<'_>,
    count: usize,
    doing: &str,
    text: &Patient,
    bind: Bind<'_>,
) -> Result<Result<(Vec<PgRow>, bool), Vec<Error>>, Error> {
    let outcome = match db.rows(doing, text.text(false), bind).await {
        Err(Trouble::Locked) if count > 1 => {
            db.rows(doing, text.text(true), bind).await.map(|rows| (rows, true))
        }
        outcome => outcome.map(|rows| (rows, false)),
    };
    match outcome {
        Ok(found) => Ok(Ok(found)),
        Err(trouble) => for_each_of(trouble, count).map(Err),
    }
}

/// The row of each of `count` requests, which rows name by their first column. A row that says anything
/// else is nobody's.
fn by_place(rows: &[PgRow], count: usize) -> Vec<Option<&PgRow>> {
    let mut places = vec![None; count];
    for row in rows {
        let place = row.try_get::<i64, _>(0).ok().and_then(|n| usize::try_from(n - 1).ok());
        if let Some(found) = place.and_then(|place| places.get_mut(place)) {
            *found = Some(row);
        }
    }
    places
}
