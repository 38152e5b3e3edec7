//! Names of tables and columns stay inside their quotes in every statement.

#![allow(clippy::unwrap_used, clippy::panic)] // A failed `unwrap` fails the test.

use fuzzing::{Fuzz, parts, text};
use leasehold_table_schema::sql::literal;
use leasehold_table_schema::{Column, Table};

use leasehold_claim::{ClaimError, ClaimSpec, IdType, RowId, States, group_number};

const NAMES: Fuzz<'_> = Fuzz {
    target: "claim_names",
    inputs: 800,
    examples: &[
        "request\u{1f}app\u{1f}status\u{1f}working\u{1f}42",
        "a\"; drop table b; --\u{1f}S\u{1f}it's\u{1f}a\\'\u{1f}-1",
        "a.b\u{1f}$$\u{1f}$body$\u{1f}{table}\u{1f}6fa459ea-ee8a-3ca4-894e-db77e160355e",
        "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\u{1f}b\u{1f}c\u{1f}d\u{1f}e",
        "Anfrage ä\u{1f}pg_temp\u{1f}\n\u{1f}\\\u{1f}007",
    ],
    words: &["$$", "$claim$", "--", "/*", "*/", "\"\"", "''", "E'", ";", "{schema}", "{table}", "%I", "%%"],
};

#[test]
fn fuzz_claim_names() {
    let plain = shape_of("t", "s", "c", "w").unwrap().unwrap();
    NAMES.check(|input| {
        let texts: Vec<_> = parts(input).into_iter().map(text).collect();
        for one in &texts {
            literals(one);
            ids(one);
        }
        let [table, schema, column, state, ..] = &texts[..] else { return };
        names(table, schema, column);
        if let Ok(shape) = shape_of(table, schema, column, state) {
            assert_eq!(shape.as_deref(), Ok(plain.as_str()), "the statements depend on the names");
        }
    });
}

fn names(table: &str, schema: &str, column: &str) {
    let qualified = Table::new(table).and_then(|table| table.in_schema(schema));
    if let Ok(qualified) = qualified {
        assert_eq!((qualified.name(), qualified.schema()), (table, Some(schema)));
        assert_eq!(tokens(&qualified.quoted()).unwrap(), [name(schema), bare("."), name(table)]);
        let _ = group_number(1, column);
    }
    if let Ok(column_name) = Column::new(column) {
        assert_eq!(tokens(&column_name.quoted()).unwrap(), [name(column)]);
    }
}

fn literals(text: &str) {
    if !text.contains('\0') {
        let read = tokens(&literal(text)).unwrap();
        let [Token::Text(back)] = &read[..] else { panic!("{read:?}") };
        assert_eq!(back, text);
    }
}

fn ids(text: &str) {
    for kind in [IdType::Int, IdType::Uuid, IdType::Text] {
        if let Ok(id) = RowId::parse(kind, text) {
            assert_eq!(RowId::parse(kind, &id.to_string()).unwrap(), id);
        }
    }
}

/// Returns the migration's script without the names in it. The inner error names the place of unmatched quotes.
fn shape_of(
    table: &str,
    schema: &str,
    column: &str,
    state: &str,
) -> Result<Result<String, String>, ClaimError> {
    let spec = ClaimSpec::builder(Table::new(table)?.in_schema(schema)?)
        .state(column, States::text(["new"], "done").taken(state).failed("failed"))
        .lease_columns("owner", "epoch", "lease_until")
        .queue("queue")
        .attempts("attempts_left")
        .build()?;
    Ok(shape(&spec.migration().sql()))
}

fn shape(sql: &str) -> Result<String, String> {
    let mut shape = String::new();
    for token in tokens(sql)? {
        match token {
            Token::Bare(text) => shape.push_str(&text),
            Token::Name(_) => shape.push_str("\"\""),
            Token::Text(_) => shape.push_str("''"),
            Token::Comment => shape.push_str("--\n"),
            Token::Body(body) => shape += &format!("$${}$$", self::shape(&body)?),
        }
    }
    // Removes the space before a literal, because only literals with a backslash have one.
    Ok(shape.split_whitespace().collect::<Vec<_>>().join(" ").replace(" ''", "''"))
}

#[derive(Clone, Debug, PartialEq)]
enum Token {
    Bare(String),
    Name(String),
    Text(String),
    Comment,
    Body(String),
}

fn name(text: &str) -> Token {
    Token::Name(text.to_owned())
}

fn bare(text: &str) -> Token {
    Token::Bare(text.to_owned())
}

/// Splits a statement into tokens like the server.
fn tokens(sql: &str) -> Result<Vec<Token>, String> {
    let mut all = Vec::new();
    let mut rest = sql;
    while let Some(first) = rest.chars().next() {
        let (token, behind) = if first == '"' {
            let (text, behind) = quoted(&rest[1..], '"', false)?;
            (Token::Name(text), behind)
        } else if let Some(escaped) = rest.trim_start_matches(' ').strip_prefix("E'") {
            let (text, behind) = quoted(escaped, '\'', true)?;
            (Token::Text(text), behind)
        } else if first == '\'' {
            let (text, behind) = quoted(&rest[1..], '\'', false)?;
            (Token::Text(text), behind)
        } else if rest.starts_with("--") {
            (Token::Comment, rest.split_once('\n').map_or("", |(_, behind)| behind))
        } else if let Some(tag) = dollar_tag(rest) {
            let (body, behind) =
                rest[tag.len()..].split_once(tag).ok_or_else(|| format!("no end: {rest}"))?;
            (Token::Body(body.to_owned()), behind)
        } else {
            (Token::Bare(first.to_string()), &rest[first.len_utf8()..])
        };
        match (all.last_mut(), &token) {
            (Some(Token::Bare(before)), Token::Bare(text)) => before.push_str(text),
            _ => all.push(token),
        }
        rest = behind;
    }
    Ok(all)
}

/// Returns the content up to the closing quote, with doubled quotes decoded, and the text after it.
fn quoted(text: &str, quote: char, escapes: bool) -> Result<(String, &str), String> {
    let mut content = String::new();
    let mut rest = text.chars();
    while let Some(c) = rest.next() {
        if c == quote {
            match rest.as_str().strip_prefix(quote) {
                Some(behind) => rest = behind.chars(),
                None => return Ok((content, rest.as_str())),
            }
        } else if c == '\\' && escapes {
            assert_eq!(rest.next(), Some('\\'), "only a backslash is escaped by one");
        }
        content.push(c);
    }
    Err(format!("no end: {text}"))
}

/// Returns the `$tag$` at the start of `text`.
fn dollar_tag(text: &str) -> Option<&str> {
    let inside = text.strip_prefix('$')?;
    let end = inside.find('$')?;
    let is_tag = inside[..end].chars().all(|c| c.is_alphanumeric() || c == '_')
        && !inside.starts_with(|c: char| c.is_ascii_digit());
    is_tag.then(|| &text[..end + 2])
}
