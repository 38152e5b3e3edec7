//! The user and the password, fixed or returned by a callback.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;

use leasehold_api::Error;

type Login = Pin<Box<dyn Future<Output = Result<(String, String), Error>> + Send>>;

/// The source of a client's user and password.
///
/// A program that opens the store by its URL gives it as an [extension](leasehold_engine::scheme::OpenOptions::with) of
/// the options. It replaces the user and the password of the URL.
#[derive(Clone)]
pub struct EtcdCredentials(Source);

#[derive(Clone)]
enum Source {
    Fixed { user: String, password: String },
    Program(Arc<dyn Fn() -> Login + Send + Sync>),
}

impl EtcdCredentials {
    /// Creates fixed credentials.
    pub fn new(user: impl Into<String>, password: impl Into<String>) -> Self {
        Self(Source::Fixed { user: user.into(), password: password.into() })
    }

    /// Creates credentials that call `credentials` for a user and a password, at the connect and each time that the
    /// server's token has ended.
    pub fn from_program<F, C>(credentials: C) -> Self
    where
        F: Future<Output = Result<(String, String), Error>> + Send + 'static,
        C: Fn() -> F + Send + Sync + 'static,
    {
        Self(Source::Program(Arc::new(move || Box::pin(credentials()))))
    }

    /// Returns the user and the password for the next token. Calls the program's callback, if there is one.
    pub(crate) async fn login(&self) -> Result<(String, String), Error> {
        match &self.0 {
            Source::Fixed { user, password } => Ok((user.clone(), password.clone())),
            Source::Program(call) => call().await,
        }
    }
}

/// Shows no password.
impl fmt::Debug for EtcdCredentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("EtcdCredentials");
        if let Source::Fixed { user, .. } = &self.0 {
            shown.field("user", user);
        }
        shown.finish_non_exhaustive()
    }
}
