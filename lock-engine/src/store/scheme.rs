//! Stores by their URLs: the types with which the crate of a store makes it reachable by a URL.
//!
//! The crate exports a constant `SCHEMES` of [`Scheme`]s, and the facade `leasehold` has one table of these
//! constants. A program registers a [`Scheme`] of a store outside `leasehold` by the facade's `register_scheme`.

use std::any::{Any, TypeId};
use std::borrow::Cow;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use leasehold_api::{Error, ErrorKind};

use crate::EngineBuilder;

/// The values of the parameter `handover`, which turns the hand-over between callers of one client on or off.
pub const HANDOVER: [(&str, bool); 2] = [("on", true), ("off", false)];

/// The schemes of one store, and the function that reads its URLs.
#[derive(Clone, Copy, Debug)]
pub struct Scheme {
    names: &'static [&'static str],
    read: fn(&StoreUrl) -> Result<Box<dyn StoreConfig>, Error>,
}

impl Scheme {
    /// Makes the schemes `names`, in lower case. `read` only checks the URL and refuses every part that it does
    /// not use.
    #[must_use]
    pub const fn new(
        names: &'static [&'static str],
        read: fn(&StoreUrl) -> Result<Box<dyn StoreConfig>, Error>,
    ) -> Self {
        Self { names, read }
    }

    /// Returns the schemes, in lower case.
    #[must_use]
    pub const fn names(&self) -> &'static [&'static str] {
        self.names
    }

    /// Reads `url`, whose scheme is one of the [`names`](Self::names).
    ///
    /// # Errors
    ///
    /// [`InvalidOption`](ErrorKind::InvalidOption), without a part of the URL that may be a password.
    pub fn read(&self, url: &StoreUrl) -> Result<Box<dyn StoreConfig>, Error> {
        (self.read)(url)
    }
}

/// The settings of a store, read from a URL. `Debug` shows no password.
#[async_trait]
pub trait StoreConfig: fmt::Debug + Send + Sync {
    /// Opens the store. Returns an engine that is ready to start.
    ///
    /// # Errors
    ///
    /// The store's error if opening fails. [`InvalidOption`](ErrorKind::InvalidOption) for settings out of
    /// bounds.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the call closes everything it has opened.
    async fn open(&self, options: &OpenOptions) -> Result<EngineBuilder, Error>;

    /// Returns the part of the settings with this type, if the store shows it; see [`extension`](#method.extension) on
    /// `dyn StoreConfig`.
    fn extension_of(&self, id: TypeId) -> Option<&(dyn Any + Send + Sync)> {
        let _ = id;
        None
    }
}

impl dyn StoreConfig + '_ {
    /// Returns an extension, a part of the settings that only some stores have, by its type. An example is
    /// the server of a store on Postgres.
    #[must_use]
    pub fn extension<T: Any + Send + Sync>(&self) -> Option<&T> {
        self.extension_of(TypeId::of::<T>())?.downcast_ref()
    }
}

/// The options with which a program opens a store, beside the URL.
#[derive(Clone, Default)]
pub struct OpenOptions {
    look_only: bool,
    extensions: Vec<Arc<dyn Any + Send + Sync>>,
}

impl OpenOptions {
    /// Makes options without additions to the URL.
    #[must_use]
    pub const fn new() -> Self {
        Self { look_only: false, extensions: Vec::new() }
    }

    /// Declares that the program will lock nothing. A store that creates files when it is opened does not
    /// create them.
    #[must_use]
    pub fn look_only(mut self) -> Self {
        self.look_only = true;
        self
    }

    /// Returns whether the program will lock nothing.
    #[must_use]
    pub const fn is_look_only(&self) -> bool {
        self.look_only
    }

    /// Adds `extension` for the stores that know its type, in place of an earlier one of the same type.
    #[must_use]
    pub fn with<T: Any + Send + Sync>(mut self, extension: T) -> Self {
        self.extensions.insert(0, Arc::new(extension));
        self
    }

    /// Returns the extension of this type, if the program has given one.
    #[must_use]
    pub fn extension<T: Any>(&self) -> Option<&T> {
        self.extensions.iter().find_map(|extension| extension.downcast_ref())
    }
}

impl fmt::Debug for OpenOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OpenOptions").field("look_only", &self.look_only).finish_non_exhaustive()
    }
}

