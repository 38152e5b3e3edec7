//! The token of the user. One task at a time requests it.

use std::sync::{Mutex, PoisonError};

use tonic::metadata::{Ascii, MetadataValue};

use super::{Class, Failure};
use crate::config::EtcdCredentials;
use crate::wire::{AuthenticateRequest, AuthenticateResponse};

/// The user's token, with the number of tokens before it.
#[derive(Clone, Default)]
pub(super) struct Token {
    number: u64,
    /// `None` before the first token, and if the cluster has authentication turned off.
    pub(super) value: Option<MetadataValue<Ascii>>,
}

impl Token {
    /// Returns whether the client has not requested a token yet.
    pub(super) const fn is_missing(&self) -> bool {
        self.number == 0
    }
}

/// The login of one client.
pub(super) struct Login {
    credentials: Option<EtcdCredentials>,
    token: Mutex<Token>,
    /// Locked by the task that requests a token. The other tasks wait and use that token.
    turn: tokio::sync::Mutex<()>,
}

impl Login {
    pub(super) fn new(credentials: Option<EtcdCredentials>) -> Self {
        Self { credentials, token: Mutex::default(), turn: tokio::sync::Mutex::new(()) }
    }

    /// Returns whether the client has a user.
    pub(super) const fn is_used(&self) -> bool {
        self.credentials.is_some()
    }

    pub(super) fn current(&self) -> Token {
        self.token.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns a token that is newer than `ended`, by one call of `authenticate` for all tasks that need one. Its
    /// failures count as unsent, because the request that needs the token was not sent.
    pub(super) async fn renewed<F>(
        &self,
        ended: &Token,
        authenticate: impl FnOnce(AuthenticateRequest) -> F,
    ) -> Result<Token, Failure>
    where
        F: Future<Output = Result<AuthenticateResponse, Failure>>,
    {
        let Some(credentials) = &self.credentials else { return Err(Failure::unsent(Class::NoUser)) };
        let _turn = self.turn.lock().await;
        let current = self.current();
        if current.number > ended.number {
            return Ok(current);
        }
        let (name, password) = credentials.login().await.map_err(Failure::of_credentials)?;
        let value = match authenticate(AuthenticateRequest { name, password }).await {
            Ok(reply) => {
                let value = reply.token.parse::<MetadataValue<Ascii>>();
                Some(value.map_err(|_| Failure::unsent(Class::EndedToken))?)
            }
            // Authentication is turned off, so the cluster allows each request without a token.
            Err(failure) if failure.class() == Class::AuthOff => None,
            Err(failure) => return Err(failure.into_unsent()),
        };
        let token = Token { number: current.number + 1, value };
        *self.token.lock().unwrap_or_else(PoisonError::into_inner) = token.clone();
        Ok(token)
    }
}
