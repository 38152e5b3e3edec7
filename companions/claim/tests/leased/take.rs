//! Taking rows in Postgres.
use std::collections::HashSet;
use std::str::FromStr as _;
use std::time::Duration;

use crate::common::*;
use leasehold_claim::{
    ClaimError, ClaimSpec, ClaimStore as _, IdType, OrderType, Outcome, OwnerToken, PgClaims, PgHeld, RowKey,
    Sql, States, Table, Take,
};
use sqlx::Executor as _;
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};

/// Every claim has a separate owner, even two claims of one process and one statement.
#[tokio::test(flavor = "multi_thread")]
async fn no_two_claims_share_an_owner() {
    let world = World::new(REQUEST).await;
    world
        .run(
            "CREATE SEQUENCE owners; CREATE TABLE numbered (LIKE request INCLUDING ALL);
        ALTER TABLE numbered DROP owner; ALTER TABLE numbered ADD owner bigint;
        INSERT INTO numbered (document) SELECT n FROM generate_series(1, 10) n",
        )
        .await;
    world.insert(10).await;
    let claims = world.claims(request());
    let mut owners = HashSet::new();
    for limit in [3, 1, 1, 5] {
        for claim in take(&claims, limit).await.claims {
            assert!(matches!(claim.claim.owner, OwnerToken::Uuid(_)));
            assert!(owners.insert(claim.claim.owner), "twice: {}", claim.claim.owner);
        }
    }
    assert_eq!(owners.len(), 10);
    assert_eq!(world.number("SELECT count(DISTINCT owner) FROM request").await, 10);

    let spec = ClaimSpec::builder(Table::new("numbered").unwrap())
        .state("status", states())
        .lease_columns("owner", "epoch", "lease_until")
        .owner_sequence(Table::new("owners").unwrap());
    let claims = world.claims(spec);
    let mut owners = HashSet::new();
    for limit in [3, 1, 1, 5] {
        for claim in take(&claims, limit).await.claims {
            assert!(matches!(claim.claim.owner, OwnerToken::Number(_)));
            assert!(owners.insert(claim.claim.owner), "twice: {}", claim.claim.owner);
            settle(&claims, &claim.claim, Outcome::Done).await.unwrap();
        }
    }
    assert_eq!(owners.len(), 10);
}

/// A worker takes rows in the order of their ids, and gets them in that order.
#[tokio::test(flavor = "multi_thread")]
async fn one_worker_takes_rows_in_order_of_their_ids() {
    for spec in [request(), beside()] {
        let world = World::new(&[REQUEST, SIDE].concat()).await;
        // Inserts rows in descending order, so their physical order differs.
        world
            .run(
                "INSERT INTO request (id) OVERRIDING SYSTEM VALUE SELECT 10 - n FROM generate_series(1, 9) n",
            )
            .await;
        let claims = world.claims(spec);
        let mut seen = Vec::new();
        for limit in [1, 3, 1, 10] {
            let taken = take(&claims, limit).await;
            seen.extend(flat(&taken));
            for claim in &taken.claims {
                settle(&claims, &claim.claim, Outcome::Done).await.unwrap();
            }
        }
        assert_eq!(seen, (1..=9).collect::<Vec<_>>());
        assert_eq!(
            world.number("SELECT count(*) FROM request WHERE status = 'complete' AND owner IS NULL").await,
            9
        );
        assert_eq!(world.number("SELECT count(*) FROM lease").await, 0);
    }
}

