//! A report on a server, its schema and the role's privileges.

use leasehold_api::{Error, ErrorKind};
use sqlx::Row as _;
use sqlx::postgres::PgRow;

use super::{FIRST_SCHEMA_VERSION, OLDEST_SCHEMA_VERSION, OLDEST_SERVER, SCHEMA_VERSION, Stores, kind_of};
use crate::ident::Identifier;

/// The result of [`inspect`](super::inspect).
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerReport {
    /// The server's version as a number (`server_version_num`): 150004 is 15.4.
    pub version_num: i32,
    /// Version in the server's notation.
    pub version: String,
    /// The encoding of the database.
    pub encoding: String,
    /// Whether the server is a standby or being restored.
    pub in_recovery: bool,
    /// Role whose privileges were checked.
    pub role: String,
    /// Database name.
    pub database: String,
    /// State of the schema.
    pub schema: SchemaState,
    /// Objects missing in the schema.
    pub missing_objects: Vec<String>,
    /// Objects that differ from the installed ones: kind, persistence, primary key, sequence options, a missing column
    /// or row-level security.
    pub altered_objects: Vec<String>,
    /// Privileges that the role lacks.
    pub missing_privileges: Vec<MissingPrivilege>,
    /// Another role that owns the schema or an object in it, or can create triggers there. Set only if the
    /// checked role is a superuser. Triggers and views of that role would run with the superuser's rights
    /// (`docs/hazards.md` H57).
    pub foreign_owner: Option<String>,
    /// Stores whose privileges were checked.
    stores: Stores,
}

/// State of the schema.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SchemaState {
    /// No schema of that name exists.
    Missing,
    /// The schema exists, but its version cannot be read. The other fields of the report explain why.
    Unreadable,
    /// The schema has this version.
    Installed(SchemaVersion),
}

/// Version information stored in the schema.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SchemaVersion {
    /// Version of the schema.
    pub version: i32,
    /// Oldest library that can use the schema, as the schema version that library installs.
    pub oldest_library: i32,
}

/// A privilege that the role lacks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MissingPrivilege {
    /// The object; `None` is the schema itself.
    pub object: Option<String>,
    /// The privilege, such as `INSERT`.
    pub privilege: String,
}

/// A role's access to the stores of a schema.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// The role can take locks and do everything else.
    Full,
    /// The role can only read. The server refuses an attempt to take a lock.
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

    /// Returns the report reduced to these stores: without privileges and altered objects that only other
    /// stores need.
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
            // Does not read the version, because the table could be a view that runs code of that role.
            || self.foreign_owner.is_some()
            || self.missing_objects.iter().any(|object| object == "version")
            || self.altered_objects.iter().any(|object| object == "version")
            || self.missing_privileges.iter().any(|lacks| lacks.object.is_none())
            || self.missing_privileges.iter().any(|lacks| lacks.object.as_deref() == Some("version"))
    }

    /// Returns the missing GRANTs as SQL, one per line.
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

    /// Checks whether the stores can work here.
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

    /// Returns the role's access to the stores, full or read-only.
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

    /// Refuses a schema in which a superuser would run another role's code.
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

    /// Returns whether the role can read all objects and write none, which is never a setup for taking locks.
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

    /// Checks that the stores support the server's version and the database's encoding.
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

    /// Returns whether this is an older version that [`install`](super::install) can upgrade.
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
