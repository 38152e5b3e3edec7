//! Defaults of database and role that must have no effect, and a server that stops.

use std::time::Duration;

use leasehold_api::{ErrorKind, LockExt as _, Validity};
use sqlx::{AssertSqlSafe, Executor};
use test_servers::{Cluster, ClusterOptions, StopMode};

use crate::support::{config_of, connection, installed};

/// Records the settings under which rows are written.
const WATCHED: &str = "\
CREATE TABLE public.seen (isolation text, durable text, statement text, lock text, read_only text, jit text);
GRANT ALL ON public.seen TO PUBLIC;
CREATE FUNCTION public.see() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO public.seen VALUES (current_setting('transaction_isolation'), current_setting('synchronous_commit'),
        current_setting('statement_timeout'), current_setting('lock_timeout'), current_setting('transaction_read_only'), current_setting('jit'));
    RETURN NULL;
END $$;
CREATE TRIGGER see AFTER INSERT OR UPDATE ON leasehold.lease FOR EACH ROW EXECUTE FUNCTION public.see()";

#[tokio::test]
async fn defaults_of_database_and_role_do_not_matter() {
    let database = installed().await;
    let mut user = connection(&database).await;
    user.execute(WATCHED).await.unwrap();
    let name = database.name();
    for setting in [
        "default_transaction_isolation = 'serializable'",
        "default_transaction_read_only = on",
        "synchronous_commit = off",
        "statement_timeout = '300ms'",
        "lock_timeout = '1ms'",
        // Long enough for a busy machine to open a session.
        "idle_session_timeout = '3s'",
        "search_path = 'public'",
    ] {
        let alter = format!("ALTER DATABASE {name} SET {setting}");
        user.execute(AssertSqlSafe(alter)).await.unwrap();
    }
    for pooler in [leasehold_postgres::Pooler::None, leasehold_postgres::Pooler::Transaction] {
        let postgres = leasehold_postgres_ttl::PgConfig::from_url(database.url())
            .unwrap()
            .pooler(pooler)
            .statement_timeout(Duration::from_secs(7));
        if pooler == leasehold_postgres::Pooler::Transaction {
            // Behind a pooler the database's limits apply until a transaction sets its own.
            for reset in ["statement_timeout", "idle_session_timeout"] {
                user.execute(AssertSqlSafe(format!("ALTER DATABASE {name} RESET {reset}"))).await.unwrap();
            }
        }
        let lock = leasehold_postgres_ttl::TtlConfig::new(postgres).connect().await.unwrap();
        let guard = lock.key("k").acquire().await.unwrap();
        tokio::time::sleep(Duration::from_millis(3_300)).await;
        guard.renew().await.unwrap();
        guard.release().await.unwrap();
        let guards = lock.keys(["a", "b", "c"]).acquire().await.unwrap();
        guards.release().await.unwrap();
        let seen: Vec<(String, String, String, String, String, String)> = sqlx::query_as(
            "SELECT DISTINCT isolation, durable, statement, lock, read_only, jit FROM public.seen",
        )
        .fetch_all(&mut connection(&database).await)
        .await
        .unwrap();
        let expected = ["read committed", "on", "7s", "250ms", "off", "off"].map(str::to_owned);
        assert_eq!(seen, [expected.into()], "{pooler:?}");
    }
}

#[tokio::test]
async fn a_restart_in_between_costs_nothing_but_time() {
    let cluster = Cluster::start(ClusterOptions::new());
    let database = cluster.fresh_database().await;
    let lock = config_of(database.url()).connect().await.unwrap();
    let guard = lock.key("k").acquire().await.unwrap();
    let token = guard.token();
    for mode in [StopMode::Fast, StopMode::Immediate] {
        cluster.stop(mode).await;
        let error = lock.key("other").wait(Duration::from_millis(300)).acquire().await.unwrap_err();
        assert!(
            [ErrorKind::Unavailable, ErrorKind::OutcomeUnknown, ErrorKind::Timeout].contains(&error.kind()),
            "{error}"
        );
        cluster.start_again().await;
        assert_eq!(guard.validity(), Validity::Valid);
        while guard.renew().await.is_err() {
            assert_ne!(guard.validity(), Validity::Lost);
        }
    }
    guard.release().await.unwrap();
    // Tokens grow also after a crash, which can lose numbers of the sequence.
    let guard = lock.key("k").acquire().await.unwrap();
    assert!(guard.token() > token);
    guard.release().await.unwrap();
}

#[tokio::test]
async fn a_missing_schema_is_an_error_that_says_what_to_do() {
    let database = test_servers::fresh_database().await;
    let error = leasehold_postgres_ttl::connect(database.url()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::SchemaMissing, "{error}");
    assert!(error.to_string().contains("leasehold schema"), "{error}");
}

#[tokio::test]
async fn odd_names_of_schemas_keys_and_labels_are_taken_literally() {
    let database = test_servers::fresh_database().await;
    let schema = leasehold_postgres::Identifier::new("odd'\"; DROP TABLE \\ x; -- {skip} é").unwrap();
    let postgres = leasehold_postgres_ttl::PgConfig::from_url(database.url())
        .unwrap()
        .schema(schema)
        .install_schema(true);
    let lock = leasehold_postgres_ttl::TtlConfig::new(postgres).connect().await.unwrap();
    for key in ["'; DELETE FROM x; --", "\\", "$1", "{schema}", "%", "_"] {
        let guard = lock.key(key).label("'\"; --").acquire().await.unwrap();
        assert!(lock.key(key).try_acquire().await.unwrap().is_none());
        guard.release().await.unwrap();
    }
}

#[tokio::test]
async fn a_role_that_acts_as_another_one_will_do() {
    let database = installed().await;
    let mut user = connection(&database).await;
    let name = database.name();
    // The acting role cannot see when the login's sessions started.
    let roles = format!(
        "CREATE ROLE {name}_acts; CREATE ROLE {name}_logs_in LOGIN IN ROLE {name}_acts;
        ALTER ROLE {name}_logs_in SET role = '{name}_acts';
        GRANT USAGE ON SCHEMA leasehold TO {name}_acts;
        GRANT ALL ON ALL TABLES IN SCHEMA leasehold TO {name}_acts;
        GRANT ALL ON ALL SEQUENCES IN SCHEMA leasehold TO {name}_acts"
    );
    sqlx::raw_sql(AssertSqlSafe(roles)).execute(&mut user).await.unwrap();
    let options: sqlx::postgres::PgConnectOptions = database.url().parse().unwrap();
    let options = options.username(&format!("{name}_logs_in"));
    let postgres =
        leasehold_postgres_ttl::PgConfig::from_options(options).connect_timeout(Duration::from_secs(60));
    let lock = leasehold_postgres_ttl::TtlConfig::new(postgres).connect().await.unwrap();
    lock.key("k").acquire().await.unwrap().release().await.unwrap();
}
