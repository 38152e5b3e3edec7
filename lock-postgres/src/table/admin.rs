//! Inspection and administration for operators.

use async_trait::async_trait;
use leasehold_api::{Error, HoldState, HolderId, KeyInfo, ListQuery, LockAdmin, LockKey, Mode};

use super::backend::TableBackend;
use super::job::{ListRequest, TableJob, only};
use super::maintenance::{LIST_PAGE, behind, behind_prefix};
use super::registry::HoldId;

#[async_trait]
impl LockAdmin for TableBackend {
    async fn inspect(&self, key: &LockKey) -> Result<KeyInfo, Error> {
        let name = key.as_str();
        // Includes ended holds, because their cooldown can last longer.
        let look = ListRequest { from: name.to_owned(), to: behind(name), ended: true, rows: 1 };
        let found = only(self.ask(TableJob::List, vec![look]).await).map_err(|error| error.with_key(key))?;
        let mut info = found.keys.into_iter().next().unwrap_or_else(|| KeyInfo::free(key.clone()));
        info.holders.retain(|hold| hold.state != HoldState::Expired);
        Ok(info)
    }

    async fn list(&self, query: &ListQuery) -> Result<Vec<KeyInfo>, Error> {
        // Returns an empty list for a prefix with NUL, because the server refuses NUL and no key contains it.
        if query.prefix.contains('\0') {
            return Ok(Vec::new());
        }
        let (limit, to) = (query.limit.unwrap_or(usize::MAX), behind_prefix(&query.prefix));
        let (mut keys, mut next) = (Vec::new(), Some(query.prefix.clone()));
        // Fetches page by page, which lets other jobs run between the pages.
        while let Some(from) = next.filter(|_| keys.len() < limit) {
            let look = ListRequest { from, to: to.clone(), ended: query.include_ended, rows: LIST_PAGE };
            let page = only(self.ask(TableJob::List, vec![look]).await)?;
            keys.extend(page.keys);
            next = page.next;
        }
        keys.truncate(limit);
        Ok(keys)
    }

    async fn force_release(&self, key: &LockKey, holder: HolderId) -> Result<bool, Error> {
        let hold = HoldId::new(key.clone(), holder, Mode::Exclusive);
        only(self.ask(TableJob::Force, vec![hold]).await).map_err(|error| error.with_key(key))
    }

    async fn ask(&self, key: &LockKey, holder: HolderId) -> Result<bool, Error> {
        let hold = HoldId::new(key.clone(), holder, Mode::Exclusive);
        only(Self::ask(self, TableJob::Ask, vec![hold]).await).map_err(|error| error.with_key(key))
    }
}
