//! What the triggers cost a writer, counted by the server.

use leasehold_capture::{Capture, Source};
use test_servers::sql::{run, text};

use super::{database, event_table, table};

const TABLES: usize = 17;
const ROWS: usize = 3;

/// Each inserted, updated or deleted row of a captured table runs one function, which inserts one row and reads no table. A
/// table that is not captured costs nothing.
#[tokio::test]
async fn a_writer_pays_one_insert_for_each_row_of_a_captured_table() {
    for captured in [0, 1, TABLES] {
        let (db, pool) = database().await;
        event_table(&pool).await;
        let mut builder = Capture::into(table("event"));
        for n in 0..TABLES {
            let source = format!("source_{n}");
            run(&pool, format!("CREATE TABLE {source} (id int PRIMARY KEY, order_id int, note text)")).await;
            if n < captured {
                let source = Source::new(table(&source)).copy("order_id", "order_id");
                builder = builder.source(source.constant("kind", "s").operation("op"));
            }
        }
        if captured > 0 {
            builder.build().unwrap().install(&pool).await.unwrap();
        }
        // A new session, because the server's counts include earlier transactions of the same session.
        let mut writer = db.connect().await;
        run(&mut writer, "BEGIN; SET LOCAL track_functions = 'all'").await;
        for n in 0..TABLES {
            let changes = format!(
                "INSERT INTO source_{n} SELECT i, i FROM generate_series(1, {ROWS}) i;
                UPDATE source_{n} SET note = 'changed'; DELETE FROM source_{n}"
            );
            run(&mut writer, changes).await;
        }
        let (own, records) = (TABLES * ROWS, captured * ROWS * 3);
        let touched = "SELECT concat_ws(' ', sum(n_tup_ins), sum(n_tup_upd), sum(n_tup_del), \
            sum(seq_scan + coalesce(idx_scan, 0))) FROM pg_stat_xact_user_tables";
        // The writer's own update and delete scan each table once.
        let expected = format!("{} {own} {own} {}", own + records, TABLES * 2);
        assert_eq!(text(&mut writer, touched).await, expected, "{captured} tables");
        let calls = "SELECT coalesce(sum(calls), 0)::text FROM pg_stat_xact_user_functions";
        assert_eq!(text(&mut writer, calls).await, records.to_string(), "{captured} tables");
    }
}