/// A take returns at most `limit` rows under every plan, and only rows in the requested states. A plain statement with IN
/// would take more rows under a bad plan.
#[tokio::test(flavor = "multi_thread")]
async fn leased_claims_never_exceed_the_limit_under_bad_plans() {
    let world = World::new(&[REQUEST, SIDE].concat()).await;
    world.insert(100).await;
    world.run("ANALYZE request").await;
    let bad = ["hashjoin", "mergejoin", "sort", "memoize", "material", "hashagg", "incremental_sort"];
    let options = PgConnectOptions::from_str(world.database.url()).unwrap();
    let options = options.options(bad.map(|name| (format!("enable_{name}"), "off")));
    let pool = PgPoolOptions::new().max_connections(2).connect_with(options).await.unwrap();

    let naive = "UPDATE request SET status = 'in-progress' WHERE id IN
        (SELECT id FROM request WHERE status = 'new' ORDER BY id LIMIT 1 FOR UPDATE SKIP LOCKED) RETURNING id";
    let mut transaction = pool.begin().await.unwrap();
    let taken = transaction.fetch_all(naive).await.unwrap().len();
    assert!(taken > 1, "the plan was not bad enough to show anything");
    transaction.rollback().await.unwrap();

    for spec in [request(), beside()] {
        let claims = PgClaims::new(pool.clone(), spec.build().unwrap()).timeout(LONG);
        for limit in [1, 7] {
            let taken = take(&claims, limit).await;
            assert_eq!(taken.claims.len(), limit as usize);
            assert_eq!(
                world.number("SELECT count(*) FROM request WHERE status = 'in-progress'").await,
                i64::from(limit)
            );
            for claim in &taken.claims {
                settle(&claims, &claim.claim, Outcome::PutBack).await.unwrap();
            }
        }
    }
}

/// The state column has an enum type, and a call takes only rows in the states that it names.
#[tokio::test(flavor = "multi_thread")]
async fn a_call_takes_only_the_enum_states_that_it_names() {
    let world = World::new(
        "CREATE SCHEMA s; CREATE TYPE s.\"State\" AS ENUM ('done', 'in_progress', 'failed', 'idle');
        CREATE TABLE s.task (id text PRIMARY KEY, status s.\"State\" NOT NULL DEFAULT 'idle',
            who uuid, epoch bigint, until timestamptz, left_ int);
        INSERT INTO s.task (id, status) VALUES ('a', 'idle'), ('b', 'failed'), ('c', 'done'), ('d', 'failed')",
    )
    .await;
    let kind = Table::new("State").unwrap().in_schema("s").unwrap();
    let spec = ClaimSpec::builder(Table::new("task").unwrap().in_schema("s").unwrap())
        .id("id", IdType::Text)
        .state("status", States::enumeration(kind, ["idle", "failed"], "done").taken("in_progress"))
        .lease_columns("who", "epoch", "until");
    let claims = world.claims(spec);
    let failed = claims.take(&Take::up_to(1).from(["failed"])).await.unwrap();
    assert_eq!(ids(&failed), [["b"]]);
    assert_eq!(failed.claims[0].rows[0].found.as_str(), "failed");
    let taken = claims.take(&Take::up_to(9)).await.unwrap();
    assert_eq!(ids(&taken), [["a"], ["d"]]);
    assert_eq!(taken.claims[1].rows[0].found.as_str(), "failed");
    let error = claims.take(&Take::up_to(1).from(["done"])).await.unwrap_err();
    assert!(matches!(&error, ClaimError::InvalidSpec(text) if text.contains("done")), "{error}");
    for claim in failed.claims.iter().chain(&taken.claims) {
        settle(&claims, &claim.claim, Outcome::Retry { error: None, after: Duration::ZERO }).await.unwrap();
    }
    assert_eq!(world.number("SELECT count(*) FROM s.task WHERE status = 'idle' AND who IS NULL").await, 3);
}

