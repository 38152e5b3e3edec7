//! URLs of the Postgres stores: our own parameters, and those that are the driver's.

use std::fmt;
use std::time::Duration;

use leasehold_api::Error;
use url::Url;

use crate::target::{duration, invalid};

/// Which of the stores in a database.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PgStore {
    Advisory,
    AdvisoryXact,
    Row,
    Ttl,
}

/// How keys become the numbers of advisory locks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PgHash {
    Fnv,
    Sha256,
    Raw,
    Pair,
    Djb2,
    Djb2Reverse,
    Sqlx,
}

/// What is known of the way to the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PgPooler {
    Detect,
    Transaction,
    None,
}

/// What a Postgres URL names.
#[derive(Debug)]
pub(crate) struct PgTarget {
    pub(crate) store: PgStore,
    pub(crate) server: ServerUrl,
    pub(crate) schema: Option<String>,
    pub(crate) install: bool,
    pub(crate) pooler: Option<PgPooler>,
    pub(crate) connect_timeout: Option<Duration>,
    pub(crate) statement_timeout: Option<Duration>,
    pub(crate) idle: Option<Duration>,
    pub(crate) confirm_every: Option<Duration>,
    pub(crate) lost_after: Option<Duration>,
    pub(crate) server_gives_up: Option<Duration>,
    pub(crate) ttl: Option<Duration>,
    pub(crate) poll: Option<Duration>,
    pub(crate) hash: Option<PgHash>,
}

/// The URL that the driver gets. It may hold a password.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct ServerUrl(pub(crate) String);

impl fmt::Debug for ServerUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ServerUrl(..)")
    }
}

/// What libpq and the driver read, without what is ours. The crate of the server decides about their values.
const OF_LIBPQ: [&str; 57] = [
    "host",
    "hostaddr",
    "port",
    "dbname",
    "user",
    "password",
    "passfile",
    "require_auth",
    "channel_binding",
    "client_encoding",
    "application_name",
    "fallback_application_name",
    "keepalives",
    "keepalives_idle",
    "keepalives_interval",
    "keepalives_count",
    "tcp_user_timeout",
    "replication",
    "gssencmode",
    "sslmode",
    "ssl",
    "requiressl",
    "sslnegotiation",
    "sslcompression",
    "sslcert",
    "sslkey",
    "sslpassword",
    "sslcertmode",
    "sslrootcert",
    "sslcrl",
    "sslcrldir",
    "sslkeylogfile",
    "sslsni",
    "requirepeer",
    "ssl_min_protocol_version",
    "ssl_max_protocol_version",
    "min_protocol_version",
    "max_protocol_version",
    "krbsrvname",
    "gsslib",
    "gssdelegation",
    "scram_client_key",
    "scram_server_key",
    "service",
    "servicefile",
    "target_session_attrs",
    "load_balance_hosts",
    "oauth_issuer",
    "oauth_client_id",
    "oauth_client_secret",
    "oauth_scope",
    "statement-cache-capacity",
    "ssl-mode",
    "ssl-root-cert",
    "ssl-ca",
    "ssl-cert",
    "ssl-key",
];

/// Our parameters that every store has.
const OF_ALL: [&str; 6] = ["schema", "install", "pooler", "connect_timeout", "statement_timeout", "idle"];

impl PgStore {
    /// The store that a scheme names.
    pub(crate) fn of_scheme(scheme: &str) -> Option<Self> {
        let (database, store) = scheme.split_once('+').unwrap_or((scheme, "advisory"));
        match store {
            _ if !["postgres", "postgresql"].contains(&database) => None,
            "advisory" => Some(Self::Advisory),
            "advisory-xact" => Some(Self::AdvisoryXact),
            "row" => Some(Self::Row),
            "ttl" => Some(Self::Ttl),
            _ => None,
        }
    }

    /// Our parameters, without [`OF_ALL`].
    const fn parameters(self) -> &'static [&'static str] {
        match self {
            Self::Advisory | Self::AdvisoryXact => {
                &["hash", "confirm_every", "lost_after", "server_gives_up"]
            }
            Self::Row => &["poll", "lost_after"],
            Self::Ttl => &["ttl", "poll"],
        }
    }
}