/// The parts of a store's URL. The facade makes it.
#[allow(clippy::exhaustive_structs)] // Exhaustive, because the facade makes the value by naming every part.
#[derive(Clone)]
pub struct StoreUrl {
    /// The scheme, in lower case.
    pub scheme: String,
    /// The original text behind the colon of the scheme.
    pub rest: String,
    /// The path, percent-encoded.
    pub path: String,
    /// The path as a file of this machine, if possible.
    pub file_path: Option<PathBuf>,
    /// Whether there is a fragment (`#...`).
    pub has_fragment: bool,
    /// The parameters behind the `?`, decoded, in their order.
    pub parameters: Vec<(String, String)>,
    /// Reads a duration such as `30s`, `250ms` or `1h30m`. [`Parameters::duration`] calls it.
    pub parse_duration: fn(&str) -> Result<Duration, Error>,
}

impl StoreUrl {
    /// Returns the parameters, for a store whose parameters are `known`.
    ///
    /// # Errors
    ///
    /// [`InvalidOption`](ErrorKind::InvalidOption) for an unknown parameter, for a parameter that is given
    /// twice, and for a fragment.
    pub fn only(&self, known: &[&str]) -> Result<Parameters, Error> {
        if self.has_fragment {
            return Err(invalid(
                "the URL of a store has no fragment; write a # that belongs to a name as %23",
            ));
        }
        for (at, (name, _)) in self.parameters.iter().enumerate() {
            if !known.contains(&name.as_str()) {
                let which = match known {
                    [] => "it has none".to_owned(),
                    [one] => format!("the one it has is {one}"),
                    [others @ .., last] => format!("those it has are {} and {last}", others.join(", ")),
                };
                return Err(invalid(format!("a {} URL has no parameter {name:?}; {which}", self.scheme)));
            }
            if self.parameters[..at].iter().any(|(earlier, _)| earlier == name) {
                return Err(given_twice(name));
            }
        }
        Ok(self.with_parameters(self.parameters.clone()))
    }

    /// Makes [`Parameters`] of `given`, some of the parameters of this URL. For a store that has checked
    /// their names.
    #[must_use]
    pub fn with_parameters(&self, given: Vec<(String, String)>) -> Parameters {
        Parameters { given, parse_duration: self.parse_duration }
    }
}

/// Shows no part that may contain a password.
impl fmt::Debug for StoreUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StoreUrl").field("scheme", &self.scheme).finish_non_exhaustive()
    }
}

/// The parameters of a URL that a store has accepted, each given once.
#[derive(Clone)]
pub struct Parameters {
    given: Vec<(String, String)>,
    parse_duration: fn(&str) -> Result<Duration, Error>,
}

impl Parameters {
    /// Returns the value of the parameter `name`, if it is given.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&str> {
        self.given.iter().find(|(given, _)| given == name).map(|(_, value)| value.as_str())
    }

    /// Returns the parameter `name` as a duration, which is longer than zero.
    ///
    /// # Errors
    ///
    /// [`InvalidOption`](ErrorKind::InvalidOption) for another value.
    pub fn duration(&self, name: &str) -> Result<Option<Duration>, Error> {
        let Some(text) = self.get(name) else { return Ok(None) };
        let duration = (self.parse_duration)(text)
            .map_err(|error| invalid(format!("the parameter {name}: {}", error.message())))?;
        if duration.is_zero() {
            return Err(invalid(format!(
                "the parameter {name} cannot be zero; leave it out for the default"
            )));
        }
        Ok(Some(duration))
    }

    /// Returns the value that belongs to the word in the parameter `name`. `None` if the parameter is not
    /// given.
    ///
    /// # Errors
    ///
    /// [`InvalidOption`](ErrorKind::InvalidOption) for an unknown word. The error repeats the known words and
    /// not the given one, because that word may be a password pasted into the wrong place.
    pub fn one_of<T: Copy>(&self, name: &str, known: &[(&str, T)]) -> Result<Option<T>, Error> {
        let Some(text) = self.get(name) else { return Ok(None) };
        let found = known.iter().find(|(word, _)| *word == text).map(|(_, value)| *value);
        found.map(Some).ok_or_else(|| {
            let words: Vec<_> = known.iter().map(|(word, _)| *word).collect();
            invalid(format!("the parameter {name} is one of {}", words.join(", ")))
        })
    }
}

impl fmt::Debug for Parameters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.given.iter().map(|(name, _)| name)).finish()
    }
}

/// Returns the error for a URL that no store can use.
#[must_use]
pub fn invalid(message: impl Into<Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::InvalidOption, message)
}

/// Returns the error for a parameter that is given twice.
#[must_use]
pub fn given_twice(name: &str) -> Error {
    invalid(format!("the parameter {name} is given twice; leave one out"))
}
