//! The schema on a real server. One program, so that all tests share a server.

#![allow(clippy::unwrap_used)] // A failed `unwrap` fails the test.

mod install;
mod owners;
mod upgrade;

use leasehold_postgres::Identifier;
use sqlx::PgConnection;
use test_servers::Database;
use test_servers::sql::run;

fn name(text: &str) -> Identifier {
    Identifier::new(text).unwrap()
}

/// Creates a role of one test, without any privilege.
async fn role(conn: &mut PgConnection, database: &Database) -> Identifier {
    let role = name(&format!("Role of {}", &database.name()[..20]));
    run(conn, format!("CREATE ROLE {0}; GRANT {0} TO CURRENT_USER", role.quoted())).await;
    role
}

async fn drop_role(conn: &mut PgConnection, role: &Identifier) {
    run(conn, format!("RESET ROLE; DROP OWNED BY {0}; DROP ROLE {0}", role.quoted())).await;
}
