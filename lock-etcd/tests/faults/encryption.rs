//! Members with TLS.

use std::path::PathBuf;
use std::time::Duration;

use leasehold_api::{Error, ErrorKind, LockExt as _};
use leasehold_etcd::{EtcdConfig, EtcdTls, connect};
use test_servers::{Certificates, Etcd, EtcdOptions};

use crate::support::{config, cycle, soon};

/// Certificates as files, in a folder that ends with this value.
struct Files {
    folder: tempfile::TempDir,
}

impl Files {
    fn of(certificates: &Certificates) -> Self {
        let files = Self { folder: tempfile::tempdir().unwrap() };
        for (name, text) in [
            ("ca.pem", &certificates.authority),
            ("client.pem", &certificates.client),
            ("client.key", &certificates.client_key),
        ] {
            std::fs::write(files.path(name), text).unwrap();
        }
        files
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn tls(&self) -> EtcdTls {
        EtcdTls::new().ca(self.path("ca.pem"))
    }

    fn identified(&self) -> EtcdTls {
        self.tls().identity(self.path("client.pem"), self.path("client.key"))
    }
}

async fn refused(config: EtcdConfig) -> Error {
    let error = soon("the client never gives up", config.connect()).await.unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::Unavailable | ErrorKind::InvalidOption), "{error:?}");
    error
}

#[tokio::test]
async fn members_with_the_certificate_of_the_authority_are_trusted() {
    let certificates = Certificates::new();
    let files = Files::of(&certificates);
    let etcd = Etcd::start(EtcdOptions::new().encrypted(certificates));
    let prefix = Etcd::fresh_prefix();
    cycle(&config(&etcd, &prefix).tls(files.tls()).connect().await.unwrap(), "k").await;
    let url = format!("{}?ca={}", etcd.url(&prefix), files.path("ca.pem").display());
    let lock = connect(&url).await.unwrap();
    let guard = lock.key("k").acquire().await.unwrap();
    guard.release().await.unwrap();
    // The name is in the certificate too.
    let port = etcd.address(0).rsplit_once(':').unwrap().1.to_owned();
    let named = EtcdConfig::new([format!("localhost:{port}")], &*prefix).tls(files.tls());
    cycle(&named.connect().await.unwrap(), "k").await;
}

#[tokio::test]
async fn a_member_that_is_not_trusted_gets_nothing() {
    let (certificates, others) = (Certificates::new(), Certificates::new());
    let (files, wrong) = (Files::of(&certificates), Files::of(&others));
    let etcd = Etcd::start(EtcdOptions::new().encrypted(certificates));
    let prefix = Etcd::fresh_prefix();
    refused(config(&etcd, &prefix).tls(wrong.tls())).await;
    // The public authorities did not sign it.
    refused(config(&etcd, &prefix).tls(EtcdTls::new())).await;
    refused(config(&etcd, &prefix).tls(EtcdTls::new().ca(files.path("missing.pem")))).await;
    refused(config(&etcd, &prefix).tls(EtcdTls::new().ca(files.path("client.key")))).await;
    assert!(etcd.entries(&prefix).await.is_empty());
}

#[tokio::test]
async fn a_certificate_for_another_host_is_refused() {
    let certificates = Certificates::for_hosts(&["another.example"]);
    let files = Files::of(&certificates);
    let etcd = Etcd::start(EtcdOptions::new().encrypted(certificates));
    refused(config(&etcd, &Etcd::fresh_prefix()).tls(files.tls())).await;
}

#[tokio::test]
async fn a_cluster_with_client_certificates_wants_one() {
    let certificates = Certificates::new();
    let files = Files::of(&certificates);
    let etcd = Etcd::start(EtcdOptions::new().encrypted(certificates).client_certificates());
    let prefix = Etcd::fresh_prefix();
    let lock =
        config(&etcd, &prefix).tls(files.identified()).ttl(Duration::from_secs(5)).connect().await.unwrap();
    cycle(&lock, "k").await;
    refused(config(&etcd, &prefix).tls(files.tls())).await;
}

#[tokio::test]
async fn encryption_on_one_side_alone_is_an_error() {
    let certificates = Certificates::new();
    let files = Files::of(&certificates);
    let (plain, etcd) = (Etcd::shared(), Etcd::start(EtcdOptions::new().encrypted(certificates)));
    let prefix = Etcd::fresh_prefix();
    for one_sided in [config(&etcd, &prefix), config(plain, &prefix).tls(files.tls())] {
        let error = soon("the client never gives up", one_sided.connect()).await.unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::Unavailable | ErrorKind::Unsupported), "{error:?}");
    }
}
