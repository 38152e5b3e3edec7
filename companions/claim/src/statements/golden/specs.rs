//! The specs for which files are written, and which statements each file has.

use std::time::Duration;

use uuid::Uuid;

use super::Statement;
use super::parameters::{
    FOUND, FULL_TENANTS, Parameters, SEEN_GROUPS, WINDOW, behind, end, finding, given, keys,
};
use super::single::{beside, held, queue};
use crate::spec::states::States;
use crate::spec::{ClaimSpec, ClaimSpecBuilder, OrderType, Retention, Unmet};
use crate::statements::groups::{LOCK, Locked, Selection};
use crate::statements::hold::hold;
use crate::statements::order::RowOrder;
use crate::statements::parts::SqlParts;
use crate::statements::pick::{TakeRequest, alone, last_waiting, pending};
use crate::statements::settle::{Ending, one};
use crate::statements::stats::stats;
use crate::statements::take::{take_alone, take_selected};
use crate::statements::tenants::PLACE;
use crate::statements::{BEGIN, lists};
use crate::store::{Outcome, Take};
use leasehold_table_schema::Table;

/// The name of a file, its introduction, and its statements.
pub(super) type File = (&'static str, String, Vec<Statement>);

pub(super) fn files() -> Vec<File> {
    vec![queue(), held(), ordered(), of_groups(), of_tenants(), waits(), beside()]
}

/// Describes a table `job` with due times, attempts and a retention of a month.
pub(super) fn job() -> ClaimSpecBuilder {
    let states = States::text(["new"], "done").taken("running").failed("failed").exhausted("dead");
    ClaimSpec::builder(Table::new("job").unwrap())
        .state("state", states)
        .lease_columns("owner", "epoch", "lease_until")
        .attempts("attempts_left")
        .settled_at("settled_at")
        .ready_at("ready_at")
        .order_by("ready_at", OrderType::Time)
        .error("error")
        .retention(Retention::KeepFor(Duration::from_secs(30 * 86_400)))
}

/// A table, and the request for which its statements are built.
pub(super) struct Case {
    pub(super) parts: SqlParts,
    pub(super) order: RowOrder,
    pub(super) take: Take,
}

impl Case {
    fn new(parts: SqlParts, nullable: &str) -> Self {
        // `ready_at` is never NULL, as on a table that the migration has made.
        parts.ready_is_given.set(true).unwrap();
        let order = RowOrder::new(&parts, |name| name == nullable);
        Self { parts, order, take: Take::up_to(20) }
    }

    pub(super) fn leased(spec: &ClaimSpec) -> Self {
        Self::new(SqlParts::leased(spec), "")
    }

    pub(super) fn held(spec: &ClaimSpec) -> Self {
        Self::new(SqlParts::held(spec), "")
    }

    pub(super) fn both(spec: ClaimSpecBuilder) -> (Self, Self) {
        let spec = spec.build().unwrap();
        (Self::leased(&spec), Self::held(&spec))
    }

    pub(super) fn request(&self) -> TakeRequest<'_> {
        let from =
            if self.take.from.is_empty() { &self.parts.inner().states.takeable } else { &self.take.from };
        TakeRequest { take: &self.take, from, batch: Uuid::nil() }
    }

    fn select<'a>(&'a self, request: &'a TakeRequest<'a>) -> Selection<'a> {
        Selection::new(&self.parts, &self.order, request, self.take.limit).unwrap()
    }

    pub(super) fn ending(&self, outcome: &Outcome) -> Ending {
        Ending::of(&self.parts, outcome).unwrap()
    }
}

pub(super) fn statement(name: &str, what: &'static str, parameters: Parameters, sql: String) -> Statement {
    Statement { name: name.to_owned(), what, parameters, sql }
}

