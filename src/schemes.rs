//! Stores that programs have registered, by the schemes of their URLs.

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::{Arc, PoisonError, RwLock};

use leasehold_api::{Error, Lock};
use leasehold_engine::scheme::invalid;

use crate::stores;

type Opening = Pin<Box<dyn Future<Output = Result<Arc<dyn Lock>, Error>> + Send>>;
type Open = Arc<dyn Fn(String) -> Opening + Send + Sync>;

static OTHERS: RwLock<BTreeMap<String, Open>> = RwLock::new(BTreeMap::new());

/// Registers a scheme, for stores outside leasehold: [`connect`](crate::connect) then passes URLs of this
/// scheme to `open`, in the whole process. Use it in programs that open stores by URLs, such as the command.
///
/// `open` gets the whole URL without surrounding space, but not the options of [`connect_with`]. Its errors
/// should not repeat the URL, which may contain a password. Register at the start of `main`, before the first
/// connection:
///
/// ```
/// use leasehold::{Lock as _, connect, memory, register_scheme};
/// use std::sync::Arc;
///
/// # #[tokio::main]
/// # async fn main() -> Result<(), leasehold::Error> {
/// register_scheme("mine", |_url| async { Ok(Arc::new(memory::connect()?) as _) })?;
/// let lock = connect("mine://host/locks?ttl=30s").await?;
/// assert!(lock.capabilities().cooldown);
/// # Ok(())
/// # }
/// ```
///
/// A program with this store and the command needs two more lines: register, then call `leasehold_cli::main()`
/// of the crate `leasehold-cli`.
///
/// # Errors
///
/// [`InvalidOption`](crate::ErrorKind::InvalidOption) for an invalid scheme (valid: a small letter, then small
/// letters, digits, `+`, `-` and `.`), for a scheme of leasehold, and for a scheme that is already registered.
///
/// [`connect_with`]: crate::connect_with
pub fn register_scheme<F, O>(scheme: &str, open: O) -> Result<(), Error>
where
    F: Future<Output = Result<Arc<dyn Lock>, Error>> + Send + 'static,
    O: Fn(String) -> F + Send + Sync + 'static,
{
    let is_scheme = scheme.starts_with(|c: char| c.is_ascii_lowercase())
        && scheme.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || "+-.".contains(c));
    if !is_scheme {
        return Err(invalid(format!(
            "{scheme:?} is not the scheme of a URL: a small letter, then small letters, digits, + - and ."
        )));
    }
    if stores::is_ours(scheme) {
        return Err(invalid(format!("the scheme {scheme:?} names a store of leasehold; choose another")));
    }
    let mut others = OTHERS.write().unwrap_or_else(PoisonError::into_inner);
    if others.contains_key(scheme) {
        return Err(invalid(format!("the scheme {scheme:?} is registered already")));
    }
    others.insert(scheme.to_owned(), Arc::new(move |url| Box::pin(open(url))));
    Ok(())
}

/// Returns the future that opens the store of this URL. `None` if its scheme is not registered.
pub(crate) fn opening(url: &str) -> Option<Opening> {
    let url = url.trim();
    let (scheme, _) = url.split_once(':')?;
    let others = OTHERS.read().unwrap_or_else(PoisonError::into_inner);
    let open = others.get(&scheme.to_ascii_lowercase()).map(Arc::clone)?;
    drop(others);
    Some(open(url.to_owned()))
}

/// Returns a list of the registered schemes, for messages.
pub(crate) fn known() -> String {
    let others = OTHERS.read().unwrap_or_else(PoisonError::into_inner);
    others.keys().map(|scheme| format!(", {scheme}:")).collect()
}

#[cfg(all(test, feature = "memory"))]
mod tests {
    use leasehold_api::{ErrorKind, LockExt as _};

    use super::*;

    fn memory() -> Result<Arc<dyn Lock>, Error> {
        Ok(Arc::new(crate::memory::connect()?))
    }

    #[tokio::test]
    async fn a_scheme_of_ones_own_gets_the_url_as_it_is() {
        let given = Arc::new(std::sync::Mutex::new(String::new()));
        let seen = Arc::clone(&given);
        let open = move |url| {
            *seen.lock().unwrap() = url;
            async { memory() }
        };
        register_scheme("own+store", open).unwrap();
        let lock = crate::connect(" Own+Store://u:p@h/x?y=%20#z ").await.unwrap();
        lock.key("k").acquire().await.unwrap().release().await.unwrap();
        assert_eq!(*given.lock().unwrap(), "Own+Store://u:p@h/x?y=%20#z");
        let unknown = crate::connect("other://h").await.unwrap_err();
        assert!(unknown.message().contains(", own+store:"), "what is known: {unknown}");
        assert_eq!(
            register_scheme("own+store", |_| async { memory() }).unwrap_err().kind(),
            ErrorKind::InvalidOption
        );
    }

    #[test]
    fn what_cannot_be_registered() {
        for scheme in [
            "",
            "Own",
            "1x",
            "a:b",
            "a b",
            "\u{e9}",
            "memory",
            "file",
            "postgres",
            "postgresql",
            "postgres+ttl",
        ] {
            let error = register_scheme(scheme, |_| async { memory() }).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidOption, "{scheme}");
        }
    }
}
