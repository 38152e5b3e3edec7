//! Taking all outstanding rows of a group as one claim.

use sqlx::PgConnection;

use super::pick::{GUARD, TAKE, claims, judge};
use super::shape::{self, Shape};
use super::statement::{Statement, column};
use super::{PgHeld, group_number};
use crate::error::ClaimError;
use crate::id::RowKey;
use crate::postgres::words::Words;
use crate::store::{Claimed, Line, Take, Taken};

/// How many rows a look for groups sees beyond those that are asked for, as many may be of one group.
const WINDOW: u32 = 64;

/// A row, or the first of a group.
struct Candidate {
    key: RowKey,
    group: Option<String>,
    line: Line,
}

impl PgHeld {
    /// First the groups, then their locks, then, in a statement that sees what was committed before the locks
    /// were granted, the rows.
    pub(super) async fn pick_groups(
        &self,
        connection: &mut PgConnection,
        take: &Take,
        line: &Option<Line>,
        limit: u32,
        reached: &mut Option<Line>,
    ) -> Result<Taken, ClaimError> {
        let (mut line, mut skipped, mut seen) = (line.clone(), 0, Vec::new());
        loop {
            let window = limit.saturating_add(WINDOW);
            let found = self.candidates(connection, take, &line, &seen, window).await?;
            let last = found.len() < window as usize;
            let (locked, refused) = self.lock_groups(connection, found, limit, &mut seen, &mut line).await?;
            skipped += refused;
            reached.clone_from(&line);
            if !locked.is_empty() {
                let mut taken = self.take_groups(connection, take, &locked).await?;
                taken.skipped += skipped;
                taken.line.clone_from(&line);
                if !taken.claims.is_empty() {
                    return Ok(taken);
                }
                skipped = taken.skipped;
            } else if last {
                return Ok(Taken { claims: Vec::new(), skipped, line: line.filter(|_| skipped > 0) });
            }
        }
    }

    /// The first rows of groups that were not seen yet, without any lock.
    async fn candidates(
        &self,
        connection: &mut PgConnection,
        take: &Take,
        line: &Option<Line>,
        seen: &[String],
        window: u32,
    ) -> Result<Vec<Candidate>, ClaimError> {
        let Shape { table, row, order, .. } = &*self.shape;
        let mut statement = Statement::default();
        let ready = self.ready(&mut statement, take)?;
        let after = shape::after(&mut statement, &self.spec, line.as_ref())?;
        let mut conditions = format!("{ready}{after}");
        if let Some(group) = &self.spec.inner.group {
            let group = group.quoted();
            if !seen.is_empty() {
                let seen = statement.bind(seen.to_vec())?;
                conditions += &format!(" AND (t.{group} IS NULL OR t.{group}::text <> ALL ({seen}::text[]))");
            }
            if let Some(behind) = after.strip_prefix(" AND ") {
                // A group whose first row the line has passed was offered in this pass.
                conditions += &format!(
                    " AND NOT EXISTS (SELECT FROM (SELECT t.{group} AS grp OFFSET 0) w, \
                     LATERAL (SELECT FROM {table} t WHERE t.{group} = w.grp AND {ready} AND ({behind}) IS NOT TRUE) x)"
                );
            }
        }
        let limit = statement.bind(i64::from(window))?;
        statement.push(&format!(
            "{GUARD}, found AS MATERIALIZED (SELECT {row} FROM {table} t \
             WHERE {conditions} {order} LIMIT {limit}), \
             placed AS (SELECT f.*, pg_catalog.row_number() OVER () AS place FROM found f) \
             SELECT g.verdict, p.id, p.queue, p.grp, p.line FROM guard g LEFT JOIN placed p ON true ORDER BY p.place"
        ));
        let rows = self.run().rows(connection, statement, TAKE).await?;
        judge(&rows)?;
        let present = rows.iter().filter(|row| matches!(column(row, 1, TAKE), Ok(Some::<String>(_))));
        present
            .map(|row| {
                Ok(Candidate {
                    key: self.key(row, 1)?,
                    group: column(row, 3, TAKE)?,
                    line: Line::of(column(row, 4, TAKE)?),
                })
            })
            .collect()
    }

    /// Tries the locks of groups in their order until `limit` were granted. The line moves to the last that was
    /// tried.
    async fn lock_groups(
        &self,
        connection: &mut PgConnection,
        found: Vec<Candidate>,
        limit: u32,
        seen: &mut Vec<String>,
        line: &mut Option<Line>,
    ) -> Result<(Vec<Candidate>, u64), ClaimError> {
        let (mut locked, mut refused, mut found) = (Vec::new(), 0, found.into_iter().peekable());
        while locked.len() < limit as usize && found.peek().is_some() {
            let mut asked: Vec<Candidate> = Vec::new();
            while asked.len() < limit as usize - locked.len()
                && let Some(candidate) = found.next()
            {
                if let Some(group) = &candidate.group {
                    if seen.contains(group) {
                        continue;
                    }
                    seen.push(group.clone());
                }
                *line = Some(candidate.line.clone());
                asked.push(candidate);
            }
            let granted = self.try_groups(connection, &asked).await?;
            for (candidate, granted) in asked.into_iter().zip(granted) {
                if granted {
                    locked.push(candidate);
                } else {
                    refused += 1;
                }
            }
        }
        Ok((locked, refused))
    }

