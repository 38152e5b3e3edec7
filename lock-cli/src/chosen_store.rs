//! Chooses the store: by `--url`, by the environment, or files in a directory of this user or unit.

use std::borrow::Cow;
use std::env;
use std::ffi::OsString;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use leasehold::etcd::EtcdCredentials;
use leasehold::file::FileConfig;
use leasehold::{ConnectOptions, Error, ErrorKind, Lock};
use tokio::process::Command;
use url::{Url, form_urlencoded};

use crate::schema::is_postgres;
use crate::{identity, waiting};

/// The variable with the URL of the store.
const URL: &str = "LEASEHOLD_URL";
/// The variable with the path of a file that has the store's URL in its first line.
const URL_FILE: &str = "LEASEHOLD_URL_FILE";
/// The largest number of bytes that are read from that file, above the length of any URL.
const LONGEST: u64 = 64 * 1024;

/// The chosen store, with its URL. Without a URL, it is the default directory of files.
#[derive(Debug)]
pub(crate) struct ChosenStore {
    url: Option<String>,
    /// Whether the URL comes from the option `--url`. A command inherits a URL from the environment anyway.
    is_from_option: bool,
    /// The file from which the URL was read, if it was. It is read again for each session, because its secrets can be
    /// rotated.
    file: Option<PathBuf>,
}

impl ChosenStore {
    /// Returns the store that `option` names. Without the option, the environment decides.
    pub(crate) fn find(option: Option<&str>) -> Result<Self, Error> {
        if let Some(url) = option {
            return Ok(Self { url: Some(url.to_owned()), is_from_option: true, file: None });
        }
        let file = env::var_os(URL_FILE);
        let url = url_of_environment(env::var_os(URL), file.clone())?;
        Ok(Self { url, is_from_option: false, file: file.map(PathBuf::from) })
    }

    pub(crate) fn url(&self) -> Option<&str> {
        self.url.as_deref()
    }

    pub(crate) async fn connect(&self) -> Result<Arc<dyn Lock>, Error> {
        match &self.url {
            Some(url) => {
                leasehold::connect_with(&with_application_name(url), self.connect_options(url)).await
            }
            None => Ok(Arc::new(leasehold::file::connect(default_dir()?)?)),
        }
    }

    /// Connects for inspection. A file store then creates no directory or file, and read access is enough.
    pub(crate) async fn connect_to_inspect(&self) -> Result<Arc<dyn Lock>, Error> {
        match &self.url {
            Some(url) => leasehold::connect_with(url, ConnectOptions::new().look_only()).await,
            None => Ok(Arc::new(FileConfig::new(default_dir()?).read_only().connect()?)),
        }
    }

    /// Reads user and password from the file whenever a server needs them. If the file cannot be read, uses the
    /// previous credentials.
    fn connect_options(&self, url: &str) -> ConnectOptions {
        let Some(file) = self.file.clone() else { return ConnectOptions::new() };
        if is_etcd(url) {
            return etcd_options(file, url);
        }
        if !is_postgres(url) {
            return ConnectOptions::new();
        }
        let before: Arc<str> = url.into();
        ConnectOptions::new().credentials(move || {
            let read = first_line(&file).and_then(|url| leasehold::postgres_credentials(&url));
            let credentials = read.or_else(|_| leasehold::postgres_credentials(&before));
            async move { credentials }
        })
    }

    /// Passes the store on to `process`, unless its environment would then contain a password. In that case it sets an
    /// empty URL, because the process would otherwise use the default file store.
    pub(crate) fn pass_on_to(&self, process: &mut Command) {
        let Some(url) = self.url.as_deref().filter(|_| self.is_from_option) else { return };
        process.env_remove(URL_FILE).env(URL, if has_password(url) { "" } else { url });
    }
}

/// Reads user and password of etcd from `file` for each login. If that fails, uses the login in `url`.
fn etcd_options(file: PathBuf, url: &str) -> ConnectOptions {
    // Without a user there is no login. Another URL is refused when it is opened.
    let Ok(Some(before)) = leasehold::etcd_login(url) else { return ConnectOptions::new() };
    ConnectOptions::new().etcd_credentials(EtcdCredentials::from_program(move || {
        let read = first_line(&file).and_then(|url| leasehold::etcd_login(&url));
        let login = read.ok().flatten().unwrap_or_else(|| before.clone());
        async move { Ok(login) }
    }))
}

fn url_of_environment(url: Option<OsString>, file: Option<OsString>) -> Result<Option<String>, Error> {
    let text = match (url, file) {
        (None, None) => return Ok(None),
        (Some(_), Some(_)) => {
            return Err(invalid(format!("{URL} and {URL_FILE} are both set; unset one of them")));
        }
        (Some(url), None) => url.into_string().map_err(|_| invalid(format!("{URL} is not UTF-8 text")))?,
        (None, Some(path)) => first_line(Path::new(&path))?,
    };
    if text.trim().is_empty() && env::var_os(waiting::HOLDERS).is_some() {
        return Err(invalid(format!(
            "{URL} is empty, as `leasehold run` leaves it for its command where the URL has a password: name the same store here, by --url or {URL_FILE}. Without a URL this would lock files of this machine, which do not exclude clients of that store"
        )));
    }
    if text.trim().is_empty() {
        return Err(invalid(format!(
            "{URL}, or the first line of the file that {URL_FILE} names, is empty; unset it for the default, or set the URL of a store, such as file:///DIRECTORY"
        )));
    }
    Ok(Some(text))
}

