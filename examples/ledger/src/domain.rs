//! The rule of the ledger. It knows nothing of locks, of HTTP or of where entries are kept.

use std::num::NonZeroU32;

/// Entries of accounts: what somebody has is the sum of them.
pub(crate) trait Entries {
    /// The sum of the holder's entries; zero without any.
    fn balance(&mut self, holder: i64) -> impl Future<Output = Result<i64, sqlx::Error>> + Send;

    /// Adds an entry. Entries are never changed.
    fn append(&mut self, holder: i64, amount: i64) -> impl Future<Output = Result<(), sqlx::Error>> + Send;
}

/// Why nothing was spent.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SpendError {
    #[error("the balance of {balance} is not enough")]
    Short { balance: i64 },
    #[error("the ledger cannot be read or written")]
    Store(#[from] sqlx::Error),
}

/// Spends `amount` if there is as much, and returns what is left.
///
/// It reads, decides and writes. When two run at once for one holder, both may read before either writes, and
/// spend the same credit: that no two do is what the lock is for.
pub(crate) async fn spend(
    entries: &mut impl Entries,
    holder: i64,
    amount: NonZeroU32,
) -> Result<i64, SpendError> {
    let amount = i64::from(amount.get());
    let balance = entries.balance(holder).await?;
    if balance < amount {
        return Err(SpendError::Short { balance });
    }
    entries.append(holder, -amount).await?;
    Ok(balance - amount)
}