    async fn try_groups(
        &self,
        connection: &mut PgConnection,
        asked: &[Candidate],
    ) -> Result<Vec<bool>, ClaimError> {
        if asked.is_empty() {
            return Ok(Vec::new());
        }
        let table = self.spec.table();
        let numbers: Vec<Option<i64>> =
            asked.iter().map(|row| row.group.as_deref().map(|group| group_number(table, group))).collect();
        let mut statement = Statement::default();
        let numbers = statement.bind(numbers)?;
        // Each once, in a list of its own: in a condition the server may ask more often, or for rows that a
        // limit cuts off.
        statement.push(&format!(
            "SELECT CASE WHEN u.n IS NULL THEN true ELSE pg_catalog.pg_try_advisory_xact_lock(u.n) END \
             FROM pg_catalog.unnest({numbers}::bigint[]) WITH ORDINALITY u(n, place) ORDER BY u.place"
        ));
        let rows = self.run().rows(connection, statement, TAKE).await?;
        rows.iter().map(|row| column(row, 0, TAKE)).collect()
    }

    /// All ready rows of the groups whose locks were granted, and rows of no group.
    async fn take_groups(
        &self,
        connection: &mut PgConnection,
        take: &Take,
        locked: &[Candidate],
    ) -> Result<Taken, ClaimError> {
        let mut rows = Vec::new();
        let groups: Vec<String> = locked.iter().filter_map(|row| row.group.clone()).collect();
        if let (false, Some(group)) = (groups.is_empty(), &self.spec.inner.group) {
            let group = group.quoted();
            let mut statement = Statement::default();
            let first = locked.iter().filter(|row| row.group.is_some()).map(|row| &row.key);
            let keys = Shape::keys(&mut statement, &self.spec, first)?;
            let groups = statement.bind(groups)?;
            let Shape { table, order, same_key, .. } = &*self.shape;
            let (ready, untaken) = (self.ready(&mut statement, take)?, self.no_sibling_taken(&group));
            let key = Shape::key_of("t", &self.spec);
            // Whether somebody is at a group is looked at once for each, and not for each of its rows.
            let conditions = format!(
                "{ready} AND t.{group}::text = ANY ({groups}::text[]) AND ({key}) IN (SELECT m.* FROM \
                 (SELECT DISTINCT t.{group} AS g FROM {keys} JOIN {table} t ON {same_key}{untaken}) l, \
                 LATERAL (SELECT {key} FROM {table} t WHERE t.{group} = l.g AND {ready} {order} LIMIT {most}) m)",
                most = self.spec.inner.group_limit,
            );
            rows = self.claim(connection, statement, &conditions, "", "NOWAIT").await?;
        }
        if locked.iter().any(|row| row.group.is_none()) {
            let mut statement = Statement::default();
            let alone = locked.iter().filter(|row| row.group.is_none()).map(|row| &row.key);
            let keys = Shape::keys(&mut statement, &self.spec, alone)?;
            let group =
                self.spec.inner.group.as_ref().map(|group| format!(" AND t.{} IS NULL", group.quoted()));
            let conditions = format!(
                "{} AND EXISTS (SELECT FROM {keys} WHERE {}){}",
                self.ready(&mut statement, take)?,
                self.shape.same_key,
                group.unwrap_or_default()
            );
            rows.extend(self.claim(connection, statement, &conditions, "", "SKIP LOCKED").await?);
        }
        let mut taken = Taken { claims: claims(rows), skipped: 0, line: None };
        self.leave_leased(connection, &mut taken).await?;
        taken.skipped = locked.len().saturating_sub(taken.claims.len()) as u64;
        let place = |claimed: &Claimed| {
            locked.iter().position(|candidate| match &claimed.group {
                Some(group) => candidate.group.as_deref() == Some(group),
                None => claimed.rows.first().is_some_and(|row| row.key == candidate.key),
            })
        };
        taken.claims.sort_by_key(place);
        Ok(taken)
    }

    /// ` AND` nobody has a row of the group of `t` under a lease.
    fn no_sibling_taken(&self, group: &str) -> String {
        let taken = Words::new(&self.spec).in_the_way("t");
        format!(
            " AND NOT EXISTS (SELECT FROM (SELECT t.{group} AS grp OFFSET 0) w, \
             LATERAL (SELECT FROM {} t WHERE t.{group} = w.grp AND {taken}) s)",
            self.shape.table
        )
    }
}