fn first_line(path: &Path) -> Result<String, Error> {
    let mut text = String::new();
    let file = std::fs::File::open(path);
    let read = file.and_then(|file| file.take(LONGEST).read_to_string(&mut text));
    read.map_err(|error| {
        let message = format!("cannot read {path:?}, which {URL_FILE} names: {error}");
        invalid(message).with_source(error)
    })?;
    // Drops a byte order mark, with which some editors start a file.
    let text = text.strip_prefix('\u{feff}').unwrap_or(&text);
    Ok(text.lines().next().unwrap_or_default().to_owned())
}

/// Returns the default directory of the locks. A systemd unit has dedicated directories, and often no home. The state
/// directory comes first because it outlives the unit, so tokens keep growing and windows last.
pub(crate) fn default_dir() -> Result<PathBuf, Error> {
    let of_unit = [env::var_os("STATE_DIRECTORY"), env::var_os("RUNTIME_DIRECTORY")];
    match of_unit.into_iter().flatten().find_map(first_absolute) {
        Some(directory) => Ok(directory.join("leasehold")),
        None => leasehold::file::default_dir(),
    }
}

/// Returns the first absolute path of a list with colons, because a unit can have several directories.
fn first_absolute(paths: OsString) -> Option<PathBuf> {
    env::split_paths(&paths).find(|path| path.is_absolute())
}

/// Returns the URL with an application name for a Postgres server, unless the URL or the environment has one.
pub(crate) fn with_application_name(url: &str) -> Cow<'_, str> {
    let is_named = |url: &Url| url.query_pairs().any(|(name, _)| name == "application_name");
    match Url::parse(url.trim()) {
        Ok(parsed) if is_postgres(url) && !is_named(&parsed) && env::var_os("PGAPPNAME").is_none() => {
            let joint = if parsed.query().is_some() { '&' } else { '?' };
            let name: String =
                form_urlencoded::byte_serialize(identity::application_name().as_bytes()).collect();
            format!("{}{joint}application_name={name}", url.trim()).into()
        }
        _ => url.into(),
    }
}

/// Returns whether `key` is the URL of a store, whose password lists of the locks would show.
pub(crate) fn is_mistaken_for_key(key: &str) -> bool {
    let is_server = is_postgres(key) || is_etcd(key);
    key.contains("://") && (is_server || Url::parse(key).is_ok_and(|url| names_password(&url)))
}

fn is_etcd(url: &str) -> bool {
    url.trim_start().get(..4).is_some_and(|scheme| scheme.eq_ignore_ascii_case("etcd"))
}

/// Returns whether the URL has or might have a password.
pub(crate) fn has_password(url: &str) -> bool {
    let url = url.trim();
    Url::parse(url).map_or_else(|_| !is_plain(url), |url| names_password(&url))
}

/// Returns whether a URL that the parser refuses, for example because of its several hosts, is too plain for a password.
/// Such a URL consists of hosts, a path and other parameters, without escapes.
fn is_plain(url: &str) -> bool {
    let is_allowed = |c: char| c.is_ascii_alphanumeric() || "+-._:/,?=&[]".contains(c);
    !url.contains("password") && url.chars().all(is_allowed)
}

fn names_password(url: &Url) -> bool {
    url.password().is_some() || url.query_pairs().any(|(name, _)| name == "password")
}

fn invalid(message: String) -> Error {
    Error::new(ErrorKind::InvalidOption, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_password_may_be_in_two_places() {
        for (url, has) in [
            ("postgres://app@db/x", false),
            ("postgres://app:pw@db/x", true),
            ("postgres://db/x?user=app&password=pw", true),
            ("file:///var/lib/locks", false),
            ("postgres://app:a/b@db/x", true),
            ("etcd://a:2379,b:2379,[::1]:2379/locks?ttl=30s", false),
            ("etcd://app:pw@a:2379,b:2379/locks", true),
            ("etcd://app@a:2379,b:2379/locks", true),
            ("postgres://a:5432,b:5432/x?password=pw", true),
            ("postgres://a:5432,b:5432/x?p%61ssword=pw", true),
            ("postgres://a:5432,b:5432/x?pass\nword=pw", true),
        ] {
            assert_eq!(has_password(url), has, "{url}");
        }
    }

    #[test]
    fn the_url_of_a_server_is_no_key() {
        for (key, is_url) in [
            ("etcd://app:pw@a:2379,b:2379/locks", true),
            ("ETCD://a", true),
            ("postgres+ttl://db/x", true),
            ("https://app:pw@host/feed", true),
            ("https://host/feed", false),
            ("etcd:a", false),
            ("\u{e9}tcd://a", false),
            ("queue://eu:west", false),
        ] {
            assert_eq!(is_mistaken_for_key(key), is_url, "{key}");
        }
    }

    #[test]
    fn a_server_learns_who_we_are_unless_that_is_said() {
        for (url, joint) in [("postgres://app@db/x", "?"), ("postgres+row://app:p%3Fw@db/x?poll=1s", "&")] {
            let named = with_application_name(url);
            let name = named.strip_prefix(url).and_then(|rest| rest.strip_prefix(joint)).unwrap();
            assert!(name.starts_with("application_name=leasehold+") && name.contains("%40"), "{named}");
        }
        for url in ["memory:", "file:///x", "postgres://db/x?application_name=mine", "not a URL"] {
            assert_eq!(with_application_name(url), url);
        }
    }

    #[test]
    fn of_several_directories_of_a_unit_the_first_counts() {
        let first = |text: &str| first_absolute(text.into()).map(|path| path.display().to_string());
        assert_eq!(first("/var/lib/a:/var/lib/b").as_deref(), Some("/var/lib/a"));
        assert_eq!(first("relative"), None);
        assert_eq!(first(""), None);
    }
}
