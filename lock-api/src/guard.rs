//! The guard of one grant.

use std::any::TypeId;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::error::{Error, Operation};
use crate::grant::Grant;
use crate::handle::GrantHandle;
use crate::id::{FencingToken, HolderId};
use crate::key::LockKey;
use crate::loss::Lost;
use crate::options::{Mode, check_label};
use crate::portable::PortableHold;
use crate::validity::Validity;

/// One grant of one key. Dropping the guard releases the key in the background. [`release`](LockGuard::release)
/// returns whether the lock was held until the end. The end of the lock's runtime waits up to a second for
/// background releases, but `std::process::exit` does not.
///
/// A guard can move to another task or thread and be released there. A leaked guard (`std::mem::forget`) is
/// held until its lock is closed or its process ends.
#[must_use = "dropping a guard releases the lock"]
pub struct LockGuard {
    // `None` only after `release` or `into_grant` has taken the grant out, before the guard is dropped.
    grant: Option<Arc<dyn Grant>>,
}

impl LockGuard {
    /// Makes a guard of a grant, for wrappers and other implementations of the lock.
    pub fn new(grant: Arc<dyn Grant>) -> Self {
        Self { grant: Some(grant) }
    }

    /// Returns the grant, for wrappers. The caller must release or abandon it.
    #[must_use]
    pub fn into_grant(mut self) -> Arc<dyn Grant> {
        match self.grant.take() {
            Some(grant) => grant,
            None => unreachable!("a guard has its grant until it is consumed"),
        }
    }

    /// Returns the key.
    #[must_use]
    pub fn key(&self) -> &LockKey {
        self.grant().key()
    }

    /// Returns the identity of this grant.
    #[must_use]
    pub fn holder(&self) -> HolderId {
        self.grant().holder()
    }

    /// Returns the identity by which the store knows the hold, which operators see. It differs from
    /// [`holder`](Self::holder) if an earlier caller of this client handed the hold over to this grant.
    #[must_use]
    pub fn stored_holder(&self) -> HolderId {
        self.grant().stored_holder()
    }

