//! The command `leasehold claims`, which lists the claimed rows of an application's table.

use std::time::Duration;

use leasehold::claim::{ClaimError, Table};
use leasehold::{Error, ErrorKind};
use serde_json::{Value, json};

use crate::args::ClaimsArgs;
use crate::output::{self, Notes, printable};
use crate::schema::{close, database, open};
use crate::survey::{ColumnRole, OpenTransaction, Survey, SurveyReport, SurveyedRow};

pub(crate) async fn claims(args: &ClaimsArgs, url: Option<&str>, notes: Notes) -> Result<u8, Error> {
    let config = database(url)?;
    let named = |error: Error| error.with_store(config.to_string());
    let survey = survey(args).map_err(|error| named(plain(error)))?;
    let mut session = open(&config).await.map_err(named)?;
    let report = survey.run(&mut session).await.map_err(|error| named(plain(error)))?;
    close(session).await;
    if args.json {
        output::json(&describe(&report));
    } else {
        output::bytes(written(&args.table, &report).as_bytes());
    }
    if report.more {
        notes.say(&format!("there are more than {} of a sort; --limit lists more", args.limit));
    }
    Ok(0)
}

pub(crate) fn survey(args: &ClaimsArgs) -> Result<Survey, ClaimError> {
    let mut survey = Survey::of(table(&args.table)?).limit(args.limit);
    for (role, name) in [
        (ColumnRole::Id, &args.id),
        (ColumnRole::State, &args.state),
        (ColumnRole::Queue, &args.queue),
        (ColumnRole::Group, &args.group),
        (ColumnRole::Owner, &args.owner),
        (ColumnRole::Epoch, &args.epoch),
        (ColumnRole::Until, &args.until),
        (ColumnRole::TakenAt, &args.taken_at),
        (ColumnRole::Attempts, &args.attempts),
        (ColumnRole::Error, &args.error),
    ] {
        if let Some(name) = name {
            survey = survey.column(role, name)?;
        }
    }
    if let Some(side) = &args.side_table {
        survey = survey.side_table(table(side)?);
    }
    if !args.takeable.is_empty() {
        survey = survey.takeable(args.takeable.iter().cloned());
    }
    if let Some(state) = &args.exhausted_state {
        survey = survey.exhausted_state(state);
    }
    Ok(survey)
}

/// Parses `TABLE` or `SCHEMA.TABLE`, each taken literally.
fn table(name: &str) -> Result<Table, ClaimError> {
    match name.split_once('.') {
        Some((schema, name)) => Ok(Table::new(name)?.in_schema(schema)?),
        None => Ok(Table::new(name)?),
    }
}

fn plain(error: ClaimError) -> Error {
    match error {
        ClaimError::Store(error) => error,
        other => Error::new(ErrorKind::InvalidOption, other.to_string()),
    }
}

fn describe(report: &SurveyReport) -> Value {
    json!({
        "keeps_leases": report.keeps_leases,
        "taken": report.taken.iter().map(row_in_json).collect::<Value>(),
        "exhausted": report.exhausted.iter().map(row_in_json).collect::<Value>(),
        "transactions": report.transactions.iter().map(transaction_in_json).collect::<Value>(),
        "more": report.more,
    })
}

fn row_in_json(row: &SurveyedRow) -> Value {
    json!({
        "queue": row.queue,
        "id": row.id,
        "group": row.group,
        "state": row.state,
        "owner": row.owner,
        "epoch": row.epoch,
        "held_for_ms": row.held_for.map(output::millis),
        "expires_in_ms": row.remaining.map(output::millis),
        "attempts_left": row.attempts_left,
        "error": row.error,
    })
}

fn transaction_in_json(open: &OpenTransaction) -> Value {
    json!({
        "pid": open.pid,
        "prepared": open.prepared,
        "application": open.application,
        "client": open.client,
        "activity": open.activity,
        "open_for_ms": open.open_for.map(output::millis),
    })
}

fn written(table: &str, report: &SurveyReport) -> String {
    let mut text = String::new();
    if !report.taken.is_empty() {
        text += &format!("taken:\n{}\n", rows(&report.taken));
    } else if report.keeps_leases {
        text += &format!("nothing is taken on {}\n", printable(table));
    } else {
        text += &format!(
            "{} keeps nowhere who has a row: what is taken is held by the transactions below\n",
            printable(table)
        );
    }
    if !report.exhausted.is_empty() {
        text += &format!("\nexhausted:\n{}\n", rows(&report.exhausted));
    }
    if !report.transactions.is_empty() {
        text += &format!("\nopen transactions that may hold rows:\n{}\n", transactions(&report.transactions));
    }
    text
}

/// Returns a text table of the rows, with the columns that have a value in at least one row.
fn rows(rows: &[SurveyedRow]) -> String {
    let names =
        ["QUEUE", "ID", "GROUP", "STATE", "OWNER", "EPOCH", "FOR", "EXPIRES IN", "ATTEMPTS LEFT", "ERROR"];
    let cells: Vec<[Option<String>; 10]> = rows.iter().map(cells).collect();
    let shown: Vec<usize> =
        (0..names.len()).filter(|column| cells.iter().any(|row| row[*column].is_some())).collect();
    let header: Vec<&str> = shown.iter().map(|column| names[*column]).collect();
    let lines = cells
        .into_iter()
        .map(|mut row| shown.iter().map(|column| output::or_dash(row[*column].take())).collect::<Vec<_>>());
    output::table(&header, lines)
}

fn cells(row: &SurveyedRow) -> [Option<String>; 10] {
    let text = |text: &Option<String>| text.as_deref().map(printable);
    [
        text(&row.queue),
        Some(printable(&row.id)),
        text(&row.group),
        text(&row.state),
        text(&row.owner),
        row.epoch.map(|epoch| epoch.to_string()),
        row.held_for.map(output::duration),
        row.remaining.map(
            |left| {
                if left == Duration::ZERO { "ended".to_owned() } else { output::duration(left) }
            },
        ),
        row.attempts_left.map(|left| left.to_string()),
        text(&row.error),
    ]
}

fn transactions(open: &[OpenTransaction]) -> String {
    let lines = open.iter().map(|open| {
        let prepared = || open.prepared.as_deref().map(|name| format!("prepared as {}", printable(name)));
        [
            output::or_dash(open.pid.map(|pid| pid.to_string())),
            output::or_dash(open.application.as_deref().map(printable)),
            output::or_dash(open.client.clone()),
            output::or_dash(open.activity.clone().or_else(prepared)),
            output::or_dash(open.open_for.map(output::duration)),
        ]
    });
    output::table(&["PID", "APPLICATION", "CLIENT", "ACTIVITY", "FOR"], lines)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dot_parts_schema_and_table() {
        assert_eq!(table("app.request").unwrap().quoted(), r#""app"."request""#);
        assert_eq!(table("request").unwrap().quoted(), r#""request""#);
        assert!(table("").is_err());
        assert!(table(".x").is_err());
    }
}
