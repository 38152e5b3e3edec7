use std::fmt::Write as _;

use super::table::TABLE;
use super::*;

/// The parameters of libpq 18, in the manual's order (section 34.1.2).
const PARAMETERS: &str = "host hostaddr port dbname user password passfile require_auth channel_binding connect_timeout \
    client_encoding options application_name fallback_application_name keepalives keepalives_idle keepalives_interval \
    keepalives_count tcp_user_timeout replication gssencmode sslmode requiressl sslnegotiation sslcompression sslcert \
    sslkey sslkeylogfile sslpassword sslcertmode sslrootcert sslcrl sslcrldir sslsni requirepeer ssl_min_protocol_version \
    ssl_max_protocol_version min_protocol_version max_protocol_version krbsrvname gsslib gssdelegation scram_client_key \
    scram_server_key service servicefile target_session_attrs load_balance_hosts oauth_issuer oauth_client_id \
    oauth_client_secret oauth_scope";

/// The environment variables of libpq 18 (section 34.15).
const VARIABLES: &str = "PGHOST PGSSLNEGOTIATION PGHOSTADDR PGPORT PGDATABASE PGUSER PGPASSWORD PGPASSFILE PGREQUIREAUTH \
    PGCHANNELBINDING PGSERVICE PGSERVICEFILE PGOPTIONS PGAPPNAME PGSSLMODE PGREQUIRESSL PGSSLCOMPRESSION PGSSLCERT \
    PGSSLKEY PGSSLCERTMODE PGSSLROOTCERT PGSSLCRL PGSSLCRLDIR PGSSLSNI PGREQUIREPEER PGSSLMINPROTOCOLVERSION \
    PGSSLMAXPROTOCOLVERSION PGGSSENCMODE PGKRBSRVNAME PGGSSLIB PGGSSDELEGATION PGCONNECT_TIMEOUT PGCLIENTENCODING \
    PGTARGETSESSIONATTRS PGLOADBALANCEHOSTS PGMINPROTOCOLVERSION PGMAXPROTOCOLVERSION PGDATESTYLE PGTZ PGGEQO \
    PGSYSCONFDIR PGLOCALEDIR";

/// Renders the table for the documents.
fn markdown() -> String {
    let code = |text: &str| if text.is_empty() { String::new() } else { format!("`{text}`") };
    let mut text = String::from("|Parameter|Variable|Here|\n|---|---|---|\n");
    for Setting { name, variable, rule, note } in TABLE {
        let words = |words: &[&str]| words.iter().map(|word| code(word)).collect::<Vec<_>>().join(", ");
        let here = match rule {
            Rule::Done => "done".to_owned(),
            Rule::NoEffect => "no effect".to_owned(),
            Rule::Refused => "refused".to_owned(),
            Rule::Words { taken, refused: [] } => words(taken),
            Rule::Words { taken, refused } => format!("{}; refused: {}", words(taken), words(refused)),
        };
        let note = if note.is_empty() { String::new() } else { format!(": {note}") };
        let _ = writeln!(text, "|{}|{}|{here}{note}|", code(name), code(variable));
    }
    text
}

fn with(url: &str, variables: &[(&str, &str)]) -> Result<Parsed, Error> {
    let variable = |name: &str| {
        variables.iter().find(|(known, _)| *known == name).map(|(_, value)| OsString::from(value))
    };
    parse(url, &Environment { variable: &variable, user: &|| Some("me".to_owned()) })
}

fn of(url: &str) -> Parsed {
    with(url, &[]).unwrap_or_else(|error| panic!("{url}: {error}"))
}

#[track_caller]
fn refused(outcome: Result<Parsed, Error>, names: &str) {
    let error = outcome.err().unwrap_or_else(|| panic!("{names} was taken"));
    assert_eq!(error.kind(), ErrorKind::InvalidOption);
    assert!(error.message().contains(names), "{names} is not in: {error}");
    assert!(!error.message().contains("hunter2"), "{error}");
}

/// Returns `HOST:PORT` for each host, with the host's address if one was given.
fn places(parsed: &Parsed) -> Vec<String> {
    let place = |Target { options, address }: &Target| {
        let host =
            options.get_socket().map_or(options.get_host().to_owned(), |path| path.display().to_string());
        let address = address.map(|address| format!("={address}")).unwrap_or_default();
        format!("{host}:{}{address}", options.get_port())
    };
    parsed.targets.iter().map(place).collect()
}

fn mode(parsed: &Parsed) -> String {
    format!("{:?}", parsed.targets[0].options.get_ssl_mode())
}

