//! Reads the URL and the environment like libpq. Each parameter is honoured, or refused if it demands an
//! unsupported feature. The driver would silently ignore unknown parameters.

mod table;
#[cfg(test)]
mod tests;

use std::ffi::OsString;
use std::net::IpAddr;

use leasehold_api::{Error, ErrorKind};
use percent_encoding::percent_decode_str;
use sqlx::postgres::PgConnectOptions;

use crate::connect::credentials::Credentials;

/// One parameter or environment variable of libpq.
#[derive(Debug)]
pub(crate) struct Setting {
    /// Parameter name, or empty if only the variable exists.
    name: &'static str,
    /// Variable name, or empty if only the parameter exists.
    variable: &'static str,
    rule: Rule,
    note: &'static str,
}

/// How a setting is handled.
#[derive(Debug)]
pub(crate) enum Rule {
    /// The setting is honoured by this crate or the driver.
    Done,
    /// The setting is accepted for the values in `taken`. The note names alternatives to the other values.
    Words { taken: &'static [&'static str], refused: &'static [&'static str] },
    /// The setting is refused with any value. The note gives the reason.
    Refused,
    /// The setting is ignored with any value, because nothing depends on it. The note gives the reason.
    NoEffect,
}

/// Servers that can take a session.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Wanted {
    /// Any server, if there is only one. Otherwise no standby.
    #[default]
    Any,
    /// No standby.
    Primary,
    /// No standby, and no server whose transactions are read-only by default.
    ReadWrite,
}

/// One host, with the driver's options for it.
#[derive(Clone, Debug)]
pub(crate) struct Target {
    pub(crate) options: PgConnectOptions,
    /// Address to use instead of resolving the host name.
    pub(crate) address: Option<IpAddr>,
}

/// The settings in a URL and the environment.
pub(crate) struct Parsed {
    /// At least one target.
    pub(crate) targets: Vec<Target>,
    pub(crate) wanted: Wanted,
    /// Whether the hosts are tried in a random order.
    pub(crate) shuffled: bool,
    /// The connection timeout, as the URL or the environment has it.
    pub(crate) connect_timeout: Option<String>,
    pub(crate) credentials: Credentials,
}

/// The source of variables and of the system user's name.
pub(crate) struct Environment<'a> {
    pub(crate) variable: &'a dyn Fn(&str) -> Option<OsString>,
    pub(crate) user: &'a dyn Fn() -> Option<String>,
}

impl Environment<'static> {
    /// Returns the environment of this process.
    pub(crate) const fn of_process() -> Self {
        Self { variable: &|name| std::env::var_os(name), user: &|| whoami::username().ok() }
    }
}

/// Returns whether a URL can have a parameter of this name, with any value.
pub(crate) fn is_parameter(name: &str) -> bool {
    is_option(name) || table::TABLE.iter().any(|setting| setting.name == name && !name.is_empty())
}

/// Returns whether the name sets a server setting: `options[geqo]=off`.
fn is_option(name: &str) -> bool {
    name.starts_with("options[") && name.ends_with(']')
}

/// A value with its place, for messages.
struct Given {
    name: &'static str,
    value: String,
    place: String,
}

