//! etcd URLs, for programs whose password changes.

use leasehold_api::Error;
use leasehold_engine::scheme::invalid;
use leasehold_etcd::EtcdConfig;
use percent_encoding::percent_decode_str;

use crate::stores;

/// Returns the user and the password of an etcd URL. `None` if the URL names no user. For
/// [`ConnectOptions::etcd_credentials`](crate::ConnectOptions::etcd_credentials), if the URL is a secret that changes.
///
/// # Errors
///
/// [`InvalidOption`](crate::ErrorKind::InvalidOption) for the URL of another store, and for a URL that
/// [`connect`](crate::connect()) refuses. No error repeats the URL.
pub fn etcd_login(url: &str) -> Result<Option<(String, String)>, Error> {
    if stores::read(url)?.extension::<EtcdConfig>().is_none() {
        return Err(invalid(
            "this needs the URL of an etcd cluster, such as etcd://user@host1,host2,host3/prefix",
        ));
    }
    let url = stores::parse(url)?;
    let authority = url.rest.trim_start_matches('/').split(['/', '?']).next().unwrap_or_default();
    let Some((login, _)) = authority.rsplit_once('@') else { return Ok(None) };
    let (user, password) = login.split_once(':').unwrap_or((login, ""));
    Ok(Some((decoded(user)?, decoded(password)?)))
}

fn decoded(text: &str) -> Result<String, Error> {
    let text = percent_decode_str(text).decode_utf8();
    text.map(Into::into).map_err(|_| invalid("user and password of an etcd URL are percent-encoded UTF-8"))
}

#[cfg(test)]
mod tests {
    use leasehold_api::ErrorKind;

    use super::*;

    #[test]
    fn the_login_of_a_url_is_decoded() {
        let login = |url| etcd_login(url).unwrap();
        let named = |user: &str, password: &str| Some((user.to_owned(), password.to_owned()));
        assert_eq!(login("etcd://a:2379,b/locks?ttl=30s"), None);
        assert_eq!(login("etcd://me@a,b"), named("me", ""));
        assert_eq!(login("etcds://a%40b:p%2Fw%3A%3F@a:1,[::1]/x?ca=/c.pem"), named("a@b", "p/w:?"));
        for wrong in ["memory:", "etcd://", "etcd://app:hunter2@a,a/x", "etcd://app:hunter2%ff@a/x"] {
            let error = etcd_login(wrong).unwrap_err();
            assert!(!format!("{error} {error:?}").contains("hunter2"), "{wrong}: {error:?}");
            assert!(
                matches!(error.kind(), ErrorKind::InvalidOption | ErrorKind::Unsupported),
                "{wrong}: {error}"
            );
        }
    }
}