#[test]
fn the_table_has_all_that_libpq_has_and_the_documents_have_the_table() {
    for name in PARAMETERS.split_whitespace() {
        assert_eq!(TABLE.iter().filter(|setting| setting.name == name).count(), 1, "{name}");
    }
    for variable in VARIABLES.split_whitespace() {
        assert_eq!(TABLE.iter().filter(|setting| setting.variable == variable).count(), 1, "{variable}");
    }
    let written = include_str!("../../../../docs/libpq.md");
    let table = markdown();
    assert!(written.contains(&table), "the table of docs/libpq.md is to be:\n{table}");
}

#[test]
fn what_asks_for_more_than_is_done_is_refused_by_its_name() {
    let free = "hunter2";
    for Setting { name, variable, rule, .. } in TABLE {
        let (bad, good): (Vec<&str>, Vec<&str>) = match rule {
            Rule::Refused => (vec![free], vec![""]),
            Rule::Words { taken, refused } => ([*refused, &[free]].concat(), [*taken, &[""]].concat()),
            Rule::NoEffect => (vec![], vec![free, ""]),
            Rule::Done => (vec![], vec![""]),
        };
        for value in bad {
            if !name.is_empty() {
                refused(with(&format!("postgres://app@db/x?{name}={value}"), &[]), name);
            }
            if !variable.is_empty() {
                refused(with("postgres://app@db/x", &[(variable, value)]), variable);
            }
        }
        // Skips these values, because the driver with native TLS cannot refuse older versions.
        let is_older = |value: &str| cfg!(feature = "tls-native-tls") && value.starts_with("tlsv1.");
        for value in good.into_iter().filter(|value| !is_older(value)) {
            if !name.is_empty() {
                of(&format!("postgres://app@db/x?{name}={value}"));
            }
            with("postgres://app@db/x", &[(variable, value)]).unwrap();
        }
    }
    let shown = with("postgres://app@db/x?channel_binding=require", &[]).err().unwrap().to_string();
    assert!(shown.contains("value require") && shown.contains("sslmode=verify-full"), "{shown}");
    refused(with("postgres://app@db/x?pgbouncer=true", &[]), "pgbouncer");
    refused(with("postgres://app@db/x?hunter2=true", &[]), "of that name");
}

#[test]
fn the_url_counts_before_the_environment() {
    let variables = [
        ("PGHOST", "of.environment"),
        ("PGPORT", "6000"),
        ("PGUSER", "envy"),
        ("PGDATABASE", "ledger"),
        ("PGSSLMODE", "verify-full"),
        ("PGTARGETSESSIONATTRS", "read-write"),
    ];
    let parsed = with("postgres://", &variables).unwrap();
    let options = &parsed.targets[0].options;
    assert_eq!(places(&parsed), ["of.environment:6000"]);
    assert_eq!((options.get_username(), options.get_database()), ("envy", Some("ledger")));
    assert_eq!((mode(&parsed).as_str(), parsed.wanted), ("VerifyFull", Wanted::ReadWrite));
    let url = "postgres://app@db:5433/x?sslmode=disable&target_session_attrs=any";
    let parsed = with(url, &variables).unwrap();
    let options = &parsed.targets[0].options;
    assert_eq!(places(&parsed), ["db:5433"]);
    assert_eq!((options.get_username(), options.get_database()), ("app", Some("x")));
    assert_eq!((mode(&parsed).as_str(), parsed.wanted), ("Disable", Wanted::Any));
    // The address applies to any host, as with psql.
    let parsed = with("postgres://app@db/x", &[("PGHOSTADDR", "192.0.2.7")]).unwrap();
    assert_eq!(places(&parsed), ["db:5432=192.0.2.7"]);
}

#[test]
fn hosts_addresses_and_ports_are_lists() {
    for (url, expected) in [
        ("postgres://app@a,b:5433,[2001:db8::1]:5434/x", vec!["a:5432", "b:5433", "2001:db8::1:5434"]),
        ("postgres://app@a,b/x?port=6000", vec!["a:6000", "b:6000"]),
        ("postgres:///x?host=a,b&port=6000,6001", vec!["a:6000", "b:6001"]),
        ("postgres:///x?host=/run/a,b", vec!["/run/a:5432", "b:5432"]),
        ("postgres://app@%2Frun%2Fpg/x", vec!["/run/pg:5432"]),
        ("postgres://app:pw@/x?host=/cloudsql/project", vec!["/cloudsql/project:5432"]),
        (
            "postgres://app@a,b/x?hostaddr=192.0.2.1,2001:db8::2",
            vec!["a:5432=192.0.2.1", "b:5432=2001:db8::2"],
        ),
        ("postgres:///x?hostaddr=192.0.2.1", vec!["192.0.2.1:5432=192.0.2.1"]),
        ("postgres://app@[::1]/x", vec!["::1:5432"]),
    ] {
        assert_eq!(places(&of(url)), expected, "{url}");
    }
    for (url, names) in [
        ("postgres://app:hunter2@a:70000/x", "port"),
        ("postgres://app:hunter2@a:0/x", "port"),
        ("postgres://app@a/x?port=hunter2", "the parameter port"),
        ("postgres://app@a,b/x?port=1,2,3", "the parameter port"),
        ("postgres://app@a,b/x?hostaddr=192.0.2.1", "the parameter hostaddr"),
        ("postgres://app@a/x?hostaddr=hunter2", "the parameter hostaddr"),
        ("postgres://app:hunter2@a/b@c", "not the URL"),
        ("postgres://app:hunter2@a/x#y", "not the URL"),
        ("mysql://app:hunter2@a/x", "not the URL"),
        ("postgres://app:%ffhunter2@a/x", "not the URL"),
    ] {
        refused(with(url, &[]), names);
    }
}

