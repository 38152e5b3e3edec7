//! Inspection and administration for operators. Reads are linearizable and write nothing.

mod list;

use async_trait::async_trait;
use leasehold_api::{Error, HolderId, KeyInfo, ListQuery, LockAdmin, LockKey, StoreFact};

use self::list::Holding;
use crate::backend::notes::{ASKED, FORCED};
use crate::backend::statements::At;
use crate::backend::{EtcdBackend, LIMIT, Shared, changes_all_the_time};
use crate::cluster::Failure;
use crate::entry::Entry;
use crate::wire::{Compare, KeyValue, RequestOp, Target, TxnRequest, delete, put};

/// The most rounds of a request to release. A round is repeated only if the entry has changed during it.
const ROUNDS: usize = 5;

#[async_trait]
impl LockAdmin for EtcdBackend {
    async fn inspect(&self, key: &LockKey) -> Result<KeyInfo, Error> {
        self.shared.inspect(key).await
    }

    async fn list(&self, query: &ListQuery) -> Result<Vec<KeyInfo>, Error> {
        // Returns an empty list for a prefix with NUL, because no key contains it.
        if query.prefix.contains('\0') {
            return Ok(Vec::new());
        }
        self.shared.list(query).await
    }

    async fn force_release(&self, key: &LockKey, holder: HolderId) -> Result<bool, Error> {
        self.shared.force_release(key, holder).await.map_err(|failure| failure.error(Some(key)))
    }

    async fn ask(&self, key: &LockKey, holder: HolderId) -> Result<bool, Error> {
        self.shared.ask(key, holder).await
    }

    async fn facts(&self) -> Result<Vec<StoreFact>, Error> {
        Ok(self.shared.facts().await)
    }
}

impl Shared {
    /// Returns the entry with which `holder` holds the key. `None` for a waiter, also if it is the first in the queue and
    /// waits for the end of a cooldown.
    async fn hold_of(&self, key: &LockKey, holder: HolderId) -> Result<Option<(At, Holding)>, Failure> {
        let found = self.find_key(key).await?;
        let holding =
            found.holders(&self.names, key).into_iter().find(|holding| holding.named.holder == holder);
        Ok(holding.map(|holding| (self.at(key, holder, holding.named.mode), holding)))
    }

    async fn force_release(&self, key: &LockKey, holder: HolderId) -> Result<bool, Failure> {
        let Some((at, holding)) = self.hold_of(key, holder).await? else { return Ok(false) };
        let Holding { entry, permit, .. } = holding;
        let number = permit.map(|number| at.end_number(number));
        let txn = |note: Option<RequestOp>| TxnRequest {
            compare: stands(&at, &entry),
            success: std::iter::once(delete(at.entry.clone())).chain(number.clone()).chain(note).collect(),
            failure: Vec::new(),
        };
        let note = put(self.names.note(key, holder), FORCED, entry.lease);
        let answer = match self.cluster.call(txn(Some(note)), LIMIT).await {
            // Deletes the entry without a note, because a full server refuses the note. The holder notices the loss at
            // its next look.
            Err(failure) if failure.is_no_space() || failure.lease_not_found() => {
                self.cluster.call(txn(None), LIMIT).await
            }
            answer => answer,
        }?;
        // An earlier copy of this request has possibly deleted the entry.
        Ok(answer.reply.succeeded || answer.unsure)
    }

    async fn ask(&self, key: &LockKey, holder: HolderId) -> Result<bool, Error> {
        let failed = |failure: Failure| failure.error(Some(key));
        for _ in 0..ROUNDS {
            let Some((at, holding)) = self.hold_of(key, holder).await.map_err(failed)? else {
                return Ok(false);
            };
            let entry = holding.entry;
            let asked = Entry { asked: true, ..Entry::read(&entry.value) };
            let mut compare = stands(&at, &entry);
            compare.push(Compare::is(at.entry.clone(), Target::Mod(entry.mod_revision)));
            let txn = TxnRequest {
                compare,
                success: vec![
                    put(at.entry.clone(), asked.write(), entry.lease),
                    put(self.names.note(key, holder), ASKED, entry.lease),
                ],
                failure: Vec::new(),
            };
            match self.cluster.call(txn, LIMIT).await {
                Ok(answer) if answer.reply.succeeded => return Ok(true),
                Ok(_) => {}
                // The lease has ended since the read, and its entry with it.
                Err(failure) if failure.lease_not_found() => {}
                Err(failure) => return Err(failed(failure)),
            }
        }
        Err(changes_all_the_time(key))
    }
}

/// Returns the conditions that the entry is still the same hold under the same lease. Its value can be another one.
fn stands(at: &At, entry: &KeyValue) -> Vec<Compare> {
    vec![
        Compare::is(at.entry.clone(), Target::Create(entry.create_revision)),
        Compare::is(at.entry.clone(), Target::Lease(entry.lease)),
    ]
}
