use cookbook::sql;
use cookbook::unique_name::{CreateError, PAGE, create};

use crate::support::*;

#[tokio::test]
async fn of_two_equal_names_at_once_one_is_a_typed_error() {
    let db = database(sql(PAGE, "schema")).await;
    let (mut a, mut b) = (db.connect().await, db.connect().await);
    run(&mut a, "INSERT INTO owner VALUES (1), (2)").await;
    let b_pid = pid(&mut b).await;
    run(&mut a, "BEGIN").await;
    create(&mut a, 1, "Foo").await.unwrap();
    let (second, ()) = while_blocked(&db, b_pid, create(&mut b, 1, "foo"), run(&mut a, "COMMIT")).await;
    let error = second.unwrap_err();
    assert!(matches!(&error, CreateError::NameTaken { name } if name == "foo"), "{error:?}");
    create(&mut b, 2, "foo").await.unwrap();

    // If the first one rolls back, the second has the name.
    run(&mut a, "BEGIN").await;
    create(&mut a, 1, "Bar").await.unwrap();
    let (second, ()) = while_blocked(&db, b_pid, create(&mut b, 1, "bar"), run(&mut a, "ROLLBACK")).await;
    second.unwrap();
    assert_eq!(text(&mut a, "SELECT count(*) FROM project").await, "3");
}

#[tokio::test]
async fn case_and_normal_form_do_not_make_another_name() {
    let db = database(sql(PAGE, "schema")).await;
    let mut a = db.connect().await;
    run(&mut a, "INSERT INTO owner VALUES (1)").await;
    create(&mut a, 1, "Caf\u{e9}").await.unwrap();
    for same in ["caf\u{e9}", "CAFe\u{301}", "cafe\u{301}"] {
        let error = create(&mut a, 1, same).await.unwrap_err();
        assert!(matches!(error, CreateError::NameTaken { .. }), "{same}: {error:?}");
    }
    create(&mut a, 1, "cafe").await.unwrap();

    // Without `normalize` the two spellings of one name are two names.
    assert_eq!(text(&mut a, "SELECT lower(E'e\\u0301') = lower(E'\\u00e9')").await, "false");

    // Other letters than A to Z need a collation that knows them, unlike the test database's.
    run(&mut a, "TRUNCATE project").await;
    run(&mut a, sql(PAGE, "index for all letters")).await;
    create(&mut a, 1, "\u{c9}t\u{e9}").await.unwrap();
    let error = create(&mut a, 1, "\u{e9}t\u{e9}").await.unwrap_err();
    let CreateError::Database(error) = error else { panic!("{error:?}") };
    assert_eq!(error.as_database_error().unwrap().constraint(), Some("project_owner_any_name_key"));
}

#[tokio::test]
async fn another_constraint_is_another_error() {
    let db = database(sql(PAGE, "schema")).await;
    let mut a = db.connect().await;
    run(&mut a, "INSERT INTO owner VALUES (1); CREATE UNIQUE INDEX only_one ON project (owner_id)").await;
    create(&mut a, 1, "one").await.unwrap();
    assert!(matches!(create(&mut a, 1, "two").await.unwrap_err(), CreateError::Database(_)));
    assert!(matches!(create(&mut a, 7, "no owner").await.unwrap_err(), CreateError::Database(_)));
}

#[tokio::test]
async fn wrong_both_check_and_both_insert() {
    let db = database(sql(PAGE, "schema")).await;
    let (mut a, mut b) = (db.connect().await, db.connect().await);
    run(&mut a, "INSERT INTO owner VALUES (1); DROP INDEX project_owner_name_key").await;
    for session in [&mut a, &mut b] {
        run(&mut *session, "BEGIN").await;
        let look = sqlx::query_scalar::<_, bool>(sql(PAGE, "wrong: look")).bind(1_i64).bind("foo");
        assert!(!look.fetch_one(session).await.unwrap());
    }
    for session in [&mut a, &mut b] {
        create(session, 1, "foo").await.unwrap();
        run(&mut *session, "COMMIT").await;
    }
    assert_eq!(text(&mut a, "SELECT count(*) FROM project").await, "2", "the same name, twice");
}
