//! Keys are used whole and literally, and no two of them are one lock.

use leasehold_api::{
    ErrorKind, KeyIdentity, Lock, LockExt as _, LockGuard, LockKey, MAX_KEY_BYTES, Namespaced,
};
use std::sync::Arc;

use crate::context::{Context, fails};

/// Keys that a store, encoding, shell or file system might confuse or interpret.
const HOSTILE: [&str; 54] = [
    "a",
    "A",
    "a ",
    " a",
    "a.",
    ".",
    "..",
    "...",
    "../a",
    "/a",
    "a/",
    "a/b",
    "a\\b",
    "a//b",
    "~",
    "~/a",
    "-",
    "--",
    "-rf",
    "%",
    "%25",
    "a%2Fb",
    "_",
    "a_b",
    "a*b",
    "*",
    "?",
    "[a]",
    "{a}",
    "$a",
    "${a}",
    "`a`",
    "a;b",
    "a:b",
    "a::b",
    "a|b",
    "a,b",
    "a\nb",
    "a\r\nb",
    "a\tb",
    "\u{7f}",
    "\u{1b}[31m",
    "'; DROP TABLE locks; --",
    "/* a */",
    "\"a\"",
    "\u{e9}",
    "e\u{301}",
    "\u{df}",
    "ss",
    "\u{130}",
    "i",
    "\u{1f512}",
    "a\u{200b}",
    "CON",
];

fn key(text: impl AsRef<str>) -> LockKey {
    LockKey::new(text).expect("a valid key")
}

pub(crate) async fn are_literal_and_distinct(cx: &Context) {
    let (a, b) = cx.two().await;
    let keys = HOSTILE.map(key);
    let mut guards = Vec::new();
    for key in &keys {
        let guard = cx.take(&a, key).await;
        assert_eq!(guard.key(), key);
        guards.push(guard);
    }
    for key in &keys {
        cx.held(&b, key).await;
    }
    // Each release frees its own key and no other.
    for (i, guard) in guards.into_iter().enumerate() {
        cx.give(guard).await;
        cx.give(cx.take(&b, &keys[i]).await).await;
        if let Some(next) = keys.get(i + 1) {
            cx.held(&b, next).await;
        }
    }
}

pub(crate) async fn invalid_ones_are_refused(cx: &Context) {
    let lock = cx.client().await;
    for bad in [String::new(), "x".repeat(MAX_KEY_BYTES + 1), "x".repeat(65_535), "a\0b".into(), "\0".into()]
    {
        let refused = lock.key(&bad).acquire().await;
        let error = fails(refused, &[ErrorKind::InvalidKey]);
        assert!(!error.is_retryable());
        fails(lock.key(&bad).try_acquire().await, &[ErrorKind::InvalidKey]);
        fails(lock.keys(["good", &bad]).acquire().await, &[ErrorKind::InvalidKey]);
    }
    cx.give(cx.take(&lock, &key("good")).await).await;
}

pub(crate) async fn long_ones_are_not_cut(cx: &Context) {
    let (a, b) = cx.two().await;
    let longest = cx.harness().longest_key();
    let long = |last: &str| key("x".repeat(longest - last.len()) + last);
    let mut keys: Vec<LockKey> = ["0", "1", "00", "\u{e9}"].map(long).into();
    keys.dedup();
    keys.extend([63, 64, 127, 128, 255, 256, longest - 1].map(|n| key("x".repeat(n))));
    keys.push(key("\u{1f512}".repeat(longest / 4)));
    let distinct: std::collections::BTreeSet<_> = keys.iter().cloned().collect();
    let mut guards = Vec::new();
    for key in &distinct {
        guards.push(cx.take(&a, key).await);
    }
    for key in &distinct {
        cx.held(&b, key).await;
    }
    for guard in guards {
        cx.give(guard).await;
    }
}

pub(crate) async fn composites_are_unambiguous(cx: &Context) {
    let (a, b) = cx.two().await;
    let lists: [&[&str]; 6] =
        [&["a:b", "c"], &["a", "b:c"], &["a", "b", "c"], &["a", "bc"], &["ab", "c"], &["a%3Ab", "c"]];
    let mut guards = Vec::new();
    for list in lists {
        guards.push(cx.take(&a, &LockKey::from_parts(list).expect("valid parts")).await);
    }
    for list in lists {
        cx.held(&b, &LockKey::from_parts(list).expect("valid parts")).await;
    }
    drop(guards);
    for list in [&["a", "", "b"][..], &["a", "b", ""], &[""]] {
        fails(LockKey::from_parts(list), &[ErrorKind::InvalidKey]);
    }
}

