//! The URLs that `connect` accepts and refuses. No error shows a password.

use leasehold::{Error, ErrorKind, connect};

async fn refused(url: &str) -> Error {
    match connect(url).await {
        Ok(lock) => panic!("{url} was taken as {lock}"),
        Err(error) => error,
    }
}

/// Returns the whole text of an error: display, debug and sources.
fn everything(error: &Error) -> String {
    let mut text = format!("{error} {error:?}");
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        text += &format!(" {cause} {cause:?}");
        source = cause.source();
    }
    text
}

#[tokio::test]
async fn what_is_not_a_store_is_refused_with_what_to_do() {
    for (url, hint) in [
        ("", "memory:NAME"),
        ("locks", "file:///DIRECTORY"),
        ("/var/lib/locks", "file:///DIRECTORY"),
        ("redis://host/0", "memory:NAME"),
        #[cfg(feature = "memory")]
        ("memory:x#y", "%23"),
        ("postgres+lease://app@db/app", "+ttl"),
        #[cfg(feature = "memory")]
        ("memory:x?ttl=1s&ttl=2s", "twice"),
    ] {
        let error = refused(url).await;
        assert_eq!(error.kind(), ErrorKind::InvalidOption, "{url}: {error}");
        assert!(error.to_string().contains(hint), "{url}: {error}");
    }
}

#[tokio::test]
async fn a_password_is_never_shown() {
    for url in [
        "postgres://app:hunter2@db/app",
        "postgres://app:hunter2@db:port/app",
        "postgres+ttl://app:hunter2@db/app?x=1&x=2",
        "etcd://app:hunter2@a:2379,b:2379/locks?x=1&x=2",
        "etcd://app:hunter2@a:port,b:2379/locks",
        "etcd://a,b/locks?password=hunter2",
        "etcd://a,b/locks#hunter2",
        "file://app:hunter2@host/dir",
        "file:///dir?password=hunter2",
        "file:///dir#hunter2",
        "memory:x?password=hunter2",
        "memory://app:hunter2@x",
        "app:hunter2@db/app",
        "://app:hunter2@db",
    ] {
        let text = everything(&refused(url).await);
        assert!(!text.contains("hunter2"), "{url}: {text}");
    }
}

#[cfg(not(feature = "memory"))]
#[tokio::test]
async fn a_missing_feature_is_named() {
    let error = refused("memory:").await;
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.to_string().contains("feature `memory`"), "{error}");
}

#[cfg(not(feature = "file"))]
#[tokio::test]
async fn a_missing_file_feature_is_named() {
    let error = refused("file:///var/lib/locks").await;
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.to_string().contains("feature `file`"), "{error}");
}

#[cfg(not(feature = "etcd"))]
#[tokio::test]
async fn a_missing_etcd_feature_is_named() {
    let error = refused("etcd://a:2379,b:2379/locks").await;
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.to_string().contains("feature `etcd`"), "{error}");
}

#[tokio::test]
async fn a_missing_postgres_feature_is_named() {
    for (scheme, feature, is_missing) in [
        ("postgres", "postgres-advisory", cfg!(not(feature = "postgres-advisory"))),
        ("postgresql+advisory-xact", "postgres-advisory", cfg!(not(feature = "postgres-advisory"))),
        ("postgres+row", "postgres-row", cfg!(not(feature = "postgres-row"))),
        ("postgres+ttl", "postgres-ttl", cfg!(not(feature = "postgres-ttl"))),
    ] {
        // No server listens on this port.
        let error = refused(&format!("{scheme}://app:hunter2@127.0.0.1:1/app")).await;
        let expected = if is_missing { ErrorKind::Unsupported } else { ErrorKind::Unavailable };
        assert_eq!(error.kind(), expected, "{scheme}: {error}");
        let part = if is_missing { feature } else { "127.0.0.1:1" };
        let text = everything(&error);
        assert!(text.contains(part) && !text.contains("hunter2"), "{scheme}: {text}");
    }
}

#[cfg(all(feature = "postgres-advisory", feature = "postgres-row", feature = "postgres-ttl"))]
#[test]
fn a_postgres_url_names_a_server_and_a_schema() {
    let url = "postgres+ttl://app:hunter2@db.example:5433/ledger?schema=My%20Locks&ttl=5s";
    let config = leasehold::postgres_config(url).unwrap();
    assert_eq!(config.schema_name().as_str(), "My Locks");
    assert_eq!((config.options().get_host(), config.options().get_port()), ("db.example", 5433));
    assert_eq!(config.options().get_database(), Some("ledger"));
    for bad in ["memory:", "postgres://db/x?schema=", "postgres://app:hunter2@db:port/x"] {
        let error = leasehold::postgres_config(bad).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidOption, "{bad}");
        assert!(!everything(&error).contains("hunter2"), "{error}");
    }
}

