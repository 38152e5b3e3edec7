//! The guards of several keys.

use std::future::{Future as _, poll_fn};
use std::ops::Deref;
use std::pin::Pin;
use std::task::Poll;
use std::time::Duration;

use crate::error::{Error, Operation};
use crate::grant::Release;
use crate::guard::LockGuard;
use crate::key::LockKey;
use crate::validity::{LossReason, Validity};

/// The guards of several keys that were taken together: a slice of [`LockGuard`]s, in the order in which the
/// keys were given. Dropping it releases all of them in the background.
///
/// ```
/// # #[tokio::main]
/// # async fn main() -> Result<(), leasehold_api::Error> {
/// use leasehold_api::{LockExt, Validity};
/// let lock = leasehold_memory::connect()?;
/// let guards = lock.keys(["account:1", "account:2"]).acquire().await?;
/// assert_eq!(guards.validity(), Validity::Valid);
/// for guard in &guards {
///     println!("{} with token {:?}", guard.key(), guard.token());
/// }
/// guards.release().await
/// # }
/// ```
///
/// Combine other guards by `collect()`, and take them apart by `into_iter()`.
#[derive(Debug, Default)]
#[must_use = "dropping the guards releases the locks"]
pub struct MultiGuard {
    guards: Vec<LockGuard>,
}

impl MultiGuard {
    /// Returns the worst validity of the guards: lost if one is lost, else in doubt if one is in doubt. Valid
    /// without guards.
    #[must_use]
    pub fn validity(&self) -> Validity {
        let worst = |a: Validity, b: Validity| if rank(a) < rank(b) { b } else { a };
        self.guards.iter().map(LockGuard::validity).fold(Validity::Valid, worst)
    }

    /// Returns the shortest [`remaining`](LockGuard::remaining) of the guards. `None` if none ends by itself.
    #[must_use]
    pub fn remaining(&self) -> Option<Duration> {
        self.guards.iter().filter_map(LockGuard::remaining).min()
    }

    /// Resolves with key and reason when the first guard is lost. Never resolves without guards.
    ///
    /// ```
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), leasehold_api::Error> {
    /// use leasehold_api::{Lock, LockExt, LossReason};
    /// let lock = leasehold_memory::connect()?;
    /// let guards = lock.keys(["account:1", "account:2"]).acquire().await?;
    /// lock.close().await?;
    /// let (key, reason) = guards.lost().await;
    /// assert_eq!((key.as_str(), reason), ("account:1", LossReason::Closed));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Cancel safety
    ///
    /// If dropped, no loss is missed: if a guard was lost before the next call, that call resolves at once.
    pub async fn lost(&self) -> (LockKey, LossReason) {
        let mut losses: Vec<_> = self.guards.iter().map(LockGuard::lost).collect();
        poll_fn(|cx| {
            for (guard, lost) in self.guards.iter().zip(&mut losses) {
                if let Poll::Ready(reason) = Pin::new(lost).poll(cx) {
                    return Poll::Ready((guard.key().clone(), reason));
                }
            }
            Poll::Pending
        })
        .await
    }

    /// Confirms all guards concurrently, as [`LockGuard::confirm`].
    ///
    /// # Errors
    ///
    /// The first failure in the order of the keys, as [`LockGuard::confirm`].
    ///
    /// # Cancel safety
    ///
    /// If dropped, nothing changes.
    pub async fn confirm(&self) -> Result<(), Error> {
        let mut confirmations: Vec<_> = self.guards.iter().map(|guard| Box::pin(guard.confirm())).collect();
        let mut answers: Vec<Option<Result<(), Error>>> = self.guards.iter().map(|_| None).collect();
        poll_fn(|cx| {
            let mut pending = false;
            for (confirmation, answer) in confirmations.iter_mut().zip(&mut answers) {
                if answer.is_none() {
                    match confirmation.as_mut().poll(cx) {
                        Poll::Ready(said) => *answer = Some(said),
                        Poll::Pending => pending = true,
                    }
                }
            }
            if pending { Poll::Pending } else { Poll::Ready(()) }
        })
        .await;
        answers.into_iter().flatten().collect()
    }

    /// Releases all guards, even if one release fails. The lock batches them into few calls of the store.
    ///
    /// # Errors
    ///
    /// The first failure in the order of the keys, as [`LockGuard::release`]. The other guards are released
    /// too.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the releases go on in the background and only their result is lost.
    pub async fn release(self) -> Result<(), Error> {
        if self.guards.len() <= 1 {
            return match self.guards.into_iter().next() {
                Some(guard) => guard.release().await,
                None => Ok(()),
            };
        }
        let begin = |guard: LockGuard| (guard.into_grant().release_in_batch(), None);
        let mut releases: Vec<(Release, Option<Result<(), Error>>)> =
            self.guards.into_iter().map(begin).collect();
        poll_fn(|cx| {
            let mut pending = false;
            for (release, answer) in releases.iter_mut().filter(|(_, answer)| answer.is_none()) {
                match Pin::new(release).poll(cx) {
                    Poll::Ready(said) => *answer = Some(said),
                    Poll::Pending => pending = true,
                }
            }
            if pending { Poll::Pending } else { Poll::Ready(()) }
        })
        .await;
        let failed = releases.into_iter().filter_map(|(_, answer)| answer?.err()).next();
        failed.map_or(Ok(()), |error| Err(error.with_operation(Operation::Release)))
    }
}

/// Returns a number that grows from valid to lost. `Ended` counts as lost, but no guard reads it.
const fn rank(validity: Validity) -> u8 {
    match validity {
        Validity::Valid => 0,
        Validity::InDoubt => 1,
        Validity::Lost | Validity::Ended => 2,
    }
}

impl Deref for MultiGuard {
    type Target = [LockGuard];

    fn deref(&self) -> &[LockGuard] {
        &self.guards
    }
}

impl FromIterator<LockGuard> for MultiGuard {
    fn from_iter<I: IntoIterator<Item = LockGuard>>(guards: I) -> Self {
        Self { guards: guards.into_iter().collect() }
    }
}

impl IntoIterator for MultiGuard {
    type Item = LockGuard;
    type IntoIter = std::vec::IntoIter<LockGuard>;

    fn into_iter(self) -> Self::IntoIter {
        self.guards.into_iter()
    }
}

impl<'a> IntoIterator for &'a MultiGuard {
    type Item = &'a LockGuard;
    type IntoIter = std::slice::Iter<'a, LockGuard>;

    fn into_iter(self) -> Self::IntoIter {
        self.guards.iter()
    }
}