impl PgTarget {
    /// Takes our own parameters out of `url` and leaves the driver its own.
    pub(crate) fn parse(store: PgStore, url: &Url, rest: &str) -> Result<Self, Error> {
        if !rest.starts_with("//") {
            return Err(invalid(
                "a Postgres URL has two slashes behind its scheme: write postgres://user@host:5432/database",
            ));
        }
        if url.fragment().is_some() {
            return Err(invalid(
                "a Postgres URL has no fragment; write a # that belongs to a name or password as %23",
            ));
        }
        let (before_query, query) = rest.split_once('?').unwrap_or((rest, ""));
        // What stands in the place of the database's name is shown; this is the rest of a password.
        if before_query[2..].split_once('/').is_some_and(|(_, path)| path.contains('@')) {
            return Err(invalid(
                "the URL has a / before its @: escape special characters of user and password, / as %2F and @ as %40",
            ));
        }
        if query.contains('@') && !before_query.contains('@') {
            return Err(invalid(
                "the URL has a ? before its @: escape special characters of user and password, ? as %3F and @ as %40",
            ));
        }
        let mut target = Self {
            store,
            server: ServerUrl(String::new()),
            schema: None,
            install: false,
            pooler: None,
            connect_timeout: None,
            statement_timeout: None,
            idle: None,
            confirm_every: None,
            lost_after: None,
            server_gives_up: None,
            ttl: None,
            poll: None,
            hash: None,
        };
        let mut seen: Vec<String> = Vec::new();
        let mut kept: Vec<(String, String)> = Vec::new();
        for (name, value) in url.query_pairs() {
            let repeatable = name == "options" || (name.starts_with("options[") && name.ends_with(']'));
            if !repeatable && seen.iter().any(|earlier| *earlier == name) {
                return Err(invalid(format!("the parameter {name} is given twice; leave one out")));
            }
            // It would be a part of this value, which messages of the server repeat.
            if value.to_ascii_lowercase().contains(";password=") {
                return Err(invalid(format!(
                    "after the parameter {name}, separate parameters by & and not by ;"
                )));
            }
            if target.take(&name, &value)? {
                seen.push(name.into_owned());
            } else if repeatable || OF_LIBPQ.contains(&&*name) {
                seen.push(name.clone().into_owned());
                kept.push((name.into_owned(), value.into_owned()));
            } else {
                return Err(target.unknown(&name));
            }
        }
        target.server = ServerUrl(for_the_driver(before_query, &kept));
        Ok(target)
    }

