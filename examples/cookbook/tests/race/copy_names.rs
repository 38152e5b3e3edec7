use std::collections::BTreeSet;

use cookbook::copy_names::{CopyError, MAX_COPIES, PAGE, activate, insert};
use cookbook::sql;
use sqlx::PgConnection;
use test_servers::Database;

use crate::support::*;

/// Creates one active project `X` and `count` archived ones of that name, with ids from 2.
async fn archived(count: i32) -> (Database, PgConnection) {
    let db = database(sql(PAGE, "schema")).await;
    let mut a = db.connect().await;
    run(
        &mut a,
        &format!(
            "INSERT INTO owner VALUES (1);
             INSERT INTO project (owner_id, name) VALUES (1, 'X');
             INSERT INTO project (owner_id, name, archived_at)
                 SELECT 1, 'X', clock_timestamp() FROM generate_series(1, {count})"
        ),
    )
    .await;
    (db, a)
}

/// Returns all names from `X` to the copy with number `last`.
fn names(last: usize) -> BTreeSet<String> {
    (1..=last).map(|copy| format!("X (Copy {copy})")).chain(["X".to_owned()]).collect()
}

#[tokio::test]
async fn twenty_inserts_at_once_are_twenty_names() {
    let db = database(sql(PAGE, "schema of two tables")).await;
    let given = at_once(&db, 20, async |_, session| {
        run(&mut *session, "BEGIN").await;
        let name = insert(session, 1, "X").await.unwrap();
        // The transaction is still usable.
        run(&mut *session, "SELECT 1; COMMIT").await;
        name
    })
    .await;
    assert_eq!(given.into_iter().collect::<BTreeSet<_>>(), names(19));
}

#[tokio::test]
async fn twenty_activations_at_once_are_twenty_names() {
    let (db, mut a) = archived(20).await;
    let given = at_once(&db, 20, async |at, session| {
        run(&mut *session, "BEGIN").await;
        let name = activate(session, 1, i64::try_from(at).unwrap() + 2).await.unwrap();
        run(&mut *session, "COMMIT").await;
        name
    })
    .await;
    let given: BTreeSet<_> = given.into_iter().chain(["X".to_owned()]).collect();
    assert_eq!(given, names(20));
    assert_eq!(text(&mut a, "SELECT count(*) FROM project WHERE archived_at IS NULL").await, "21");
    assert!(matches!(activate(&mut a, 1, 2).await, Err(CopyError::NotArchived)), "once");
}

#[tokio::test]
async fn names_fit_the_column_and_tries_are_bounded() {
    let long = "\u{e9}".repeat(40);
    let db = database(sql(PAGE, "schema of two tables")).await;
    let mut a = db.connect().await;
    assert_eq!(insert(&mut a, 1, &long).await.unwrap(), long);
    run(&mut a, "BEGIN").await;
    for copy in 1..=MAX_COPIES {
        let name = insert(&mut a, 1, &long).await.unwrap();
        assert_eq!(name.chars().count(), 40);
        assert!(name.ends_with(&format!("\u{e9} (Copy {copy})")), "{name}");
    }
    assert!(matches!(insert(&mut a, 1, &long).await, Err(CopyError::TooManyCopies)));
    run(&mut a, "SELECT 1; COMMIT").await;

    let (_db, mut a) = archived(MAX_COPIES + 1).await;
    run(&mut a, &format!("UPDATE project SET name = '{long}'; BEGIN")).await;
    for id in 2..=i64::from(MAX_COPIES) + 1 {
        assert_eq!(activate(&mut a, 1, id).await.unwrap().chars().count(), 40);
    }
    let last = i64::from(MAX_COPIES) + 2;
    assert!(matches!(activate(&mut a, 1, last).await, Err(CopyError::TooManyCopies)));
    run(&mut a, "SELECT 1; COMMIT").await;
}

