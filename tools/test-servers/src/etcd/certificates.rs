//! Certificates for encrypted servers.

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, ExtendedKeyUsagePurpose, IsCa, KeyPair,
    KeyUsagePurpose,
};

use crate::or_panic;

/// An authority with the certificates of a server and of a client, all in PEM.
#[derive(Debug, Clone)]
pub struct Certificates {
    /// The certificate of the authority.
    pub authority: String,
    /// The certificate of the client.
    pub client: String,
    /// The key of the client.
    pub client_key: String,
    server: String,
    server_key: String,
}

impl Certificates {
    /// Creates an authority and its certificates, the server's one for `127.0.0.1` and `localhost`.
    ///
    /// # Panics
    ///
    /// Never, unless the library of certificates fails.
    #[track_caller]
    #[must_use]
    pub fn new() -> Self {
        Self::for_hosts(&["127.0.0.1", "localhost"])
    }

    /// Creates as [`Self::new`] does, with the server's certificate for these hosts.
    ///
    /// # Panics
    ///
    /// Never, unless a host is no name.
    #[track_caller]
    #[must_use]
    pub fn for_hosts(hosts: &[&str]) -> Self {
        or_panic(Self::create(hosts).map_err(|error| format!("cannot make certificates: {error}")))
    }

    fn create(hosts: &[&str]) -> Result<Self, rcgen::Error> {
        let mut params = CertificateParams::new(Vec::new())?;
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
        let authority = CertifiedIssuer::self_signed(params, KeyPair::generate()?)?;
        let signed = |hosts: &[&str], usages: Vec<ExtendedKeyUsagePurpose>| {
            let mut params =
                CertificateParams::new(hosts.iter().map(ToString::to_string).collect::<Vec<_>>())?;
            params.extended_key_usages = usages;
            let key = KeyPair::generate()?;
            let certificate = params.signed_by(&key, &authority)?;
            Ok::<_, rcgen::Error>((certificate.pem(), key.serialize_pem()))
        };
        // The server's JSON calls connect to the server itself, as a client with the server's certificate.
        let both = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        let (server, server_key) = signed(hosts, both)?;
        let (client, client_key) = signed(&["client"], vec![ExtendedKeyUsagePurpose::ClientAuth])?;
        Ok(Self { authority: authority.pem(), client, client_key, server, server_key })
    }

    /// Returns the files of a server.
    pub(super) fn of_server(&self) -> [(&'static str, &str); 3] {
        [("ca.crt", &self.authority), ("server.crt", &self.server), ("server.key", &self.server_key)]
    }
}

impl Default for Certificates {
    fn default() -> Self {
        Self::new()
    }
}
