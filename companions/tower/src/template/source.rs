//! Reads values of a request. If two parsers could pick different values, the request is refused.

use std::borrow::Cow;
use std::str;

use http::HeaderName;
use http::request::Parts;

use super::parse::{KeyPart, Value};
use super::{FromExtensions, json};
use crate::key::KeyError;

pub(super) enum ValueSource {
    #[cfg_attr(not(feature = "axum"), allow(dead_code))]
    Path(String),
    Query(String),
    Header(HeaderName),
    Json(Vec<String>),
    Extension(FromExtensions),
}

impl KeyPart {
    pub(super) fn resolve(&self, parts: &mut Parts, body: Option<&[u8]>) -> Result<Cow<'_, str>, KeyError> {
        let Some(value) = &self.value else { return Ok(Cow::Borrowed(&self.before)) };
        let name = &value.name;
        let text = value.read(parts, body)?;
        if text.is_empty() {
            return Err(value.fault(format!("`{name}` is empty")));
        }
        let text = match value.form {
            None => text,
            Some(form) => form
                .apply(&text)
                .ok_or_else(|| value.fault(format!("`{name}` is not {}", form.expected())))?,
        };
        if self.before.is_empty() && self.after.is_empty() {
            return Ok(Cow::Owned(text));
        }
        Ok(Cow::Owned(format!("{}{text}{}", self.before, self.after)))
    }
}

impl Value {
    fn read(&self, parts: &mut Parts, body: Option<&[u8]>) -> Result<String, KeyError> {
        let name = &self.name;
        match &self.source {
            ValueSource::Path(field) => path(parts, field),
            ValueSource::Query(field) => {
                let query = parts.uri.query().unwrap_or_default();
                let mut found = form_urlencoded::parse(query.as_bytes()).filter(|(name, _)| name == field);
                let value = self.only(found.next(), found.next().is_some())?.1;
                // Refuses values with replacement characters, because different invalid inputs would make the same
                // value.
                if value.contains(char::REPLACEMENT_CHARACTER) {
                    return Err(KeyError::bad_request(format!("`{name}` is not UTF-8")));
                }
                Ok(value.into_owned())
            }
            ValueSource::Header(field) => {
                let mut found = parts.headers.get_all(field).iter();
                let value = self.only(found.next(), found.next().is_some())?;
                let text = str::from_utf8(value.as_bytes());
                text.map(str::to_owned).map_err(|_| KeyError::bad_request(format!("`{name}` is not UTF-8")))
            }
            ValueSource::Json(path) => json::field(body.unwrap_or_default(), path)
                .map_err(|fault| KeyError::bad_request(fault.about(name))),
            ValueSource::Extension(read) => read(&parts.extensions)
                .ok_or_else(|| KeyError::internal(format!("the request has no extension for `{name}`"))),
        }
    }

    fn only<T>(&self, first: Option<T>, has_second: bool) -> Result<T, KeyError> {
        match first {
            Some(_) if has_second => {
                Err(KeyError::bad_request(format!("`{}` occurs more than once", self.name)))
            }
            Some(value) => Ok(value),
            None => Err(KeyError::bad_request(format!("`{}` is missing", self.name))),
        }
    }

    /// Returns the error of a bad value. Only the service sets extensions, so their errors are its fault.
    fn fault(&self, detail: String) -> KeyError {
        match self.source {
            ValueSource::Extension(_) => KeyError::internal(detail),
            _ => KeyError::bad_request(detail),
        }
    }
}

#[cfg(feature = "axum")]
fn path(parts: &mut Parts, field: &str) -> Result<String, KeyError> {
    use std::future::Future as _;
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    use axum::extract::rejection::RawPathParamsRejection;
    use axum::extract::{FromRequestParts as _, RawPathParams};

    // Polls once, which is enough because the extractor only reads an extension.
    let read = pin!(RawPathParams::from_request_parts(parts, &()));
    let Poll::Ready(read) = read.poll(&mut Context::from_waker(Waker::noop())) else {
        return Err(KeyError::internal("the path's parameters are not there yet"));
    };
    let params = read.map_err(|rejection| match rejection {
        RawPathParamsRejection::InvalidUtf8InPathParam(_) => {
            KeyError::bad_request(format!("`path.{field}` is not UTF-8"))
        }
        _ => KeyError::internal(format!(
            "`path.{field}`: the layer is not on a route, so there are no parameters; use route_layer"
        )),
    })?;
    let mut found = params.iter().filter(|(name, _)| *name == field);
    match (found.next(), found.next()) {
        (Some((_, value)), None) => Ok(value.to_owned()),
        // Refuses the request. Nested routers can define the name twice, and a handler might take either value.
        (Some(_), Some(_)) => {
            Err(KeyError::internal(format!("the route has the parameter `{field}` twice; rename one")))
        }
        (None, _) => Err(KeyError::internal(format!("the route has no parameter `{field}`"))),
    }
}

#[cfg(not(feature = "axum"))]
fn path(_: &mut Parts, field: &str) -> Result<String, KeyError> {
    // Unreachable, because the parser refuses such a template.
    Err(KeyError::internal(format!("`path.{field}` needs the feature `axum`")))
}
