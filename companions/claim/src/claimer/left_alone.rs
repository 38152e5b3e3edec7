//! Rows that are skipped for a time, because the table refused to write them.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::backoff::Backoff;
use crate::spec::ClaimSpec;
use crate::spec::ids::RowKey;
use crate::store::{ClaimedRow, Excluded};

/// The pauses for which a row is skipped. The pause doubles each time that the row could not be written.
const PAUSES: Backoff = Backoff::exponential(Duration::from_secs(2)).at_most(Duration::from_secs(600));

/// The largest number of skipped rows. If it is exceeded, the row whose pause ends first is no longer skipped.
const MOST: usize = 500;

/// A skipped row. If the spec groups rows, its group is skipped, because rows of a group are done in order.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum LeftAloneKey {
    Row(RowKey),
    Group(Arc<str>),
}

#[derive(Debug)]
struct Entry {
    times: u32,
    until: Instant,
}

/// The rows and groups that this claimer skips for a time.
#[derive(Debug, Default)]
pub(super) struct LeftAlone(HashMap<LeftAloneKey, Entry>);

impl LeftAlone {
    /// Skips the row, or its group if the spec groups rows, for about twice the last pause. Returns the length of this
    /// pause.
    pub(super) fn leave(&mut self, spec: &ClaimSpec, row: &RowKey, group: Option<&Arc<str>>) -> Duration {
        let (what, now) = (of(spec, row, group), Instant::now());
        let times = self.0.get(&what).map_or(1, |entry| entry.times.saturating_add(1));
        if times == 1 && self.0.len() >= MOST {
            let next = self.0.iter().min_by_key(|(_, entry)| entry.until).map(|(what, _)| what.clone());
            next.map(|next| self.0.remove(&next));
        }
        let pause = PAUSES.after(times);
        self.0.insert(what, Entry { times, until: now + pause });
        pause
    }

    /// Stops skipping rows after they were written.
    pub(super) fn forget(&mut self, spec: &ClaimSpec, rows: &[ClaimedRow], group: Option<&Arc<str>>) {
        if !self.0.is_empty() {
            for row in rows {
                self.0.remove(&of(spec, &row.key, group));
            }
        }
    }

    /// Returns the rows and groups to skip now.
    pub(super) fn now(&self) -> Excluded {
        let (now, mut excluded) = (Instant::now(), Excluded::default());
        for (what, _) in self.0.iter().filter(|(_, entry)| entry.until > now) {
            match what {
                LeftAloneKey::Row(row) => excluded.rows.push(row.clone()),
                LeftAloneKey::Group(group) => excluded.groups.push(Arc::clone(group)),
            }
        }
        excluded
    }
}

fn of(spec: &ClaimSpec, row: &RowKey, group: Option<&Arc<str>>) -> LeftAloneKey {
    match group.filter(|_| spec.inner.grouped) {
        Some(group) => LeftAloneKey::Group(Arc::clone(group)),
        None => LeftAloneKey::Row(row.clone()),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)] // An error here fails the test.

    use super::*;
    use crate::{ClaimSpec, States, Table};

    #[tokio::test(start_paused = true)]
    async fn pauses_grow_until_the_row_is_written_and_the_list_has_a_bound() {
        let spec =
            ClaimSpec::builder(Table::new("job").unwrap()).state("state", States::text(["new"], "done"));
        let spec = spec.build().unwrap();
        let (mut left, row) = (LeftAlone::default(), RowKey::new(0));
        for whole in [2, 4, 8, 16] {
            let pause = left.leave(&spec, &row, None);
            assert!(
                pause >= Duration::from_secs(whole) / 2 && pause <= Duration::from_secs(whole),
                "{pause:?}"
            );
            assert_eq!(left.now().rows, std::slice::from_ref(&row));
            tokio::time::advance(pause).await;
            assert!(left.now().is_empty(), "it can be taken again");
        }
        for n in 1..=2 * i64::try_from(MOST).unwrap() {
            left.leave(&spec, &RowKey::new(n), None);
            assert!(left.0.len() <= MOST);
        }
        assert_eq!(left.now().rows.len(), MOST, "what had come back went first");
    }
}
