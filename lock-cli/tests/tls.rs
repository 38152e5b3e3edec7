//! Encrypted connections with generated certificates: the servers that each `sslmode` accepts, and the messages of refusals.
//! These tests need a driver with TLS.
#![cfg(feature = "tls-rustls-ring-webpki")]
#![allow(clippy::unwrap_used, missing_docs)]

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use leasehold::postgres::sqlx::{Connection as _, PgConnection, Row as _, raw_sql};
use leasehold::{Error, ErrorKind, LockExt as _};
use test_servers::{Cluster, ClusterOptions};

/// The certificate is valid for the name `localhost`, but not for the address 127.0.0.1.
const EXTENSIONS: &str = "\
[req]
distinguished_name = name
x509_extensions = authority
prompt = no
[name]
CN = made for a test
[authority]
basicConstraints = critical, CA:TRUE
keyUsage = critical, keyCertSign, cRLSign
subjectKeyIdentifier = hash
[server]
basicConstraints = CA:FALSE
subjectAltName = DNS:localhost
extendedKeyUsage = serverAuth
";

const STORES: [&str; 4] = ["postgres", "postgres+advisory-xact", "postgres+row", "postgres+ttl"];

struct Certificates(tempfile::TempDir);

impl Certificates {
    /// Creates two authorities, `ours` and `other`, and a server certificate signed by `ours`.
    fn make() -> Self {
        let made = Self(tempfile::tempdir().unwrap());
        std::fs::write(made.path("config"), EXTENSIONS).unwrap();
        let new_key = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -config config";
        for authority in ["ours", "other"] {
            let files = format!("-keyout {authority}.key -out {authority}.crt");
            made.openssl(&format!("req -x509 {new_key} -days 2 {files}"));
        }
        made.openssl(&format!("req -new {new_key} -keyout server.key -out server.csr"));
        made.openssl(
            "x509 -req -in server.csr -CA ours.crt -CAkey ours.key -CAcreateserial -days 2 \
             -extfile config -extensions server -out server.crt",
        );
        made
    }

    fn openssl(&self, arguments: &str) {
        let mut command = Command::new("openssl");
        command.args(arguments.split_whitespace()).current_dir(self.0.path()).stdin(Stdio::null());
        let output = command.output().unwrap_or_else(|error| {
            panic!("cannot start openssl ({error}); install it: apt-get install openssl")
        });
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "openssl {arguments}: {said}");
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn text(&self, name: &str) -> String {
        std::fs::read_to_string(self.path(name)).unwrap()
    }
}

/// Returns the URL of a store on `cluster` under the name `host`.
fn url(cluster: &Cluster, scheme: &str, host: &str, mode: &str, authority: Option<&Path>) -> String {
    let authority = authority.map(|file| format!("&sslrootcert={}", file.display())).unwrap_or_default();
    let port = cluster.port();
    format!("{scheme}://postgres:s3cret@{host}:{port}/postgres?install=true&sslmode={mode}{authority}")
}

/// Returns whether all sessions of the library are encrypted while a lock is held.
async fn encrypted(cluster: &Cluster, url: &str) -> bool {
    let lock = leasehold::connect(url).await.unwrap_or_else(|error| panic!("{url}: {error:?}"));
    let guard = lock.key("k").acquire().await.unwrap();
    let mut looking = PgConnection::connect(&cluster.admin_url()).await.unwrap();
    let sessions = "SELECT count(*) FILTER (WHERE s.ssl), count(*) FROM pg_stat_ssl s
        JOIN pg_stat_activity a USING (pid) WHERE a.application_name = 'leasehold'";
    let row = raw_sql(sessions).fetch_one(&mut looking).await.unwrap();
    let (encrypted, all): (i64, i64) = (row.get(0), row.get(1));
    guard.release().await.unwrap();
    lock.close().await.unwrap();
    assert!(all > 0 && (encrypted == 0 || encrypted == all), "{url}: {encrypted} of {all}");
    encrypted > 0
}

async fn refused(url: &str) -> Error {
    let error = match leasehold::connect(url).await {
        Ok(lock) => panic!("{url} was taken as {lock}"),
        Err(error) => error,
    };
    let mut shown = format!("{error} {error:?}");
    let mut cause = std::error::Error::source(&error);
    while let Some(source) = cause {
        shown += &format!(" {source} {source:?}");
        cause = source.source();
    }
    assert!(!shown.contains("s3cret"), "{shown}");
    error
}

