//! Counts of mechanical signs of hard text in comments and documents, and samples of both for a reader to grade.

mod passages;
mod signs;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use crate::step::Outcome;
use passages::Passage;
use signs::{OPENING, SIGNS, SUMMED};

const USAGE: &str = "usage: cargo xtask words [--list SIGN | --sample N [--seed S] | --update]";

/// The most hits of S01 to S13 in each package and document, one `NAME NUMBER` per line. They only fall.
const CEILINGS: &str = "tools/xtask/src/words/ceilings.txt";
/// The most words of the README and of all documents together.
const MOST_WORDS: [(&str, usize); 2] = [("README.md", 750), ("*.md", 66_500)];
/// Accepted hits, one `PATH | PHRASE | REASON` per line. A passage of the file that contains the phrase does not count.
const EXCEPTIONS: &str = "tools/xtask/src/words/exceptions.txt";

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Hits {
    /// Hits of the signs that are faults.
    forbidden: usize,
    /// Hits of the signs S01 to S13.
    summed: usize,
}

/// Prints counts, places or a sample, or updates the ceilings, depending on `arguments`.
pub(crate) fn run(arguments: &[&str]) -> Outcome {
    let number = |text: &str| text.parse::<u64>().map_err(|_| USAGE.to_owned());
    match *arguments {
        [] => report(),
        ["--list", sign] => list(sign),
        ["--sample", count] => sample(number(count)?, fastrand::u64(..)),
        ["--sample", count, "--seed", seed] => sample(number(count)?, number(seed)?),
        ["--update"] => update(),
        _ => Err(USAGE.to_owned()),
    }
}

/// Fails if a sign that is a fault occurs, if a package or a document has more hits than its ceiling allows, or if the
/// documents have too many words.
pub(crate) fn check() -> Outcome {
    let mut wrong = above(&rooms(&all()?), &ceilings()?);
    for (documents, most) in MOST_WORDS {
        let words = passages::total(&root(), documents)?;
        if words > most {
            wrong.push(format!(
                "{documents}: {words} words, at most {most}; shorten what the change makes needless"
            ));
        }
    }
    if wrong.is_empty() {
        println!("-- words: no faults, and no package or document is above its ceiling ({CEILINGS})");
        return Ok(());
    }
    Err(format!("{}\nlist the places with: cargo xtask words --list SIGN", wrong.join("\n")))
}

fn above(rooms: &BTreeMap<String, Hits>, ceilings: &BTreeMap<String, usize>) -> Vec<String> {
    let mut wrong = Vec::new();
    for (name, Hits { forbidden, summed }) in rooms {
        if *forbidden > 0 {
            wrong.push(format!("{name}: {forbidden} signs that are faults"));
        }
        // A new package or page may have up to four hits, because single hits can be right.
        let most = ceilings.get(name).copied().unwrap_or(4);
        if *summed > most {
            wrong.push(format!("{name}: {summed} signs S01 to S13, at most {most}"));
        }
    }
    wrong
}

/// Returns the absolute paths of the files in git that match `pattern`.
pub(crate) fn tracked(pattern: &str) -> Outcome<Vec<String>> {
    let root = root();
    let paths = passages::tracked(&root, pattern)?;
    Ok(paths.iter().map(|path| root.join(path).display().to_string()).collect())
}

fn root() -> PathBuf {
    // Goes up two folders, because this package is `tools/xtask`.
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap_or(Path::new(".")).to_owned()
}

fn all() -> Outcome<Vec<Passage>> {
    let root = root();
    let exceptions = exceptions(&root)?;
    let mut all = passages::comments(&root)?;
    all.extend(passages::paragraphs(&root)?);
    let is_right = |passage: &Passage| {
        exceptions
            .iter()
            .any(|(path, phrase)| passage.place.starts_with(path) && passage.text.contains(phrase))
    };
    all.retain(|passage| !is_right(passage));
    Ok(all)
}

fn hits_of(passage: &Passage) -> Hits {
    let text = passage.plain();
    let mut hits = Hits::default();
    for (at, sign) in SIGNS.iter().enumerate() {
        let count = sign.count(&text);
        hits.summed += if at < SUMMED { count } else { 0 };
        hits.forbidden += if sign.is_forbidden { count } else { 0 };
    }
    hits.forbidden += if passage.is_of_function { OPENING.count(&text) } else { 0 };
    hits
}

fn rooms(all: &[Passage]) -> BTreeMap<String, Hits> {
    let mut rooms: BTreeMap<String, Hits> = BTreeMap::new();
    for passage in all {
        let hits = hits_of(passage);
        let room = rooms.entry(passage.room.clone()).or_default();
        room.forbidden += hits.forbidden;
        room.summed += hits.summed;
    }
    rooms
}