fn ordered() -> File {
    let states = States::text(["new", "again"], "done").taken("running");
    let spec = ClaimSpec::builder(Table::new("message").unwrap().in_schema("app").unwrap())
        .state("state", states)
        .lease_columns("owner", "epoch", "lease_until")
        .queue("queue")
        .order_by_descending("priority", OrderType::Int)
        .order_by("sent_at", OrderType::Time);
    let parts = SqlParts::leased(&spec.build().unwrap());
    let case = Case { take: Take::up_to(20).queue("mail"), ..Case::new(parts, "sent_at") };
    let (parts, order, request) = (&case.parts, &case.order, case.request());
    let columns = ["priority", "sent_at", "id", "queue"];
    let null = ["priority", "id", "queue"];
    let statements = vec![
        statement(
            "take",
            "Takes the first rows of a queue.",
            finding(&[]),
            take_alone(parts, order, &request, None, false),
        ),
        statement(
            "take behind",
            "Takes the first rows behind the cursor of the pass.",
            behind(&columns, &[]),
            take_alone(parts, order, &request, Some(&[false; 4]), false),
        ),
        statement(
            "take behind a null",
            "Takes the first rows behind a cursor whose sent_at is NULL.",
            behind(&null, &[]),
            take_alone(parts, order, &request, Some(&[false, true, false, false]), false),
        ),
        statement(
            "pending",
            "Returns whether a pass would find a row.",
            finding(&[]),
            pending(parts, order, &request),
        ),
        statement(
            "settle one as done",
            "Ends a claim of one row.",
            end(),
            one(parts, &case.ending(&Outcome::Done)),
        ),
    ];
    let head = "-- Rows of several queues, ordered by descending priority and a time that can be NULL, with two claimable states.\n";
    ("ordered", head.to_owned(), statements)
}

fn of_groups() -> File {
    let spec = job().group("entity").grouped().group_limit(100);
    let (leased, held) = Case::both(spec);
    let request = leased.request();
    let (select, select_held) = (leased.select(&request), held.select(&request));
    let members = select_held.members(Locked::Refuse);
    let statements = vec![
        statement("begin", "Begins the transaction of a leased take.", Vec::new(), BEGIN.to_owned()),
        statement(
            "look",
            "Finds the first rows of new groups, without a lock.",
            finding(&[WINDOW, SEEN_GROUPS]),
            select.look(None),
        ),
        statement(
            "look behind",
            "Finds the first rows of new groups behind the cursor of the pass.",
            behind(&["ready_at", "id"], &[WINDOW, SEEN_GROUPS]),
            select.look(Some(&[false, false])),
        ),
        statement(
            "lock",
            "Locks groups until the transaction ends, without waiting.",
            given(&[("bigint[]", "the numbers of their locks")]),
            LOCK.to_owned(),
        ),
        statement(
            "take members",
            "Takes the rows of the groups whose locks were granted, under leases.",
            finding(&FOUND),
            take_selected(&select),
        ),
        statement(
            "hold members",
            "Locks the rows of the groups for the open transaction. Fails if one of them is locked.",
            finding(&FOUND),
            hold(&held.parts, &held.order, &request, members, "n.claim"),
        ),
    ];
    let head = "-- The table of queue.sql with groups: all ready rows of a group are one claim. A take is a transaction of\n\
                -- three statements: look, lock, and take or hold.\n";
    ("groups", head.to_owned(), statements)
}

