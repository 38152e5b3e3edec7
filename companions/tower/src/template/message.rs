//! Templates for the keys of messages.

use std::fmt;
use std::future::{Future, ready};

use http::Request;
use leasehold_api::LockKey;
use serde::Serialize;

use super::parse::{self, Subject};
use super::{Template, TemplateError};
use crate::key::{KeyError, KeyFor};

/// A key made of the fields of a message, such as `ledger:{{event.credit_holder_id}}`, for messages of a channel, a
/// queue or a bus. It is parsed once, at start-up.
///
/// A message is any type that serde serializes, and `{event.a.b}` is the field `b` of its field `a`, as JSON would name
/// it. A field is text or an integer. Separators, braces and the forms `|int`, `|uuid` and `|lower` are as in
/// [`Template`].
///
/// ```
/// use leasehold_tower::MessageTemplate;
///
/// #[derive(serde::Serialize)]
/// struct Spent {
///     credit_holder_id: u64,
///     amount: i64,
/// }
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let template = MessageTemplate::parse("ledger:{{event.credit_holder_id}}")?;
/// let key = template.key(&Spent { credit_holder_id: 42, amount: -10 })?;
/// assert_eq!(key.as_str(), "ledger:42");
/// # Ok(())
/// # }
/// ```
///
/// As the key of a [`LockLayer`](crate::LockLayer), it serializes each message once. The example `consumer` of this crate
/// reads a channel with it.
#[derive(Clone)]
pub struct MessageTemplate(Template);

impl MessageTemplate {
    /// Parses a template.
    ///
    /// # Errors
    ///
    /// [`TemplateError`] with the position of the mistake. Sources of requests, such as `path`, are mistakes here.
    pub fn parse(text: &str) -> Result<Self, TemplateError> {
        let parts = parse::template(text, &[], Subject::Message)?;
        Ok(Self(Template { text: text.into(), parts: parts.into() }))
    }

    /// Returns the key of `message`, for a lock that no layer takes.
    ///
    /// # Errors
    ///
    /// [`KeyError`] that names the field if it is missing, empty, neither text nor an integer, or not of the form. It is
    /// the [sender's fault](KeyError::is_client_fault), except for a message that cannot be serialized.
    pub fn key<M: Serialize>(&self, message: &M) -> Result<LockKey, KeyError> {
        let json = serde_json::to_vec(message)
            .map_err(|error| KeyError::internal(format!("the message cannot be serialized: {error}")))?;
        // The sources of a message are fields of this text, so nothing of the request is read.
        let mut nothing = Request::new(()).into_parts().0;
        self.0.key(&mut nothing, Some(&json))
    }
}

impl<M: Serialize + Send + 'static> KeyFor<M> for MessageTemplate {
    fn key_for(&self, message: M) -> impl Future<Output = (M, Result<LockKey, KeyError>)> + Send {
        let key = self.key(&message);
        ready((message, key))
    }
}

impl fmt::Debug for MessageTemplate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("MessageTemplate").field(&self.0.text).finish()
    }
}

impl fmt::Display for MessageTemplate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde::ser::Error as _;
    use serde::{Serialize, Serializer};
    use serde_json::json;

    use super::*;

    fn key(template: &str, message: &impl Serialize) -> Result<String, String> {
        let template = MessageTemplate::parse(template).unwrap();
        assert!(MessageTemplate::parse(&template.to_string()).is_ok());
        match template.key(message) {
            Ok(key) => Ok(key.as_str().to_owned()),
            Err(error) => {
                assert!(error.is_client_fault(), "{error:?}");
                Err(error.to_string())
            }
        }
    }

    #[test]
    fn fields_of_any_serializable_message_make_the_key() {
        #[derive(Serialize)]
        struct Spent<'a> {
            credit_holder_id: u64,
            #[serde(rename = "wallet")]
            account: BTreeMap<&'a str, &'a str>,
            note: Option<&'a str>,
        }
        let message = Spent { credit_holder_id: 42, account: [("id", "a:b")].into(), note: None };
        assert_eq!(key("ledger:{{event.credit_holder_id}}", &message), Ok("ledger:42".to_owned()));
        assert_eq!(key("w:{event.wallet.id}-x", &message), Ok("w:a%3Ab-x".to_owned()));
        assert_eq!(key("fixed", &message), Ok("fixed".to_owned()));
        assert_eq!(key("n:{event.id|int}", &json!({"id": "042"})), Ok("n:42".to_owned()));
        // Enums are objects of one field.
        #[derive(Serialize)]
        enum Event {
            Spent { holder: u8 },
        }
        assert_eq!(key("l:{event.Spent.holder}", &Event::Spent { holder: 7 }), Ok("l:7".to_owned()));
    }

    #[test]
    fn a_field_that_is_missing_empty_or_no_text_is_refused_by_name() {
        let message = json!({"a": {"b": "", "c": 1.5, "d": null, "e": true}, "secret": "hunter2"});
        for (template, says) in [
            ("k:{event.x}", "`event.x` is missing"),
            ("k:{event.a.x}", "`event.a.x` is missing"),
            ("k:{event.secret.x}", "`event.secret.x` is missing"),
            ("k:{event.a.d}", "`event.a.d` is missing"),
            ("k:{event.a.b}", "`event.a.b` is empty"),
            ("k:{event.a.c}", "`event.a.c` is neither text nor an integer"),
            ("k:{event.a.e}", "`event.a.e` is neither text nor an integer"),
            ("k:{event.a}", "`event.a` is neither text nor an integer"),
            ("k:{event.secret|int}", "`event.secret` is not an integer"),
        ] {
            assert_eq!(key(template, &message), Err(says.to_owned()), "{template}");
        }
        for message in [json!(7), json!("text"), json!([1]), json!(null)] {
            let error = key("k:{event.id}", &message).unwrap_err();
            assert_eq!(error, "`event.id` is missing", "{message}");
        }
    }

    #[test]
    fn mistakes_are_errors_when_the_template_is_parsed() {
        for (text, at, message) in [
            ("", 0, "empty"),
            ("l:{event}", 3, "needs a name"),
            ("l:{event.}", 3, "needs a name"),
            ("l:{event.a..b}", 9, "a name is empty"),
            ("l:{path.id}", 3, "no source of a message"),
            ("l:{json.id}", 3, "no source of a message"),
            ("l:{evnt.id}", 3, "no source of a message"),
            ("l:{event.id|number}", 12, "no form"),
            ("l:{{event.id}", 2, "no }}"),
            ("l:{event.a}{event.b}", 11, "at most one value"),
        ] {
            let error = MessageTemplate::parse(text).expect_err(text);
            assert_eq!(error.at(), at, "{text:?}: {error}");
            assert!(error.to_string().contains(message), "{text:?}: {error}");
        }
    }

    #[test]
    fn a_message_that_cannot_be_serialized_is_a_fault_of_the_service() {
        struct Broken;

        impl Serialize for Broken {
            fn serialize<S: Serializer>(&self, _: S) -> Result<S::Ok, S::Error> {
                Err(S::Error::custom("broken"))
            }
        }
        let error = MessageTemplate::parse("k:{event.id}").unwrap().key(&Broken).unwrap_err();
        assert!(!error.is_client_fault() && format!("{error:?}").contains("broken"), "{error:?}");
    }
}
