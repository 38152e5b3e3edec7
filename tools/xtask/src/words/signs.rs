//! Mechanical signs of text that is hard to read, as regular expressions. `docs/style.md` has the rules behind them.

use std::sync::LazyLock;

use regex::Regex;

/// A pattern. Its hits show places to check. They do not prove that a sentence is bad.
pub(super) struct Sign {
    pub(super) name: &'static str,
    /// Whether the lint counts each hit as a fault.
    pub(super) is_forbidden: bool,
    pattern: Regex,
    /// Pattern of the text after a hit that makes the hit not count.
    unless_before: Option<Regex>,
}

const NEGATION: &str = "no|not|nobody|nothing|never|none|without|neither|cannot|nor";

/// The first thirteen are the signs whose sum has a goal.
pub(super) static SIGNS: LazyLock<Vec<Sign>> = LazyLock::new(|| {
    let two_negations = format!(r"\b(?:{NEGATION})\b[^.;:!?]*?\b(?:{NEGATION}|unless)\b");
    [
        ("S01 what", false, r"\b[Ww]hat\b", ""),
        (
            "S02 who-clause",
            true,
            r"(?:^|[.:;,(] |\b(?:by|to|of|for|with|and|or|than|from|on|until) )[Ww]ho\b|\b[Ww]ho(?:m|se)?ever\b|\b[Ww]hatever\b",
            "",
        ),
        ("S03 somebody", false, r"\b(?:[Ss]ome|[Nn]o|[Aa]ny|[Ee]very)body\b", ""),
        ("S04 tell, say, ask", false, r"\b(?:told|tells?|hears?|heard|says?|said|asks?|asked|asking)\b", ""),
        (
            "S05 passive with preposition",
            false,
            r"\b(?:is|are|was|were|be|been|being) (?:waited|looked|asked|told|gone|come|counted|cared|begun|cleaned|paid|walked|known|spoken|heard|reckoned|let) (?:for|at|after|to|of|by|on|with|out|through|over|go)\b",
            "",
        ),
        (
            "S06 that, those, one as noun",
            true,
            r"\b(?:[Tt]hat|[Tt]hose) (?:of|which|to which|whose|who)\b|\b[Tt]hose that\b|\b[Oo]nes? (?:that|who|whose|of which)\b|\bof (?:those|that)[,.;:]",
            "",
        ),
        (
            "S07 is there, is at it",
            true,
            r"\b(?:is|are|was|were|be|been|not|still|already) there\b|\b(?:is|are|was|were|others|nobody|somebody) at (?:it|them|their|the row|one|its)\b|\b(?:nobody|somebody|who|others) (?:is|are) at\b",
            r"^ (?:is|are|was|were|may|can)",
        ),
        (
            "S08 time words",
            false,
            r"\bmeanwhile\b|\bby then\b|\bjust (?:then|now)\b|\bin between\b|\b[Ff]rom (?:here|there|now|then|which|when|that \w+|its? \w+|the \w+) on\b|\bany more\b",
            "",
        ),
        ("S09 two negations", false, &two_negations, ""),
        (
            "S10 so that, as .. as",
            false,
            r"\bso that\b|\bas (?:long|far|soon|often|many|much|well|few|little|late|early|large|small|good|\w+ly) as\b",
            "",
        ),
        (
            "S11 archaic",
            true,
            r"\bbut for\b|\bbe it\b|\ball the same\b|\bfor ever\b|\bto be had\b|\b[Aa]new\b|\bof (?:its|their|our|his|your) own\b",
            "",
        ),
        (
            "S12 where for if",
            false,
            r"(?:^|[.;] )Where |[:;,] where (?:the|a|an|it|there|no|nobody|that|this|they|several|one)\b",
            r"^\w+\.",
        ),
        ("S13 may have, may not", false, r"\bmay (?:have|not)\b", ""),
        (
            "house words",
            true,
            r"\b(?:let|lets|letting) go\b|\b(?:give|gives|given|giving|gave) back\b|\bhand(?:s|ed)? on\b|\b(?:lie|lies|lay) ready\b|\bonce more\b|\b(?:come|comes|came) to nothing\b|\btravels? (?:together|in the same)\b|\bmend(?:s|ed|ing)?\b|\bin the sand\b",
            "",
        ),
    ]
    .into_iter()
    .map(|(name, is_forbidden, pattern, unless_before)| Sign::new(name, is_forbidden, pattern, unless_before))
    .collect()
});

/// Number of the first [`SIGNS`] whose hits are added up.
pub(super) const SUMMED: usize = 13;

/// S16: a function's comment that starts with a clause instead of a verb.
pub(super) static OPENING: LazyLock<Sign> = LazyLock::new(|| {
    let words =
        "What|How|Whether|When|Where|Who|Whoever|As|Those|That|Nothing|Nobody|From|The same|It|One|All";
    Sign::new("S16 comment of a function opens with a clause", true, &format!(r"^(?:{words})\b"), "")
});

impl Sign {
    fn new(name: &'static str, is_forbidden: bool, pattern: &str, unless_before: &str) -> Self {
        let compiled =
            |pattern: &str| Regex::new(pattern).unwrap_or_else(|error| unreachable!("{name}: {error}"));
        let unless_before = (!unless_before.is_empty()).then(|| compiled(unless_before));
        Self { name, is_forbidden, pattern: compiled(pattern), unless_before }
    }

    /// Returns how many times the sign occurs.
    pub(super) fn count(&self, text: &str) -> usize {
        let is_excused =
            |end: usize| self.unless_before.as_ref().is_some_and(|rest| rest.is_match(&text[end..]));
        self.pattern.find_iter(text).filter(|hit| !is_excused(hit.end())).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(text: &str) -> Vec<&'static str> {
        let hits = SIGNS.iter().filter(|sign| sign.count(text) > 0);
        hits.map(|sign| sign.name.split(' ').next().unwrap_or_default()).collect()
    }

    #[test]
    fn each_sign_is_found_in_a_sentence_that_shows_it() {
        for (text, sign) in [
            ("Sends what changed.", "S01"),
            ("Blocked by whoever holds the key.", "S02"),
            ("Nobody waits.", "S03"),
            ("The server says no.", "S04"),
            ("A release that is waited for.", "S05"),
            ("Returns those of the batch.", "S06"),
            ("Returns whether the row is there.", "S07"),
            ("The lease ended meanwhile.", "S08"),
            ("It never ends without a lease.", "S09"),
            ("Renews so that the lease lasts.", "S10"),
            ("A connection of its own.", "S11"),
            ("Where it fails, retry.", "S12"),
            ("The answer may have been lost.", "S13"),
            ("The lock is handed on.", "house"),
        ] {
            assert!(found(text).contains(&sign), "{text}: {:?}", found(text));
        }
        assert_eq!(OPENING.count("Whether it is held."), 1);
    }

    #[test]
    fn plain_sentences_have_no_sign() {
        let plain =
            ["Returns whether the key is held.", "Is still there is no question.", "Where std::sync fits."];
        assert_eq!(found(plain[0]), [""; 0]);
        assert_eq!(found(plain[1]), [""; 0], "what follows makes it another sentence");
        assert_eq!(OPENING.count(plain[0]), 0);
    }
}