#[tokio::test]
async fn wrong_catching_23505_ends_the_transaction() {
    let db = database(sql(PAGE, "schema of two tables")).await;
    let mut a = db.connect().await;
    insert(&mut a, 1, "X").await.unwrap();
    run(&mut a, "BEGIN").await;
    let error = attempt(&mut a, "INSERT INTO project (owner_id, name) VALUES (1, 'x')").await.unwrap_err();
    assert_eq!(state(&error), "23505");
    let next = attempt(&mut a, "INSERT INTO project (owner_id, name) VALUES (1, 'x (Copy 1)')").await;
    assert_eq!(state(&next.unwrap_err()), "25P02");
}

#[tokio::test]
async fn wrong_inserts_in_opposite_order_deadlock() {
    let db = database(sql(PAGE, "schema of two tables")).await;
    let (mut a, mut b) = (db.connect().await, db.connect().await);
    let b_pid = pid(&mut b).await;
    for (session, first) in [(&mut a, "one"), (&mut b, "two")] {
        run(&mut *session, "BEGIN").await;
        insert(session, 1, first).await.unwrap();
    }
    let second = async |session: &mut PgConnection, name: &str| {
        let done = insert(session, 1, name).await.err();
        run(&mut *session, "ROLLBACK").await;
        done
    };
    let (b_error, a_error) = while_blocked(&db, b_pid, second(&mut b, "one"), second(&mut a, "two")).await;
    let states = a_error.into_iter().chain(b_error).map(|error| match error {
        CopyError::Database(error) => state(&error),
        other => panic!("{other:?}"),
    });
    assert_eq!(states.collect::<Vec<_>>(), ["40P01"], "one of the two is the victim");
}

/// Activates in two sessions. The second waits for the first, which then commits.
async fn race(statement: &str, locks_first: bool) -> (String, String) {
    let (db, mut a) = archived(2).await;
    let mut b = db.connect().await;
    let b_pid = pid(&mut b).await;
    let activate = async |session: &mut PgConnection, id: i64| {
        if locks_first {
            sqlx::query(sql(PAGE, "lock owner")).bind(1_i64).execute(&mut *session).await?;
        }
        let query = sqlx::query_scalar::<_, String>(sqlx::AssertSqlSafe(statement.to_owned()));
        query.bind(id).bind(1_i64).bind(MAX_COPIES).fetch_one(session).await
    };
    run(&mut a, "BEGIN").await;
    run(&mut b, "BEGIN").await;
    assert_eq!(activate(&mut a, 2).await.unwrap(), "X (Copy 1)");
    let (second, ()) = while_blocked(&db, b_pid, activate(&mut b, 3), run(&mut a, "COMMIT")).await;
    let after = attempt(&mut b, "SELECT 1").await.map_or_else(|error| state(&error), |_| String::new());
    (second.unwrap_or_else(|error| state(&error)), after)
}

#[tokio::test]
async fn wrong_without_the_lock_an_activation_fails_with_23505() {
    let activate = sql(PAGE, "activate");
    assert_eq!(race(activate, true).await, ("X (Copy 2)".to_owned(), String::new()), "with it it works");
    assert_eq!(race(activate, false).await, ("23505".to_owned(), "25P02".to_owned()));
}

#[tokio::test]
async fn wrong_with_the_lock_in_the_same_statement_an_activation_fails_with_23505() {
    let activate = sql(PAGE, "activate");
    let from = "FROM project o\n";
    assert!(activate.contains(from));
    let with_lock = activate.replace(from, "FROM owned JOIN project o ON o.owner_id = owned.id\n");
    let lock = sql(PAGE, "lock owner").replace("SELECT FROM", "SELECT id FROM").replace("$1", "$2");
    let statement = format!("WITH owned AS MATERIALIZED ({lock}) {with_lock}");
    assert_eq!(race(&statement, false).await, ("23505".to_owned(), "25P02".to_owned()));
}
