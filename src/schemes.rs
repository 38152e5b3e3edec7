//! Stores that programs have registered, by the schemes of their URLs.

use std::sync::{PoisonError, RwLock};

use leasehold_api::Error;
use leasehold_engine::scheme::{Scheme, invalid};

use crate::stores;

static OTHERS: RwLock<Vec<Scheme>> = RwLock::new(Vec::new());

/// Registers the schemes of a store outside leasehold. [`connect`](crate::connect()) then opens URLs of these
/// schemes, in the whole process. Use it in programs that open stores by URLs, such as the command.
///
/// The scheme opens an engine, and `leasehold` starts it like the engine of a built-in store. Metrics, hand-over and the
/// command then treat both alike. To use another [`Lock`](crate::Lock), such as a wrapper, wrap the lock of
/// [`connect`](crate::connect()).
///
/// The store gets what a store of leasehold gets: the [parts of the URL](crate::engine::scheme::StoreUrl), with
/// a parser of durations, and the [options](crate::engine::scheme::OpenOptions) of [`connect_with`]. Its errors
/// should not repeat the URL, which may contain a password. Register at the start of `main`, before the first
/// connection:
///
/// ```
/// use leasehold::engine::scheme::{Scheme, StoreConfig, StoreUrl};
/// use leasehold::{Lock as _, connect, memory, register_scheme};
///
/// fn read(url: &StoreUrl) -> Result<Box<dyn StoreConfig>, leasehold::Error> {
///     let store = memory::MemoryStore::new(); // the settings of your store, which implement `StoreConfig`
///     let ttl = url.only(&["ttl"])?.duration("ttl")?; // other parameters are refused
///     Ok(Box::new(match ttl {
///         Some(ttl) => store.default_ttl(ttl),
///         None => store,
///     }))
/// }
///
/// # #[tokio::main]
/// # async fn main() -> Result<(), leasehold::Error> {
/// register_scheme(Scheme::new(&["mine"], read))?;
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
/// letters, digits, `+`, `-` and `.`), for a [`Scheme`] without a name, for a scheme of leasehold, and for a scheme that
/// is already registered.
///
/// [`connect_with`]: crate::connect_with
pub fn register_scheme(scheme: Scheme) -> Result<(), Error> {
    if scheme.names().is_empty() {
        return Err(invalid("a Scheme needs at least one name to be reached by a URL"));
    }
    let mut others = OTHERS.write().unwrap_or_else(PoisonError::into_inner);
    for name in scheme.names() {
        let is_scheme = name.starts_with(|c: char| c.is_ascii_lowercase())
            && name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || "+-.".contains(c));
        if !is_scheme {
            return Err(invalid(format!(
                "{name:?} is not the scheme of a URL: a small letter, then small letters, digits, + - and ."
            )));
        }
        if stores::is_ours(name) {
            return Err(invalid(format!("the scheme {name:?} names a store of leasehold; choose another")));
        }
        if others.iter().any(|other| other.names().contains(name)) {
            return Err(invalid(format!("the scheme {name:?} is registered already")));
        }
    }
    others.push(scheme);
    Ok(())
}

/// Returns the registered scheme of this name.
pub(crate) fn find(name: &str) -> Option<Scheme> {
    let others = OTHERS.read().unwrap_or_else(PoisonError::into_inner);
    others.iter().find(|scheme| scheme.names().contains(&name)).copied()
}

/// Returns a list of the registered schemes, for messages.
pub(crate) fn known() -> String {
    let others = OTHERS.read().unwrap_or_else(PoisonError::into_inner);
    others.iter().flat_map(Scheme::names).map(|name| format!(", {name}:")).collect()
}

#[cfg(all(test, feature = "memory"))]
mod tests {
    use std::sync::Mutex;
    use std::time::Duration;

    use leasehold_api::{ErrorKind, LockExt as _};
    use leasehold_engine::scheme::{OpenOptions, StoreConfig, StoreUrl};
    use leasehold_engine::{EngineBuilder, async_trait};

    use super::*;
    use crate::memory::MemoryStore;
    use crate::{ConnectOptions, connect, connect_with};

    /// The parts of each URL, and whether its store was opened for inspection only.
    static SEEN: Mutex<Vec<(String, Option<Duration>, bool)>> = Mutex::new(Vec::new());

    #[derive(Debug)]
    struct Own {
        rest: String,
        ttl: Option<Duration>,
    }

    #[async_trait]
    impl StoreConfig for Own {
        async fn open(&self, options: &OpenOptions) -> Result<EngineBuilder, Error> {
            SEEN.lock().unwrap_or_else(PoisonError::into_inner).push((
                self.rest.clone(),
                self.ttl,
                options.is_look_only(),
            ));
            StoreConfig::open(&MemoryStore::new(), options).await
        }
    }

    fn read(url: &StoreUrl) -> Result<Box<dyn StoreConfig>, Error> {
        let given = url.only(&["ttl"])?;
        Ok(Box::new(Own { rest: url.rest.clone(), ttl: given.duration("ttl")? }))
    }

    #[tokio::test]
    async fn a_scheme_of_ones_own_gets_the_url_and_the_options() {
        let own = Scheme::new(&["own+store", "own"], read);
        register_scheme(own).unwrap();
        let lock = connect(" Own+Store://u:p@a,b/x?ttl=90s ").await.unwrap();
        lock.key("k").acquire().await.unwrap().release().await.unwrap();
        connect_with("own:", ConnectOptions::new().look_only()).await.unwrap();
        let ttl = Some(Duration::from_secs(90));
        let seen = [("//u:p@a,b/x?ttl=90s".to_owned(), ttl, false), (String::new(), None, true)];
        assert_eq!(*SEEN.lock().unwrap(), seen);
        for wrong in ["own:?ttl=90", "own:?other=1", "own:#x"] {
            let error = connect(wrong).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidOption, "{wrong}: {error}");
        }
        let unknown = connect("other://h").await.unwrap_err();
        assert!(unknown.message().contains(", own+store:, own:"), "what is known: {unknown}");
        assert_eq!(register_scheme(own).unwrap_err().kind(), ErrorKind::InvalidOption);
    }

    #[test]
    fn what_cannot_be_registered() {
        const NAMES: [&[&str]; 13] = [
            &[],
            &[""],
            &["Own"],
            &["1x"],
            &["a:b"],
            &["a b"],
            &["\u{e9}"],
            &["memory"],
            &["file"],
            &["postgres"],
            &["postgresql"],
            &["postgres+ttl"],
            &["fine", "memory"],
        ];
        for names in NAMES {
            let error = register_scheme(Scheme::new(names, read)).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidOption, "{names:?}");
        }
        assert!(find("fine").is_none(), "registered in part");
    }
}
