//! The address of a member.

use std::fmt;
use std::net::Ipv6Addr;

use leasehold_api::Error;

use crate::error::invalid;

/// The port of etcd's clients.
const PORT: u16 = 2379;

/// The host and the port of a member's client URL.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Address {
    /// A name, an IPv4 address, or an IPv6 address without brackets.
    pub(crate) host: String,
    pub(crate) port: u16,
}

impl Address {
    /// Reads `host`, `host:port`, `[IPv6]`, `[IPv6]:port` or a bare IPv6 address. The error does not repeat the text,
    /// because it might be a part of a password.
    pub(crate) fn parse(text: &str) -> Result<Self, Error> {
        let (host, port) = split(text).ok_or_else(|| {
            invalid(
                "a member of an etcd cluster is written host or host:port, without a scheme; an IPv6 address stands in brackets",
            )
        })?;
        let port = match port {
            None => PORT,
            Some(port) => match port.parse() {
                Ok(port) if port != 0 => port,
                _ => {
                    return Err(invalid(
                        "the port of a member of an etcd cluster is a number from 1 to 65535",
                    ));
                }
            },
        };
        Ok(Self { host: host.to_ascii_lowercase(), port })
    }
}

fn split(text: &str) -> Option<(&str, Option<&str>)> {
    if text.parse::<Ipv6Addr>().is_ok() {
        return Some((text, None));
    }
    if let Some(rest) = text.strip_prefix('[') {
        let (host, behind) = rest.split_once(']')?;
        host.parse::<Ipv6Addr>().ok()?;
        return match behind {
            "" => Some((host, None)),
            _ => Some((host, Some(behind.strip_prefix(':')?))),
        };
    }
    let (host, port) = match text.split_once(':') {
        Some((host, port)) => (host, Some(port)),
        None => (text, None),
    };
    let is_of_a_name = |c: char| c.is_ascii_alphanumeric() || "-._".contains(c);
    (!host.is_empty() && host.chars().all(is_of_a_name)).then_some((host, port))
}

/// Writes `host:port`, with brackets around an IPv6 address.
impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{}:{}", self.host, self.port)
        }
    }
}

#[cfg(test)]
mod tests {
    use leasehold_api::ErrorKind;

    use super::*;

    #[test]
    fn reads_names_and_addresses_with_and_without_a_port() {
        for (text, shown) in [
            ("a", "a:2379"),
            ("A.Example:1", "a.example:1"),
            ("127.0.0.1", "127.0.0.1:2379"),
            ("[::1]", "[::1]:2379"),
            ("[::1]:65535", "[::1]:65535"),
            ("fe80::1", "[fe80::1]:2379"),
        ] {
            assert_eq!(Address::parse(text).unwrap().to_string(), shown, "{text}");
        }
    }

    #[test]
    fn refuses_what_is_no_address_without_repeating_it() {
        for text in [
            "",
            ":2379",
            "a:",
            "a:0",
            "a:65536",
            "a:x",
            "a:1:2",
            "http://a",
            "a/b",
            "u:secret@a",
            "[::1",
            "[a]:1",
            "[::1]x",
            "a b",
            "\u{e9}",
            "%61",
        ] {
            let error = Address::parse(text).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidOption, "{text}");
            assert!(!error.to_string().contains("secret"), "{error}");
        }
    }
}
