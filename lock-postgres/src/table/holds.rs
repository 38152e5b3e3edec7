//! Statements on existing holds: renew, confirm, release.

use std::collections::BTreeMap;
use std::hash::BuildHasherDefault;

use fnv::FnvHashMap;
use leasehold_api::{Error, ErrorKind, HolderId, LossReason};
use leasehold_engine::{ReleaseReply, Renewed, late_copy_error};
use sqlx::Row as _;
use sqlx::postgres::PgRow;
use tokio::time::Instant;

use super::common::Common;
use super::db::{Bind, Db, Statement, StatementFailure, locked_error};
use super::dialect::WaitOrSkip;
use super::job::{PendingCall, hand_out};
use super::registry::{BeforeRelease, HoldId, ReleaseRequest};
use super::values::HolderText;
use crate::error::store_error;

/// Maximum number of rows that one statement renews, confirms or releases.
const MOST_ROWS: usize = 4096;

pub(super) async fn renew(
    db: &mut Db<'_>,
    common: &Common,
    calls: Vec<PendingCall<(HoldId, i64), Renewed>>,
) -> Result<(), Error> {
    let items: Vec<&(HoldId, i64)> = calls.iter().flat_map(|call| &call.items).collect();
    // Sends each hold once, because the statement replies once per hold. The last requested TTL counts.
    let (once, which) = each_hold_once(items.iter().map(|(hold, _)| hold));
    let mut alike: BTreeMap<(bool, i64), Vec<usize>> = BTreeMap::new();
    for (place, at) in once.iter().enumerate() {
        let (hold, ttl) = items[*at];
        alike.entry((hold.in_parts, *ttl)).or_default().push(place);
    }
    let mut answers: Vec<Option<Result<Renewed, Error>>> = once.iter().map(|_| None).collect();
    for ((in_parts, ttl), places) in alike {
        for part in places.chunks(MOST_ROWS) {
            let holds: Vec<&HoldId> = part.iter().map(|place| &items[once[*place]].0).collect();
            for (place, answer) in part.iter().zip(renew_part(db, common, &holds, in_parts, ttl).await?) {
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
    part: &[&HoldId],
    in_parts: bool,
    ttl: i64,
) -> Result<Vec<Result<Renewed, Error>>, Error> {
    let asked = Instant::now();
    let bind = |query| bind_holds(query, part).bind(ttl);
    let mut waits = true;
    let statements = common.statements.of_holds(in_parts);
    if let Some(text) = &statements.renew_early {
        match db.rows("renew", text, &bind).await {
            Ok(rows) if count(&rows) == part.len() => {
                part.iter().for_each(|hold| common.registry.confirmed(hold.holder, asked));
                return Ok(part.iter().map(|_| Ok(Renewed::Extended)).collect());
            }
            Ok(_) | Err(StatementFailure::BadValue(_)) => {}
            Err(StatementFailure::Locked { .. }) if part.len() > 1 => waits = false,
            Err(failure) => return Ok(failure.for_each(part.len())?.into_iter().map(Err).collect()),
        }
    }
    let text = &statements.renew;
    let rows = wait_then_skip(db, part.len(), "renew", text, waits, &bind).await;
    let (rows, skipped) = match rows? {
        Ok(found) => found,
        Err(errors) => return Ok(errors.into_iter().map(Err).collect()),
    };
    let answer = |(row, hold): (Option<&PgRow>, &&HoldId)| match row {
        Some(row) => {
            common.registry.confirmed(hold.holder, asked);
            report_asked(common, row, hold);
            Ok(Renewed::Extended)
        }
        None if skipped => Err(locked_error().with_key(&hold.key)),
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
    calls: Vec<PendingCall<HoldId, bool>>,
) -> Result<(), Error> {
    let items: Vec<&HoldId> = calls.iter().flat_map(|call| &call.items).collect();
    let mut answers = Vec::with_capacity(items.len());
    for places in same_statements(&items) {
        let part: Vec<&HoldId> = places.iter().map(|place| items[*place]).collect();
        let text = &common.statements.of_holds(part.iter().any(|hold| hold.in_parts)).confirm;
        let given: Vec<_> = match db.rows("confirm", text, &|query| bind_holds(query, &part)).await {
            Ok(rows) => {
                let found = by_name(&rows, &part);
                for (row, hold) in found.iter().zip(&part).filter_map(|(row, hold)| Some(((*row)?, hold))) {
                    report_asked(common, row, hold);
                }
                found.iter().map(|row| Ok(row.is_some())).collect()
            }
            Err(failure) => failure.for_each(part.len())?.into_iter().map(Err).collect(),
        };
        answers.extend(places.into_iter().zip(given));
    }
    hand_out(calls, in_order(answers), |_, _| ());
    Ok(())
}

/// Returns the positions in `holds`, in portions whose holds are of the same kind and fit into one statement.
fn same_statements(holds: &[&HoldId]) -> Vec<Vec<usize>> {
    let of_kind = |in_parts| (0..holds.len()).filter(move |at| holds[*at].in_parts == in_parts);
    let kinds = [false, true].map(|in_parts| of_kind(in_parts).collect::<Vec<_>>());
    kinds.iter().flat_map(|kind| kind.chunks(MOST_ROWS)).map(<[usize]>::to_vec).collect()
}

/// Returns the values in the order of their positions.
fn in_order<T>(mut answers: Vec<(usize, T)>) -> Vec<T> {
    answers.sort_by_key(|(place, _)| *place);
    answers.into_iter().map(|(_, answer)| answer).collect()
}

/// Checks whether another client was served after each hold of `call` was released.
pub(super) async fn served(
    db: &mut Db<'_>,
    common: &Common,
    call: PendingCall<HoldId, bool>,
) -> Result<(), Error> {
    let mut answers = Vec::with_capacity(call.items.len());
    for hold in &call.items {
        let bind = |query: Statement| query.bind(hold.key.as_str()).bind(HolderText(hold.holder));
        answers.push(match db.row("see who was served", &common.statements.served, &bind).await {
            Ok(Some(row)) => row.try_get(0).map_err(|error| store_error(error, "see who was served")),
            Ok(None) => Ok(false),
            Err(failure) => failure.for_each(1)?.into_iter().next().map_or(Ok(false), Err),
        });
    }
    hand_out(vec![call], answers, |_, _| ());
    Ok(())
}

pub(super) async fn release(
    db: &mut Db<'_>,
    common: &Common,
    calls: Vec<PendingCall<ReleaseRequest, ReleaseReply>>,
) -> Result<(), Error> {
    let items: Vec<&ReleaseRequest> = calls.iter().flat_map(|call| &call.items).collect();
    if let [release] = items[..] {
        let answer = release_one(db, common, release).await?;
        hand_out(calls, [answer], |_, _| ());
        return Ok(());
    }
    let (once, which) = each_hold_once(items.iter().map(|release| &release.hold));
    let releases: Vec<&ReleaseRequest> = once.iter().map(|at| items[*at]).collect();
    let answers: Vec<_> = free(db, common, &releases).await?.into_iter().map(Some).collect();
    hand_out(calls, copies(&which, &answers), |_, _| ());
    Ok(())
}

/// Releases grants that no caller received.
pub(super) async fn undo(db: &mut Db<'_>, common: &Common, holds: &[HoldId]) -> Result<(), Error> {
    let asked = Instant::now();
    let releases: Vec<_> =
        holds.iter().map(|hold| ReleaseRequest { hold: hold.clone(), unused: true }).collect();
    let answers = free(db, common, &releases.iter().collect::<Vec<_>>()).await?;
    let freed = holds.iter().zip(answers).filter(|(_, answer)| answer.is_ok());
    common.registry.settle(&freed.map(|(hold, _)| hold.clone()).collect::<Vec<_>>(), asked);
    Ok(())
}

/// Releases distinct holds.
async fn free(
    db: &mut Db<'_>,
    common: &Common,
    releases: &[&ReleaseRequest],
) -> Result<Vec<Result<ReleaseReply, Error>>, Error> {
    let mut answers = Vec::with_capacity(releases.len());
    let holds: Vec<&HoldId> = releases.iter().map(|release| &release.hold).collect();
    for places in same_statements(&holds) {
        let part: Vec<&ReleaseRequest> = places.iter().map(|place| releases[*place]).collect();
        let given = match part[..] {
            [release] => vec![release_one(db, common, release).await?],
            _ => release_many(db, common, &part).await?,
        };
        answers.extend(places.into_iter().zip(given));
    }
    Ok(in_order(answers))
}

/// Releases one hold with one statement. A second one follows if the hold has a new waiter or is not held.
async fn release_one(
    db: &mut Db<'_>,
    common: &Common,
    release: &ReleaseRequest,
) -> Result<Result<ReleaseReply, Error>, Error> {
    match release_alone(db, common, release).await {
        Ok(freed) => Ok(Ok(freed)),
        Err(StatementFailure::ConnectionUnusable(error)) => Err(error),
        Err(failure) => Ok(Err(failure.into_error().with_key(&release.hold.key))),
    }
}

async fn release_alone(
    db: &mut Db<'_>,
    common: &Common,
    release: &ReleaseRequest,
) -> Result<ReleaseReply, StatementFailure> {
    let ReleaseRequest { hold, unused } = release;
    let statements = common.statements.of_holds(hold.in_parts);
    let bind = |query: Statement| query.bind(hold.key.as_str()).bind(HolderText(hold.holder)).bind(*unused);
    if !common.contention.contains(&hold.key)
        && db.execute("release", &statements.release_unawaited, &bind).await? > 0
    {
        common.registry.ended(hold.holder);
        return Ok(ReleaseReply::new(true));
    }
    let before = common.registry.before_release(&[hold]);
    let row = db.row("release", &statements.release_one, &bind).await?;
    freed(common, hold, row.as_ref(), 0, &before).map_err(StatementFailure::OutcomeUnknown)
}

async fn release_many(
    db: &mut Db<'_>,
    common: &Common,
    part: &[&ReleaseRequest],
) -> Result<Vec<Result<ReleaseReply, Error>>, Error> {
    let text = &common.statements.of_holds(part.iter().any(|release| release.hold.in_parts)).release;
    let holds: Vec<&HoldId> = part.iter().map(|release| &release.hold).collect();
    let bind = |query| {
        let unused = part.iter().filter(|release| release.unused);
        bind_holds(query, &holds).bind(unused.map(|e| HolderText(e.hold.holder)).collect::<Vec<_>>())
    };
    let before = common.registry.before_release(&holds);
    let (rows, skipped) = match wait_then_skip(db, part.len(), "release", text, true, &bind).await? {
        Ok(found) => found,
        Err(errors) => return Ok(errors.into_iter().map(Err).collect()),
    };
    let numbered = |row| Some((holder_at(row, 0)?, row));
    let found: FnvHashMap<HolderId, &PgRow> = rows.iter().filter_map(numbered).collect();
    let answer = |hold: &&HoldId| match found.get(&hold.holder) {
        None if skipped => Err(locked_error().with_key(&hold.key)),
        row => freed(common, hold, row.copied(), 1, &before),
    };
    Ok(holds.iter().map(answer).collect())
}

/// Reads the reply to a release from the number in column `at` of its row. Without a row the key was not
/// held. It is an error if the hold's request might still run, or might have run when the release was sent
/// (`before`), because it was possibly granted between the release and this reply.
fn freed(
    common: &Common,
    hold: &HoldId,
    row: Option<&PgRow>,
    at: usize,
    before: &BeforeRelease<'_>,
) -> Result<ReleaseReply, Error> {
    if row.is_none() && before.may_be_granted(hold) {
        // The request of a known session is answered, or ends with that session.
        if common.registry.is_hidden(hold) {
            return Err(late_copy_error(&hold.key));
        }
        let message = "the session that was asked for this hold did not answer before the release, so it may still be granted, and the release is repeated";
        return Err(Error::new(ErrorKind::Unavailable, message).with_key(&hold.key));
    }
    let number: Result<i32, _> = row.map_or(Ok(0), |row| row.try_get(at));
    common.registry.ended(hold.holder);
    let number = number.map_err(|error| store_error(error, "release"))?;
    let awaited = number & 2 != 0;
    if awaited {
        common.contention.add(&hold.key);
    } else {
        common.contention.remove(&hold.key);
    }
    Ok(ReleaseReply::new(number & 1 != 0).waiters(awaited))
}

/// Runs the variant of `text` that waits for locked rows. If a row stays locked, runs the variant that skips them.
/// Without `waits`, runs only the latter. Returns the rows, and whether locked rows might have been skipped.
async fn wait_then_skip(
    db: &mut Db<'_>,
    count: usize,
    doing: &str,
    text: &WaitOrSkip,
    waits: bool,
    bind: Bind<'_>,
) -> Result<Result<(Vec<PgRow>, bool), Vec<Error>>, Error> {
    let mut skips = !waits;
    let mut outcome = db.rows(doing, text.text(skips), bind).await;
    if count > 1 && !skips && matches!(outcome, Err(StatementFailure::Locked { .. })) {
        skips = true;
        outcome = db.rows(doing, text.text(skips), bind).await;
    }
    let outcome = outcome.map(|rows| (rows, skips));
    match outcome {
        Ok(found) => Ok(Ok(found)),
        Err(failure) => failure.for_each(count).map(Err),
    }
}

/// Reports a request to release to the engine, if the third column is true. A renewal of leases has two columns.
fn report_asked(common: &Common, row: &PgRow, hold: &HoldId) {
    if row.try_get(2).unwrap_or(false) {
        common.events(|events| events.asked(&hold.key, hold.holder));
    }
}

/// Reads the count that a statement returns.
fn count(rows: &[PgRow]) -> usize {
    let count: Option<i64> = rows.first().and_then(|row| row.try_get(0).ok());
    count.and_then(|count| usize::try_from(count).ok()).unwrap_or(0)
}

/// Binds the keys and the holders of `holds`.
fn bind_holds(query: Statement, holds: &[&HoldId]) -> Statement {
    query
        .bind(holds.iter().map(|hold| hold.key.as_str()).collect::<Vec<_>>())
        .bind(holds.iter().map(|hold| HolderText(hold.holder)).collect::<Vec<_>>())
}

/// Returns the row of each of `holds`, matched by the first two columns. Other rows are ignored.
fn by_name<'r>(rows: &'r [PgRow], holds: &[&HoldId]) -> Vec<Option<&'r PgRow>> {
    let name = |row: &'r PgRow| Some(((row.try_get(0).ok()?, holder_at(row, 1)?), row));
    let found: FnvHashMap<(&str, HolderId), &PgRow> = rows.iter().filter_map(name).collect();
    holds.iter().map(|hold| found.get(&(hold.key.as_str(), hold.holder)).copied()).collect()
}

fn holder_at(row: &PgRow, at: usize) -> Option<HolderId> {
    row.try_get::<&str, _>(at).ok()?.parse().ok()
}

/// Returns the last position of each distinct hold, and for each item the index of its hold in that list.
fn each_hold_once<'h>(holds: impl Iterator<Item = &'h HoldId>) -> (Vec<usize>, Vec<usize>) {
    let least = holds.size_hint().0;
    let (mut once, mut which) = (Vec::with_capacity(least), Vec::with_capacity(least));
    let mut places: FnvHashMap<&HoldId, usize> =
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

/// Returns the reply of each item. Items of the same hold get copies.
fn copies<A: Clone>(which: &[usize], answers: &[Option<Result<A, Error>>]) -> Vec<Result<A, Error>> {
    let missing =
        || Error::new(ErrorKind::OutcomeUnknown, "the server was not asked; this is a bug to report");
    let answer = |place: &usize| answers[*place].clone().unwrap_or_else(|| Err(missing()));
    which.iter().map(answer).collect()
}
