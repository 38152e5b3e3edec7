//! The command `leasehold schema`, and the Postgres part of `leasehold check`.

use std::time::Duration;

use leasehold::postgres::schema::{self, Access, SchemaState, ServerReport, Stores};
use leasehold::postgres::sqlx::{Connection as _, PgConnection};
use leasehold::postgres::{DEFAULT_SCHEMA, Identifier, PgConfig};
use leasehold::{Error, ErrorKind};
use serde_json::{Value, json};

use crate::args::{GrantedStore, SchemaArgs, SchemaCommand, SchemaGrants, SchemaPrint};
use crate::output;

/// The time limit of an installation. It is longer than the installation's statements wait for concurrent
/// installations.
const INSTALL_LIMIT: Duration = Duration::from_secs(60);

pub(crate) async fn schema(args: &SchemaArgs, url: Option<&str>) -> Result<u8, Error> {
    match &args.command {
        SchemaCommand::Print(args) => print(args, url),
        SchemaCommand::Apply(args) => apply(args, url).await,
    }
}

fn print(args: &SchemaPrint, url: Option<&str>) -> Result<u8, Error> {
    let schema = match (&args.schema, url) {
        (Some(name), _) => Identifier::new(name)?,
        (None, Some(url)) if is_postgres(url) => leasehold::postgres_config(url)?.schema_name().clone(),
        (None, Some(_)) => {
            let message =
                "the store of this URL has no schema; name a Postgres database, or the schema by --schema";
            return Err(Error::new(ErrorKind::Unsupported, message));
        }
        (None, None) => Identifier::new(DEFAULT_SCHEMA)?,
    };
    output::bytes(schema::script(&schema, &grants(&args.grants, &schema)?).as_bytes());
    Ok(0)
}

fn grants(args: &SchemaGrants, schema: &Identifier) -> Result<String, Error> {
    let mut text = String::new();
    // Refuses these words as roles, because the server gives them their special meaning even in quotes.
    let everybody = |role: &&String| ["public", "none"].iter().any(|word| role.eq_ignore_ascii_case(word));
    if let Some(role) = args.grant_to.iter().chain(&args.grant_read_to).find(everybody) {
        let message = format!("{role} is no role but a word of the server; name the role of the program");
        return Err(Error::new(ErrorKind::InvalidOption, message));
    }
    if let Some(role) = &args.grant_to {
        let stores = args.store.map_or(Stores::All, GrantedStore::stores);
        text += &schema::grants(schema, &Identifier::new(role)?, stores);
    }
    if let Some(role) = &args.grant_read_to {
        text += &schema::grants_to_read(schema, &Identifier::new(role)?);
    }
    Ok(text)
}

impl GrantedStore {
    fn stores(self) -> Stores {
        match self {
            Self::Advisory => Stores::Advisory,
            Self::Row => Stores::Row,
            Self::Ttl => Stores::Lease,
        }
    }
}

async fn apply(args: &SchemaGrants, url: Option<&str>) -> Result<u8, Error> {
    let config = database(url)?;
    let grants = grants(args, config.schema_name())?;
    let named = |error: Error| error.with_store(config.to_string());
    let mut session = open(&config).await.map_err(named)?;
    within(INSTALL_LIMIT, schema::install(&mut session, config.schema_name())).await.map_err(named)?;
    if !grants.is_empty() {
        within(INSTALL_LIMIT, schema::grant(&mut session, config.schema_name(), &grants))
            .await
            .map_err(named)?;
    }
    close(session).await;
    output::line(&format!("the schema \"{}\" is ready on {config}", config.schema_name()));
    Ok(0)
}

/// Returns the configuration of the database of `url`.
pub(crate) fn database(url: Option<&str>) -> Result<PgConfig, Error> {
    let url = url.ok_or_else(|| {
        Error::new(
            ErrorKind::InvalidOption,
            "no database is named; set --url or LEASEHOLD_URL to postgres://USER@HOST/DATABASE",
        )
    })?;
    leasehold::postgres_config(url)
}

