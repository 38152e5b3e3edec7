use leasehold_api::ErrorKind;

use super::*;

fn shown(config: &EtcdConfig) -> Vec<String> {
    config.addresses().unwrap().iter().map(ToString::to_string).collect()
}

#[tokio::test]
async fn a_url_has_members_a_user_a_prefix_and_parameters() {
    let config =
        EtcdConfig::from_url(" etcd://me:p%40%2fw@h1,h2:1,[::1]:2/a/b%20c/?ttl=5m&handover=off ").unwrap();
    assert_eq!(shown(&config), ["h1:2379", "h2:1", "[::1]:2"]);
    assert_eq!(config.prefix, "a/b c");
    assert_eq!((config.ttl, config.handover), (Duration::from_secs(300), false));
    let login = config.credentials.clone().unwrap().login().await.unwrap();
    assert_eq!(login, ("me".to_owned(), "p@/w".to_owned()));
    let texts = [format!("{config:?}"), config.store().to_string()];
    assert!(texts.iter().all(|text| !text.contains("p@/w") && !text.contains("p%40")), "{texts:?}");
}

#[test]
fn a_url_of_one_host_has_the_defaults() {
    let config = EtcdConfig::from_url("etcd://h").unwrap();
    assert_eq!((config.prefix.as_str(), config.ttl, config.handover), ("leasehold", DEFAULT_TTL, true));
    assert!(config.credentials.is_none() && config.tls.is_none());
    assert_eq!(*config.store(), *"etcd://h/leasehold");
}

#[test]
fn tls_has_a_scheme_and_files_of_its_own() {
    let config = EtcdConfig::from_url("etcds://h/x?ca=/c.pem&cert=/a.pem&key=/k.pem").unwrap();
    assert_eq!(config.tls, Some(EtcdTls::new().ca("/c.pem").identity("/a.pem", "/k.pem")));
    for wrong in ["etcds://h?cert=/a.pem", "etcds://h?key=/k.pem", "etcd://h?ca=/c.pem"] {
        assert_eq!(EtcdConfig::from_url(wrong).unwrap_err().kind(), ErrorKind::InvalidOption, "{wrong}");
    }
}

#[test]
fn a_wrong_url_is_refused_without_its_password() {
    for wrong in [
        "",
        "etcd",
        "http://h",
        "etcd:h",
        "etcd:///x",
        "etcd://",
        "etcd://u:secret@/x",
        "etcd://h,,g",
        "etcd://h,h:2379",
        "etcd://h:x",
        "etcd://u:sec/ret@h/x",
        "etcd://u:sec?ret@h/x",
        "etcd://u:secret@h/x#y",
        "etcd://u:secret@h/x?ttl=30",
        "etcd://u:secret@h/x?ttl=0s",
        "etcd://u:secret@h/x?ttl=2h",
        "etcd://u:secret@h/x?ttl=s",
        "etcd://u:secret@h/x?ttl=99999999999999999999h",
        "etcd://u:secret@h/x?handover=secret",
        "etcd://u:secret@h/x?ttl=1s&ttl=1s",
        "etcd://u:secret@h/x?password=y",
        "etcd://u:%ff@h/x",
        "etcd://h/%00",
    ] {
        let error = EtcdConfig::from_url(wrong).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidOption, "{wrong}: {error}");
        assert!(!format!("{error} {error:?}").contains("secret"), "{wrong}: {error:?}");
    }
}

#[test]
fn settings_out_of_bounds_are_refused() {
    let long = "p".repeat(MAX_PREFIX + 1);
    let many: Vec<_> = (0..=MAX_MEMBERS).map(|n| format!("h{n}")).collect();
    let none: [&str; 0] = [];
    for wrong in [
        EtcdConfig::new(none, "p"),
        EtcdConfig::new(many, "p"),
        EtcdConfig::new(["h"], ""),
        EtcdConfig::new(["h"], long),
        EtcdConfig::new(["h"], "a\0b"),
        EtcdConfig::new(["h"], "a//b"),
        EtcdConfig::new(["h"], "a/"),
        EtcdConfig::new(["h"], "p").ttl(Duration::ZERO),
        EtcdConfig::new(["h"], "p").ttl(MAX_TTL + Duration::from_millis(1)),
    ] {
        assert_eq!(wrong.addresses().unwrap_err().kind(), ErrorKind::InvalidOption, "{wrong:?}");
    }
}
