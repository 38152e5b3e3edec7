//! The files with statements that take single rows, not groups.

use std::time::Duration;

use leasehold_table_schema::Table;

use super::parameters::{CLAIMED, behind, end, ends, finding, given, keys};
use super::specs::{Case, File, job, statement};
use crate::spec::ClaimSpec;
use crate::spec::states::{State, States};
use crate::statements::hold::{hold, leased_of, lock_row};
use crate::statements::pick::{alone, first, pending};
use crate::statements::renew::renew;
use crate::statements::settle::{many, one, probe};
use crate::statements::stats::stats;
use crate::statements::take::{put_back, take_alone};
use crate::statements::{lists, purge, requeue, sweep};
use crate::store::{Outcome, Take};

pub(super) fn queue() -> File {
    let spec = job().work(["payload"]).build().unwrap();
    let (case, single) = (Case::leased(&spec), Case { take: Take::up_to(1), ..Case::leased(&spec) });
    let (parts, order, request) = (&case.parts, &case.order, case.request());
    let retry = Outcome::Retry { error: Some(String::new()), after: Duration::from_secs(1) };
    let limit = || given(&[("bigint", "the largest number of rows")]);
    let dead = State::new("dead");
    let statements = vec![
        statement(
            "take one",
            "Takes the first row, under a lease.",
            finding(&[]),
            take_alone(parts, order, &single.request(), None, true),
        ),
        statement(
            "take",
            "Takes the first rows, each as a claim.",
            finding(&[]),
            take_alone(parts, order, &request, None, false),
        ),
        statement(
            "take behind",
            "Takes the first rows behind the cursor of the pass.",
            behind(&["ready_at", "id"], &[]),
            take_alone(parts, order, &request, Some(&[false, false]), false),
        ),
        statement(
            "first",
            "Lists the rows that `take` would take, after the table has refused to write one of them.",
            finding(&[]),
            first(parts, order, &request, None),
        ),
        statement(
            "put back",
            "Puts back the rows of a batch whose reply was lost.",
            given(&[("bigint", "the largest number of claims in the batch"), ("text", "the batch")]),
            put_back(parts).unwrap(),
        ),
        statement(
            "pending",
            "Returns whether a pass would find a row.",
            finding(&[]),
            pending(parts, order, &request),
        ),
        statement(
            "renew",
            "Renews leases, without waiting. Returns the rows that it has not renewed.",
            given(&[&CLAIMED[..], &[("bigint", "the lease in milliseconds")]].concat()),
            renew(parts),
        ),
        statement(
            "settle one as done",
            "Ends a claim of one row.",
            end(),
            one(parts, &case.ending(&Outcome::Done)),
        ),
        statement(
            "settle one to be retried",
            "Ends a claim of one row, which is due again after a pause.",
            end(),
            one(parts, &case.ending(&retry)),
        ),
        statement(
            "settle one by putting it back",
            "Ends a claim of one row, which does not count as an attempt.",
            end(),
            one(parts, &case.ending(&Outcome::PutBack)),
        ),
        statement(
            "settle some as failed",
            "Ends a claim of several rows: all of them or none.",
            ends(),
            many(parts, &case.ending(&Outcome::Failed(String::new())), false, None),
        ),
        statement(
            "settle many as done",
            "Ends several claims, each as a whole, without waiting.",
            ends(),
            many(parts, &case.ending(&Outcome::Done), true, None),
        ),
        statement("probe", "Returns the state of rows that were not settled.", given(&CLAIMED), probe(parts)),
        statement(
            "next end",
            "Returns the milliseconds until the first lease ends. 0 means sweep now.",
            Vec::new(),
            sweep::next_end(parts),
        ),
        statement("sweep", "Returns rows whose lease has ended.", limit(), sweep::sweep(parts)),
        statement(
            "sweep ended",
            "Lists the rows that `sweep` would return, after the table has refused to write one of them.",
            limit(),
            sweep::ended(parts),
        ),
        statement(
            "sweep keys",
            "Returns the rows with these keys whose lease has ended.",
            keys(&[("bigint", "the largest number of rows")]),
            sweep::sweep_keys(parts),
        ),
        statement(
            "use up",
            "Sets claimable rows without attempts left to exhausted.",
            limit(),
            sweep::use_up(parts).unwrap(),
        ),
        statement(
            "cancel",
            "Settles rows as failed, even if they are taken.",
            keys(&[("text", "the message")]),
            requeue::cancel(parts, &State::new("failed")),
        ),
        statement(
            "requeue",
            "Gives rows that have failed or are exhausted further attempts.",
            keys(&[("bigint", "the number of attempts")]),
            requeue::requeue(parts, &requeue::given_up(parts)),
        ),
        statement(
            "requeue all",
            "Gives the first 20 rows in a state further attempts.",
            given(&[("bigint", "the number of attempts")]),
            requeue::requeue(parts, &requeue::in_state(parts, &dead, 20)),
        ),
        statement(
            "requeue keys",
            "Lists rows in a state, after the table has refused to write one of them.",
            limit(),
            requeue::keys_in_state(parts, &dead),
        ),
        statement(
            "purge",
            "Deletes rows whose retention is over.",
            limit(),
            purge::purge(parts, &purge::oldest(parts, &parts.key())),
        ),
        statement(
            "purge oldest",
            "Lists the rows that `purge` would delete, after the table has refused to delete one of them.",
            limit(),
            purge::oldest(parts, &parts.key_text()),
        ),
        statement(
            "purge keys",
            "Deletes the rows with these keys whose retention is over.",
            keys(&[("bigint", "the largest number of rows")]),
            purge::purge(parts, &purge::picked_by_key(parts)),
        ),
        statement(
            "taken",
            "Lists rows that are taken, the longest held first.",
            limit(),
            lists::taken(parts),
        ),
        statement("exhausted", "Lists rows without attempts left.", limit(), lists::exhausted(parts)),
        statement(
            "stats",
            "Counts the rows of each kind, at most 20.",
            finding(&[]),
            stats(parts, order, &request),
        ),
    ];
    let head = "-- A queue of rows with due times and attempts, taken under leases, and kept for a month after their end.\n";
    ("queue", head.to_owned(), statements)
}

