//! Kept inputs, one per line, escaped as Rust byte strings. Lines that begin with `#` describe the failure.

use std::fs;
use std::path::{Path, PathBuf};

/// Returns the path of the corpus of `target`.
pub(crate) fn path(target: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(format!("{target}.txt"))
}

/// Returns the inputs with their line numbers.
pub(crate) fn of(target: &str) -> Vec<(usize, Vec<u8>)> {
    let path = path(target);
    let text = fs::read_to_string(&path)
        .unwrap_or_else(|error| panic!("cannot read the corpus {}: {error}", path.display()));
    let lines = text.lines().enumerate().filter(|(_, line)| !line.starts_with('#'));
    lines.map(|(at, line)| (at + 1, bytes(line))).collect()
}

/// Escapes `input` as a line.
pub(crate) fn line(input: &[u8]) -> String {
    let line = input.escape_ascii().to_string();
    match line.strip_prefix('#') {
        Some(rest) => format!(r"\x23{rest}"),
        None => line,
    }
}

/// Parses `line`, which can contain unescaped non-ASCII characters.
pub(crate) fn bytes(line: &str) -> Vec<u8> {
    let mut input = Vec::new();
    let mut rest = line.as_bytes();
    while let [first, behind @ ..] = rest {
        let (byte, behind) = match (first, behind) {
            (b'\\', [b'x', high, low, behind @ ..]) => {
                let digits = [*high, *low].map(|digit| char::from(digit).to_digit(16));
                let [Some(high), Some(low)] = digits else { panic!("not two digits behind \\x: {line}") };
                (u8::try_from(16 * high + low).unwrap_or(0), behind)
            }
            (b'\\', [letter, behind @ ..]) => {
                let byte = match letter {
                    b'n' => b'\n',
                    b'r' => b'\r',
                    b't' => b'\t',
                    other => *other,
                };
                (byte, behind)
            }
            (byte, behind) => (*byte, behind),
        };
        input.push(byte);
        rest = behind;
    }
    input
}
