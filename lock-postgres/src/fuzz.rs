//! Fuzz tests of names on the server, and of the numbers of keys.

use fuzzing::{Fuzz, parts, text};
use leasehold_api::LockKey;

use crate::number::{Djb2Xor, Fnv1a64, KeyNumber, RawBigint, RawPair, Sha256, SqlxNames, unpack};
use crate::{Identifier, MAX_IDENTIFIER_BYTES};

const EXAMPLES: [&str; 8] = [
    "leasehold\u{1f}ledger:42",
    "My \"locks\"\u{1f}-9223372036854775808",
    "a.b\u{1f}7,-42",
    "odd\"; DROP TABLE users; --\u{1f}9223372036854775807",
    "é\u{1f}2147483647,-2147483648",
    "$1\u{1f}0",
    "pg_x\u{1f}🚀",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\u{1f}héllo",
];

const NAMES: Fuzz<'_> = Fuzz {
    target: "identifiers",
    inputs: 10_000,
    examples: &EXAMPLES,
    words: &["\"\"", "pg_", "--", "/*", "$$"],
};

const NUMBERS: Fuzz<'_> =
    Fuzz { target: "numbers", inputs: 10_000, examples: &EXAMPLES, words: &["-0", "+1", ",", "٤", "7,42"] };

#[test]
fn fuzz_identifiers() {
    NAMES.check(|input| {
        for name in parts(input).into_iter().map(text) {
            let identifier = Identifier::new(&name);
            let is_valid = !name.is_empty()
                && name.len() <= MAX_IDENTIFIER_BYTES
                && !name.contains('\0')
                && !name.starts_with("pg_");
            assert_eq!(identifier.is_ok(), is_valid, "{identifier:?}");
            let Ok(identifier) = identifier else { continue };
            for behind in ["", ".\"x\"", " y"] {
                let statement = identifier.quoted() + behind;
                assert_eq!(read_quoted(&statement), Some((name.clone(), behind)));
            }
            assert_eq!(identifier.to_string(), name);
        }
    });
}

/// Parses a quoted name as the server does. Returns the name and the rest of the statement.
fn read_quoted(statement: &str) -> Option<(String, &str)> {
    let mut name = String::new();
    let mut rest = statement.strip_prefix('"')?;
    loop {
        let end = rest.find('"')?;
        name.push_str(&rest[..end]);
        rest = &rest[end + 1..];
        let Some(behind) = rest.strip_prefix('"') else { return Some((name, rest)) };
        name.push('"');
        rest = behind;
    }
}

#[test]
fn fuzz_numbers() {
    let kinds: [&dyn KeyNumber; 7] = [
        &Fnv1a64,
        &Sha256::default(),
        &SqlxNames,
        &Djb2Xor::Forward,
        &Djb2Xor::Reverse,
        &RawBigint,
        &RawPair,
    ];
    let other = Identifier::new("another schema").unwrap();
    NUMBERS.check(|input| {
        let texts: Vec<_> = parts(input).into_iter().map(text).collect();
        let [schema, key, ..] = &texts[..] else { return };
        let (Ok(schema), Ok(key)) = (Identifier::new(schema), LockKey::new(key)) else { return };
        for kind in kinds {
            let number = kind.number(&schema, &key).ok();
            assert_eq!(kind.number(&schema, &key).ok(), number);
            if !kind.covers_schema() {
                assert_eq!(kind.number(&other, &key).ok(), number, "{kind:?}");
            }
            // Only mappings for numeric keys can refuse a key.
            assert!(number.is_some() || kind.exact(), "{kind:?}");
        }
        let fnv = [schema.as_str(), key.as_str()].iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, part| {
            let length = u64::try_from(part.len()).unwrap().to_le_bytes();
            let step = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
            part.as_bytes().iter().fold(length.iter().fold(hash, step), step)
        });
        assert_eq!(Fnv1a64.number(&schema, &key).unwrap(), fnv.cast_signed());
        let djb2 = Djb2Xor::Forward.number(&schema, &key).unwrap();
        assert!((0..1 << 32).contains(&djb2));
        // The text of a number must read as the same number, because each number has one notation.
        let single = RawBigint.number(&schema, &key).ok().map(|number| number.to_string());
        assert_eq!(single.is_some(), is_number(key.as_str(), i64::MIN.into(), i64::MAX.into()));
        assert!(single.is_none_or(|text| text == key.as_str()));
        let pair = RawPair.number(&schema, &key).ok().map(unpack);
        let is_half = |half: &str| is_number(half, i32::MIN.into(), i32::MAX.into());
        let is_pair = key.as_str().split_once(',').is_some_and(|(a, b)| is_half(a) && is_half(b));
        assert_eq!(pair.is_some(), is_pair);
        assert!(pair.is_none_or(|(first, second)| format!("{first},{second}") == key.as_str()));
    });
}

/// Returns whether `text` is a whole number in this range, in its only notation.
fn is_number(text: &str, least: i128, most: i128) -> bool {
    let digits = text.strip_prefix('-').unwrap_or(text);
    let is_plain = !digits.is_empty()
        && digits.len() < 30
        && digits.bytes().all(|byte| byte.is_ascii_digit())
        && (text == "0" || !digits.starts_with('0'));
    is_plain && text.parse::<i128>().is_ok_and(|number| (least..=most).contains(&number))
}