pub(crate) fn is_postgres(url: &str) -> bool {
    url.trim_start().get(..8).is_some_and(|scheme| scheme.eq_ignore_ascii_case("postgres"))
}

/// A report on a server, its schema and the user's privileges.
#[derive(Debug)]
pub(crate) struct ServerFacts {
    config: PgConfig,
    report: ServerReport,
}

impl ServerFacts {
    /// Inspects the server of `url`. Returns `None` for other stores. Also returns `None` without a reply, because
    /// connecting to the store then reports the reason.
    pub(crate) async fn of(url: Option<&str>) -> Option<Self> {
        let url = url.filter(|url| is_postgres(url))?;
        let config = leasehold::postgres_config(url).ok()?;
        let mut session = open(&config).await.ok()?;
        let looking = schema::inspect(&mut session, config.schema_name());
        let report = within(config.call_limit(), looking)
            .await
            .ok()?
            .for_stores(leasehold::postgres_stores(url).ok()?);
        close(session).await;
        Some(Self { config, report })
    }

    /// Returns whether the role can only inspect locks.
    pub(crate) fn may_only_look(&self) -> bool {
        matches!(self.report.access(self.config.schema_name()), Ok(Access::ReadOnly))
    }

    /// Returns whether a superuser inspects a schema in which another role could run code with the superuser's rights.
    pub(crate) fn is_in_foreign_schema(&self) -> bool {
        self.report.foreign_owner.is_some()
    }

    pub(crate) fn rows(&self) -> Vec<[String; 2]> {
        let report = &self.report;
        let listed = |items: &[String]| if items.is_empty() { "none".to_owned() } else { items.join(", ") };
        let lacking: Vec<_> = report
            .missing_privileges
            .iter()
            .map(|lacks| match &lacks.object {
                Some(object) => format!("{} on {object}", lacks.privilege),
                None => format!("{} on the schema", lacks.privilege),
            })
            .collect();
        let state = match report.schema {
            SchemaState::Installed(version) => format!("version {}", version.version),
            SchemaState::Missing => "not installed".to_owned(),
            _ => "version unknown".to_owned(),
        };
        [
            ("server", format!("PostgreSQL {}", report.version)),
            ("database", report.database.clone()),
            ("encoding", report.encoding.clone()),
            ("standby", if report.in_recovery { "yes" } else { "no" }.to_owned()),
            ("role", report.role.clone()),
            ("schema", format!("\"{}\", {state}", self.config.schema_name())),
            ("objects missing", listed(&report.missing_objects)),
            ("objects altered", listed(&report.altered_objects)),
            ("privileges missing", listed(&lacking)),
        ]
        .map(|(name, value)| [name.to_owned(), value])
        .into()
    }

    pub(crate) fn is_standby(&self) -> bool {
        self.report.in_recovery
    }

    pub(crate) fn describe(&self) -> Value {
        let report = &self.report;
        let version = match report.schema {
            SchemaState::Installed(version) => Some(version.version),
            _ => None,
        };
        json!({
            "version_num": report.version_num,
            "version": report.version,
            "database": report.database,
            "encoding": report.encoding,
            "standby": report.in_recovery,
            "role": report.role,
            "schema": self.config.schema_name().as_str(),
            "schema_version": version,
            "missing_objects": report.missing_objects,
            "altered_objects": report.altered_objects,
            "missing_grants": report.missing_grants(self.config.schema_name()),
        })
    }
}

/// Opens a session for this command only.
pub(crate) async fn open(config: &PgConfig) -> Result<PgConnection, Error> {
    config.connect().await
}

/// Limits `work` to the time `limit`, because the server might be unresponsive.
async fn within<T>(limit: Duration, work: impl Future<Output = Result<T, Error>>) -> Result<T, Error> {
    tokio::time::timeout(limit, work).await.unwrap_or_else(|_| {
        let message = "the server does not answer; check host, port and network, then try again";
        Err(Error::new(ErrorKind::Unavailable, message))
    })
}

/// Closes the session. Ignores a failure, which has no consequence.
pub(crate) async fn close(session: PgConnection) {
    let _ = tokio::time::timeout(Duration::from_secs(1), session.close()).await;
}
