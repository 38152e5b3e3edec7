//! The rule of the ledger, independent of locks, HTTP and storage.

use std::error::Error;
use std::num::NonZeroU32;

/// Entries of accounts. A balance is the sum of an account's entries.
pub(crate) trait Entries {
    /// Returns the sum of the holder's entries, or zero without any.
    fn balance(&mut self, holder: i64) -> impl Future<Output = Result<i64, Unavailable>> + Send;

    /// Adds an entry. Entries are never changed.
    fn append(&mut self, holder: i64, amount: i64) -> impl Future<Output = Result<(), Unavailable>> + Send;
}

/// The entries cannot be read or written. The source is the storage's own error.
#[derive(Debug, thiserror::Error)]
#[error("the ledger cannot be read or written")]
pub(crate) struct Unavailable(#[source] Box<dyn Error + Send + Sync>);

impl Unavailable {
    pub(crate) fn new(source: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self(source.into())
    }
}

/// The reason why nothing was spent.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SpendError {
    #[error("the balance of {balance} is not enough")]
    Short { balance: i64 },
    #[error(transparent)]
    Store(#[from] Unavailable),
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

#[cfg(test)]
mod tests {
    use super::*;

    /// A storage that is unknown to the domain, with a separate error.
    struct Amounts(Vec<i64>);

    impl Entries for Amounts {
        async fn balance(&mut self, _: i64) -> Result<i64, Unavailable> {
            if self.0.is_empty() { Err(Unavailable::new("no entries")) } else { Ok(self.0.iter().sum()) }
        }

        async fn append(&mut self, _: i64, amount: i64) -> Result<(), Unavailable> {
            self.0.push(amount);
            Ok(())
        }
    }

    #[tokio::test]
    async fn spends_up_to_the_balance_on_any_storage() {
        let ten = NonZeroU32::new(10).unwrap();
        let mut entries = Amounts(vec![25]);
        assert_eq!(spend(&mut entries, 1, ten).await.unwrap(), 15);
        assert_eq!(spend(&mut entries, 1, ten).await.unwrap(), 5);
        let refused = spend(&mut entries, 1, ten).await.unwrap_err();
        assert!(matches!(refused, SpendError::Short { balance: 5 }), "{refused}");
        assert_eq!(entries.0, [25, -10, -10], "a refusal writes nothing");

        let failed = spend(&mut Amounts(Vec::new()), 1, ten).await.unwrap_err();
        let SpendError::Store(unavailable) = failed else { panic!("{failed}") };
        assert_eq!(unavailable.source().unwrap().to_string(), "no entries");
    }
}
