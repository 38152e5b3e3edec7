//! Tests the settings that each URL sets, and the URLs that are refused.
#![cfg(all(
    feature = "memory",
    feature = "file",
    feature = "postgres-advisory",
    feature = "postgres-row",
    feature = "postgres-ttl",
    feature = "etcd"
))]

use super::*;
use crate::postgres::PgConfig;

fn settings(url: &str) -> String {
    format!("{:?}", read(url).unwrap_or_else(|error| panic!("{url}: {error}")))
}

#[test]
fn the_table_has_the_schemes_of_the_crates() {
    for store in STORES {
        let schemes = store.compiled_in.unwrap().iter().flat_map(Scheme::names);
        assert!(schemes.eq(store.schemes), "{}", store.feature);
    }
    let ours = "memory:, memory:NAME, file:///DIRECTORY, postgres:// also with +advisory, +advisory-xact, +row or +ttl, and etcd:// or etcds://HOST,HOST/PREFIX";
    assert!(known().starts_with(ours), "{}", known());
}

#[test]
fn schemes_name_stores() {
    for (scheme, config) in [
        ("postgres", "AdvisoryConfig"),
        ("postgresql", "AdvisoryConfig"),
        ("postgres+advisory", "AdvisoryConfig"),
        ("postgresql+advisory-xact", "XactConfig"),
        ("POSTGRES+row", "RowConfig"),
        ("postgresql+ttl", "TtlConfig"),
    ] {
        let url = format!("{scheme}://app@db/ledger");
        assert!(settings(&url).starts_with(&format!("{config} {{")), "{scheme}");
        let server = read(&url).unwrap().extension::<PgConfig>().unwrap().to_string();
        assert_eq!(server, "postgres ledger at db:5432", "{scheme}");
    }
    assert!(settings("memory:jobs").starts_with("MemoryStore { name: \"memory:jobs\""));
    assert!(settings("file:///var/lib/locks").starts_with("FileConfig { dir: \"/var/lib/locks\""));
    for scheme in ["etcd", "ETCDS"] {
        let shown = settings(&format!("{scheme}://a,b:1/team/locks"));
        assert!(
            shown.starts_with("EtcdConfig { members: [\"a\", \"b:1\"], prefix: \"team/locks\""),
            "{shown}"
        );
    }
    for bad in ["postgres+lease", "postgres+", "+row", "mysql+row", "postgres+row+ttl"] {
        assert!(read(&format!("{bad}://app@db/ledger")).is_err(), "{bad}");
    }
}

#[test]
fn parameters_become_settings() {
    let shows = |url: &str, parts: &[&str]| {
        let shown = settings(url);
        for part in parts {
            assert!(shown.contains(part), "{url}: {part} in {shown}");
        }
        assert!(!shown.contains("Hunter2x"), "{shown}");
    };
    shows(
        "postgres+ttl://a%40b:Hunter2x%2F@[::1]:5433/my%20db?sslmode=disable&schema=My%20%22locks&install=true&ttl=45s&poll=50ms&options=-c%20work_mem%3D1MB&options[geqo]=off&pooler=transaction&connect_timeout=3&statement_timeout=2s&idle=10m",
        &[
            "server: \"postgres my db at [::1]:5433\"",
            "user: \"a@b\"",
            r#"My \"locks"#,
            "install: true",
            " ttl: 45s",
            "poll: 50ms",
            "pooler: Transaction",
            "connect_timeout: 3s",
            "statement_timeout: 2s",
            "idle: Some(600s)",
        ],
    );
    shows("postgres://db?connect_timeout=3s", &["connect_timeout: 3s", "install: false", "Fnv1a64"]);
    shows(
        "postgres://db?confirm_every=500ms&lost_after=3s&server_gives_up=1m",
        &["confirm_every: 500ms", "lost_after: 3s", "server_gives_up: 60s"],
    );
    shows("postgres+advisory-xact://db?hash=djb2-reverse", &["Reverse"]);
    shows("postgres+row://db?poll=1s&lost_after=5s", &["poll: 1s", "confirm: 1s", "handover: true"]);
    for store in ["postgres://db", "postgres+row://db", "postgres+ttl://db", "file:///d"] {
        shows(&format!("{store}?handover=off"), &["handover: false"]);
        shows(&format!("{store}?handover=on"), &["handover: true"]);
    }
    shows(
        "etcd://a%40b:Hunter2x%2F@a:1,[::1],c/my%20locks?ttl=1m30s&handover=off",
        &["\"[::1]\"", "user: \"a@b\"", "prefix: \"my locks\"", "ttl: 90s", "tls: None", "handover: false"],
    );
    shows("etcds://a/x?ca=/c.pem&cert=/a.pem&key=/k.pem", &["/c.pem", "/a.pem", "/k.pem", "handover: true"]);
    shows("memory:jobs?ttl=30s", &["default_ttl: Some(30s)"]);
    shows(
        "file:///var/lib/my%20locks?poll=20ms&mode=0660&read-only=true",
        &["/var/lib/my locks", "poll: 20ms", "mode: Some(432)", "read_only: true"],
    );
}

#[test]
fn what_would_be_ignored_is_refused() {
    for (url, hint) in [
        ("memory:?poll=1s", "a memory URL has no parameter \"poll\"; the one it has is ttl"),
        ("memory:x?ttl=0s", "the parameter ttl cannot be zero"),
        ("memory://x", "no host and no slashes"),
        ("file:dir", "with three slashes"),
        ("file:///", "a directory of its own"),
        (
            "file:///d?ttl=1s",
            "a file URL has no parameter \"ttl\"; those it has are poll, mode, read-only and handover",
        ),
        ("file:///d?poll=1s&poll=1s", "the parameter poll is given twice"),
        ("file:///d?mode=9", "octal"),
        ("file:///d?read-only=false", "true or left out"),
        ("file:///d?handover=no", "on, off"),
        ("file:///d#x", "%23"),
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
        ("postgres+ttl://db/x?lost_after=30s", "statement_timeout, idle, ttl, poll, handover"),
        ("postgres+advisory-xact://db/x?handover=off", "server_gives_up"),
        ("postgres://db/x?idle=5", "30s"),
        ("postgres://db/x?schema=a&schema=b", "twice"),
        ("postgres://db/x?sslmode=require&sslmode=disable", "twice"),
        ("postgres://db/x#y", "%23"),
        ("etcd://a,b/x?poll=1s", "a etcd URL has no parameter \"poll\"; those it has are ttl and handover"),
        ("etcd://a,b/x?ca=/c.pem", "no parameter \"ca\""),
        ("etcd://a,b/x?ttl=30", "30s"),
        ("etcd://a,b/x?ttl=2h", "hour"),
        ("etcd://a,b/x?handover=no", "on, off"),
        ("etcd://a,b/x#y", "%23"),
        ("etcd://a,a/x", "twice"),
        ("etcd:a", "etcd://"),
        ("etcd://app:1/ter2@a,b/x", "%2F"),
        ("etcd://app:1?ter2@a,b/x", "%3F"),
        ("postgres:db", "postgres://"),
        ("postgres:/db", "postgres://"),
        ("postgres://app:1?ter2@db/x", "%3F"),
        ("postgres://app:1/ter2@db/x", "%2F"),
        ("postgres://app:/ter2@db/x", "%2F"),
        ("postgres+row://app:1?ter2%40db/x", "known are"),
    ] {
        let error = read(url).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidOption, "{url}: {error}");
        assert!(error.message().contains(hint), "{url}: {error}");
        assert!(!error.message().contains("ter2"), "{url}: {error}");
    }
}