pub(crate) fn parse(url: &str, environment: &Environment<'_>) -> Result<Parsed, Error> {
    let rest = ["postgres://", "postgresql://"].iter().find_map(|scheme| url.strip_prefix(scheme));
    let rest = rest.ok_or_else(not_a_url)?;
    let (before, query) = rest.split_once('?').unwrap_or((rest, ""));
    if url.contains('#') {
        return Err(not_a_url());
    }
    let (authority, database) = before.split_once('/').unwrap_or((before, ""));
    if database.contains('@') {
        return Err(not_a_url());
    }
    let (login, hosts_given) = authority.rsplit_once('@').unwrap_or(("", authority));
    let (user, password) = login.split_once(':').unwrap_or((login, ""));

    let (hosts_named, ports) = of_authority(&decoded(hosts_given)?);

    let mut settings = Settings::default();
    for (name, value) in form_urlencoded::parse(query.as_bytes()) {
        settings.take(&name, value.into_owned())?;
    }
    let of_url = [("user", decoded(user)?), ("password", decoded(password)?), ("dbname", decoded(database)?)];
    for (name, value) in of_url.into_iter().chain([("host", hosts_named), ("port", ports)]) {
        settings.take_default(name, value);
    }
    settings.take_environment(environment)?;
    if settings.find("user").is_none() {
        let user = (environment.user)().ok_or_else(|| {
            invalid("no user is named, and the system has no name for the user of this process; name one in the URL (postgres://USER@HOST/DATABASE) or by PGUSER")
        })?;
        settings.take_default("user", user);
    }
    settings.settle_encryption()?;
    let of = |name| settings.find(name).map(|given| given.value.clone());
    Ok(Parsed {
        wanted: match of("target_session_attrs").as_deref() {
            Some("read-write") => Wanted::ReadWrite,
            Some("primary") => Wanted::Primary,
            _ => Wanted::Any,
        },
        shuffled: of("load_balance_hosts").is_some_and(|order| order == "random"),
        connect_timeout: of("connect_timeout"),
        credentials: Credentials { user: of("user"), password: of("password") },
        targets: hosts(&settings)?.iter().map(|host| settings.target(host)).collect::<Result<_, _>>()?,
    })
}

#[derive(Default)]
struct Settings {
    given: Vec<Given>,
    /// `options` and `options[NAME]`, in their order.
    options: Vec<(String, String)>,
    /// Whether the environment names a root certificate, which the driver reads itself.
    root_of_environment: bool,
    /// Whether the system's public certificate authorities are trusted.
    trusts_system: bool,
}

impl Settings {
    fn find(&self, name: &str) -> Option<&Given> {
        self.given.iter().find(|given| given.name == name)
    }

    /// Stores a parameter of the URL. If it is given several times, the last one counts.
    fn take(&mut self, name: &str, value: String) -> Result<(), Error> {
        if is_option(name) || name == "options" {
            self.options.push((name.to_owned(), value));
            return Ok(());
        }
        let found = table::TABLE.iter().find(|setting| setting.name == name && !name.is_empty());
        let Some(setting) = found else {
            // Shows only names that a parameter could have, because another name might be a piece of a
            // password.
            let plain = name.chars().all(|c| c.is_ascii_lowercase() || c == '_' || c == '-');
            let which = if plain { format!("{name:?}") } else { "of that name".to_owned() };
            return Err(invalid(format!(
                "neither libpq nor the driver has a parameter {which}; leave it out"
            )));
        };
        let name = match setting.name {
            "ssl-mode" => "sslmode",
            "ssl-root-cert" | "ssl-ca" => "sslrootcert",
            "ssl-cert" => "sslcert",
            "ssl-key" => "sslkey",
            name => name,
        };
        if value.is_empty() {
            return Ok(());
        }
        let given = Given { name, value, place: format!("the parameter {name}") };
        check(&given)?;
        self.given.retain(|earlier| earlier.name != name);
        self.given.push(given);
        Ok(())
    }

    /// Stores a value, unless a parameter of the same name was given.
    fn take_default(&mut self, name: &'static str, value: String) {
        if !value.is_empty() && self.find(name).is_none() {
            self.given.push(Given { name, value, place: "the URL".to_owned() });
        }
    }

    fn take_environment(&mut self, environment: &Environment<'_>) -> Result<(), Error> {
        for Setting { name, variable, rule, .. } in table::TABLE.iter().filter(|row| !row.variable.is_empty())
        {
            let value = (environment.variable)(variable).filter(|value| !value.is_empty());
            let Some(value) = value.filter(|_| self.find(name).is_none()) else { continue };
            // Skips the variables that the driver reads itself, the last three also as text.
            let by_driver = ["PGPASSFILE", "PGOPTIONS", "PGSSLCERT", "PGSSLKEY", "PGSSLROOTCERT"];
            let is_system = *variable == "PGSSLROOTCERT" && value == "system";
            self.root_of_environment |= *variable == "PGSSLROOTCERT";
            if matches!(rule, Rule::NoEffect) || (by_driver.contains(variable) && !is_system) {
                continue;
            }
            let place = format!("the environment variable {variable}");
            let value = value.into_string().map_err(|_| invalid(format!("{place} is not UTF-8 text")))?;
            let given = Given { name, value, place };
            check(&given)?;
            // Leaves the timeout to `PgConfig::from_url`, whose error names the variable.
            if *name != "connect_timeout" {
                self.given.push(given);
            }
        }
        Ok(())
    }

