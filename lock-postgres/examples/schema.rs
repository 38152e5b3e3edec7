//! Installs the schema of the Postgres locks with the privileges of one role, and checks whether that role lacks any.
//!
//! ```text
//! DATABASE_URL=postgres://owner@localhost/app cargo run -p leasehold-postgres --example schema -- app
//! ```

use std::error::Error;

use leasehold_postgres::schema::{self, SchemaState, Stores};
use leasehold_postgres::{DEFAULT_SCHEMA, Identifier};
use sqlx::{Connection as _, PgConnection};

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

#[tokio::main]
async fn main() -> Result<()> {
    let url = std::env::var("DATABASE_URL").map_err(|_| "set DATABASE_URL to a database to try this in")?;
    let role = std::env::args().nth(1).ok_or("name the role that is to use the locks")?;
    for line in run(&url, &role).await? {
        println!("{line}");
    }
    Ok(())
}

/// Installs the schema and grants the role its privileges. Returns a line for each step, with the state after
/// it.
pub async fn run(url: &str, role: &str) -> Result<Vec<String>> {
    let (name, role) = (Identifier::new(DEFAULT_SCHEMA)?, Identifier::new(role)?);
    let mut owner = PgConnection::connect(url).await?;
    let before = schema::inspect(&mut owner, &name).await?.schema;
    let mut steps =
        vec![if before == SchemaState::Missing { "no schema yet".to_owned() } else { format!("{before:?}") }];

    // A second call does nothing. `schema::script` prints the same SQL for a migration tool.
    schema::install(&mut owner, &name).await?;
    let grants = schema::grants(&name, &role, Stores::All);
    schema::grant(&mut owner, &name, &grants).await?;
    steps.push(format!("installed, and granted to {role}"));

    // Continues with the application's role.
    sqlx::raw_sql(sqlx::AssertSqlSafe(format!("SET ROLE {}", role.quoted()))).execute(&mut owner).await?;
    schema::check(&mut owner, &name).await?;
    let report = schema::inspect(&mut owner, &name).await?;
    steps.push(format!("{} lacks {} privileges", report.role, report.missing_privileges.len()));
    owner.close().await?;
    Ok(steps)
}