#[cfg(all(feature = "postgres-advisory", feature = "postgres-row", feature = "postgres-ttl"))]
#[test]
fn what_a_url_leaves_out_of_liveness_keeps_its_share() {
    use leasehold::postgres::Liveness;
    use std::time::Duration;

    let ms = Duration::from_millis;
    for (parameters, [confirm, lost, server]) in [
        ("", [3_000, 10_000, 15_000]),
        ("?lost_after=30s", [9_000, 30_000, 45_000]),
        ("?lost_after=3s&confirm_every=1s", [1_000, 3_000, 4_500]),
        ("?server_gives_up=1m", [3_000, 10_000, 60_000]),
    ] {
        let config = leasehold::postgres_config(&format!("postgres://app@db/x{parameters}")).unwrap();
        assert_eq!(
            config.liveness_settings(),
            Liveness::new(ms(confirm), ms(lost), ms(server)),
            "{parameters}"
        );
    }
    let config = leasehold::postgres_config("postgres+row://app@db/x?statement_timeout=800ms").unwrap();
    assert_eq!(config.statement_limit(), ms(800));
    for (parameters, hint) in [
        ("lost_after=20s&server_gives_up=15s", "server_gives_up"),
        ("lost_after=1s&confirm_every=900ms", "two confirmations"),
        ("lost_after=1d", "a day at most"),
        ("statement_timeout=2h", "shorter"),
        ("statement_timeout=1ms", "longer"),
    ] {
        let error = leasehold::postgres_config(&format!("postgres://app@db/x?{parameters}")).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidOption, "{parameters}: {error}");
        assert!(error.to_string().contains(hint), "{parameters}: {error}");
    }
}

#[cfg(feature = "postgres-row")]
#[tokio::test]
async fn the_bounds_of_a_holder_of_rows_are_named_by_its_parameter() {
    for value in ["200ms", "6m"] {
        let error = refused(&format!("postgres+row://app@127.0.0.1:1/x?lost_after={value}")).await;
        assert_eq!(error.kind(), ErrorKind::InvalidOption, "{error}");
        assert!(error.to_string().contains("lost_after of rows is 250ms to 5m"), "{error}");
    }
}

/// On another executor than tokio, each store returns an error and does not panic.
#[test]
fn without_a_runtime_every_store_says_so() {
    let directory = tempfile::tempdir().unwrap();
    let file = url::Url::from_directory_path(directory.path()).unwrap().to_string();
    let postgres = |store: &str| format!("postgres{store}://app@127.0.0.1:1/x");
    for (url, is_compiled_in) in [
        ("memory:".to_owned(), cfg!(feature = "memory")),
        (file, cfg!(feature = "file")),
        (postgres(""), cfg!(feature = "postgres-advisory")),
        (postgres("+advisory-xact"), cfg!(feature = "postgres-advisory")),
        (postgres("+row"), cfg!(feature = "postgres-row")),
        (postgres("+ttl"), cfg!(feature = "postgres-ttl")),
    ] {
        let connecting = std::pin::pin!(connect(&url));
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        match Future::poll(connecting, &mut context) {
            std::task::Poll::Ready(Err(error)) => {
                let expected = if is_compiled_in { ErrorKind::NoRuntime } else { ErrorKind::Unsupported };
                assert_eq!(error.kind(), expected, "{url}: {error}");
            }
            other => panic!("{url}: {other:?}"),
        }
    }
}

#[cfg(all(feature = "postgres-advisory", feature = "postgres-row", feature = "postgres-ttl"))]
#[test]
fn urls_as_libpq_knows_them_are_taken_or_the_parameter_is_named() {
    let several =
        "postgres+ttl://app:hunter2@a.example:5433,b.example/ledger?target_session_attrs=read-write&ttl=5s";
    let config = leasehold::postgres_config(several).unwrap();
    assert_eq!(config.to_string(), "postgres ledger at a.example:5433,b.example:5432");
    let by_socket = "postgres+row://app:hunter2@/ledger?host=/cloudsql/project:region:db";
    let config = leasehold::postgres_config(by_socket).unwrap();
    assert_eq!(config.to_string(), "postgres ledger at /cloudsql/project:region:db");
    for (parameter, names) in [
        ("channel_binding=require", "channel_binding"),
        ("target_session_attrs=standby", "target_session_attrs"),
        ("sslmode=no-verify", "sslmode"),
        ("service=ledger", "service"),
        ("pgbouncer=true", "pgbouncer"),
    ] {
        let error =
            leasehold::postgres_config(&format!("postgres://app:hunter2@db/x?{parameter}")).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidOption, "{parameter}: {error}");
        assert!(error.message().contains(names) && !everything(&error).contains("hunter2"), "{error}");
    }
    let changed = "postgres+ttl://app:changed@db/x?ttl=5s";
    let credentials = leasehold::postgres_credentials(changed).unwrap();
    assert_eq!(credentials, leasehold::postgres::Credentials::password("changed").user("app"));
}

#[cfg(feature = "memory")]
mod memory {
    use super::*;
    use leasehold::LockExt;
    use std::time::Duration;