    /// Whether the parameter is one of ours; its value is noted then.
    fn take(&mut self, name: &str, value: &str) -> Result<bool, Error> {
        match name {
            "schema" => self.schema = Some(value.to_owned()),
            "install" => {
                self.install = one_of(name, value, &[("true", true), ("false", false)])?;
            }
            "pooler" => {
                let known = [
                    ("transaction", PgPooler::Transaction),
                    ("none", PgPooler::None),
                    ("detect", PgPooler::Detect),
                ];
                self.pooler = Some(one_of(name, value, &known)?);
            }
            "connect_timeout" => self.connect_timeout = Some(connect_timeout(value)?),
            "statement_timeout" => self.statement_timeout = Some(duration(name, value)?),
            "idle" => self.idle = Some(duration(name, value)?),
            _ if !self.store.parameters().contains(&name) => return Ok(false),
            "confirm_every" => self.confirm_every = Some(duration(name, value)?),
            "lost_after" => self.lost_after = Some(duration(name, value)?),
            "server_gives_up" => self.server_gives_up = Some(duration(name, value)?),
            "ttl" => self.ttl = Some(duration(name, value)?),
            "poll" => self.poll = Some(duration(name, value)?),
            "hash" => {
                let known = [
                    ("fnv", PgHash::Fnv),
                    ("sha256", PgHash::Sha256),
                    ("raw", PgHash::Raw),
                    ("pair", PgHash::Pair),
                    ("djb2", PgHash::Djb2),
                    ("djb2-reverse", PgHash::Djb2Reverse),
                    ("sqlx", PgHash::Sqlx),
                ];
                self.hash = Some(one_of(name, value, &known)?);
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    fn unknown(&self, name: &str) -> Error {
        let own: Vec<_> = OF_ALL.iter().chain(self.store.parameters()).copied().collect();
        // A name that no parameter could have may be a piece of a password.
        let plain = |c: char| c.is_ascii_lowercase() || c == '_' || c == '-';
        let which = if name.chars().all(plain) { format!("{name:?}") } else { "of that name".to_owned() };
        invalid(format!(
            "this store has no parameter {which} and neither has libpq; known are {}, and those of libpq, such as sslmode, sslrootcert, host, port, dbname, user, password, application_name, options",
            own.join(", ")
        ))
    }
}

/// libpq has it as a whole number of seconds, and the driver leaves it to us; durations have units here.
fn connect_timeout(value: &str) -> Result<Duration, Error> {
    let given = match value.parse() {
        Ok(seconds) => Duration::from_secs(seconds),
        Err(_) => duration("connect_timeout", value)?,
    };
    if (Duration::from_secs(1)..=Duration::from_secs(3600)).contains(&given) {
        return Ok(given);
    }
    Err(invalid("the parameter connect_timeout is 1 to 3600 seconds: write 5 or 5s"))
}

/// The value that `text` names. An error repeats the known ones, not `text`, which may be a password that
/// was pasted into the wrong place.
fn one_of<T: Copy>(name: &str, text: &str, known: &[(&str, T)]) -> Result<T, Error> {
    known.iter().find(|(word, _)| *word == text).map(|(_, value)| *value).ok_or_else(|| {
        let words: Vec<_> = known.iter().map(|(word, _)| *word).collect();
        invalid(format!("the parameter {name} is one of {}", words.join(", ")))
    })
}

fn for_the_driver(before_query: &str, kept: &[(String, String)]) -> String {
    let mut text = format!("postgres:{before_query}");
    if !kept.is_empty() {
        let mut query = url::form_urlencoded::Serializer::new(String::new());
        query.extend_pairs(kept);
        text += &format!("?{}", query.finish());
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::target::Target;

    fn parsed(text: &str) -> PgTarget {
        match Target::parse(text).unwrap() {
            Target::Postgres(target) => target,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn schemes_name_stores() {
        for (scheme, store) in [
            ("postgres", PgStore::Advisory),
            ("postgresql", PgStore::Advisory),
            ("postgres+advisory", PgStore::Advisory),
            ("postgresql+advisory-xact", PgStore::AdvisoryXact),
            ("POSTGRES+row", PgStore::Row),
            ("postgresql+ttl", PgStore::Ttl),
        ] {
            let target = parsed(&format!("{scheme}://app@db/ledger"));
            assert_eq!(
                (target.store, target.server.0.as_str()),
                (store, "postgres://app@db/ledger"),
                "{scheme}"
            );
        }
        for bad in ["postgres+lease", "postgres+", "+row", "mysql+row", "postgres+row+ttl"] {
            assert!(Target::parse(&format!("{bad}://app@db/ledger")).is_err(), "{bad}");
        }
    }

    #[test]
    fn ours_are_taken_and_the_driver_gets_the_rest_unchanged() {
        let target = parsed(
            "postgres+ttl://a%40b:p%3Fw%2F@[::1]:5433/my%20db?sslmode=require&schema=My%20%22locks&install=true&ttl=45s&poll=50ms&options=-c%20work_mem%3D1MB&options[geqo]=off&pooler=transaction&connect_timeout=3&idle=10m",
        );
        assert_eq!(
            target.server.0,
            "postgres://a%40b:p%3Fw%2F@[::1]:5433/my%20db?sslmode=require&options=-c+work_mem%3D1MB&options%5Bgeqo%5D=off"
        );
        assert_eq!(target.schema.as_deref(), Some("My \"locks"));
        assert!(target.install);
        assert_eq!(
            (target.ttl, target.poll),
            (Some(Duration::from_secs(45)), Some(Duration::from_millis(50)))
        );
        assert_eq!(target.pooler, Some(PgPooler::Transaction));
        assert_eq!(target.connect_timeout, Some(Duration::from_secs(3)));
        assert_eq!(target.idle, Some(Duration::from_secs(600)));
        assert_eq!(parsed("postgres://db?connect_timeout=3s").connect_timeout, Some(Duration::from_secs(3)));
        let target = parsed(
            "postgres://db?confirm_every=500ms&lost_after=3s&server_gives_up=1m&statement_timeout=2s&sslmode=require",
        );
        assert_eq!(target.server.0, "postgres://db?sslmode=require");
        let millis = |given: Option<Duration>| given.unwrap().as_millis();
        assert_eq!(
            [
                millis(target.confirm_every),
                millis(target.lost_after),
                millis(target.server_gives_up),
                millis(target.statement_timeout)
            ],
            [500, 3_000, 60_000, 2_000]
        );
        assert!(!format!("{target:?}").contains("p%3Fw"));
        assert_eq!(parsed("postgres://db?hash=djb2-reverse").hash, Some(PgHash::Djb2Reverse));
        assert_eq!(parsed("postgres:///db?host=/run/pg").server.0, "postgres:///db?host=%2Frun%2Fpg");
    }

    #[test]
    fn several_hosts_and_hosts_of_the_query_are_left_to_the_driver() {
        for url in [
            "postgres://app:p%2Cw@a.example:5432,b.example:5433/ledger?target_session_attrs=read-write",
            "postgres://app:pw@[::1]:5432,[::2]/ledger",
            "postgres://app:pw@/ledger?host=%2Fcloudsql%2Fproject",
            "postgres://a,b/ledger",
        ] {
            assert_eq!(parsed(url).server.0, url);
        }
    }

    #[cfg(any(feature = "postgres-advisory", feature = "postgres-row", feature = "postgres-ttl"))]
    #[test]
    fn the_crate_of_the_server_knows_the_same_parameters() {
        use crate::postgres::is_parameter;

        for name in OF_LIBPQ {
            assert!(is_parameter(name), "{name}");
        }
        for name in OF_ALL.into_iter().chain(PgStore::Ttl.parameters().iter().copied()) {
            assert_eq!(is_parameter(name), name == "connect_timeout", "{name}");
        }
    }

    #[test]
    fn what_would_be_ignored_is_refused() {
        for (url, hint) in [
            ("postgres://db/x?pgbouncer=true", "pgbouncer"),
            ("postgres://db/x?sslaccept=strict", "sslaccept"),
            ("postgres://db/x?ttl=30s", "hash"),
            ("postgres+row://db/x?ttl=30s", "poll"),
            ("postgres+row://db/x?hash=fnv", "poll"),
            ("postgres+ttl://db/x?ttl=30", "30s"),
            ("postgres+ttl://db/x?ttl=0s", "zero"),
            ("postgres://db/x?hash=md5", "djb2-reverse"),
            ("postgres://db/x?install=yes", "true, false"),
            ("postgres://db/x?pooler=session", "transaction"),
            ("postgres://db/x?connect_timeout=0", "seconds"),
            ("postgres://db/x?connect_timeout=2h", "seconds"),
            ("postgres://db/x?connect_timeout=soon", "30s"),
            ("postgres://db/x?statement_timeout=5", "30s"),
            ("postgres://db/x?lost_after=30", "30s"),
            ("postgres://db/x?lost_after=0s", "zero"),
            ("postgres://db/x?lost_after=3s&lost_after=3s", "twice"),
            ("postgres+row://db/x?confirm_every=1s", "lost_after"),
            ("postgres+ttl://db/x?lost_after=30s", "statement_timeout, idle, ttl, poll"),
            ("postgres://db/x?idle=5", "30s"),
            ("postgres://db/x?schema=a&schema=b", "twice"),
            ("postgres://db/x?sslmode=require&sslmode=disable", "twice"),
            ("postgres://db/x#y", "%23"),
            ("postgres:db", "postgres://"),
            ("postgres:/db", "postgres://"),
            ("postgres://app:1?ter2@db/x", "%3F"),
            ("postgres://app:1/ter2@db/x", "%2F"),
            ("postgres://app:/ter2@db/x", "%2F"),
            ("postgres+row://app:1?ter2%40db/x", "known are"),
        ] {
            let error = Target::parse(url).unwrap_err();
            assert_eq!(error.kind(), leasehold_api::ErrorKind::InvalidOption, "{url}: {error}");
            assert!(error.message().contains(hint), "{url}: {error}");
            assert!(!error.message().contains("ter2"), "{url}: {error}");
        }
    }
}