fn report() -> Outcome {
    let all = all()?;
    let (documents, comments): (Vec<_>, Vec<_>) =
        all.iter().partition(|passage| passage.room.ends_with(".md"));
    for (name, passages) in [("comments", comments), ("documents", documents)] {
        let words: usize = passages.iter().map(|passage| passage.words()).sum();
        println!("{name}: {words} words");
        let mut sum = 0;
        for (at, sign) in SIGNS.iter().enumerate() {
            let hits: usize = passages.iter().map(|passage| sign.count(&passage.plain())).sum();
            sum += if at < SUMMED { hits } else { 0 };
            println!("  {:32}{hits:7}{:8.2} per 1,000 words", sign.name, per_thousand(hits, words));
        }
        println!("  {:32}{sum:7}{:8.2} per 1,000 words", "S01 to S13", per_thousand(sum, words));
    }
    let functions: Vec<_> = all.iter().filter(|passage| passage.is_of_function).collect();
    let opened = functions.iter().filter(|passage| OPENING.count(&passage.plain()) > 0).count();
    let share = 100.0 * opened as f64 / functions.len().max(1) as f64;
    println!("{}: {opened} of {}, {share:.1} %", OPENING.name, functions.len());
    println!("faults and S01 to S13 of each package and document:");
    for (name, Hits { forbidden, summed }) in rooms(&all) {
        println!("  {name:44}{forbidden:6}{summed:6}");
    }
    let root = root();
    println!("words of all documents: {}", passages::total(&root, "*.md")?);
    println!("words of README.md: {}", passages::total(&root, "README.md")?);
    Ok(())
}

fn per_thousand(hits: usize, words: usize) -> f64 {
    1000.0 * hits as f64 / words.max(1) as f64
}

fn list(wanted: &str) -> Outcome {
    let signs: Vec<_> = SIGNS.iter().filter(|sign| sign.name.starts_with(wanted)).collect();
    let is_opening = OPENING.name.starts_with(wanted);
    if signs.is_empty() && !is_opening {
        return Err(format!("there is no sign {wanted}\n{USAGE}"));
    }
    for passage in all()? {
        let text = passage.plain();
        let is_hit = signs.iter().any(|sign| sign.count(&text) > 0)
            || is_opening && passage.is_of_function && OPENING.count(&text) > 0;
        if is_hit {
            println!("{}: {}", passage.place, passage.text);
        }
    }
    Ok(())
}

/// Prints `count` comments, each with its item without the body, and half as many paragraphs, for a reader who grades them.
fn sample(count: u64, seed: u64) -> Outcome {
    let mut random = fastrand::Rng::with_seed(seed);
    let root = root();
    println!("seed {seed}");
    let comments = passages::comments(&root)?;
    let paragraphs = passages::paragraphs(&root)?;
    for (passages, count) in [(comments, count), (paragraphs, count / 2)] {
        let mut chosen = random.choose_multiple(passages, usize::try_from(count).unwrap_or(usize::MAX));
        chosen.sort_by(|a, b| a.place.cmp(&b.place));
        for (at, passage) in chosen.iter().enumerate() {
            println!("\n{} {}\n  {}", at + 1, passage.place, passage.text);
            if !passage.signature.is_empty() {
                println!("  > {}", passage.signature);
            }
        }
    }
    Ok(())
}

fn update() -> Outcome {
    let rooms = rooms(&all()?);
    // Skips the comparison in the first update, which has no ceilings.
    if root().join(CEILINGS).exists() {
        let wrong = above(&rooms, &ceilings()?);
        if !wrong.is_empty() {
            return Err(format!("a ceiling only falls\n{}", wrong.join("\n")));
        }
    }
    let text: String = rooms.iter().map(|(name, hits)| format!("{name} {}\n", hits.summed)).collect();
    fs::write(root().join(CEILINGS), text).map_err(|error| format!("cannot write {CEILINGS}: {error}"))
}

fn ceilings() -> Outcome<BTreeMap<String, usize>> {
    let text = fs::read_to_string(root().join(CEILINGS))
        .map_err(|error| format!("cannot read {CEILINGS}: {error}"))?;
    let parsed = text.lines().map(|line| {
        let (name, summed) = line.split_once(' ')?;
        Some((name.to_owned(), summed.parse().ok()?))
    });
    parsed.collect::<Option<_>>().ok_or_else(|| format!("{CEILINGS} is not `NAME NUMBER` in each line"))
}

fn exceptions(root: &Path) -> Outcome<Vec<(String, String)>> {
    let text = fs::read_to_string(root.join(EXCEPTIONS))
        .map_err(|error| format!("cannot read {EXCEPTIONS}: {error}"))?;
    let parsed = text.lines().filter(|line| !line.is_empty()).map(|line| {
        match line.split(" | ").collect::<Vec<_>>()[..] {
            [path, phrase, reason] if !reason.is_empty() => Some((path.to_owned(), phrase.to_owned())),
            _ => None,
        }
    });
    parsed
        .collect::<Option<_>>()
        .ok_or_else(|| format!("{EXCEPTIONS} is not `PATH | PHRASE | REASON` in each line"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn passage(text: &str, is_of_function: bool) -> Passage {
        let (place, room) = ("a/src/b.rs:1".to_owned(), "a".to_owned());
        Passage { place, room, text: text.to_owned(), signature: String::new(), is_of_function }
    }

    #[test]
    fn faults_are_none_and_other_signs_stay_below_the_ceiling() {
        let riddles =
            [passage("Whether whoever has it lets go of it.", true), passage("Says `what` it is.", false)];
        let rooms = rooms(&riddles);
        assert_eq!(rooms["a"], Hits { forbidden: 3, summed: 1 });
        let faults = "a: 3 signs that are faults";
        for (ceilings, wrong) in [
            (BTreeMap::new(), vec![faults]),
            (BTreeMap::from([("a".to_owned(), 1)]), vec![faults]),
            (BTreeMap::from([("a".to_owned(), 0)]), vec![faults, "a: 1 signs S01 to S13, at most 0"]),
        ] {
            assert_eq!(above(&rooms, &ceilings), wrong);
        }
    }
}
