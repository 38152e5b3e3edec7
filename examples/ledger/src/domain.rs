//! The rule of the ledger, independent of locks, HTTP and storage.

use std::num::NonZeroU32;

/// Entries of accounts. A balance is the sum of an account's entries.
pub(crate) trait Entries {
    /// Returns the sum of the holder's entries, or zero without any.
    fn balance(&mut self, holder: i64) -> impl Future<Output = Result<i64, sqlx::Error>> + Send;

    /// Adds an entry. Entries are never changed.
    fn append(&mut self, holder: i64, amount: i64) -> impl Future<Output = Result<(), sqlx::Error>> + Send;
}

/// The reason why nothing was spent.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SpendError {
    #[error("the balance of {balance} is not enough")]
    Short { balance: i64 },
    #[error("the ledger cannot be read or written")]
    Store(#[from] sqlx::Error),
}

/// Spends `amount` if the balance suffices, and returns the new balance.
///
/// It reads, decides and writes. Without a lock, two runs for one holder might both read before either writes, and
/// spend the same credit twice.
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