pub(crate) async fn namespaces_do_not_meet(cx: &Context) {
    let (a, b) = cx.two().await;
    let inside = |lock: &Arc<dyn Lock>, name: &str| -> Arc<dyn Lock> {
        Arc::new(Namespaced::new(lock.clone(), name).expect("a valid name"))
    };
    fails(Namespaced::new(a.clone(), ""), &[ErrorKind::InvalidKey]);
    let pairs = [("a", "bc"), ("ab", "c"), ("a", "b:c"), ("a:b", "c"), ("A", "bc")];
    let mut guards: Vec<LockGuard> = Vec::new();
    for (name, text) in pairs {
        let guard = cx.take(&inside(&a, name), &key(text)).await;
        assert_eq!(guard.key(), &key(text), "a guard shows the key that was asked for");
        guards.push(guard);
    }
    for (name, text) in pairs {
        cx.held(&inside(&b, name), &key(text)).await;
        // The same key, composed by hand.
        cx.held(&b, &key(text).in_namespace(name).expect("a valid key")).await;
    }
    cx.give(cx.take(&b, &key("bc")).await).await;
    let error = fails(
        inside(&b, "a")
            .acquire(&key("bc"), &leasehold_api::AcquireOptions::new().wait(cx.short_wait()))
            .await,
        cx.budget_ended(),
    );
    assert_eq!(error.key(), Some(&key("bc")));
    drop(guards);
}

pub(crate) async fn similar_ones_at_once(cx: &Context) {
    let (a, b) = cx.two().await;
    let n = cx.at_once(cx.many(1_500, 400));
    let mut guards = Vec::new();
    // Makes keys of numbers, bits and repetitions, because narrow or weak hashes confuse these.
    let texts = (0..n).map(|i| match i % 3 {
        0 => format!("k{i}"),
        1 => format!("{i:b}"),
        _ => format!("{}{}", "ab".repeat(i % 7), i),
    });
    let keys: std::collections::BTreeSet<LockKey> = texts.map(key).collect();
    for (i, key) in keys.iter().enumerate() {
        guards.push(cx.take(if i % 2 == 0 { &a } else { &b }, key).await);
    }
    for guard in guards {
        cx.give(guard).await;
    }
}

pub(crate) async fn ten_thousand_at_once(cx: &Context) {
    let lock = cx.client().await;
    let wished = cx.many(10_000, 1_000);
    let most = cx.at_once(wished);
    let mut guards = Vec::new();
    for key in cx.some_keys(most) {
        guards.push(cx.take(&lock, &key).await);
    }
    if most < wished {
        let beyond = lock.try_acquire(&cx.key(), &leasehold_api::AcquireOptions::new()).await;
        assert!(fails(beyond, &[ErrorKind::Capacity]).is_retryable());
    }
    assert!(guards.iter().all(|g| g.validity().is_held()));
    let last = guards[guards.len() - 1].key().clone();
    drop(guards);
    cx.undone(&lock, &last).await;
}

pub(crate) async fn hashing_is_declared(cx: &Context) {
    if let KeyIdentity::Hashed { bits } = cx.capabilities().keys {
        assert!(bits >= 32, "a hash of {bits} bits takes many keys for each other");
    }
    // Compares with fixed texts, because the store must get the same text from every version and platform.
    assert_eq!(LockKey::from_parts(["ledger", "42"]).expect("valid").as_str(), "ledger:42");
    assert_eq!(LockKey::from_parts(["a:b%", "c"]).expect("valid").as_str(), "a%3Ab%25:c");
    assert_eq!(key("42").in_namespace("a:b").expect("valid").as_str(), "a%3Ab:42");
    let (a, b) = cx.two().await;
    let guard = cx.take(&a, &LockKey::from_parts(["ledger", "42"]).expect("valid")).await;
    cx.held(&b, &key("ledger:42")).await;
    cx.give(guard).await;
}
