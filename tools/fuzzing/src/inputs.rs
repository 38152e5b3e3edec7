//! Inputs: valid ones that were changed a little, words in any order, and anything at all.

use proptest::collection::vec;
use proptest::prelude::{Just, any, prop_oneof};
use proptest::strategy::{BoxedStrategy, Strategy as _};

/// No input is longer.
const LONGEST: usize = 1 << 16;

/// Words that mean something to many readers.
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

/// One change of an input: which, where, over how many bytes, and with which word or byte.
type Change = (u8, u16, u8, u16);

/// Inputs near to `examples`, with `words` in them.
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
        // A byte that may end what is no text any more.
        4 if at < input.len() => input[at] = what.to_le_bytes()[0],
        // The same again, up to many times.
        5 => {
            let piece = input[at..end].to_vec();
            let times = [1, 2, 16, 400][what % 4];
            drop(input.splice(at..at, piece.repeat(times)));
        }
        // The same elsewhere.
        6 => {
            let piece = input[at..end].to_vec();
            let there = what % (input.len() + 1);
            drop(input.splice(there..there, piece));
        }
        // The rest of another one.
        7 => {
            let other = &examples[what % examples.len()];
            let from = usize::from(length) % (other.len() + 1);
            input.truncate(at);
            input.extend_from_slice(&other[from..]);
        }
        _ => {}
    }
}
