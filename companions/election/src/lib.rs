#![cfg_attr(docsrs, feature(doc_cfg))]
#![doc = include_str!("../README.md")]
// Which public types are exhaustive is decided type by type in docs/decisions/public-api.md.
#![warn(clippy::exhaustive_enums, clippy::exhaustive_structs)]

mod campaign;
mod campaigns;
mod election;
mod exit;
mod observer;
mod pauses;
mod state;
mod term;

use leasehold_api::{Error, Lock, LockKey};

pub use election::{Election, OnLoss};
pub use observer::Observer;
pub use state::{ElectionHandle, Failure, State};
pub use term::{BodyError, Next, Term, TermResult};

/// Elections on every [`Lock`].
pub trait ElectExt: Lock {
    /// Starts an election for `key`. It does nothing until [`Election::lead`] is awaited. To move it into a
    /// task, make it of an `Arc` by [`Election::new`].
    ///
    /// ```
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), leasehold_api::Error> {
    /// use leasehold_election::{ElectExt, Next};
    /// let lock = leasehold_memory::connect()?;
    /// let election = lock.elect("scheduler").value("10.0.0.7:8080");
    /// election.lead(async |term| {
    ///     println!("leading with token {:?}", term.token());
    ///     Ok(Next::Done)
    /// }).await
    /// # }
    /// ```
    fn elect<K>(&self, key: K) -> Election<&Self>
    where
        K: TryInto<LockKey>,
        K::Error: Into<Error>,
    {
        Election::new(self, key)
    }

    /// Observes the leader of `key` without being a candidate.
    ///
    /// ```
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), leasehold_api::Error> {
    /// use leasehold_api::LockExt;
    /// use leasehold_election::ElectExt;
    /// let lock = leasehold_memory::connect()?;
    /// let mut observer = lock.observe("scheduler");
    /// assert!(observer.changed().await?.is_none(), "nobody leads");
    /// let _leader = lock.key("scheduler").label("10.0.0.7:8080").acquire().await?;
    /// let leader = observer.changed().await?.and_then(|hold| hold.label);
    /// assert_eq!(leader.as_deref(), Some("10.0.0.7:8080"));
    /// # Ok(())
    /// # }
    /// ```
    fn observe<K>(&self, key: K) -> Observer<&Self>
    where
        K: TryInto<LockKey>,
        K::Error: Into<Error>,
    {
        Observer::new(self, key)
    }
}

impl<L: Lock + ?Sized> ElectExt for L {}
