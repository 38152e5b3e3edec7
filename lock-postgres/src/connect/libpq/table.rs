//! All connection parameters and environment variables of libpq, and how each is handled.

use super::{Rule, Setting};

use Rule::{Done, NoEffect, Refused, Words};

const fn row(name: &'static str, variable: &'static str, rule: Rule, note: &'static str) -> Setting {
    Setting { name, variable, rule, note }
}

const NO_GSS: &str = "the driver does not speak GSSAPI";
const NO_OAUTH: &str = "the driver does not speak OAuth";
const PROBES: &str = "sessions are confirmed instead (`lost_after`)";
const FORMATS: &str = "no statement of ours depends on it";

/// The table. It refuses settings that demand more security than is available, or a different server than
/// would be used.
pub(super) const TABLE: &[Setting] = &[
    row("host", "PGHOST", Done, "several with commas between them; a directory of sockets begins with `/`"),
    row(
        "hostaddr",
        "PGHOSTADDR",
        Done,
        "as many as hosts. The certificate is verified against the name in `host`",
    ),
    row("port", "PGPORT", Done, "one for all hosts, or as many as hosts"),
    row("dbname", "PGDATABASE", Done, ""),
    row("user", "PGUSER", Done, "else the user of the system"),
    row("password", "PGPASSWORD", Done, ""),
    row("passfile", "", Refused, "name the file by PGPASSFILE"),
    row("", "PGPASSFILE", Done, "else `~/.pgpass`"),
    row("require_auth", "PGREQUIREAUTH", Refused, "the driver uses the method that the server chooses"),
    row(
        "channel_binding",
        "PGCHANNELBINDING",
        Words { taken: &["prefer", "disable"], refused: &["require"] },
        "the driver binds no channel: leave it out and have the certificate verified, by sslmode=verify-full",
    ),
    row("connect_timeout", "PGCONNECT_TIMEOUT", Done, "for all hosts and addresses together"),
    row("client_encoding", "PGCLIENTENCODING", NoEffect, "always UTF-8"),
    row("options", "PGOPTIONS", Done, "the URL's options follow the variable's"),
    row("application_name", "PGAPPNAME", Done, ""),
    row("fallback_application_name", "", Done, "without an `application_name`"),
    row("keepalives", "", NoEffect, PROBES),
    row("keepalives_idle", "", NoEffect, PROBES),
    row("keepalives_interval", "", NoEffect, PROBES),
    row("keepalives_count", "", NoEffect, PROBES),
    row("tcp_user_timeout", "", NoEffect, PROBES),
    row(
        "replication",
        "",
        Words { taken: &["false", "off", "no", "0"], refused: &["true", "on", "yes", "1", "database"] },
        "locks are not replicated: leave it out",
    ),
    row(
        "gssencmode",
        "PGGSSENCMODE",
        Words { taken: &["prefer", "disable"], refused: &["require"] },
        "the driver does not speak GSSAPI: encrypt by TLS, with sslmode=verify-full",
    ),
    row(
        "sslmode",
        "PGSSLMODE",
        Words {
            taken: &["prefer", "disable", "allow", "require", "verify-ca", "verify-full"],
            refused: &["no-verify"],
        },
        "a word of another driver: write require",
    ),
    row(
        "ssl",
        "",
        Words { taken: &["true"], refused: &["false"] },
        "write sslmode=disable; true is sslmode=require",
    ),
    row(
        "requiressl",
        "PGREQUIRESSL",
        Words { taken: &["0", "1"], refused: &[] },
        "1 is sslmode=require where no `sslmode` is given",
    ),
    row(
        "sslnegotiation",
        "PGSSLNEGOTIATION",
        Words { taken: &["postgres"], refused: &["direct"] },
        "the driver asks the server first: leave it out",
    ),
    row("sslcompression", "PGSSLCOMPRESSION", NoEffect, "nothing is compressed, with libpq neither"),
    row("sslcert", "PGSSLCERT", Done, ""),
    row("sslkey", "PGSSLKEY", Done, "a file"),
    row("sslpassword", "", Refused, "the driver reads keys without a password alone"),
    row(
        "sslcertmode",
        "PGSSLCERTMODE",
        Words { taken: &["allow"], refused: &["disable", "require"] },
        "a certificate is sent if the server asks for one: leave sslcert out, or have the server insist",
    ),
    row(
        "sslrootcert",
        "PGSSLROOTCERT",
        Done,
        "makes `require` mean `verify-ca`. `system` is the authorities of the chosen `tls-` feature, with `verify-full`",
    ),
    row("sslcrl", "PGSSLCRL", Refused, "the driver reads no lists of revoked certificates"),
    row("sslcrldir", "PGSSLCRLDIR", Refused, "the driver reads no lists of revoked certificates"),
    row("sslkeylogfile", "", Refused, "the driver writes no keys"),
    row(
        "sslsni",
        "PGSSLSNI",
        Words { taken: &["1"], refused: &["0"] },
        "the driver names the host to the server: leave it out",
    ),
    row("requirepeer", "PGREQUIREPEER", Refused, "the driver does not ask who owns the server's process"),
    row(
        "ssl_min_protocol_version",
        "PGSSLMINPROTOCOLVERSION",
        Words { taken: &["tlsv1", "tlsv1.1", "tlsv1.2"], refused: &["tlsv1.3"] },
        "the driver also speaks TLSv1.2 (with tls-native-tls, older versions): have the server insist, by its ssl_min_protocol_version",
    ),
    row("ssl_max_protocol_version", "PGSSLMAXPROTOCOLVERSION", Refused, "the driver speaks the newest"),
    row(
        "min_protocol_version",
        "PGMINPROTOCOLVERSION",
        Words { taken: &["3.0"], refused: &["3.2", "latest"] },
        "the driver speaks version 3.0: leave it out",
    ),
    row(
        "max_protocol_version",
        "PGMAXPROTOCOLVERSION",
        Words { taken: &["3.0", "3.2", "latest"], refused: &[] },
        "",
    ),
    row("krbsrvname", "PGKRBSRVNAME", NoEffect, NO_GSS),
    row("gsslib", "PGGSSLIB", NoEffect, NO_GSS),
    row("gssdelegation", "PGGSSDELEGATION", NoEffect, NO_GSS),
    row("scram_client_key", "", Refused, "the driver logs in with a password"),
    row("scram_server_key", "", Refused, "the driver logs in with a password"),
    row("service", "PGSERVICE", Refused, "files of services are not read: write its parameters into the URL"),
    row("servicefile", "PGSERVICEFILE", NoEffect, "a service is refused"),
    row(
        "target_session_attrs",
        "PGTARGETSESSIONATTRS",
        Words {
            taken: &["any", "read-write", "primary"],
            refused: &["read-only", "standby", "prefer-standby"],
        },
        "locks are taken at the primary: write read-write, or leave it out",
    ),
    row(
        "load_balance_hosts",
        "PGLOADBALANCEHOSTS",
        Words { taken: &["disable", "random"], refused: &[] },
        "",
    ),
    row("oauth_issuer", "", Refused, NO_OAUTH),
    row("oauth_client_id", "", Refused, NO_OAUTH),
    row("oauth_client_secret", "", Refused, NO_OAUTH),
    row("oauth_scope", "", Refused, NO_OAUTH),
    row("", "PGDATESTYLE", NoEffect, FORMATS),
    row("", "PGTZ", NoEffect, FORMATS),
    row("", "PGGEQO", NoEffect, FORMATS),
    row("", "PGSYSCONFDIR", NoEffect, "a service is refused"),
    row("", "PGLOCALEDIR", NoEffect, "messages are the server's and ours"),
    // The driver's own parameters, beside libpq's.
    row("statement-cache-capacity", "", Done, "of the driver"),
    row("ssl-mode", "", Done, "as `sslmode`"),
    row("ssl-root-cert", "", Done, "as `sslrootcert`"),
    row("ssl-ca", "", Done, "as `sslrootcert`"),
    row("ssl-cert", "", Done, "as `sslcert`"),
    row("ssl-key", "", Done, "as `sslkey`"),
];
