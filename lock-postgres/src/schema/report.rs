//! What a server says of itself, its schema, and what the role may do there.

use leasehold_api::{Error, ErrorKind};
use sqlx::Row as _;
use sqlx::postgres::PgRow;

use super::{FIRST_SCHEMA_VERSION, OLDEST_SCHEMA_VERSION, OLDEST_SERVER, SCHEMA_VERSION, Stores, kind_of};
use crate::ident::Identifier;

/// What [`inspect`](super::inspect) found.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerReport {
    /// `server_version_num`: 150004 is 15.4.
    pub version_num: i32,
    /// The version as the server writes it.
    pub version: String,
    /// The encoding of the database.
    pub encoding: String,
    /// A standby, or a server that is being restored.
    pub in_recovery: bool,
    /// The role whose privileges count.
    pub role: String,
    /// The database.
    pub database: String,
    /// The schema.
    pub schema: SchemaState,
    /// Objects of the schema that are not there.
    pub missing_objects: Vec<String>,
    /// Objects that are not as they were installed: another kind, persistence, primary key or sequence options, a column that is not there, row-level security.
    pub altered_objects: Vec<String>,
    /// Privileges that the role lacks.
    pub missing_privileges: Vec<MissingPrivilege>,
    /// For a superuser alone: another role, which owns the schema or something in it, or may make triggers there. Its triggers and views would run
    /// with the rights of the superuser (`docs/hazards.md` H57).
    pub foreign_owner: Option<String>,
    /// Whose needs the privileges are.
    stores: Stores,
}

/// Whether the schema is there.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SchemaState {
    /// There is no schema of that name.
    Missing,
    /// The schema is there, but its version cannot be read; the other fields of the report say why.
    Unreadable,
    /// The schema says which version it is.
    Installed(SchemaVersion),
}

/// What the schema says of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SchemaVersion {
    /// Its version.
    pub version: i32,
    /// The oldest library that may use it, as the version that library would install.
    pub oldest_library: i32,
}

/// A privilege that the role lacks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MissingPrivilege {
    /// The object; `None` is the schema itself.
    pub object: Option<String>,
    /// Such as `INSERT`.
    pub privilege: String,
}

/// What a role can do with the stores of a schema.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Take locks, and everything else.
    Full,
    /// Look at them. An attempt to take one is refused by the server.
    ReadOnly,
}

impl ServerReport {
    pub(super) fn read(row: &PgRow) -> Result<Self, sqlx::Error> {
        let list = |column: &str| -> Result<Vec<String>, sqlx::Error> {
            let text: String = row.try_get(column)?;
            Ok(text.split(',').filter(|item| !item.is_empty()).map(str::to_owned).collect())
        };
        let schema =
            if row.try_get("schema_exists")? { SchemaState::Unreadable } else { SchemaState::Missing };
        let mut missing_privileges = Vec::new();
        if schema == SchemaState::Unreadable && !row.try_get::<bool, _>("schema_usage")? {
            missing_privileges.push(MissingPrivilege { object: None, privilege: "USAGE".to_owned() });
        }
        for item in list("lacking")? {
            if let Some((object, privilege)) = item.split_once(' ') {
                missing_privileges.push(MissingPrivilege {
                    object: Some(object.to_owned()),
                    privilege: privilege.to_owned(),
                });
            }
        }
        Ok(Self {
            version_num: row.try_get("version_num")?,
            version: row.try_get("version_text")?,
            encoding: row.try_get("encoding")?,
            in_recovery: row.try_get("in_recovery")?,
            role: row.try_get("role")?,
            database: row.try_get("database")?,
            schema,
            missing_objects: list("missing")?,
            altered_objects: list("altered")?,
            missing_privileges,
            foreign_owner: None,
            stores: Stores::All,
        })
    }

    /// The same, without what only other stores need: their privileges, and that their objects are as they were made.
    #[must_use]
    pub fn for_stores(mut self, stores: Stores) -> Self {
        let is_needed =
            |lacks: &MissingPrivilege| lacks.object.as_deref().is_none_or(|object| stores.use_object(object));
        self.missing_privileges.retain(is_needed);
        self.altered_objects.retain(|object| stores.use_object(object));
        self.stores = stores;
        self
    }

    pub(super) fn explains_no_version(&self) -> bool {
        self.schema == SchemaState::Missing
            // It may be a view by now, and call what that role likes.
            || self.foreign_owner.is_some()
            || self.missing_objects.iter().any(|object| object == "version")
            || self.altered_objects.iter().any(|object| object == "version")
            || self.missing_privileges.iter().any(|lacks| lacks.object.is_none())
            || self.missing_privileges.iter().any(|lacks| lacks.object.as_deref() == Some("version"))
    }

    /// The GRANTs that are missing, as SQL, one per line.
    #[must_use]
    pub fn missing_grants(&self, schema: &Identifier) -> Vec<String> {
        let schema = schema.quoted();
        let role = format!("\"{}\"", self.role.replace('"', "\"\""));
        let grant = |lacks: &MissingPrivilege| {
            let MissingPrivilege { object, privilege } = lacks;
            match object {
                None => format!("GRANT {privilege} ON SCHEMA {schema} TO {role};"),
                Some(object) => {
                    format!("GRANT {privilege} ON {}{schema}.{object} TO {role};", kind_of(object))
                }
            }
        };
        self.missing_privileges.iter().map(grant).collect()
    }

    /// Whether the stores can work here.
    ///
    /// # Errors
    ///
    /// As [`check`](super::check).
    pub fn ready(&self, schema: &Identifier) -> Result<(), Error> {
        match self.access(schema)? {
            Access::Full => Ok(()),
            Access::ReadOnly => Err(self.lacks_privileges(schema)),
        }
    }

