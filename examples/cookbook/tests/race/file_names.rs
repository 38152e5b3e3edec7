use cookbook::file_names::{PAGE, base_name, find};
use cookbook::sql;
use proptest::prelude::{Strategy as _, any, prop, prop_assert_eq, prop_oneof};
use proptest::test_runner::{Config, TestCaseError, TestRunner};
use sqlx::PgConnection;

use crate::support::*;

const HOME: [&str; 5] = ["home.png", "home.jpg", "home@2x.png", "home@2x.gif", "home@3x.png"];

/// Names with special cases, and their base names.
const EDGES: [(&str, &str); 18] = [
    ("HOME.PNG", "home"),
    ("home@1.5x.png", "home"),
    ("home@2X.png", "home"),
    ("home.v2.png", "home.v2"),
    ("a.tar.gz", "a.tar"),
    (".gitignore", ".gitignore"),
    (".png", ".png"),
    ("noext", "noext"),
    ("home.", "home."),
    ("@2x.png", "@2x"),
    ("home@2x@3x.png", "home@2x"),
    ("v1.2", "v1"),
    ("home.12345678", "home"),
    ("home.123456789", "home.123456789"),
    ("home@x.png", "home@x"),
    ("home@2.x.png", "home@2.x"),
    ("a\nb.png", "a\nb"),
    ("\u{c9}.png", "\u{c9}"),
];

fn schema() -> String {
    [sql(PAGE, "base name"), sql(PAGE, "schema")].concat()
}

async fn on_server(connection: &mut PgConnection, files: &[String]) -> Vec<String> {
    let bases = "SELECT base_name(file) FROM unnest($1) WITH ORDINALITY AS f (file, place) ORDER BY place";
    sqlx::query_scalar(bases).bind(files).fetch_all(connection).await.unwrap()
}

async fn insert(connection: &mut PgConnection, file: &str) -> sqlx::Result<()> {
    let insert = "INSERT INTO picture (project_id, file) VALUES (1, $1)";
    sqlx::query(insert).bind(file).execute(connection).await.map(|_| ())
}

#[tokio::test]
async fn variants_of_one_picture_conflict() {
    let db = database(&schema()).await;
    let mut a = db.connect().await;
    for first in HOME {
        insert(&mut a, first).await.unwrap();
        for second in HOME {
            let error = insert(&mut a, second).await.unwrap_err();
            assert_eq!(state(&error), "23505", "{first} and {second}");
            assert_eq!(error.as_database_error().unwrap().constraint(), Some("picture_base_key"));
        }
        run(&mut a, "TRUNCATE picture").await;
    }
}

#[tokio::test]
async fn unusual_file_names_have_fixed_base_names() {
    let db = database(&schema()).await;
    let mut a = db.connect().await;
    for file in HOME {
        assert_eq!(base_name(file), "home", "{file}");
    }
    let files: Vec<String> = EDGES.iter().map(|(file, _)| (*file).to_owned()).collect();
    let bases = on_server(&mut a, &files).await;
    for ((file, base), on_server) in EDGES.into_iter().zip(bases) {
        assert_eq!((base_name(file).as_str(), on_server.as_str()), (base, base), "{file:?}");
    }
}

#[tokio::test]
async fn paths_and_other_normal_forms_are_refused() {
    let db = database(&schema()).await;
    let mut a = db.connect().await;
    for refused in ["", "a/home.png", "e\u{301}.png"] {
        assert_eq!(state(&insert(&mut a, refused).await.unwrap_err()), "23514", "{refused:?}");
    }
    insert(&mut a, "\u{e9}.png").await.unwrap();
}

#[test]
fn base_names_agree_in_rust_and_in_sql() {
    let piece = prop_oneof![
        5 => prop::sample::select(vec![
            ".", "@", ".12345678", ".123456789", "x", "X", "2", "1.5", "@2x", "@1.5X", ".png", ".PNG", "home",
            "\u{e9}", "\u{130}", "\u{3a3}", "\n", " ",
        ])
        .prop_map(str::to_owned),
        1 => any::<char>().prop_filter("not in text", |c| *c != '\0').prop_map(String::from),
    ];
    let file = prop::collection::vec(piece, 0..8).prop_map(|pieces| pieces.concat());
    let files = prop::collection::vec(file, 64);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let db = runtime.block_on(database(&schema()));
    let connection = std::cell::RefCell::new(runtime.block_on(db.connect()));
    let config = Config { cases: 64, failure_persistence: None, ..Config::default() };
    let agree = TestRunner::new(config).run(&files, |files| {
        let bases = runtime.block_on(on_server(&mut connection.borrow_mut(), &files));
        for (file, base) in files.iter().zip(bases) {
            prop_assert_eq!(base_name(file), base, "{:?}", file);
        }
        Ok::<(), TestCaseError>(())
    });
    agree.unwrap();
}

#[tokio::test]
async fn any_variant_finds_the_row_by_the_index() {
    let db = database(&schema()).await;
    let mut a = db.connect().await;
    run(&mut a, "INSERT INTO picture (project_id, file) SELECT 1, 'other ' || i || '.png' FROM generate_series(1, 10000) i").await;
    insert(&mut a, "Home@2x.PNG").await.unwrap();
    for file in HOME {
        assert_eq!(find(&mut a, 1, file).await.unwrap(), Some(10_001), "{file}");
    }
    assert_eq!(find(&mut a, 2, "home.png").await.unwrap(), None);
    run(&mut a, "ANALYZE picture; SET plan_cache_mode = force_generic_plan").await;
    run(&mut a, &format!("PREPARE find (bigint, text) AS {}", sql(PAGE, "find"))).await;
    let plan: Vec<String> =
        sqlx::query_scalar("EXPLAIN EXECUTE find (1, 'home.gif')").fetch_all(&mut a).await.unwrap();
    assert!(plan.concat().contains("Index Scan using picture_base_key"), "{plan:?}");
}
