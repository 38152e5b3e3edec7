//! TLS.

use leasehold_api::Error;
use tonic::transport::Endpoint;

use crate::config::{Address, EtcdTls};
#[cfg(any(
    feature = "tls-rustls-aws-lc-rs",
    feature = "tls-rustls-ring-webpki",
    feature = "tls-rustls-ring-native-roots"
))]
pub(super) use with_rustls::{Trust, load};
#[cfg(not(any(
    feature = "tls-rustls-aws-lc-rs",
    feature = "tls-rustls-ring-webpki",
    feature = "tls-rustls-ring-native-roots"
)))]
pub(super) use without::{Trust, load};

#[cfg(any(
    feature = "tls-rustls-aws-lc-rs",
    feature = "tls-rustls-ring-webpki",
    feature = "tls-rustls-ring-native-roots"
))]
mod with_rustls {
    use std::path::{Path, PathBuf};
    use std::time::Duration;

    use tonic::transport::{Certificate, ClientTlsConfig, Identity};

    use super::{Address, Endpoint, Error, EtcdTls};
    use crate::error::invalid;

    /// The time for the TLS handshake.
    const HANDSHAKE_LIMIT: Duration = Duration::from_secs(2);

    /// The settings of TLS, with the files read.
    pub(in crate::cluster) struct Trust(ClientTlsConfig);

    /// Reads the files of the settings.
    pub(in crate::cluster) async fn load(tls: Option<&EtcdTls>) -> Result<Option<Trust>, Error> {
        let Some(tls) = tls else { return Ok(None) };
        let config = ClientTlsConfig::new().timeout(HANDSHAKE_LIMIT);
        let config = match &tls.ca {
            Some(file) => config.ca_certificate(Certificate::from_pem(read(file).await?)),
            None => config.with_enabled_roots(),
        };
        let config = match &tls.identity {
            Some((certificate, key)) => {
                config.identity(Identity::from_pem(read(certificate).await?, read(key).await?))
            }
            None => config,
        };
        Ok(Some(Trust(config)))
    }

    async fn read(file: &Path) -> Result<Vec<u8>, Error> {
        let path: PathBuf = file.to_owned();
        let read = tokio::task::spawn_blocking(move || std::fs::read(path)).await;
        read.map_err(std::io::Error::other).flatten().map_err(|error| {
            invalid(format!("the file {} of the TLS settings cannot be read", file.display()))
                .with_source(error)
        })
    }

    impl Trust {
        /// Returns the endpoint with TLS. The certificate of the member has to name its host.
        pub(in crate::cluster) fn apply(
            &self,
            endpoint: Endpoint,
            address: &Address,
        ) -> Result<Endpoint, Error> {
            endpoint.tls_config(self.0.clone().domain_name(&address.host)).map_err(|error| {
                invalid("the certificates of the TLS settings cannot be used; check that they are PEM files")
                    .with_source(error)
            })
        }
    }
}

#[cfg(not(any(
    feature = "tls-rustls-aws-lc-rs",
    feature = "tls-rustls-ring-webpki",
    feature = "tls-rustls-ring-native-roots"
)))]
mod without {
    use std::convert::Infallible;

    use leasehold_api::ErrorKind;

    use super::{Address, Endpoint, Error, EtcdTls};

    /// Stands for the settings in a program that was built without TLS. No value of it exists.
    pub(in crate::cluster) struct Trust(Infallible);

    /// Fails if there are settings of TLS, because this program was built without TLS.
    pub(in crate::cluster) async fn load(tls: Option<&EtcdTls>) -> Result<Option<Trust>, Error> {
        match tls {
            None => Ok(None),
            Some(_) => Err(Error::new(
                ErrorKind::Unsupported,
                "this program was compiled without TLS for etcd; switch on one of the cargo features tls-rustls-ring-webpki, tls-rustls-ring-native-roots and tls-rustls-aws-lc-rs",
            )),
        }
    }

    impl Trust {
        /// Is never called.
        pub(in crate::cluster) fn apply(&self, _: Endpoint, _: &Address) -> Result<Endpoint, Error> {
            match self.0 {}
        }
    }
}