    /// What the role can do with the stores: all, or look.
    ///
    /// # Errors
    ///
    /// As [`check`](super::check).
    pub fn access(&self, schema: &Identifier) -> Result<Access, Error> {
        self.suitable_server()?;
        let missing = |what: String| {
            Err(Error::new(
                ErrorKind::SchemaMissing,
                format!(
                    "{what} in the database {:?}; run `leasehold schema apply`, let an administrator run what `leasehold schema print` prints, or connect with install=true",
                    self.database
                ),
            ))
        };
        if self.schema == SchemaState::Missing {
            return missing(format!("there is no schema {:?}", schema.as_str()));
        }
        self.is_safe_to_use(schema)?;
        if let SchemaState::Installed(version) = self.schema {
            version.usable(schema)?;
        }
        let access = if self.may_only_read() { Access::ReadOnly } else { Access::Full };
        if access == Access::Full && !self.missing_privileges.is_empty() {
            return Err(self.lacks_privileges(schema));
        }
        if !self.missing_objects.is_empty() {
            return missing(format!(
                "the schema {:?} has no {}",
                schema.as_str(),
                self.missing_objects.join(", ")
            ));
        }
        if !self.altered_objects.is_empty() {
            return Err(Error::new(
                ErrorKind::Corrupt,
                format!(
                    "in the schema {:?} somebody altered {}: the kind, a column, the primary key, row-level security, LOGGED or UNLOGGED, or the sequence's INCREMENT, CACHE or CYCLE; alter it back to what `leasehold schema print` prints",
                    schema.as_str(),
                    self.altered_objects.join(", ")
                ),
            ));
        }
        match self.schema {
            SchemaState::Installed(_) => Ok(access),
            _ => missing(format!("the schema {:?} does not say which version it is", schema.as_str())),
        }
    }

    /// Whether a superuser would run what another role has put into the schema.
    pub(super) fn is_safe_to_use(&self, schema: &Identifier) -> Result<(), Error> {
        let Some(owner) = &self.foreign_owner else { return Ok(()) };
        Err(Error::new(
            ErrorKind::PermissionDenied,
            format!(
                "{:?} is a superuser, and the schema {:?}, or something in it, belongs to the role {owner:?}, or that role may make triggers or foreign keys there, which would run with the rights of a superuser; connect as the owner, or as a role with the privileges of `leasehold schema print --grant-to ROLE`, or revoke TRIGGER and REFERENCES and drop what was made by them (docs/hazards.md H57)",
                self.role,
                schema.as_str()
            ),
        ))
    }

    fn lacks_privileges(&self, schema: &Identifier) -> Error {
        let (role, grants) = (&self.role, self.missing_grants(schema).join(" "));
        let message = format!("the role {role:?} lacks privileges; let an administrator run: {grants}");
        Error::new(ErrorKind::PermissionDenied, message)
    }

    /// Whether the role may read everything and write nothing, as nobody who is to take locks would be set up.
    fn may_only_read(&self) -> bool {
        let is_missing = |(object, privilege): (&str, &str)| {
            let is_it = |lacks: &MissingPrivilege| {
                lacks.object.as_deref() == Some(object) && lacks.privilege == privilege
            };
            self.missing_privileges.iter().any(is_it)
        };
        self.stores.needs().all(|need| is_missing(need) == (need.1 != "SELECT"))
            && self.missing_privileges.iter().all(|lacks| lacks.object.is_some())
    }

    /// Whether server and database are of a kind that the stores can work on.
    pub(super) fn suitable_server(&self) -> Result<(), Error> {
        if self.version_num < OLDEST_SERVER {
            return Err(Error::new(
                ErrorKind::InvalidOption,
                format!(
                    "the server is PostgreSQL {}; leasehold needs {} or newer",
                    self.version,
                    OLDEST_SERVER / 10_000
                ),
            ));
        }
        if self.encoding != "UTF8" {
            return Err(Error::new(
                ErrorKind::InvalidOption,
                format!(
                    "the database {:?} is in {}, where not every key can be kept; create one with ENCODING 'UTF8'",
                    self.database, self.encoding
                ),
            ));
        }
        if self.in_recovery {
            return Err(Error::new(
                ErrorKind::Unavailable,
                "this server is a standby, whose locks exclude nobody; connect to the primary (docs/hazards.md H10)",
            ));
        }
        Ok(())
    }
}

impl SchemaVersion {
    pub(super) fn read(row: &PgRow) -> Result<Self, sqlx::Error> {
        Ok(Self { version: row.try_get("version")?, oldest_library: row.try_get("oldest_library")? })
    }

    const fn is_usable(self) -> bool {
        self.version >= OLDEST_SCHEMA_VERSION && self.oldest_library <= SCHEMA_VERSION
    }

    /// Whether it is an older one, from which [`install`](super::install) goes on to this one.
    pub(super) const fn can_be_upgraded(self) -> bool {
        self.version >= FIRST_SCHEMA_VERSION && self.version < SCHEMA_VERSION
    }

    pub(super) fn usable(self, schema: &Identifier) -> Result<(), Error> {
        if self.is_usable() {
            return Ok(());
        }
        let advice = if self.version > SCHEMA_VERSION {
            "update this program, or name another schema"
        } else {
            "run `leasehold schema apply` of the version that this program was built with"
        };
        Err(Error::new(
            ErrorKind::SchemaMissing,
            format!(
                "the schema {:?} has version {} and is for libraries of {} or newer; this one knows {OLDEST_SCHEMA_VERSION} to {SCHEMA_VERSION}: {advice}",
                schema.as_str(),
                self.version,
                self.oldest_library
            ),
        ))
    }
}