#[test]
fn urls_as_providers_print_them() {
    for (url, place, user, encryption) in [
        // Heroku, Supabase, Amazon, Neon without its last parameter, Azure with the @ of its older users, Google, Aiven.
        (
            "postgres://u8k:p4s@ec2-1-2-3-4.compute-1.amazonaws.com:5432/d1",
            "ec2-1-2-3-4.compute-1.amazonaws.com:5432",
            "u8k",
            "Prefer",
        ),
        (
            "postgresql://postgres.ref:[YOUR-PASSWORD]@aws-0-eu.pooler.supabase.com:6543/postgres",
            "aws-0-eu.pooler.supabase.com:6543",
            "postgres.ref",
            "Prefer",
        ),
        (
            "postgresql://app:pw@db.abc.eu-west-1.rds.amazonaws.com/x?sslmode=verify-full&sslrootcert=global-bundle.pem",
            "db.abc.eu-west-1.rds.amazonaws.com:5432",
            "app",
            "VerifyFull",
        ),
        (
            "postgresql://alex:pw@ep-cool-1-pooler.us-east-2.aws.neon.tech/neondb?sslmode=require&options=endpoint%3Dep-cool-1",
            "ep-cool-1-pooler.us-east-2.aws.neon.tech:5432",
            "alex",
            "Require",
        ),
        (
            "postgres://app%40srv:pw@srv.postgres.database.azure.com:5432/postgres?sslmode=require",
            "srv.postgres.database.azure.com:5432",
            "app@srv",
            "Require",
        ),
        (
            "postgres://app@srv:pw@srv.postgres.database.azure.com:5432/postgres?sslmode=require",
            "srv.postgres.database.azure.com:5432",
            "app@srv",
            "Require",
        ),
        (
            "postgres://avnadmin:pw@pg-1.aivencloud.com:22000/defaultdb?ssl=true",
            "pg-1.aivencloud.com:22000",
            "avnadmin",
            "Require",
        ),
        (
            "postgres://app:pw@h/x?ssl-mode=allow&gssencmode=prefer&connect_timeout=10",
            "h:5432",
            "app",
            "Prefer",
        ),
    ] {
        let parsed = of(url);
        assert_eq!(places(&parsed), [place], "{url}");
        assert_eq!(parsed.targets[0].options.get_username(), user, "{url}");
        assert_eq!(mode(&parsed), encryption, "{url}");
    }
    let neon = of("postgresql://alex:pw@h/neondb?options=endpoint%3Dep-cool-1");
    assert_eq!(neon.targets[0].options.get_options(), Some("endpoint=ep-cool-1"));
    refused(
        with("postgresql://alex:pw@h/neondb?sslmode=require&channel_binding=require", &[]),
        "channel_binding",
    );
    refused(
        with("postgresql://alex:pw@h/neondb?sslmode=no-verify", &[]),
        "sslmode is refused with the value no-verify",
    );
}

/// Checks that a named authority is verified. Otherwise the driver would encrypt but trust any server.
#[test]
fn an_authority_that_is_named_is_asked() {
    assert_eq!(mode(&of("postgres://app@db/x?sslmode=require&sslrootcert=ours.crt")), "VerifyCa");
    let variables = [("PGSSLROOTCERT", "ours.crt"), ("PGREQUIRESSL", "1")];
    assert_eq!(mode(&with("postgres://app@db/x", &variables).unwrap()), "VerifyCa");
    assert_eq!(mode(&of("postgres://app@db/x?sslrootcert=system")), "VerifyFull");
    refused(with("postgres://app@db/x?sslmode=require&sslrootcert=system", &[]), "sslrootcert=system");
}

#[test]
fn without_a_user_the_system_names_one_or_the_error_says_where_to() {
    assert_eq!(of("postgres://db/x").targets[0].options.get_username(), "me");
    let nobody = |url: &str, user: Option<&str>| {
        let variable = |name: &str| user.filter(|_| name == "PGUSER").map(OsString::from);
        parse(url, &Environment { variable: &variable, user: &|| None })
    };
    refused(nobody("postgres://db/x", None), "PGUSER");
    assert!(nobody("postgres://app@db/x", None).is_ok() && nobody("postgres://db/x", Some("app")).is_ok());
}