    /// With metrics, the given function classifies only the keys of its connection.
    #[cfg(feature = "metrics")]
    #[tokio::test]
    async fn the_program_puts_keys_into_classes() {
        use leasehold::{ConnectOptions, LockKey, connect_with};
        use std::sync::atomic::{AtomicBool, Ordering};

        static ASKED: AtomicBool = AtomicBool::new(false);
        fn second_part(key: &LockKey) -> &str {
            ASKED.store(true, Ordering::Relaxed);
            key.as_str().split(':').nth(1).unwrap_or_default()
        }

        connect("memory:").await.unwrap().key("a:b").acquire().await.unwrap().release().await.unwrap();
        assert!(!ASKED.load(Ordering::Relaxed));
        let lock = connect_with("memory:", ConnectOptions::new().key_class(second_part)).await.unwrap();
        lock.key("a:b").acquire().await.unwrap().release().await.unwrap();
        assert!(ASKED.load(Ordering::Relaxed));
    }

    #[tokio::test]
    async fn a_name_is_shared_and_no_name_is_private() {
        let [a, b] = [
            connect("memory:shared-by-name").await.unwrap(),
            connect("memory:shared-by-name").await.unwrap(),
        ];
        let held = a.key("k").acquire().await.unwrap();
        assert!(b.key("k").try_acquire().await.unwrap().is_none(), "one store");
        assert!(connect("memory:another").await.unwrap().key("k").try_acquire().await.unwrap().is_some());
        assert!(connect("memory:").await.unwrap().key("k").try_acquire().await.unwrap().is_some());
        assert!(connect("memory:").await.unwrap().key("k").try_acquire().await.unwrap().is_some());
        held.release().await.unwrap();
    }

    #[tokio::test]
    async fn a_ttl_gives_leases() {
        let lock = connect("memory:?ttl=30s").await.unwrap();
        let guard = lock.key("k").acquire().await.unwrap();
        let remaining = guard.remaining().expect("a lease");
        assert!(remaining <= Duration::from_secs(30), "{remaining:?}");
        let plain = connect("memory:").await.unwrap().key("k").acquire().await.unwrap();
        assert_eq!(plain.remaining(), None);
    }

    #[tokio::test]
    async fn a_store_s_own_connect_gives_the_engine_and_what_it_has_counted() {
        let lock: leasehold::engine::Engine = leasehold::memory::connect().unwrap();
        lock.key("k").acquire().await.unwrap().release().await.unwrap();
        let counters: leasehold::engine::Counters = lock.counters();
        assert_eq!((counters.granted, counters.released, counters.lost), (1, 1, 0));
    }

    #[tokio::test]
    async fn strict_about_the_rest() {
        for (url, hint) in [
            ("memory://x", "memory:NAME"),
            ("memory:///x", "memory:NAME"),
            ("memory:/x", "memory:NAME"),
            ("memory:x?poll=1s", "is ttl"),
            ("memory:x?TTL=1s", "is ttl"),
            ("memory:x?ttl=", "ttl"),
            ("memory:x?ttl=30", "30s"),
            ("memory:x?ttl=0s", "zero"),
        ] {
            let error = refused(url).await;
            assert_eq!(error.kind(), ErrorKind::InvalidOption, "{url}: {error}");
            assert!(error.to_string().contains(hint), "{url}: {error}");
        }
    }
}

#[cfg(feature = "file")]
mod file {
    use super::*;
    use leasehold::LockExt;

    #[tokio::test]
    async fn one_directory_is_one_store() {
        let dir = tempfile::tempdir().unwrap();
        let url = url::Url::from_directory_path(dir.path()).unwrap().to_string();
        let a = connect(&url).await.unwrap();
        let b = connect(&format!("{url}?poll=5ms")).await.unwrap();
        let held = a.key("k").acquire().await.unwrap();
        assert!(b.key("k").try_acquire().await.unwrap().is_none());
        held.release().await.unwrap();
        assert!(b.key("k").try_acquire().await.unwrap().is_some());
    }

    #[tokio::test]
    async fn the_path_is_absolute_and_of_this_machine() {
        for url in [
            "file:locks",
            "file:./locks",
            "file://locks",
            "file://server/locks",
            "file:/locks",
            "file:",
            "file:///",
        ] {
            let error = refused(url).await;
            assert_eq!(error.kind(), ErrorKind::InvalidOption, "{url}: {error}");
            assert!(error.to_string().contains("file:///var/lib/locks"), "{url}: {error}");
        }
    }

    #[tokio::test]
    async fn strict_about_parameters() {
        for (url, hint) in [
            ("file:///tmp/locks?ttl=1s", "are poll, mode, read-only and handover"),
            ("file:///tmp/locks?mode=rw", "octal"),
            ("file:///tmp/locks?mode=0777", "0660"),
            ("file:///tmp/locks?read-only=no", "left out"),
            ("file:///tmp/locks?mode=0660&mode=0660", "twice"),
            ("file:///tmp/locks?poll=fast", "30s"),
            ("file:///tmp/locks?poll=0ms", "zero"),
            ("file:///tmp/locks?poll=1s&poll=1s", "twice"),
        ] {
            let error = refused(url).await;
            assert_eq!(error.kind(), ErrorKind::InvalidOption, "{url}: {error}");
            assert!(error.to_string().contains(hint), "{url}: {error}");
        }
    }
}
