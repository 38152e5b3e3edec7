//! Templates for keys, written in the route's configuration.

mod form;
#[cfg(test)]
mod fuzz;
mod json;
mod message;
mod parse;
mod source;

use std::fmt;
use std::future::{Future, ready};
use std::sync::Arc;

use bytes::Bytes;
use http::{Extensions, Request, StatusCode};
use http_body::Body;
use http_body_util::{BodyExt as _, LengthLimitError, Limited};
use leasehold_api::{Error, ErrorKind, LockKey};
use tracing::debug;

use crate::BoxError;
use crate::key::{KeyError, KeyFor};
pub use message::MessageTemplate;
use parse::{KeyPart, Subject};

/// A key made of a request's values, such as `ledger:{path.holder|int}`. It is parsed once, at start-up.
///
/// | In a template | Is |
/// |---|---|
/// | `a:b` | two parts; a `:` or `%` inside a value is escaped, so different values never make the same key |
/// | `{path.id}`, `{{path.id}}` | the route's parameter `id`, decoded (feature `axum`) |
/// | `{query.id}` | the parameter `id` of the query string, decoded |
/// | `{header.x-user}` | the header `x-user` |
/// | `{ext.user}` | the value that a function returns for an extension of the request; see [`Template::builder`] |
/// | `{json.order.id}` | the field `id` of the object `order` in the body; see [`Template::parse_with_body`] |
/// | `\|int` | the value as an integer: `42`, `042` and `+42` are one key |
/// | `\|uuid` | the value as a UUID, in one spelling |
/// | `\|lower` | the value in lower case |
///
/// A part has at most one value, with or without text around it. A [`KeyError`] results if a value is missing, empty,
/// duplicated, not UTF-8 or not of the form. Its status is 400 for values sent by the client (query, header, body).
/// It is 500 for values of the service (a route without that parameter, a missing extension). A failed value never
/// yields a partial key.
///
/// **Use the form that the handler uses.** Without `|int`, a handler with `Path<i64>` sees one number where the lock
/// sees three keys, and a client can evade the lock by writing `042`. The surest way is
/// [`extracted`](crate::extracted()) with the handler's own extractor.
#[derive(Clone)]
pub struct Template {
    text: Arc<str>,
    parts: Arc<[KeyPart]>,
}

/// A [`Template`] that reads the body before the lock is acquired. The handler gets the body byte for byte. A body
/// longer than the limit gets status 413.
#[derive(Clone, Debug)]
pub struct BodyTemplate {
    template: Template,
    limit: usize,
}

impl Template {
    /// Parses a template.
    ///
    /// # Errors
    ///
    /// [`TemplateError`] with the position of the mistake.
    pub fn parse(text: &str) -> Result<Self, TemplateError> {
        Self::builder(text).build()
    }

    /// Parses a template with fields of the JSON body. Bodies longer than `limit` bytes are refused.
    ///
    /// # Errors
    ///
    /// As [`parse`](Self::parse).
    pub fn parse_with_body(text: &str, limit: usize) -> Result<BodyTemplate, TemplateError> {
        Self::builder(text).build_with_body(limit)
    }

    /// Begins a template with values from the request's extensions, which other layers insert.
    ///
    /// ```
    /// use leasehold_tower::Template;
    ///
    /// #[derive(Clone)]
    /// struct User {
    ///     id: u64,
    /// }
    ///
    /// let key = Template::builder("ledger:{ext.user}").extension("user", |user: &User| user.id).build()?;
    /// # let _ = key;
    /// # Ok::<(), leasehold_tower::TemplateError>(())
    /// ```
    pub fn builder(text: &str) -> TemplateBuilder {
        TemplateBuilder { text: text.into(), extensions: Vec::new() }
    }

    /// Reads the body before the lock is acquired, although the key does not need it. A client that sends slowly then
    /// does not hold the lock. Bodies longer than `limit` bytes are refused.
    #[must_use]
    pub fn buffer_body(self, limit: usize) -> BodyTemplate {
        BodyTemplate { template: self, limit }
    }

    fn key(&self, parts: &mut http::request::Parts, body: Option<&[u8]>) -> Result<LockKey, KeyError> {
        let mut values = Vec::with_capacity(self.parts.len());
        for part in self.parts.iter() {
            values.push(part.resolve(parts, body)?);
        }
        Ok(LockKey::from_parts(values)?)
    }
}

