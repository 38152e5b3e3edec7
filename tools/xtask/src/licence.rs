//! Whether a licence expression can be satisfied with licences that we accept.

/// What may come into the programs of those who use leasehold.
const ACCEPTED: [&str; 10] = [
    "MIT",
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-2-Clause",
    "BSD-3-Clause",
    // For data; the list of certificate authorities (webpki-roots, only with TLS) has it.
    "CDLA-Permissive-2.0",
    "ISC",
    "Unicode-3.0",
    "Unlicense",
    "Zlib",
];

/// `expression` is SPDX, such as `(MIT OR Apache-2.0) AND Unicode-3.0`, or the old form `MIT/Apache-2.0`.
pub(crate) fn is_accepted(expression: &str) -> bool {
    let spaced = expression.replace('/', " OR ").replace('(', " ( ").replace(')', " ) ");
    let words: Vec<&str> = spaced.split_whitespace().collect();
    let mut rest = words.as_slice();
    // A part that was not understood is not accepted.
    any_of(&mut rest) && rest.is_empty()
}

fn any_of(words: &mut &[&str]) -> bool {
    let mut accepted = all_of(words);
    while take(words, "OR") {
        accepted |= all_of(words);
    }
    accepted
}

fn all_of(words: &mut &[&str]) -> bool {
    let mut accepted = one(words);
    while take(words, "AND") {
        accepted &= one(words);
    }
    accepted
}

fn one(words: &mut &[&str]) -> bool {
    if take(words, "(") {
        return any_of(words) & take(words, ")");
    }
    let Some((licence, rest)) = words.split_first() else {
        return false;
    };
    *words = rest;
    match words {
        ["WITH", exception, rest @ ..] => {
            *words = rest;
            ACCEPTED.contains(&format!("{licence} WITH {exception}").as_str())
        }
        _ => ACCEPTED.contains(licence),
    }
}

fn take(words: &mut &[&str], word: &str) -> bool {
    match words.split_first() {
        Some((first, rest)) if *first == word => {
            *words = rest;
            true
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expressions() {
        for (expression, accepted) in [
            ("MIT", true),
            ("MIT OR Apache-2.0", true),
            ("MIT/Apache-2.0", true),
            ("GPL-3.0", false),
            ("GPL-3.0 OR MIT", true),
            ("GPL-3.0 AND MIT", false),
            ("(MIT OR GPL-3.0) AND Unicode-3.0", true),
            ("(MIT AND GPL-3.0) OR ISC", true),
            ("MIT AND (GPL-3.0 OR LGPL-2.1)", false),
            ("MIT OR GPL-3.0 AND GPL-2.0", true),
            ("Apache-2.0 WITH LLVM-exception", true),
            ("Apache-2.0 WITH Other-exception OR MIT", true),
            ("Apache-2.0 WITH Other-exception", false),
            ("", false),
            ("MIT MIT", false),
            ("(MIT", false),
        ] {
            assert_eq!(is_accepted(expression), accepted, "{expression}");
        }
    }
}