/// Queues are separate, and the same id in two queues means two rows.
#[tokio::test(flavor = "multi_thread")]
async fn the_same_id_in_two_queues_is_two_rows() {
    let world = World::new(&[
        "CREATE TABLE job (queue_id text NOT NULL DEFAULT 'default', id integer NOT NULL, done boolean NOT NULL DEFAULT false,
            owner uuid, epoch bigint NOT NULL DEFAULT 0, lease_until timestamptz, PRIMARY KEY (queue_id, id));
        INSERT INTO job (queue_id, id) SELECT q, n FROM generate_series(1, 3) n, (VALUES ('q1'), ('q2')) v(q);",
        SIDE,
    ].concat()).await;
    let spec = || {
        ClaimSpec::builder(Table::new("job").unwrap())
            .id("id", IdType::Int)
            .state("done", States::boolean())
            .queue("queue_id")
    };
    let columns = || spec().lease_columns("owner", "epoch", "lease_until");
    let side = || spec().side_table(Table::new("lease").unwrap());
    for spec in [columns(), side()] {
        let claims = world.claims(spec);
        let q1 = claims.take(&Take::up_to(2).queue("q1")).await.unwrap();
        let keys: Vec<_> = q1.claims.iter().map(|claim| claim.rows[0].key.clone()).collect();
        assert_eq!(keys, [RowKey::queued("q1", 1), RowKey::queued("q1", 2)]);
        // Takes from all queues in the order of ids. The cursor can be between the two rows of an id.
        let mut cursor = None;
        let mut rest = Vec::new();
        loop {
            let taken = claims.take(&Take::up_to(1).after(cursor.clone())).await.unwrap();
            let Some(claim) = taken.claims.first() else { break };
            rest.push((claim.rows[0].key.to_string(), claim.claim.clone()));
            cursor = taken.cursor;
        }
        let names: Vec<_> = rest.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["1 in queue q2", "2 in queue q2", "3 in queue q1", "3 in queue q2"]);
        settle(&claims, &rest[0].1, Outcome::Done).await.unwrap();
        assert_eq!(world.text("SELECT string_agg(queue_id || id, ' ') FROM job WHERE done").await, "q21");
        for claim in
            q1.claims.iter().map(|claim| &claim.claim).chain(rest[1..].iter().map(|(_, claim)| claim))
        {
            settle(&claims, claim, Outcome::PutBack).await.unwrap();
        }
        assert_eq!(take(&claims, 10).await.claims.len(), 5);
        world.run("UPDATE job SET done = false, owner = NULL, lease_until = NULL; DELETE FROM lease").await;
    }
    assert!(matches!(
        world.claims(request()).take(&Take::up_to(1).queue("q1")).await,
        Err(ClaimError::InvalidSpec(_))
    ));
}

/// A row that another transaction has locked for long does not delay the others.
#[tokio::test(flavor = "multi_thread")]
async fn a_slow_row_does_not_block_the_rest() {
    for spec in [request(), beside()] {
        let world = World::new(&[REQUEST, SIDE].concat()).await;
        world.insert(3).await;
        let claims = world.claims(spec);
        let mut slow = world.pool.begin().await.unwrap();
        slow.execute("SELECT FROM request WHERE id = 1 FOR UPDATE").await.unwrap();
        assert_eq!(flat(&bounded(take(&claims, 9)).await), [2, 3]);
        assert!(claims.pending(&Take::up_to(1)).await.unwrap(), "the locked row is still to be done");
        slow.rollback().await.unwrap();
        assert_eq!(flat(&take(&claims, 9).await), [1]);
        assert!(!claims.pending(&Take::up_to(1)).await.unwrap());
    }
}

