//! The operator's view.

use async_trait::async_trait;
use leasehold_api::{Error, HoldInfo, HoldState, HolderId, ListQuery, LockAdmin, LockKey};

use super::backend::{TableBackend, only};
use super::job::{Look, TableJob};
use super::registry::Named;

#[async_trait]
impl LockAdmin for TableBackend {
    async fn inspect(&self, key: &LockKey) -> Result<Option<HoldInfo>, Error> {
        let key = key.as_str().to_owned();
        let look = Look { from: key.clone(), to: Some(key), prefix: String::new(), ended: true, limit: None };
        let hold: Option<HoldInfo> = only(self.ask(TableJob::Look, vec![look]).await)?.into_iter().next();
        // Over, but a cooldown may still keep others out.
        Ok(hold.filter(|hold| hold.state != HoldState::Expired))
    }

    async fn list(&self, query: &ListQuery) -> Result<Vec<HoldInfo>, Error> {
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
