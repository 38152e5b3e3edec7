//! Infinite times, `infinity` and `-infinity`. Before PostgreSQL 17, the server refuses to subtract them.

use crate::common::*;
use leasehold_claim::{ClaimSpecBuilder, ClaimStore as _, Outcome, RowKey, Take};

/// A row with such a time does not stop any operation on the other rows.
#[tokio::test]
async fn an_infinite_time_in_any_column_of_one_row_stops_nothing() {
    let columns = ["lease_until", "ready_at", "taken_at", "settled_at"];
    let beside = |column: &'static str| ("lease", column);
    let sides = ["lease_until", "taken_at"].map(beside);
    let own = columns.map(|column| ("request", column));
    for (table, column) in own.into_iter().chain(sides) {
        for time in ["-infinity", "infinity"] {
            let is_side = table == "lease";
            let spec: fn() -> ClaimSpecBuilder = if is_side { beside_all } else { all };
            let what = format!("{table}.{column} = {time}");
            let world = World::new(&format!("{REQUEST}{SIDE}")).await;
            let claims = world.claims(spec());
            claims
                .spec()
                .migration()
                .apply(&world.pool)
                .await
                .unwrap_or_else(|error| panic!("{what}: {error}"));
            world.insert(4).await;
            // One row is claimed by a dead worker, and one row is settled.
            let taken = take(&claims, 2).await;
            settle(&claims, &taken.claims[1].claim, Outcome::Done).await.unwrap();
            let row = if is_side {
                "id = '1'".to_owned()
            } else {
                format!("id = {}", if column == "settled_at" { 2 } else { 1 })
            };
            world.run(&format!("UPDATE {table} SET {column} = '{time}' WHERE {row}")).await;
            world.run("INSERT INTO request (document, ready_at) VALUES ('bad', NULL)").await;

            let upkeep = claims.upkeep(9).await.unwrap_or_else(|error| panic!("{what}: {error}"));
            let has_ended = column == "lease_until" && time == "-infinity";
            assert_eq!(upkeep.swept.returned.len(), usize::from(has_ended), "{what}: {upkeep:?}");
            let listed = claims.taken(9).await.unwrap_or_else(|error| panic!("{what}: {error}"));
            assert_eq!(listed.len(), usize::from(!has_ended), "{what}");
            let limit = Take::up_to(9);
            claims.stats(&limit).await.unwrap_or_else(|error| panic!("{what}: {error}"));
            assert!(claims.pending(&limit).await.unwrap_or_else(|error| panic!("{what}: {error}")), "{what}");
            let next = claims.take(&limit).await.unwrap_or_else(|error| panic!("{what}: {error}"));
            let is_later = time == "infinity" && column == "ready_at" && has_ended;
            assert_eq!(next.claims.len(), 3 + usize::from(has_ended && !is_later), "{what}");
            let renewed = claims.renew(&[next.claims[0].claim.clone()], LONG).await;
            renewed.unwrap_or_else(|error| panic!("{what}: {error}"));
            for outcome in [Outcome::Done, Outcome::Failed("x".to_owned())] {
                let _ = claims
                    .cancel(&[RowKey::new(1)], "x")
                    .await
                    .unwrap_or_else(|error| panic!("{what}: {error}"));
                let _ = claims
                    .requeue(&[RowKey::new(1)], 1)
                    .await
                    .unwrap_or_else(|error| panic!("{what}: {error}"));
                for claimed in take(&claims, 9).await.claims {
                    settle(&claims, &claimed.claim, outcome.clone())
                        .await
                        .unwrap_or_else(|error| panic!("{what}: {error}"));
                }
            }
            if !is_side {
                claims.purge(9).await.unwrap_or_else(|error| panic!("{what}: {error}"));
            }
            // A row that is never ready, or always ready.
            world.run(&format!("INSERT INTO request (document, ready_at) VALUES ('odd', '{time}')")).await;
            let odd = claims.take(&limit).await.unwrap_or_else(|error| panic!("{what}: {error}"));
            assert_eq!(odd.claims.len(), usize::from(is_side || time == "-infinity"), "{what}");
            claims.stats(&limit).await.unwrap_or_else(|error| panic!("{what}: {error}"));
        }
    }
}

fn all() -> ClaimSpecBuilder {
    request()
        .order_by("ready_at", leasehold_claim::OrderType::Time)
        .retention(leasehold_claim::Retention::KeepFor(LONG))
}

fn beside_all() -> ClaimSpecBuilder {
    beside()
}

/// A pass continues after a row whose time in the order is infinite, with either type.
#[tokio::test]
async fn a_cursor_is_drawn_behind_infinite_times_with_a_zone_and_without() {
    for kind in ["timestamptz", "timestamp"] {
        let world = World::new(REQUEST).await;
        world.run(&format!("ALTER TABLE request ADD due {kind} NOT NULL DEFAULT now()")).await;
        world
            .run("INSERT INTO request (due) VALUES ('infinity'), ('-infinity'), ('2020-03-29 02:30'), ('2020-03-29 03:10')")
            .await;
        let claims = world.claims(request().order_by("due", leasehold_claim::OrderType::Time));
        claims.spec().migration().apply(&world.pool).await.unwrap();
        claims.spec().ensure(&world.pool).await.unwrap_or_else(|error| panic!("{kind}: {error}"));
        let (mut cursor, mut seen) = (None, Vec::new());
        for zone in ["UTC", "America/New_York", "Europe/Berlin", "UTC"] {
            // Each session has another zone, which must not matter. In Berlin, 2:30 did not exist on that day, and is read as
            // a moment after 3:10.
            let options = (*world.pool.connect_options()).clone().options([("TimeZone", zone)]);
            let one =
                sqlx::postgres::PgPoolOptions::new().max_connections(1).connect_with(options).await.unwrap();
            let claims = leasehold_claim::PgClaims::new(one, claims.spec().clone()).timeout(LONG);
            let taken = claims.take(&Take::up_to(1).after(cursor)).await.unwrap();
            seen.extend(flat(&taken));
            cursor = taken.cursor;
        }
        assert_eq!(seen, [2, 3, 4, 1], "{kind}");
    }
}
