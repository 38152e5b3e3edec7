//! The operator's view.

use async_trait::async_trait;
use leasehold_api::{Error, HoldState, HolderId, KeyInfo, ListQuery, LockAdmin, LockKey};

use super::backend::{TableBackend, only};
use super::job::{Look, TableJob};
use super::registry::Named;

#[async_trait]
impl LockAdmin for TableBackend {
    async fn inspect(&self, key: &LockKey) -> Result<KeyInfo, Error> {
        let name = key.as_str().to_owned();
        // What has ended too: a cooldown may outlast it.
        let look =
            Look { from: name.clone(), to: Some(name), prefix: String::new(), ended: true, limit: None };
        let found = only(self.ask(TableJob::Look, vec![look]).await).map_err(|error| error.with_key(key))?;
        let mut info = found.into_iter().next().unwrap_or_else(|| KeyInfo::free(key.clone()));
        info.holders.retain(|hold| hold.state != HoldState::Expired);
        Ok(info)
    }

    async fn list(&self, query: &ListQuery) -> Result<Vec<KeyInfo>, Error> {
        let look = Look {
            from: query.prefix.clone(),
            to: None,
            // The server refuses NUL, and no key has one.
            prefix: query.prefix.clone(),
            ended: query.include_ended,
            limit: query.limit.map(|limit| i64::try_from(limit).unwrap_or(i64::MAX)),
        };
        if query.prefix.contains('\0') {
            return Ok(Vec::new());
        }
        only(self.ask(TableJob::Look, vec![look]).await)
    }

    async fn force_release(&self, key: &LockKey, holder: HolderId) -> Result<bool, Error> {
        let hold = Named { key: key.clone(), holder };
        only(self.ask(TableJob::Force, vec![hold]).await).map_err(|error| error.with_key(key))
    }
}