/// A pass offers no row twice, in any order. The next pass finds rows that appear before the cursor.
#[tokio::test(flavor = "multi_thread")]
async fn a_pass_in_mixed_orders_offers_no_row_twice() {
    let world = World::new(
        "CREATE TABLE work (id uuid PRIMARY KEY DEFAULT gen_random_uuid(), done boolean NOT NULL DEFAULT false,
            priority smallint, run_at timestamptz, name varchar(10), owner uuid, epoch bigint, lease_until timestamptz);
        INSERT INTO work (priority, run_at, name) SELECT p, r, n FROM
            (VALUES (1), (2), (NULL)) a(p),
            (VALUES (timestamptz '2026-01-02 03:04:05.000006+00'), ('infinity'), (NULL), ('0044-03-15 12:00:00+00 BC')) b(r),
            (VALUES ('a'), ('=b'), (''), (NULL)) c(n)",
    )
    .await;
    let spec = || {
        ClaimSpec::builder(Table::new("work").unwrap())
            .id("id", IdType::Uuid)
            .state("done", States::boolean())
            .lease_columns("owner", "epoch", "lease_until")
            .order_by_descending("priority", OrderType::Int)
            .order_by("run_at", OrderType::Time)
            .order_by_descending("name", OrderType::Text)
    };
    let expected = world
        .text("SELECT string_agg(id::text, ' ' ORDER BY priority DESC, run_at, name DESC, id) FROM work")
        .await;
    // With other date styles and time zones of the session too.
    let options = PgConnectOptions::from_str(world.database.url()).unwrap();
    let options = options.options([("DateStyle", "SQL, DMY"), ("TimeZone", "Asia/Kathmandu")]);
    let odd = PgPoolOptions::new().max_connections(2).connect_with(options).await.unwrap();
    for pool in [world.pool.clone(), odd] {
        let claims = PgClaims::new(pool, spec().build().unwrap());
        for limit in [1, 5] {
            let (mut cursor, mut seen) = (None, Vec::new());
            loop {
                let taken = claims.take(&Take::up_to(limit).after(cursor.clone())).await.unwrap();
                if taken.claims.is_empty() {
                    break;
                }
                seen.extend(ids(&taken).concat());
                cursor = taken.cursor.clone();
                // Puts the rows back at once, so only the cursor prevents a second offer.
                for claim in &taken.claims {
                    settle(&claims, &claim.claim, Outcome::PutBack).await.unwrap();
                }
            }
            assert_eq!(seen.join(" "), expected);
        }
    }
    // The default order, by id.
    let world = World::new(REQUEST).await;
    world.insert(5).await;
    let claims = world.claims(request());
    let first = take(&claims, 3).await;
    world.run("INSERT INTO request (id) OVERRIDING SYSTEM VALUE VALUES (-1)").await;
    let second = claims.take(&Take::up_to(9).after(first.cursor.clone())).await.unwrap();
    assert_eq!(flat(&second), [4, 5]);
    assert_eq!(flat(&take(&claims, 9).await), [-1]);
}

/// A claim and a view treat an ended lease the same, because both use the state function.
#[tokio::test(flavor = "multi_thread")]
async fn an_ended_lease_counts_the_same_for_claim_and_view() {
    let world = World::new(REQUEST).await;
    world
        .run(
            "CREATE FUNCTION request_claim_state(text, timestamptz) RETURNS text LANGUAGE sql AS
        $$ SELECT CASE WHEN $1 = 'in-progress' AND $2 <= clock_timestamp() THEN 'new' ELSE $1 END $$;
        CREATE VIEW seen AS SELECT id, request_claim_state(status, lease_until) AS status FROM request",
        )
        .await;
    world.insert(2).await;
    let claims = world.claims(request().expire_on_read());
    let late = take_one(&claims).await;
    let other = take_one(&claims).await;
    assert!(take(&claims, 9).await.claims.is_empty());
    world.run("UPDATE request SET lease_until = clock_timestamp() WHERE id = 1").await;
    assert_eq!(world.text("SELECT string_agg(status, ' ' ORDER BY id) FROM seen").await, "new in-progress");
    assert!(claims.pending(&Take::up_to(1)).await.unwrap());
    let taken = take(&claims, 9).await;
    assert_eq!(flat(&taken), [1]);
    assert_eq!(taken.claims[0].rows[0].epoch, 2);
    assert_eq!(taken.claims[0].rows[0].found.as_str(), "new");
    assert!(matches!(settle(&claims, &late.claim, Outcome::Done).await, Err(ClaimError::Superseded { .. })));
    settle(&claims, &other.claim, Outcome::Done).await.unwrap();
    settle(&claims, &taken.claims[0].claim, Outcome::Done).await.unwrap();
}

/// The work has the server's JSON form, and the user's filter applies.
#[tokio::test(flavor = "multi_thread")]
async fn work_and_filter() {
    let world = World::new(REQUEST).await;
    world
        .run("INSERT INTO request (entity, document) VALUES ('no', 'x'), ('e', E'q\"\\n'), ('e', NULL)")
        .await;
    let claims = world.claims(request().filter(Sql::trusted("t.entity = 'e' OR false")));
    let taken = take(&claims, 9).await;
    assert_eq!(flat(&taken), [2, 3]);
    let works: Vec<_> = taken.claims.iter().map(|claim| claim.rows[0].work.clone()).collect();
    assert_eq!(works[0]["document"], "q\"\n");
    assert!(works[1]["document"].is_null());
    assert_eq!(taken.claims[0].lease, Take::DEFAULT_LEASE);
    assert_eq!(taken.claims[0].epoch(), Some(1));
}