    /// Translates the encryption settings where libpq and the driver differ.
    fn settle_encryption(&mut self) -> Result<(), Error> {
        let of = |name| self.find(name).map(|given| given.value.to_ascii_lowercase());
        let mode = of("sslmode").or_else(|| {
            let requires = of("ssl").is_some() || of("requiressl").is_some_and(|given| given == "1");
            requires.then(|| "require".to_owned())
        });
        let root = self.find("sslrootcert").map(|given| given.value.clone());
        let mode = match (mode.as_deref(), root.as_deref()) {
            (None | Some("verify-full"), Some("system")) => {
                self.trusts_system = true;
                Some("verify-full")
            }
            (Some(_), Some("system")) => {
                return Err(invalid(
                    "sslrootcert=system goes with sslmode=verify-full alone: anybody can have a certificate of these authorities, for another name",
                ));
            }
            // Verifies the authority as libpq does, because the driver would trust any server.
            (Some("require"), root) if root.is_some() || self.root_of_environment => Some("verify-ca"),
            // Replaces `allow`, with which the driver would never encrypt. `prefer` encrypts if possible and
            // requires no more.
            (Some("allow"), _) => Some("prefer"),
            (mode, _) => mode,
        };
        let mode = mode.map(str::to_owned);
        self.given
            .retain(|given| given.name != "sslmode" && !(self.trusts_system && given.name == "sslrootcert"));
        self.take_default("sslmode", mode.unwrap_or_default());
        Ok(())
    }

    /// Returns the options for one host, as the driver reads them, with the password from its password file.
    fn target(&self, host: &Host) -> Result<Target, Error> {
        let mut query = form_urlencoded::Serializer::new("postgres:///?".to_owned());
        let mut add = |name: &str, value: &str| {
            query.append_pair(name, value);
        };
        let port = host.port;
        let name = host.name.clone().or_else(|| host.address.map(|address| address.to_string()));
        let name = name.unwrap_or_else(|| {
            // Uses the driver's default: the socket directory, if it exists.
            PgConnectOptions::new_without_pgpass().port(port).get_host().to_owned()
        });
        if name.starts_with('/') {
            // Adds `localhost` first, because the password file lists sockets under this name.
            add("host", "localhost");
        }
        add("host", &name);
        add("port", &port.to_string());
        for name in ["user", "password", "dbname", "sslmode", "sslrootcert", "sslcert", "sslkey"] {
            self.find(name).into_iter().for_each(|given| add(name, &given.value));
        }
        let application = self.find("application_name").or_else(|| self.find("fallback_application_name"));
        application.into_iter().for_each(|given| add("application_name", &given.value));
        let capacity = self.find("statement-cache-capacity");
        capacity.into_iter().for_each(|given| add(given.name, &given.value));
        self.options.iter().for_each(|(name, value)| add(name, value));
        let mut options = query.finish().parse::<PgConnectOptions>().map_err(|_| not_a_url())?;
        if self.trusts_system && self.root_of_environment {
            // Overrides the environment's root certificate, which the driver would read as a file with the
            // name `system`.
            options = options.ssl_root_cert_from_pem(Vec::new());
        }
        Ok(Target { options, address: host.address })
    }
}