impl<B: Send + 'static> KeyFor<Request<B>> for Template {
    // Computes the key here and not in the future, because a lazy future would have to hold the request.
    fn key_for(
        &self,
        request: Request<B>,
    ) -> impl Future<Output = (Request<B>, Result<LockKey, KeyError>)> + Send {
        let (mut parts, body) = request.into_parts();
        let key = self.key(&mut parts, None);
        ready((Request::from_parts(parts, body), key))
    }
}

impl<B> KeyFor<Request<B>> for BodyTemplate
where
    B: Body<Data = Bytes> + From<Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
{
    async fn key_for(&self, request: Request<B>) -> (Request<B>, Result<LockKey, KeyError>) {
        let (mut parts, body) = request.into_parts();
        let bytes = match Limited::new(body, self.limit).collect().await {
            Ok(collected) => collected.to_bytes(),
            Err(error) => {
                let error = self.unreadable(error);
                return (Request::from_parts(parts, Bytes::new().into()), Err(error));
            }
        };
        let key = self.template.key(&mut parts, Some(&bytes));
        (Request::from_parts(parts, bytes.into()), key)
    }
}

impl BodyTemplate {
    fn unreadable(&self, error: BoxError) -> KeyError {
        if error.is::<LengthLimitError>() {
            let detail = format!("the body is longer than {} bytes", self.limit);
            return KeyError::new(StatusCode::PAYLOAD_TOO_LARGE, detail);
        }
        debug!(%error, "the body could not be read");
        KeyError::bad_request("the body could not be read")
    }
}

impl fmt::Debug for Template {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Template").field(&self.text).finish()
    }
}

impl fmt::Display for Template {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// A function that returns a value of the request's extensions.
type FromExtensions = Arc<dyn Fn(&Extensions) -> Option<String> + Send + Sync>;

/// Builds a [`Template`]. See [`Template::builder`].
#[must_use = "build makes the template"]
pub struct TemplateBuilder {
    text: Arc<str>,
    extensions: Vec<(String, FromExtensions)>,
}

impl TemplateBuilder {
    /// Sets the value of `{ext.name}`: the result of `value` for the request's extension of type `X`.
    pub fn extension<X, V>(
        mut self,
        name: impl Into<String>,
        value: impl Fn(&X) -> V + Send + Sync + 'static,
    ) -> Self
    where
        X: Send + Sync + 'static,
        V: fmt::Display,
    {
        let read = move |all: &Extensions| all.get::<X>().map(|x| value(x).to_string());
        self.extensions.push((name.into(), Arc::new(read)));
        self
    }

    /// Parses the template.
    ///
    /// # Errors
    ///
    /// As [`Template::parse`], or if an extension in the template has no value.
    pub fn build(self) -> Result<Template, TemplateError> {
        self.parse(Subject::Request)
    }

    /// Parses a template with fields of the JSON body. See [`Template::parse_with_body`].
    ///
    /// # Errors
    ///
    /// As [`build`](Self::build).
    pub fn build_with_body(self, limit: usize) -> Result<BodyTemplate, TemplateError> {
        Ok(self.parse(Subject::RequestWithBody)?.buffer_body(limit))
    }

    fn parse(self, subject: Subject) -> Result<Template, TemplateError> {
        let parts = parse::template(&self.text, &self.extensions, subject)?;
        Ok(Template { text: self.text, parts: parts.into() })
    }
}

impl fmt::Debug for TemplateBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("TemplateBuilder").field(&self.text).finish()
    }
}

/// The error of a malformed template, with its position.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the key template is wrong at byte {at}: {message}")]
pub struct TemplateError {
    at: usize,
    message: String,
}

impl TemplateError {
    fn new(at: usize, message: impl Into<String>) -> Self {
        Self { at, message: message.into() }
    }

    /// Returns the byte offset of the mistake in the template, from 0.
    #[must_use]
    pub const fn at(&self) -> usize {
        self.at
    }
}

impl From<TemplateError> for Error {
    fn from(error: TemplateError) -> Self {
        Self::new(ErrorKind::InvalidOption, error.to_string())
    }
}
