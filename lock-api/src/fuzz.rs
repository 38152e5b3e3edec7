//! Fuzz test: keys of any text, keys of several parts, and the text form of holder ids.

use fuzzing::{Fuzz, parts, text};

use crate::{HolderId, LockKey, MAX_KEY_BYTES};

const KEYS: Fuzz<'_> = Fuzz {
    target: "keys",
    inputs: 20_000,
    examples: &[
        "ledger:42",
        "ledger\u{1f}42",
        "a:b\u{1f}c%3A\u{1f}%25",
        "nightly report\u{1f}",
        "Schlüssel/🔑 ",
        "0123456789abcdef0123456789abcdef-17",
        "ffffffffffffffffffffffffffffffff-18446744073709551615",
    ],
    words: &["%3A", "%25", "::", "\u{1b}[31m", "\u{7f}", "\u{85}", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"],
};

#[test]
fn fuzz_keys() {
    KEYS.check(|input| {
        let pieces: Vec<String> = parts(input).into_iter().map(text).collect();
        pieces.iter().for_each(|piece| {
            one_text(piece);
            holder(piece);
        });
        several_parts(&pieces);
    });
}

fn one_text(text: &str) {
    let key = LockKey::new(text);
    let is_valid = !text.is_empty() && text.len() <= MAX_KEY_BYTES && !text.contains('\0');
    assert_eq!(key.is_ok(), is_valid, "{key:?}");
    let Ok(key) = key else { return };
    assert_eq!(key.as_str(), text);
    assert_eq!(text.parse::<LockKey>().unwrap(), key);
    assert!(!key.to_string().contains(char::is_control), "{key}");
    assert!(!format!("{key:?}").contains(|c: char| c.is_ascii_control()), "{key:?}");
}

/// Checks that a key of several parts can be split into the same parts again.
fn several_parts(pieces: &[String]) {
    let key = LockKey::from_parts(pieces);
    let escaped: usize = pieces.iter().map(|piece| piece.len() + 2 * piece.matches([':', '%']).count()).sum();
    let is_valid = pieces.iter().all(|piece| !piece.is_empty() && !piece.contains('\0'))
        && escaped + pieces.len() - 1 <= MAX_KEY_BYTES;
    assert_eq!(key.is_ok(), is_valid, "{key:?}");
    let Ok(key) = key else { return };
    let back: Vec<_> = key.as_str().split(':').map(unescaped).collect();
    assert_eq!(back, pieces);
    let [name, rest @ ..] = pieces else { return };
    if let Ok(rest) = LockKey::from_parts(rest) {
        assert_eq!(rest.in_namespace(name).unwrap(), key);
    }
}

fn unescaped(part: &str) -> String {
    part.replace("%3A", ":").replace("%25", "%")
}

fn holder(text: &str) {
    if let Ok(holder) = text.parse::<HolderId>() {
        assert_eq!(holder.to_string().parse::<HolderId>().unwrap(), holder);
        let (instance, serial) = text.split_once('-').unwrap();
        assert_eq!(instance.to_lowercase(), format!("{:032x}", holder.instance()));
        assert_eq!(serial.trim_start_matches('0'), holder.serial().to_string().trim_start_matches('0'));
    }
}