/// Invalid input is refused before a statement is sent, or when the table is first used.
#[tokio::test(flavor = "multi_thread")]
async fn bad_input() {
    let world = World::new(REQUEST).await;
    let claims = world.claims(request());
    for take in [Take::up_to(0), Take::up_to(1).lease(Duration::from_micros(999))] {
        assert!(matches!(claims.take(&take).await, Err(ClaimError::InvalidSpec(_))), "{take:?}");
    }
    // A spec without a lease.
    let bare = ClaimSpec::builder(Table::new("request").unwrap()).state("status", states());
    assert!(matches!(world.claims(bare).take(&Take::up_to(1)).await, Err(ClaimError::Unsupported(_))));
    // A missing table, and a missing column.
    let missing = ClaimSpec::builder(Table::new("nowhere").unwrap()).state("status", states()).lease_columns(
        "owner",
        "epoch",
        "lease_until",
    );
    let error = world.claims(missing).take(&Take::up_to(1)).await.unwrap_err();
    assert!(error.to_string().contains("no table nowhere"), "{error}");
    let error = world.claims(request().queue("lane")).take(&Take::up_to(1)).await.unwrap_err();
    assert!(error.to_string().contains("lane") && error.to_string().contains("spec"), "{error}");
    // A NULL state and an unknown state are never taken and block no other row.
    world
        .run(
            "ALTER TABLE request DROP CONSTRAINT request_status, ALTER status DROP NOT NULL;
        INSERT INTO request (status) VALUES (NULL), ('odd'), ('new')",
        )
        .await;
    assert_eq!(flat(&take(&claims, 9).await), [3]);
    assert!(!claims.pending(&Take::up_to(1)).await.unwrap());
    // A lease without a time zone would end at another time in each session.
    world.run("ALTER TABLE request ALTER lease_until TYPE timestamp").await;
    let error = world.claims(request()).take(&Take::up_to(1)).await.unwrap_err();
    assert!(matches!(&error, ClaimError::InvalidSpec(text) if text.contains("timestamptz")), "{error}");
}

/// A `numeric` value is never converted to a float, with held and leased claims. Other types are unchanged.
#[tokio::test(flavor = "multi_thread")]
async fn numbers_of_thirty_digits_arrive_as_they_are() {
    let digits = "123456789012345678901234567890.12345678901234567890";
    let world = World::new(&format!(
        "{REQUEST} {SIDE} CREATE DOMAIN money_of_ours AS numeric CHECK (VALUE > 0);
         ALTER TABLE request ADD amount numeric DEFAULT {digits}, ADD \"Amount \"\"2\" money_of_ours DEFAULT {digits},
             ADD parts numeric[] DEFAULT ARRAY[{digits}, NULL, 1], ADD none numeric, ADD plain integer DEFAULT 7,
             ADD share float8 DEFAULT 0.5, ADD doc jsonb DEFAULT '{{\"a\": [1, {{\"b\": null}}]}}', ADD list int[] DEFAULT '{{1,2}}';
         INSERT INTO request DEFAULT VALUES; INSERT INTO request DEFAULT VALUES; INSERT INTO request DEFAULT VALUES"
    ))
    .await;
    let expected = serde_json::json!({
        "amount": digits, "Amount \"2": digits, "parts": [digits, null, "1"], "none": null, "plain": 7, "share": 0.5,
        "doc": {"a": [1, {"b": null}]}, "list": [1, 2],
    });
    let columns = ["amount", "Amount \"2", "parts", "none", "plain", "share", "doc", "list"];
    for spec in [request(), beside()] {
        let claimed = take_one(&world.claims(spec.work(columns))).await;
        let mut work = claimed.rows[0].work.clone();
        work.as_object_mut().unwrap().retain(|name, _| columns.contains(&name.as_str()));
        assert_eq!(work, expected);
    }
    let held = PgHeld::new(world.pool.clone(), request().work(columns).build().unwrap());
    let hold = held.begin(&Take::up_to(1)).await.unwrap().unwrap();
    assert_eq!(hold.taken().claims[0].rows[0].work["parts"], expected["parts"]);
}
