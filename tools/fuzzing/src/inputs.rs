//! Inputs: slightly changed valid ones, words in any order, and arbitrary bytes.

use proptest::collection::vec;
use proptest::prelude::{Just, any, prop_oneof};
use proptest::strategy::{BoxedStrategy, Strategy as _};

/// Maximum length of an input, in bytes.
const LONGEST: usize = 1 << 16;

/// Words with a meaning in many formats.
const COMMON: [&str; 30] = [
    "\0", "\n", "\r\n", "\t", " ", "\"", "'", "\\", "/", ":", "@", "?", "#", "%", "%00", "%2F", "&", "=",
    ",", ".", "-", "{", "}", "\u{1f}", "\u{fffd}", "\u{feff}", "\u{202e}", "é", "🔑", "\u{130}",
];
const NUMBERS: [&str; 10] = [
    "0",
    "-1",
    "007",
    "1e9",
    "9223372036854775807",
    "-9223372036854775808",
    "18446744073709551616",
    "4294967296",
    "2147483648",
    "0x7f",
];

/// One change of an input: kind, position, length in bytes, and the number of a word or byte.
type Change = (u8, u16, u8, u16);

/// Generates inputs near `examples`, with `words` in them.
pub(crate) fn near(examples: &[&str], words: &[&str]) -> BoxedStrategy<Vec<u8>> {
    let examples: Vec<Vec<u8>> = examples.iter().map(|text| text.as_bytes().to_vec()).collect();
    let all = words.iter().chain(&COMMON).chain(&NUMBERS);
    let words: Vec<Vec<u8>> = all.map(|text| text.as_bytes().to_vec()).collect();
    let others = examples.clone();
    let (count, known) = (examples.len(), words.clone());
    let change = (0..8u8, any::<u16>(), 0..24u8, any::<u16>());
    let changed = (0..count, vec(change, 0..6)).prop_map(move |(example, changes)| {
        let mut input = examples[example].clone();
        for one in changes {
            apply(one, &mut input, &others, &known);
            input.truncate(LONGEST);
        }
        input
    });
    let count = words.len();
    let in_any_order = vec(0..count, 0..12)
        .prop_map(move |all| all.iter().flat_map(|word| words[*word].iter().copied()).collect::<Vec<u8>>());
    let bytes = vec(any::<u8>(), 0..200);
    let characters = vec(any::<char>(), 0..60).prop_map(|text| String::from_iter(text).into_bytes());
    prop_oneof![16 => changed, 4 => in_any_order, 1 => bytes, 1 => characters, 1 => Just(Vec::new())].boxed()
}

fn apply((kind, at, length, what): Change, input: &mut Vec<u8>, examples: &[Vec<u8>], words: &[Vec<u8>]) {
    let at = usize::from(at) % (input.len() + 1);
    let end = (at + usize::from(length)).min(input.len());
    let what = usize::from(what);
    let word = &words[what % words.len()];
    match kind {
        0 => drop(input.drain(at..end)),
        1 => drop(input.splice(at..at, word.iter().copied())),
        2 => drop(input.splice(at..end, word.iter().copied())),
        3 => input.truncate(at),
        // A byte that might make the input invalid text.
        4 if at < input.len() => input[at] = what.to_le_bytes()[0],
        // Repeats the piece, up to 400 times.
        5 => {
            let piece = input[at..end].to_vec();
            let times = [1, 2, 16, 400][what % 4];
            drop(input.splice(at..at, piece.repeat(times)));
        }
        // Inserts the piece elsewhere.
        6 => {
            let piece = input[at..end].to_vec();
            let there = what % (input.len() + 1);
            drop(input.splice(there..there, piece));
        }
        // Appends the rest of another example.
        7 => {
            let other = &examples[what % examples.len()];
            let from = usize::from(length) % (other.len() + 1);
            input.truncate(at);
            input.extend_from_slice(&other[from..]);
        }
        _ => {}
    }
}