pub(super) fn held() -> File {
    let case = Case::held(&job().build().unwrap());
    let (parts, order, request) = (&case.parts, &case.order, case.request());
    let pick = alone(parts, order, &request, None, false);
    let pick_behind = alone(parts, order, &request, Some(&[false, false]), false);
    let retry = Outcome::Retry { error: None, after: Duration::ZERO };
    let statements = vec![
        statement(
            "hold",
            "Locks the first rows for the open transaction, and records them in its setting leasehold.held.",
            finding(&[]),
            hold(parts, order, &request, pick, "n.place"),
        ),
        statement(
            "hold behind",
            "Locks the first rows behind the cursor of the pass.",
            behind(&["ready_at", "id"], &[]),
            hold(parts, order, &request, pick_behind, "n.place"),
        ),
        statement(
            "settle as done",
            "Ends a claim that the transaction holds.",
            ends(),
            many(parts, &case.ending(&Outcome::Done), false, None),
        ),
        statement(
            "settle to be retried",
            "Ends a held claim, which will be retried. Only now the attempt is written.",
            ends(),
            many(parts, &case.ending(&retry), false, None),
        ),
        statement("probe", "Returns the state of rows that were not settled.", given(&CLAIMED), probe(parts)),
        statement(
            "lock row",
            "Locks one row in any state and reads it.",
            given(&[("text[]", "the id of the row"), ("text[]", "its queue")]),
            lock_row(parts),
        ),
    ];
    let head = "-- The table of queue.sql, whose rows an open transaction holds.\n";
    ("held", head.to_owned(), statements)
}

pub(super) fn beside() -> File {
    let spec = ClaimSpec::builder(Table::new("payment").unwrap())
        .state("processed", States::boolean())
        .side_table(Table::new("payment_lease").unwrap())
        .attempts("attempts_left");
    let (case, held) = Case::both(spec);
    let (parts, order, request) = (&case.parts, &case.order, case.request());
    let limit = || given(&[("bigint", "the largest number of rows")]);
    let statements = vec![
        statement(
            "take",
            "Takes the first rows, each as a claim.",
            finding(&[]),
            take_alone(parts, order, &request, None, false),
        ),
        statement(
            "put back",
            "Puts back the rows of a batch whose reply was lost.",
            given(&[("bigint", "the largest number of claims in the batch"), ("text", "the batch")]),
            put_back(parts).unwrap(),
        ),
        statement(
            "renew",
            "Renews leases, without waiting. Returns the rows that it has not renewed.",
            given(&[&CLAIMED[..], &[("bigint", "the lease in milliseconds")]].concat()),
            renew(parts),
        ),
        statement(
            "settle many as done",
            "Ends several claims, each as a whole, without waiting.",
            ends(),
            many(parts, &case.ending(&Outcome::Done), true, None),
        ),
        statement(
            "settle many by putting them back",
            "Ends several claims that do not count as attempts. Only their leases are deleted.",
            ends(),
            many(parts, &case.ending(&Outcome::PutBack), true, None),
        ),
        statement("probe", "Returns the state of rows that were not settled.", given(&CLAIMED), probe(parts)),
        statement(
            "next end",
            "Returns the milliseconds until the first lease ends. 0 means sweep now.",
            Vec::new(),
            sweep::next_end(parts),
        ),
        statement("sweep", "Returns rows whose lease has ended.", limit(), sweep::sweep(parts)),
        statement(
            "taken",
            "Lists rows that are taken, the longest held first.",
            limit(),
            lists::taken(parts),
        ),
        statement(
            "leased of",
            "Lists the rows locked by the transaction that have a lease.",
            keys(&[]),
            leased_of(&held.parts).unwrap(),
        ),
    ];
    let head = "-- A table with a boolean and attempts, whose leases are in a side table.\n";
    ("side_table", head.to_owned(), statements)
}