#[track_caller]
fn assert_error(error: &Error, kind: ErrorKind, says: &str) {
    assert_eq!(error.kind(), kind, "{error:?}");
    assert!(error.message().contains(says), "{says:?} is not in: {error:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_with_a_certificate() {
    let certificates = Certificates::make();
    let (certificate, key) = (certificates.text("server.crt"), certificates.text("server.key"));
    let cluster = Cluster::start(ClusterOptions::new().password("s3cret").tls(certificate, key));
    let ours = certificates.path("ours.crt");
    for scheme in STORES {
        let full = url(&cluster, scheme, "localhost", "verify-full", Some(&ours));
        assert!(encrypted(&cluster, &full).await, "{scheme}");
    }
    let authority = url(&cluster, "postgres", "127.0.0.1", "verify-ca", Some(&ours));
    assert!(encrypted(&cluster, &authority).await, "the name does not count");
    // `require` encrypts without a check of the server's name.
    assert!(encrypted(&cluster, &url(&cluster, "postgres", "127.0.0.1", "require", None)).await);
    assert!(!encrypted(&cluster, &url(&cluster, "postgres", "127.0.0.1", "disable", None)).await);

    let advice = "check sslmode and sslrootcert against the server's certificate and the host's name in it";
    let another_name = url(&cluster, "postgres", "127.0.0.1", "verify-full", Some(&ours));
    assert_error(&refused(&another_name).await, ErrorKind::InvalidOption, advice);
    let other = certificates.path("other.crt");
    for mode in ["verify-ca", "verify-full"] {
        let error = refused(&url(&cluster, "postgres", "localhost", mode, Some(&other))).await;
        assert_error(&error, ErrorKind::InvalidOption, advice);
    }
    // A given `sslrootcert` is checked even with `require`, as by libpq.
    let error = refused(&url(&cluster, "postgres", "localhost", "require", Some(&other))).await;
    assert_error(&error, ErrorKind::InvalidOption, advice);
    let missing = certificates.path("nowhere.crt");
    let error = refused(&url(&cluster, "postgres", "localhost", "verify-full", Some(&missing))).await;
    assert_error(&error, ErrorKind::InvalidOption, "sslrootcert, sslcert and sslkey");
}

/// The URL has several hosts, each with an address (`hostaddr`). The first cannot be reached.
#[tokio::test(flavor = "multi_thread")]
async fn a_certificate_is_verified_against_the_host_whatever_the_address() {
    let certificates = Certificates::make();
    let (certificate, key) = (certificates.text("server.crt"), certificates.text("server.key"));
    let cluster = Cluster::start(ClusterOptions::new().password("s3cret").tls(certificate, key));
    let ours = certificates.path("ours.crt").display().to_string();
    let at = |scheme: &str, hosts: &str, addresses: &str, ports: &str| {
        format!(
            "{scheme}://postgres:s3cret@/postgres?install=true&sslmode=verify-full&sslrootcert={ours}&host={hosts}&hostaddr={addresses}&port={ports}"
        )
    };
    let port = cluster.port();
    for scheme in STORES {
        let one = at(scheme, "localhost", "127.0.0.1", &port.to_string());
        assert!(encrypted(&cluster, &one).await, "{scheme}");
        let two = at(scheme, "elsewhere.example,localhost", "127.0.0.1,127.0.0.1", &format!("1,{port}"));
        assert!(encrypted(&cluster, &two).await, "{scheme}");
    }
    let advice = "check sslmode and sslrootcert against the server's certificate and the host's name in it";
    let another = at("postgres", "elsewhere.example", "127.0.0.1", &port.to_string());
    assert_error(&refused(&another).await, ErrorKind::InvalidOption, advice);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_without_a_certificate() {
    let cluster = Cluster::start(ClusterOptions::new().password("s3cret"));
    assert!(!encrypted(&cluster, &url(&cluster, "postgres", "127.0.0.1", "prefer", None)).await);
    for mode in ["require", "verify-full"] {
        let error = refused(&url(&cluster, "postgres", "127.0.0.1", mode, None)).await;
        assert_error(&error, ErrorKind::InvalidOption, "no encrypted connection came about; check sslmode");
    }
}
