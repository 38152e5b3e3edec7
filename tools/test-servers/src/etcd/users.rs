//! Users and roles.

use serde_json::json;

use super::Etcd;
use super::api::encoded;
use super::keys::end;

/// A user with the right to read and write the keys of one prefix.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EtcdUser {
    name: String,
    password: String,
    prefix: String,
}

impl EtcdUser {
    /// Describes a user.
    #[must_use]
    pub fn new(name: impl Into<String>, password: impl Into<String>, prefix: impl Into<String>) -> Self {
        Self { name: name.into(), password: password.into(), prefix: prefix.into() }
    }
}

impl Etcd {
    /// Creates `root` and these users, and turns authentication on.
    ///
    /// # Panics
    ///
    /// If a member refuses it.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the servers stay in their current state until their values are dropped.
    pub async fn require_users(&self, users: &[EtcdUser]) {
        const ROOT: &str = "the password of root";
        self.ask("auth/user/add", json!({ "name": "root", "password": ROOT })).await;
        self.ask("auth/role/add", json!({ "name": "root" })).await;
        self.ask("auth/user/grant", json!({ "user": "root", "role": "root" })).await;
        for user in users {
            let key = user.prefix.as_bytes();
            let right =
                json!({ "permType": "READWRITE", "key": encoded(key), "range_end": encoded(end(key)) });
            self.ask("auth/user/add", json!({ "name": user.name, "password": user.password })).await;
            self.ask("auth/role/add", json!({ "name": user.name })).await;
            self.ask("auth/role/grant", json!({ "name": user.name, "perm": right })).await;
            self.ask("auth/user/grant", json!({ "user": user.name, "role": user.name })).await;
        }
        self.ask("auth/enable", json!({})).await;
        let mut root = self.inner.root.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        *root = Some(ROOT.to_owned());
    }

    /// Changes the password of a user.
    ///
    /// # Panics
    ///
    /// If a member refuses it.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the servers stay in their current state until their values are dropped.
    pub async fn change_password(&self, name: &str, password: &str) {
        self.ask("auth/user/changepw", json!({ "name": name, "password": password })).await;
    }

    /// Withdraws the only right of a user of [`Self::require_users`].
    ///
    /// # Panics
    ///
    /// If a member refuses it.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the servers stay in their current state until their values are dropped.
    pub async fn withdraw_right(&self, user: &EtcdUser) {
        let key = user.prefix.as_bytes();
        let right = json!({ "role": user.name, "key": encoded(key), "range_end": encoded(end(key)) });
        self.ask("auth/role/revoke", right).await;
    }
}