    /// Returns the fencing token, if the store has tokens. The token of an exclusive grant is greater than the token of
    /// every earlier grant of the key. The token of a [shared grant or a permit](Mode) is greater than the token of every
    /// earlier exclusive one. Such tokens can be equal or in any order among themselves, so do not compare two readers.
    ///
    /// ```
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), leasehold_api::Error> {
    /// use leasehold_api::LockExt;
    /// let lock = leasehold_memory::connect()?;
    /// let first = lock.key("ledger:42").acquire().await?;
    /// let earlier = first.token();
    /// first.release().await?;
    /// let second = lock.key("ledger:42").acquire().await?;
    /// assert!(second.token() > earlier);
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn token(&self) -> Option<FencingToken> {
        self.grant().token()
    }

    /// Returns the mode of the grant, which is always the requested one.
    #[must_use]
    pub fn mode(&self) -> Mode {
        self.grant().mode()
    }

    /// Returns the number of this [permit](Mode::Permit) of N, from 0 to N - 1. No other live permit of the key has
    /// it, so it can stand for a port or a device. `None` in the other modes.
    ///
    /// ```
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), leasehold_api::Error> {
    /// use leasehold_api::LockExt;
    /// let lock = leasehold_memory::connect()?;
    /// let [one, two] = [lock.key("gpu").permits(2).acquire().await?, lock.key("gpu").permits(2).acquire().await?];
    /// assert_eq!((one.permit(), two.permit()), (Some(0), Some(1)));
    /// assert!(lock.key("gpu").permits(2).try_acquire().await?.is_none());
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn permit(&self) -> Option<u32> {
        self.grant().permit()
    }

    /// Returns the current validity of the grant, computed from the clock.
    ///
    /// ```
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), leasehold_api::Error> {
    /// use leasehold_api::{LockExt, Validity};
    /// let lock = leasehold_memory::connect()?;
    /// let guard = lock.key("ledger:42").acquire().await?;
    /// if guard.validity() == Validity::Valid {
    ///     // Start the next step of the protected work.
    /// }
    /// guard.release().await
    /// # }
    /// ```
    #[must_use]
    pub fn validity(&self) -> Validity {
        self.grant().validity()
    }

    /// Waits until the validity differs from `seen`, and returns it. A holder can follow the start and the end of
    /// doubt by it. Returns at once if the grant has ended, because no change follows.
    ///
    /// ```
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), leasehold_api::Error> {
    /// use leasehold_api::{Lock, LockExt, Validity};
    /// let lock = leasehold_memory::connect()?;
    /// let guard = lock.key("leader").acquire().await?;
    /// let handle = guard.handle();
    /// let follower = tokio::spawn(async move {
    ///     let mut now = handle.validity();
    ///     while now.is_held() {
    ///         println!("{now}"); // valid, then perhaps in doubt, and valid again
    ///         now = handle.validity_changed(now).await;
    ///     }
    ///     now
    /// });
    /// lock.close().await?;
    /// assert_eq!(follower.await.unwrap(), Validity::Lost);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Cancel safety
    ///
    /// If dropped, the grant is unaffected. A later call with the same `seen` returns the change.
    pub async fn validity_changed(&self, seen: Validity) -> Validity {
        self.shared().validity_changed(seen).await
    }

    /// Returns how much longer the grant is valid if the store confirms nothing more. `None` if it does not end
    /// by itself, zero once it is lost.
    ///
    /// ```
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), leasehold_api::Error> {
    /// use std::time::Duration;
    /// use leasehold_api::LockExt;
    /// let lock = leasehold_memory::connect()?;
    /// let guard = lock.key("report").ttl(Duration::from_secs(30)).acquire().await?;
    /// assert!(guard.remaining().is_some_and(|left| left <= Duration::from_secs(30)));
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn remaining(&self) -> Option<Duration> {
        self.grant().remaining()
    }

    /// Returns a future that resolves when the grant is lost, and never after a normal release.
    ///
    /// ```
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), leasehold_api::Error> {
    /// use leasehold_api::LockExt;
    /// # async fn work() {}
    /// let lock = leasehold_memory::connect()?;
    /// let guard = lock.key("ledger:42").acquire().await?;
    /// tokio::select! {
    ///     reason = guard.lost() => println!("stopped, because {reason}"),
    ///     () = work() => guard.release().await?,
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn lost(&self) -> Lost {
        self.grant().lost()
    }

    /// Waits for a request of an operator or another client to release (`ask` of
    /// [`LockAdmin`](crate::LockAdmin)), and returns at once if one has arrived. The grant stays as it is, so the holder
    /// decides when to release. Stays pending on a store without such requests
    /// ([`AdminCapabilities`](crate::AdminCapabilities)), and if the grant ends before one.
    ///
    /// ```no_run
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), leasehold_api::Error> {
    /// use leasehold_api::LockExt;
    /// # async fn step() {}
    /// let lock = leasehold_memory::connect()?;
    /// let guard = lock.key("leader").acquire().await?;
    /// loop {
    ///     tokio::select! {
    ///         reason = guard.lost() => return Err(leasehold_api::Error::lost(reason)),
    ///         () = guard.asked() => return guard.release().await,
    ///         () = step() => {}
    ///     }
    /// }
    /// # }
    /// ```
    ///
    /// # Cancel safety
    ///
    /// If dropped, nothing is lost. A later future still resolves.
    pub async fn asked(&self) {
        self.shared().asked().await;
    }

    /// Returns a handle with which another task can watch this grant. The handle can neither renew nor release.
    ///
    /// ```
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), leasehold_api::Error> {
    /// use leasehold_api::{End, LockExt};
    /// let lock = leasehold_memory::connect()?;
    /// let guard = lock.key("leader").acquire().await?;
    /// let ended = guard.handle().ended();
    /// drop(guard);
    /// assert_eq!(ended.await, End::Released);
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn handle(&self) -> GrantHandle {
        GrantHandle { grant: self.shared() }
    }

    /// Returns an extension of the grant by its type: a feature of one store, for example to tie a database
    /// transaction to the lease. `None` if the store has none of this type.
    ///
    /// After this call the hold does not pass to the next caller of this client, because a user of the extension can
    /// outlive the guard.
    #[must_use]
    pub fn extension<T: std::any::Any + Send + Sync>(&self) -> Option<&T> {
        self.grant().extension(TypeId::of::<T>())?.downcast_ref()
    }

    /// Renews the lease now, for its TTL. Renewal is automatic, so call this only to be sure before a long
    /// step.
    ///
    /// ```
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), leasehold_api::Error> {
    /// use std::time::Duration;
    /// use leasehold_api::LockExt;
    /// let lock = leasehold_memory::connect()?;
    /// let guard = lock.key("report").ttl(Duration::from_secs(30)).acquire().await?;
    /// guard.renew().await?;
    /// guard.renew_for(Duration::from_secs(300)).await?;
    /// guard.release().await
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Lost`](crate::ErrorKind::Lost) if the grant has ended, because an ended lease is never revived.
    /// [`Unsupported`](crate::ErrorKind::Unsupported) on a store without leases.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the call may still renew the lease. Validity never claims more than the store confirmed.
    pub async fn renew(&self) -> Result<(), Error> {
        self.shared().renew(None).await.map_err(|e| e.with_operation(Operation::Renew))
    }

    /// Renews the lease now, for `ttl`, which also is its TTL for later renewals. A shorter TTL counts for
    /// [`validity`](Self::validity) as soon as it is sent, because the store may apply it before its reply
    /// arrives. If readers of this client share a hold, a shorter TTL changes nothing, and a longer one counts for all.
    ///
    /// # Errors
    ///
    /// As [`renew`](Self::renew), and [`InvalidOption`](crate::ErrorKind::InvalidOption) for a TTL that the
    /// store does not accept.
    ///
    /// # Cancel safety
    ///
    /// As [`renew`](Self::renew). The lease has either the new TTL or the old one.
    pub async fn renew_for(&self, ttl: Duration) -> Result<(), Error> {
        self.shared().renew(Some(ttl)).await.map_err(|e| e.with_operation(Operation::Renew))
    }

    /// Queries the store whether the lock is still held, for a step that cannot be undone. `Ok` means that the
    /// lock was held when the store answered a query sent after this call.
    ///
    /// [`validity`](Self::validity) depends on a clock. If a hypervisor stops the machine (a snapshot, a
    /// migration), its clocks stop too, and the guard reads valid until the next query. This call does not rely
    /// on a clock. It says nothing about the time after its reply, so send the [`token`](Self::token) along if
    /// the receiver can check it.
    ///
    /// ```
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), leasehold_api::Error> {
    /// use leasehold_api::LockExt;
    /// let lock = leasehold_memory::connect()?;
    /// let guard = lock.key("payout:42").acquire().await?;
    /// guard.confirm().await?;
    /// // Send the payment.
    /// guard.release().await
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Lost`](crate::ErrorKind::Lost) if the grant has ended. [`Unavailable`](crate::ErrorKind::Unavailable)
    /// or [`OutcomeUnknown`](crate::ErrorKind::OutcomeUnknown) if the store did not answer within the time
    /// limit of one call. The state of the lock is then unknown, so do not take the step.
    /// [`Unsupported`](crate::ErrorKind::Unsupported) for a lock that cannot query its store.
    ///
    /// # Cancel safety
    ///
    /// If dropped, nothing changes.
    pub async fn confirm(&self) -> Result<(), Error> {
        self.shared().confirm().await.map_err(|e| e.with_operation(Operation::Confirm))
    }

    /// Changes the label that operators and observers see beside the hold, to at most
    /// [`MAX_LABEL_BYTES`](crate::MAX_LABEL_BYTES) bytes. `Ok` means that the lock is still held, and that others
    /// see the label within [`AdminCapabilities::lag`](crate::AdminCapabilities::lag). The lease is not renewed.
    ///
    /// ```
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), leasehold_api::Error> {
    /// use leasehold_api::{Lock, LockExt};
    /// let lock = leasehold_memory::connect()?;
    /// let guard = lock.key("leader").label("starting").acquire().await?;
    /// guard.relabel("10.0.0.7:8080").await?;
    /// if let Some(admin) = lock.admin() {
    ///     let info = admin.inspect(guard.key()).await?;
    ///     assert_eq!(info.holder().and_then(|hold| hold.label.as_deref()), Some("10.0.0.7:8080"));
    /// }
    /// guard.release().await
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`InvalidOption`](crate::ErrorKind::InvalidOption) for a label that is too long or contains NUL.
    /// [`Lost`](crate::ErrorKind::Lost) if the grant has ended, and then a successor's label is untouched.
    /// [`OutcomeUnknown`](crate::ErrorKind::OutcomeUnknown) or [`Unavailable`](crate::ErrorKind::Unavailable) if the
    /// store did not answer. [`Unsupported`](crate::ErrorKind::Unsupported) unless
    /// [`Capabilities::relabel`](crate::Capabilities::relabel) is declared.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the call may still change the label, also after a later call.
    pub async fn relabel(&self, label: impl Into<Arc<str>>) -> Result<(), Error> {
        let label = label.into();
        let relabelled = match check_label(&label) {
            Ok(()) => self.shared().relabel(label).await,
            Err(error) => Err(error.with_key(self.key())),
        };
        relabelled.map_err(|e| e.with_operation(Operation::Relabel))
    }

    /// Gives the hold out of this client, because another process releases it. Returns a text, from which
    /// [`Lock::adopt`](crate::Lock::adopt) makes a guard there ([example](PortableHold)).
    ///
    /// The call renews the hold once, and marks it at the store as given out. After that the hold lasts for `ttl` or
    /// until its adoption, also if this client is closed, and its maximum hold is void. Handles of this guard read ended.
    /// A request to release that arrives before the adoption lapses with it.
    ///
    /// # Errors
    ///
    /// After an error the guard is released, as if it had been dropped. If the process ends before that, the store keeps
    /// the hold for `ttl`.
    ///
    /// - [`Unsupported`](crate::ErrorKind::Unsupported) unless [`Capabilities::portable`](crate::Capabilities::portable)
    ///   is declared.
    /// - [`InvalidOption`](crate::ErrorKind::InvalidOption) for a TTL out of the store's bounds, and for a hold without a
    ///   lease, with a cooldown, or whose [`extension`](Self::extension) (a fence) or [`relabel`](Self::relabel) was used.
    /// - [`Lost`](crate::ErrorKind::Lost) if the grant has ended.
    /// - [`Unavailable`](crate::ErrorKind::Unavailable) or [`OutcomeUnknown`](crate::ErrorKind::OutcomeUnknown) if the
    ///   grant is in doubt, the store did not confirm the call, or an earlier renewal for another TTL was unanswered,
    ///   however long ago.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the guard is released, as if it had been dropped.
    pub async fn into_ref(self, ttl: Duration) -> Result<PortableHold, Error> {
        // The guard stays until the hold is out, so its drop releases the hold in every other case.
        let portable = self.shared().into_ref(ttl).await.map_err(|e| e.with_operation(Operation::GiveOut))?;
        drop(self.into_grant());
        Ok(portable)
    }

    /// Releases the lock. `Ok` means that the lock was held until now, and is free or with the next waiter.
    ///
    /// ```
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), leasehold_api::Error> {
    /// use leasehold_api::{ErrorKind, LockExt};
    /// let lock = leasehold_memory::connect()?;
    /// let guard = lock.key("ledger:42").acquire().await?;
    /// match guard.release().await {
    ///     Err(error) if error.kind() == ErrorKind::Lost => println!("the work may have overlapped"),
    ///     outcome => outcome?,
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Lost`](crate::ErrorKind::Lost) if the lock was lost before, or if its connection failed during the
    /// release. The work under it may have overlapped with another holder's.
    /// [`OutcomeUnknown`](crate::ErrorKind::OutcomeUnknown) or [`Unavailable`](crate::ErrorKind::Unavailable)
    /// if the store did not confirm. The release is then retried in the background until it succeeds or the
    /// hold is over.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the release goes on in the background and only its result is lost.
    pub async fn release(self) -> Result<(), Error> {
        self.into_grant().release().await.map_err(|e| e.with_operation(Operation::Release))
    }

    fn grant(&self) -> &Arc<dyn Grant> {
        match &self.grant {
            Some(grant) => grant,
            None => unreachable!("a guard has its grant until it is consumed"),
        }
    }

    fn shared(&self) -> Arc<dyn Grant> {
        Arc::clone(self.grant())
    }
}

impl Drop for LockGuard {
    fn drop(&mut self) {
        if let Some(grant) = self.grant.take() {
            grant.abandon();
        }
    }
}

impl fmt::Debug for LockGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockGuard")
            .field("key", self.key())
            .field("holder", &self.holder())
            .field("token", &self.token())
            .field("validity", &self.validity())
            .finish_non_exhaustive()
    }
}