/// Refuses an unsupported value. The error shows only values that libpq knows, because others might be a misplaced
/// password.
fn check(given: &Given) -> Result<(), Error> {
    let Given { name, value, place } = given;
    let Some(setting) = table::TABLE.iter().find(|setting| setting.name == *name) else { return Ok(()) };
    let note = setting.note;
    match setting.rule {
        Rule::Done | Rule::NoEffect => Ok(()),
        Rule::Refused => Err(invalid(format!("{place} is refused: {note}"))),
        Rule::Words { taken, refused } => {
            let value = value.to_ascii_lowercase();
            let too_old =
                *name == "ssl_min_protocol_version" && value != "tlsv1" && cfg!(feature = "tls-native-tls");
            if taken.contains(&&*value) && !too_old {
                return Ok(());
            }
            if too_old || refused.contains(&&*value) {
                return Err(invalid(format!("{place} is refused with the value {value}: {note}")));
            }
            Err(invalid(format!("{place} is one of {}", taken.join(", "))))
        }
    }
}

#[derive(Clone, Debug)]
struct Host {
    name: Option<String>,
    address: Option<IpAddr>,
    port: u16,
}

/// Splits the URL's authority into host names and ports, each comma-separated as in parameters.
fn of_authority(text: &str) -> (String, String) {
    let host = |text: &str| {
        let after_address = text.rfind(']').map_or(0, |end| end + 1);
        match text[after_address..].split_once(':') {
            Some((name, port)) => (text[..after_address + name.len()].to_owned(), port.to_owned()),
            None => (text.to_owned(), String::new()),
        }
    };
    let (names, ports): (Vec<_>, Vec<_>) = text.split(',').map(host).unzip();
    let ports = if ports.iter().all(String::is_empty) { String::new() } else { ports.join(",") };
    (names.join(","), ports)
}

/// Removes the brackets around an IPv6 address, which the driver would treat as part of it.
fn without_brackets(text: &str) -> &str {
    text.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(text)
}

fn hosts(settings: &Settings) -> Result<Vec<Host>, Error> {
    let list = |name| settings.find(name).map(|given| (given, given.value.split(',').collect::<Vec<_>>()));
    let (names, addresses) = (list("host"), list("hostaddr"));
    let count = names.as_ref().or(addresses.as_ref()).map_or(1, |(_, list)| list.len());
    let mut hosts = vec![Host { name: None, address: None, port: 5432 }; count];
    for (host, name) in hosts.iter_mut().zip(names.into_iter().flat_map(|(_, list)| list)) {
        host.name = Some(without_brackets(name).to_owned()).filter(|name| !name.is_empty());
    }
    if let Some((given, list)) = addresses {
        let place = &given.place;
        if list.len() != count {
            return Err(invalid(format!("{place} has as many addresses as there are hosts")));
        }
        for (host, text) in hosts.iter_mut().zip(list).filter(|(_, text)| !text.is_empty()) {
            let address = without_brackets(text).parse().map_err(|_| {
                invalid(format!(
                    "{place} is an address such as 192.0.2.1 or 2001:db8::1; a name goes into host"
                ))
            })?;
            host.address = Some(address);
        }
    }
    if let Some((given, list)) = list("port") {
        let place = &given.place;
        if list.len() != 1 && list.len() != count {
            return Err(invalid(format!("{place} has one port, or as many as there are hosts")));
        }
        for (host, text) in hosts.iter_mut().zip(list.iter().cycle()).filter(|(_, text)| !text.is_empty()) {
            host.port = text.parse().ok().filter(|port| *port != 0).ok_or_else(|| bad_port(place))?;
        }
    }
    Ok(hosts)
}

fn decoded(text: &str) -> Result<String, Error> {
    let text = percent_decode_str(text).decode_utf8().map_err(|_| not_a_url())?;
    if text.contains('\0') { Err(not_a_url()) } else { Ok(text.into_owned()) }
}

fn bad_port(place: &str) -> Error {
    invalid(format!("{place} has a port that is no number from 1 to 65535; escape special characters with %"))
}

fn not_a_url() -> Error {
    invalid(
        "this is not the URL of a Postgres database; write postgres://user@host:5432/database and escape special characters with %",
    )
}

fn invalid(message: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::InvalidOption, message)
}
