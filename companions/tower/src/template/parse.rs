//! The grammar of templates.

use std::fmt;

use http::HeaderName;
use leasehold_api::MAX_KEY_BYTES;

use super::form::Form;
use super::source::ValueSource;
use super::{FromExtensions, TemplateError};

/// The part between two separators: text, or text around one value.
#[derive(Debug)]
pub(super) struct KeyPart {
    pub(super) before: String,
    pub(super) value: Option<Value>,
    pub(super) after: String,
}

#[derive(Debug)]
pub(super) struct Value {
    /// The value as the template writes it, for messages.
    pub(super) name: String,
    pub(super) source: ValueSource,
    pub(super) form: Option<Form>,
}

impl fmt::Debug for ValueSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ValueSource")
    }
}

/// The subject of a template, which decides about its sources.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Subject {
    Request,
    RequestWithBody,
    Message,
}

pub(super) fn template(
    text: &str,
    extensions: &[(String, FromExtensions)],
    subject: Subject,
) -> Result<Vec<KeyPart>, TemplateError> {
    if text.len() > MAX_KEY_BYTES {
        let message = format!("a key has at most {MAX_KEY_BYTES} bytes, and the template alone has more");
        let at = (0..=MAX_KEY_BYTES).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
        return Err(TemplateError::new(at, message));
    }
    let mut parser = Parser { text, at: 0, extensions, subject };
    let mut parts = Vec::new();
    loop {
        parts.push(parser.part()?);
        if !parser.eat(":") {
            return Ok(parts);
        }
    }
}

struct Parser<'t> {
    text: &'t str,
    at: usize,
    extensions: &'t [(String, FromExtensions)],
    subject: Subject,
}

impl Parser<'_> {
    fn part(&mut self) -> Result<KeyPart, TemplateError> {
        let start = self.at;
        let mut part = KeyPart { before: String::new(), value: None, after: String::new() };
        while let Some(c) = self.rest().chars().next() {
            match c {
                ':' => break,
                '{' if part.value.is_some() => {
                    let message = "a part has at most one value, or different values could make the same key; put a : between the two";
                    return Err(self.wrong(message));
                }
                '{' => part.value = Some(self.value()?),
                '}' => return Err(self.wrong("there is no { before this }")),
                '%' => return Err(self.wrong("% is not allowed: it escapes values")),
                c if c.is_control() => return Err(self.wrong("control characters are not allowed")),
                c => {
                    self.at += c.len_utf8();
                    if part.value.is_some() { part.after.push(c) } else { part.before.push(c) }
                }
            }
        }
        if self.at == start {
            return Err(self.wrong("a part is empty"));
        }
        Ok(part)
    }

    /// Parses `{source.name|form}` or the same in double braces.
    fn value(&mut self) -> Result<Value, TemplateError> {
        let start = self.at;
        let close = if self.eat("{{") { "}}" } else { "}" };
        self.at = start + close.len();
        let Some(length) = self.rest().find(close) else {
            return Err(TemplateError::new(start, format!("there is no {close} for this brace")));
        };
        let inside = &self.text[self.at..self.at + length];
        if let Some(brace) = inside.find(['{', '}']) {
            return Err(TemplateError::new(self.at + brace, "a brace inside of braces"));
        }
        let value = self.inside(inside)?;
        self.at += length + close.len();
        Ok(value)
    }

    fn inside(&self, text: &str) -> Result<Value, TemplateError> {
        let (name, form) = match text.split_once('|') {
            Some((name, form)) => {
                let at = self.at + name.len() + 1;
                let known = Form::named(form).ok_or_else(|| {
                    TemplateError::new(at, format!("`{form}` is no form; there are int, uuid and lower"))
                })?;
                (name, Some(known))
            }
            None => (text, None),
        };
        if name.is_empty() {
            return Err(self.wrong("the value has no name, such as path.id"));
        }
        let (kind, field) = name.split_once('.').unwrap_or((name, ""));
        let source = self.source(kind, field)?;
        Ok(Value { name: name.to_owned(), source, form })
    }

    fn source(&self, kind: &str, field: &str) -> Result<ValueSource, TemplateError> {
        let at_field = self.at + kind.len() + 1;
        let source = match kind {
            "event" if self.subject == Subject::Message => ValueSource::Json(Self::names(field, at_field)?),
            _ if self.subject == Subject::Message => {
                let message = format!("`{kind}` is no source of a message; there is only event");
                return Err(self.wrong(message));
            }
            "path" if cfg!(not(feature = "axum")) => {
                return Err(self.wrong("parameters of the path need the feature `axum`"));
            }
            "path" => ValueSource::Path(field.to_owned()),
            "query" => ValueSource::Query(field.to_owned()),
            "header" if !field.is_empty() => ValueSource::Header(
                HeaderName::try_from(field)
                    .map_err(|_| TemplateError::new(at_field, format!("`{field}` is no name of a header")))?,
            ),
            "json" if self.subject != Subject::RequestWithBody => {
                return Err(self.wrong("fields of the body need a limit: use Template::parse_with_body"));
            }
            "json" => ValueSource::Json(Self::names(field, at_field)?),
            "ext" if !field.is_empty() => {
                let known = self.extensions.iter().find(|(name, _)| name == field).ok_or_else(|| {
                    let message = format!("no extension `{field}` was given; use Template::builder");
                    TemplateError::new(at_field, message)
                })?;
                ValueSource::Extension(known.1.clone())
            }
            "header" | "ext" => ValueSource::Query(String::new()),
            _ => {
                let message = format!("`{kind}` is no source; there are path, query, header, ext and json");
                return Err(self.wrong(message));
            }
        };
        if field.is_empty() {
            return Err(self.wrong(format!("`{kind}` needs a name, such as {kind}.id")));
        }
        Ok(source)
    }

    /// Splits the path to a field. An empty path is an error of the caller.
    fn names(field: &str, at: usize) -> Result<Vec<String>, TemplateError> {
        let names: Vec<_> = field.split('.').map(str::to_owned).collect();
        match names.iter().any(String::is_empty) && !field.is_empty() {
            true => Err(TemplateError::new(at, "a name is empty")),
            false => Ok(names),
        }
    }

    fn rest(&self) -> &str {
        &self.text[self.at..]
    }

    fn eat(&mut self, token: &str) -> bool {
        let is_there = self.rest().starts_with(token);
        if is_there {
            self.at += token.len();
        }
        is_there
    }

    fn wrong(&self, message: impl Into<String>) -> TemplateError {
        TemplateError::new(self.at, message)
    }
}

