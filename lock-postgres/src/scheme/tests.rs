use leasehold_engine::scheme::invalid;

use super::*;

/// Splits the URL as the facade does, without a fragment.
fn parsed(text: &str) -> StoreUrl {
    let (scheme, rest) = text.split_once(':').unwrap();
    let query = rest.split_once('?').map_or("", |(_, query)| query);
    StoreUrl {
        scheme: scheme.to_owned(),
        rest: rest.to_owned(),
        path: String::new(),
        file_path: None,
        has_fragment: false,
        parameters: form_urlencoded::parse(query.as_bytes()).into_owned().collect(),
        parse_duration: |_| Err(invalid("not read here")),
    }
}

#[test]
fn ours_are_taken_and_the_driver_gets_the_rest_unchanged() {
    let url = parsed(
        "postgres+ttl://a%40b:p%3Fw%2F@[::1]:5433/my%20db?sslmode=require&schema=My%20%22locks&install=true&ttl=45s&options=-c%20work_mem%3D1MB&options[geqo]=off&pooler=transaction&connect_timeout=3",
    );
    let (driver_url, given) = split(&url, &["ttl"]).unwrap();
    assert_eq!(
        driver_url,
        "postgres://a%40b:p%3Fw%2F@[::1]:5433/my%20db?sslmode=require&options=-c+work_mem%3D1MB&options%5Bgeqo%5D=off"
    );
    assert_eq!(
        ["schema", "install", "ttl", "pooler", "connect_timeout", "sslmode"].map(|name| given.get(name)),
        [Some("My \"locks"), Some("true"), Some("45s"), Some("transaction"), Some("3"), None]
    );
    let (driver_url, _) = split(&parsed("postgres:///db?host=/run/pg"), &[]).unwrap();
    assert_eq!(driver_url, "postgres:///db?host=%2Frun%2Fpg");
}

#[test]
fn several_hosts_and_hosts_of_the_query_are_left_to_the_driver() {
    for url in [
        "postgres://app:p%2Cw@a.example:5432,b.example:5433/ledger?target_session_attrs=read-write",
        "postgres://app:pw@[::1]:5432,[::2]/ledger",
        "postgres://app:pw@/ledger?host=%2Fcloudsql%2Fproject",
        "postgres://a,b/ledger",
    ] {
        assert_eq!(split(&parsed(url), &[]).unwrap().0, url);
    }
}

#[test]
fn no_parameter_of_ours_is_one_of_libpq() {
    for name in
        COMMON.into_iter().chain(["hash", "confirm_every", "lost_after", "server_gives_up", "ttl", "poll"])
    {
        // Only `connect_timeout` is also a parameter of libpq, in seconds.
        assert_eq!(is_parameter(name), name == "connect_timeout", "{name}");
    }
}