fn of_tenants() -> File {
    let states = States::text(["new"], "done").taken("running");
    let spec = ClaimSpec::builder(Table::new("work").unwrap())
        .state("state", states)
        .lease_columns("owner", "epoch", "lease_until")
        .limit("tenant", 5);
    let (leased, held) = Case::both(spec);
    let (request, request_held) = (leased.request(), held.request());
    let (select, select_held) = (leased.select(&request), held.select(&request_held));
    let rows = [&FOUND[..], &[("int4[]", "the numbers of their tenants' places")]].concat();
    let picked = select_held.chosen();
    let statements = vec![
        statement(
            "look in order",
            "Finds the first rows of all tenants, with the room of each tenant.",
            finding(&[WINDOW, FULL_TENANTS]),
            select.look_in_order(None),
        ),
        statement(
            "look in order behind",
            "Finds the first rows of all tenants behind the cursor of the pass, with the room of each tenant.",
            behind(&["id"], &[WINDOW, FULL_TENANTS]),
            select.look_in_order(Some(&[false])),
        ),
        statement(
            "look by tenant",
            "Finds the first rows of each tenant with room, and rows without a tenant.",
            finding(&[WINDOW, FULL_TENANTS]),
            select.look_by_tenant(None),
        ),
        statement(
            "look by tenant behind",
            "Finds the first rows behind the cursor of the pass, of each tenant with room and without a tenant.",
            behind(&["id"], &[WINDOW, FULL_TENANTS]),
            select.look_by_tenant(Some(&[false])),
        ),
        statement(
            "lock",
            "Locks tenants until the transaction ends, without waiting.",
            given(&[("bigint[]", "the numbers of their locks")]),
            LOCK.to_owned(),
        ),
        statement(
            "take chosen",
            "Takes rows of the tenants whose locks were granted, as many as have room, under leases.",
            finding(&rows),
            take_selected(&select),
        ),
        statement(
            "place",
            "Takes the first free place of a tenant for the open transaction.",
            given(&[("int4", "the number of the tenant's places"), ("int4", "the number of its places")]),
            PLACE.to_owned(),
        ),
        statement(
            "count",
            "Returns the number of places that leases leave to the tenant of a row.",
            given(&[("text[]", "the id of the row"), ("text[]", "its queue")]),
            select_held.count(),
        ),
        statement(
            "hold chosen",
            "Locks the rows that have a place for the open transaction.",
            finding(&rows),
            hold(&held.parts, &held.order, &request_held, picked, "n.claim"),
        ),
    ];
    let head = "-- At most five rows of a tenant are in progress at a time. A leased take is a transaction of look, lock and take.\n\
                -- A held take is look, then place for each row, count if there are leases, and hold.\n";
    ("tenants", head.to_owned(), statements)
}

fn waits() -> File {
    let states = States::text(["new"], "done").taken("running").failed("failed");
    let spec = ClaimSpec::builder(Table::new("request").unwrap())
        .state("state", states)
        .lease_columns("owner", "epoch", "lease_until")
        .group("entity")
        .kind("kind")
        .waits("update", "create", Unmet::Block, Unmet::Block)
        .waits("report", "update", Unmet::Run, Unmet::Run);
    let (leased, held) = Case::both(spec);
    let (request, request_held) = (leased.request(), held.request());
    let (parts, order) = (&leased.parts, &leased.order);
    let pick = alone(&held.parts, &held.order, &request_held, None, false);
    let lock = |at: usize| held.parts.lock_preconditions(&held.parts.inner().preconditions[at]).unwrap();
    let statements = vec![
        statement(
            "take",
            "Takes the first rows whose preconditions are met.",
            finding(&[]),
            take_alone(parts, order, &request, None, false),
        ),
        statement(
            "pending",
            "Returns whether a row is claimable, or depends on a row that is taken or claimable.",
            finding(&[]),
            pending(parts, order, &request),
        ),
        statement(
            "hold",
            "Locks the first rows for the open transaction.",
            finding(&[]),
            hold(&held.parts, &held.order, &request_held, pick, "n.place"),
        ),
        statement(
            "lock what an update waits for",
            "Locks the rows on which these depend, and returns whether all of them are done.",
            keys(&[]),
            lock(0),
        ),
        statement(
            "lock what a report waits for",
            "Locks the rows on which these depend, and returns whether all of them are done or have failed.",
            keys(&[]),
            lock(1),
        ),
        statement(
            "last waiting",
            "Finds the last row that depends on another, if no row was found.",
            finding(&[]),
            last_waiting(&held.parts, &held.order, &request_held, None),
        ),
        statement(
            "blocked",
            "Lists rows that depend on a failed or missing row.",
            given(&[("bigint", "the largest number of rows")]),
            lists::blocked(parts),
        ),
        statement(
            "stats",
            "Counts the rows of each kind, at most 20.",
            finding(&[]),
            stats(parts, order, &request),
        ),
    ];
    let head = "-- In each entity an update waits for its create, and never runs if the create has failed or is missing. A report waits\n\
                -- for the updates, and runs whether or not they have failed.\n";
    ("preconditions", head.to_owned(), statements)
}
