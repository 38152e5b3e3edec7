//! Breaks a statement into lines, so a reader sees its parts. Only white space changes.

/// The longest line, unless a single expression is longer.
const WIDTH: usize = 110;

/// A bracket of at most this length stays on one line.
const SHORT: usize = 40;

/// Keywords that begin a new line in a query.
const CLAUSES: [&str; 18] = [
    "SELECT",
    "FROM",
    "WHERE",
    "ORDER",
    "GROUP",
    "HAVING",
    "LIMIT",
    "FOR",
    "RETURNING",
    "SET",
    "UNION",
    "JOIN",
    "LEFT",
    "UPDATE",
    "DELETE",
    "INSERT",
    "USING",
    "ON",
];

/// A piece of a statement: a word with adjacent characters, or the contents of a bracket.
#[derive(Debug)]
enum Piece {
    Word(String),
    Group { open: String, inside: Vec<Piece>, close: String },
}

/// Formats the statement with a line for each clause and indented brackets.
pub(super) fn layout(sql: &str) -> String {
    let mut tokens = tokens(sql).into_iter().peekable();
    let pieces = parse(&mut tokens, None).0;
    let mut lines = Vec::new();
    block(&pieces, 0, &mut lines);
    lines.join("\n")
}

/// Returns the statement without insignificant white space, for comparison.
pub(super) fn squeezed(sql: &str) -> String {
    tokens(sql).join(" ").replace("( ", "(").replace(" )", ")")
}

/// Splits the statement into words, brackets and commas. Quoted text is one word.
fn tokens(sql: &str) -> Vec<String> {
    let (mut all, mut word, mut quote) = (Vec::new(), String::new(), None);
    for c in sql.chars() {
        match (quote, c) {
            (Some(end), _) => {
                word.push(c);
                quote = if c == end { None } else { quote };
            }
            (None, '\'' | '"') => {
                word.push(c);
                quote = Some(c);
            }
            (None, '(') => {
                word.push(c);
                all.push(std::mem::take(&mut word));
            }
            (None, ')') => {
                all.extend((!word.is_empty()).then(|| std::mem::take(&mut word)));
                word.push(c);
            }
            (None, ',') => {
                word.push(c);
                all.push(std::mem::take(&mut word));
            }
            (None, c) if c.is_whitespace() => {
                all.extend((!word.is_empty()).then(|| std::mem::take(&mut word)));
            }
            (None, _) => word.push(c),
        }
    }
    all.extend((!word.is_empty()).then_some(word));
    all
}

/// Parses tokens up to the end of the bracket `until`. Returns the pieces, and the token that ended them.
fn parse(
    tokens: &mut std::iter::Peekable<std::vec::IntoIter<String>>,
    until: Option<&str>,
) -> (Vec<Piece>, String) {
    let mut pieces = Vec::new();
    while let Some(token) = tokens.next() {
        let ends = match until {
            Some(")") => token.starts_with(')'),
            Some(_) => token == "END" || token.starts_with("END,") || token.starts_with("END::"),
            None => false,
        };
        if ends {
            return (pieces, token);
        }
        let close = if token.ends_with('(') { Some(")") } else { (token == "CASE").then_some("END") };
        let piece = match close {
            Some(close) => {
                let (inside, close) = parse(tokens, Some(close));
                Piece::Group { open: token, inside, close }
            }
            None => Piece::Word(token),
        };
        pieces.push(piece);
    }
    (pieces, String::new())
}

fn flat(pieces: &[Piece]) -> String {
    let parts: Vec<String> = pieces.iter().map(flat_one).collect();
    parts.join(" ")
}

fn flat_one(piece: &Piece) -> String {
    match piece {
        Piece::Word(word) => word.clone(),
        Piece::Group { open, inside, close } if open == "CASE" => format!("CASE {} {close}", flat(inside)),
        Piece::Group { open, inside, close } => format!("{open}{}{close}", flat(inside)),
    }
}

fn word(piece: &Piece) -> &str {
    match piece {
        Piece::Word(word) => word,
        Piece::Group { open, .. } => open,
    }
}

/// Adds the pieces as one line if they fit, otherwise as one line for each clause.
fn block(pieces: &[Piece], indent: usize, lines: &mut Vec<String>) {
    let text = flat(pieces);
    if indent + text.len() <= WIDTH {
        lines.push(format!("{:indent$}{text}", ""));
        return;
    }
    let mut rest = pieces;
    while !rest.is_empty() {
        let next = (1..rest.len()).find(|at| begins(rest, *at)).unwrap_or(rest.len());
        clause(&rest[..next], indent, 4, lines);
        rest = &rest[next..];
    }
}

/// Returns whether a new clause begins at piece `at`.
fn begins(pieces: &[Piece], at: usize) -> bool {
    let (before, this) = (word(&pieces[at - 1]), word(&pieces[at]));
    let next = pieces.get(at + 1).map_or("", word);
    match this {
        "FROM" => !matches!(before, "DELETE" | "DISTINCT" | "ROWS"),
        "UPDATE" => before != "KEY" && before != "FOR",
        "JOIN" => before != "LEFT",
        "SELECT" => before != "ALL",
        "ON" => next == "CONFLICT",
        "WHEN" | "ELSE" => true,
        _ => CLAUSES.contains(&this),
    }
}

/// Adds a clause as one line if it fits. Otherwise breaks it at commas or conditions, and indents the rest by `more`.
fn clause(pieces: &[Piece], indent: usize, more: usize, lines: &mut Vec<String>) {
    let text = flat(pieces);
    let is_with = word(&pieces[0]) == "WITH";
    if indent + text.len() <= WIDTH && !is_with {
        lines.push(format!("{:indent$}{text}", ""));
        return;
    }
    let is_condition = |piece: &Piece| matches!(word(piece), "AND" | "OR" | "THEN");
    let by_condition = pieces.iter().any(is_condition);
    let further = if is_with { indent } else { indent + more };
    let mut from = 0;
    for at in 1..=pieces.len() {
        let breaks = match pieces.get(at) {
            None => true,
            Some(next) if by_condition => is_condition(next),
            Some(_) => closes(&pieces[at - 1]).ends_with(','),
        };
        if breaks {
            item(&pieces[from..at], if from == 0 { indent } else { further }, lines);
            from = at;
        }
    }
}

/// Returns the text that closes a piece: its bracket, or nothing.
fn closes(piece: &Piece) -> &str {
    match piece {
        Piece::Word(word) => word,
        Piece::Group { close, .. } => close,
    }
}

/// Adds an item as one line if it fits. Otherwise puts the contents of its brackets on separate lines.
fn item(pieces: &[Piece], indent: usize, lines: &mut Vec<String>) {
    let mut line = format!("{:indent$}", "");
    let mut is_begun = false;
    for piece in pieces {
        let text = flat_one(piece);
        let space = if is_begun { " " } else { "" };
        is_begun = true;
        match piece {
            Piece::Group { open, inside, close }
                if line.len() + text.len() > WIDTH && flat(inside).len() > SHORT =>
            {
                lines.push(format!("{line}{space}{open}"));
                let is_query = matches!(
                    inside.first().map(word),
                    Some("SELECT" | "UPDATE" | "DELETE" | "INSERT" | "WITH" | "(")
                );
                if is_query || open == "CASE" {
                    block(inside, indent + 4, lines);
                } else {
                    clause(inside, indent + 4, 0, lines);
                }
                line = format!("{:indent$}{close}", "");
            }
            _ => line += &format!("{space}{text}"),
        }
    }
    lines.push(line);
}