#[cfg(test)]
mod tests {
    use super::super::Template;

    #[test]
    fn wrong_templates_are_refused_with_the_byte() {
        let wrong = [
            ("", 0, "empty"),
            (":a", 0, "empty"),
            ("a::b", 2, "empty"),
            ("a:", 2, "empty"),
            ("a%3A", 1, "%"),
            ("a{", 1, "no }"),
            ("a}", 1, "no {"),
            ("{{query.id}", 0, "no }}"),
            ("{query.id}}", 10, "no {"),
            ("{query.{id}}", 7, "inside"),
            ("{}", 1, "no name"),
            ("{|int}", 1, "no name"),
            ("{query}", 1, "needs a name"),
            ("{query.}", 1, "needs a name"),
            ("{header.}", 1, "needs a name"),
            ("{ext.}", 1, "needs a name"),
            ("{header.a b}", 8, "no name of a header"),
            ("{event.id}", 1, "no source"),
            ("{hotel}", 1, "no source"),
            ("l:{query.id|number}", 12, "no form"),
            ("l:{query.id|}", 12, "no form"),
            ("{query.a}{query.b}", 9, "at most one value"),
            ("{query.a}-{query.b}", 10, "at most one value"),
            ("l:{ext.user}", 7, "no extension"),
            ("l:{json.id}", 3, "parse_with_body"),
            ("a\nb", 1, "control"),
        ];
        for (text, at, message) in wrong {
            let error = Template::parse(text).expect_err(text);
            assert_eq!(error.at(), at, "{text:?}: {error}");
            assert!(error.to_string().contains(message), "{text:?}: {error}");
        }
        let error = Template::parse_with_body("l:{json.a..b}", 10).unwrap_err();
        assert_eq!(error.at(), 8, "{error}");
        assert_eq!(Template::parse(&"a".repeat(513)).unwrap_err().at(), 512);
        assert_eq!(Template::parse(&"日".repeat(200)).unwrap_err().at(), 510, "where a character begins");
    }

    #[test]
    fn right_templates() {
        for text in ["a", "a:b", "{query.id}", "l:{{query.id|int}}:x", "user-{header.x-user|lower}-v1"] {
            assert_eq!(Template::parse(text).expect(text).to_string(), text);
        }
        assert!(Template::parse_with_body("o:{json.order.id|uuid}", 10).is_ok());
    }
}
