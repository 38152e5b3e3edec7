//! A search table that is kept up to date from three source tables.
//!
//! Triggers on orders, order lines and payments record each change in a change table, in the same transaction. One
//! claim gets all changes of an order. It rebuilds the order's search row once, in the transaction that settles the
//! claim. Changes stay for 30 days as a history and are then purged. Orders and history are searched by words, with
//! indexes. The example drops and creates its schema on each run.
//!
//! ```text
//! DATABASE_URL=postgres://localhost/test cargo run -p leasehold-capture --example orders
//! ```

use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use leasehold_capture::{Capture, Source};
use leasehold_claim::sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use leasehold_claim::sqlx::{Connection as _, PgConnection, PgPool, query, query_as, query_scalar, raw_sql};
use leasehold_claim::{
    Claim, ClaimError, ClaimSpec, ClaimStore as _, Claimer, Outcome, PgClaims, Retention, States, Table, Take,
};
use tokio::time::timeout;

type Result<T, E = Box<dyn Error + Send + Sync>> = std::result::Result<T, E>;

const SCHEMA: &str = "leasehold_orders";

/// A time limit that the example only reaches if the server is broken.
const LONG: Duration = Duration::from_secs(60);

const TABLES: &str = "
    DROP SCHEMA IF EXISTS leasehold_orders CASCADE;
    CREATE SCHEMA leasehold_orders;
    CREATE TABLE orders (id bigint PRIMARY KEY, customer text NOT NULL);
    CREATE TABLE order_line (order_id bigint NOT NULL, article text NOT NULL, price bigint NOT NULL);
    CREATE TABLE payment (order_id bigint NOT NULL, amount bigint NOT NULL);
    CREATE TABLE change (
        id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        status text NOT NULL DEFAULT 'new',
        order_id bigint, -- NULL: any order, after a TRUNCATE
        source text NOT NULL,
        operation text NOT NULL,
        detail jsonb NOT NULL, -- the row before and after the change
        document tsvector GENERATED ALWAYS AS (jsonb_to_tsvector('simple', detail - 'table' - 'op', '[\"string\"]')) STORED
    );
    CREATE INDEX change_document ON change USING gin (document);
    CREATE TABLE order_search (
        order_id bigint PRIMARY KEY,
        words text NOT NULL,
        open_amount bigint NOT NULL,
        rebuilt bigint NOT NULL DEFAULT 1,
        document tsvector GENERATED ALWAYS AS (to_tsvector('simple', words)) STORED
    );
    CREATE INDEX order_search_document ON order_search USING gin (document)";

/// Searches the orders as they are now. Accepts the words of a search box: `pear -apple`, `"red pear"`, `pear or fig`.
pub const SEARCH: &str = "
    SELECT order_id, words, open_amount, rebuilt FROM order_search
    WHERE document @@ websearch_to_tsquery('simple', $1)
    ORDER BY ts_rank(document, websearch_to_tsquery('simple', $1)) DESC, order_id LIMIT 20";

/// Searches the changes, settled or not, newest first. First finds all matches and then sorts them, because a plan that
/// reads all changes in order would be slow for rare words.
pub const SEARCH_HISTORY: &str = "
    WITH found AS MATERIALIZED (
        SELECT id, order_id, source, operation FROM change WHERE document @@ websearch_to_tsquery('simple', $1)
    )
    SELECT order_id, source, operation FROM found ORDER BY id DESC LIMIT 20";

/// Rebuilds the search row of an order from the current tables and counts the rebuilds.
const REBUILD: &str = "
    INSERT INTO order_search (order_id, words, open_amount)
    SELECT o.id,
        concat_ws(' ', o.customer, (SELECT string_agg(article, ' ' ORDER BY article) FROM order_line WHERE order_id = o.id)),
        COALESCE((SELECT sum(price) FROM order_line WHERE order_id = o.id), 0)
            - COALESCE((SELECT sum(amount) FROM payment WHERE order_id = o.id), 0)
    FROM orders o WHERE o.id = $1
    ON CONFLICT (order_id) DO UPDATE SET words = excluded.words, open_amount = excluded.open_amount,
        rebuilt = order_search.rebuilt + 1";

const REMOVE: &str =
    "DELETE FROM order_search WHERE order_id = $1 AND NOT EXISTS (SELECT FROM orders WHERE id = $1)";

const SPREAD: &str = "
    INSERT INTO change (order_id, source, operation, detail)
    SELECT id, 'all', 'TRUNCATE', '{}' FROM (SELECT id FROM orders UNION SELECT order_id FROM order_search) o";

#[tokio::main]
async fn main() -> Result<()> {
    let url = std::env::var("DATABASE_URL").map_err(|_| "set DATABASE_URL to a database to try this in")?;
    let shop = Shop::set_up(&url).await?;
    shop.sell().await?;
    println!("{} changes are recorded", shop.changes().await?);
    println!("an order at a time, with so many changes each: {:?}", shop.rebuild(3).await?);
    shop.all().await?.iter().for_each(|row| println!("  {row:?}"));
    shop.clear_out().await?;
    println!("after a DELETE and a TRUNCATE: {:?}", shop.rebuild(4).await?);
    shop.all().await?.iter().for_each(|row| println!("  {row:?}"));
    println!("orders with a pear: {:?}", shop.search("pear").await?);
    println!("changes with a pear: {:?}", shop.search_history("pear").await?);
    println!("{} changes are purged at once", shop.purge().await?);
    shop.let_days_pass(31).await?;
    println!("{} changes are purged after 31 days", shop.purge().await?);
    Ok(())
}

/// Groups the changes by order into one claim. Settled changes stay for 30 days.
fn spec() -> Result<ClaimSpec, ClaimError> {
    ClaimSpec::builder(Table::new("change")?)
        .state("status", States::text(["new"], "done").taken("in_progress").failed("failed"))
        .group("order_id")
        .grouped()
        .lease_columns("owner", "epoch", "lease_until")
        .settled_at("settled_at")
        .error("error")
        .work(["order_id"])
        .retention(Retention::KeepFor(Duration::from_secs(30 * 24 * 60 * 60)))
        // No notification, because notifying transactions commit one after the other.
        .notify_on_insert(false)
        .build()
}

/// Describes the sources. The order's number has another column name in each table.
fn capture() -> Result<Capture, ClaimError> {
    let source = |table: &str, order: &str| {
        let source = Source::new(Table::new(table)?).copy("order_id", order);
        Ok::<_, ClaimError>(source.constant("source", table).operation("operation").image("detail"))
    };
    Capture::into(Table::new("change")?)
        .source(source("orders", "id")?)
        .source(source("order_line", "order_id")?)
        .source(source("payment", "order_id")?)
        .build()
}

/// The connection pool and the claims on changes.
#[derive(Debug)]
pub struct Shop {
    pool: PgPool,
    claims: PgClaims,
}

/// A row of the search table: order, words, open amount, number of rebuilds.
pub type Found = (i64, String, i64, i64);

/// A change: order, source table, operation.
pub type Changed = (Option<i64>, String, String);

impl Shop {
    /// Creates the tables and the triggers.
    pub async fn set_up(url: &str) -> Result<Self> {
        let options = url.parse::<PgConnectOptions>()?.options([("search_path", SCHEMA)]);
        let pool = PgPoolOptions::new().connect_with(options).await?;
        raw_sql(TABLES).execute(&pool).await?;
        let (spec, capture) = (spec()?, capture()?);
        spec.migration().apply(&pool).await?;
        spec.ensure(&pool).await?;
        capture.install(&pool).await?;
        Ok(Self { claims: PgClaims::new(pool.clone(), spec), pool })
    }

    /// Changes three orders, and a fourth in a transaction that rolls back.
    pub async fn sell(&self) -> Result<()> {
        let mut connection = self.pool.acquire().await?;
        for order in 1..=3 {
            let mut sale = connection.begin().await?;
            sell(&mut sale, order).await?;
            sale.commit().await?;
        }
        let mut sale = connection.begin().await?;
        sell(&mut sale, 4).await?;
        sale.rollback().await?;
        query("UPDATE order_line SET price = price - 1 WHERE order_id = 2").execute(&mut *connection).await?;
        query("DELETE FROM order_line WHERE order_id = 3").execute(&mut *connection).await?;
        Ok(())
    }

    /// Deletes an order and truncates all payments.
    pub async fn clear_out(&self) -> Result<()> {
        query("DELETE FROM orders WHERE id = 3").execute(&self.pool).await?;
        query("TRUNCATE payment").execute(&self.pool).await?;
        Ok(())
    }

    /// Processes this many claims. Returns the number of changes in each.
    pub async fn rebuild(&self, claims: usize) -> Result<Vec<usize>> {
        let claimer = Claimer::builder(Arc::new(self.claims.clone())).start()?;
        let mut changes = Vec::new();
        while changes.len() < claims {
            let claim = timeout(LONG, claimer.next()).await?.ok_or("the claimer is closed")?;
            changes.push(claim.rows().len());
            self.rebuild_one(claim).await?;
        }
        claimer.close().await?;
        Ok(changes)
    }

    /// Rebuilds the row and ends the claim in one transaction.
    async fn rebuild_one(&self, mut claim: Claim) -> Result<()> {
        #[derive(serde::Deserialize)]
        struct Change {
            order_id: Option<i64>,
        }
        let mut transaction = self.pool.begin().await?;
        match claim.work::<Change>()?.order_id {
            Some(order) => {
                query(REMOVE).bind(order).execute(&mut *transaction).await?;
                query(REBUILD).bind(order).execute(&mut *transaction).await?;
            }
            // The change names no order. Inserts a change for each order, because only the holder of an order's claim
            // can rebuild its row.
            None => {
                query(SPREAD).execute(&mut *transaction).await?;
                self.claims.notify(&mut transaction).await?;
            }
        }
        claim.settle_with(&self.claims, transaction, Outcome::Done).await?;
        Ok(())
    }

    /// Returns the orders with these words, the best match first.
    pub async fn search(&self, words: &str) -> Result<Vec<Found>> {
        Ok(query_as(SEARCH).bind(words).fetch_all(&self.pool).await?)
    }

    /// Returns the changes with these words in the row before or after, the newest first.
    pub async fn search_history(&self, words: &str) -> Result<Vec<Changed>> {
        Ok(query_as(SEARCH_HISTORY).bind(words).fetch_all(&self.pool).await?)
    }

    /// Returns the search table.
    pub async fn all(&self) -> Result<Vec<Found>> {
        let sql = "SELECT order_id, words, open_amount, rebuilt FROM order_search ORDER BY order_id";
        Ok(query_as(sql).fetch_all(&self.pool).await?)
    }

    /// Returns the number of changes, settled or not.
    pub async fn changes(&self) -> Result<i64> {
        Ok(query_scalar("SELECT count(*) FROM change").fetch_one(&self.pool).await?)
    }

    /// Returns whether a change is not settled yet.
    pub async fn is_behind(&self) -> Result<bool, ClaimError> {
        self.claims.pending(&Take::up_to(1)).await
    }

    /// Deletes changes that were settled more than 30 days ago, in small batches.
    pub async fn purge(&self) -> Result<u64, ClaimError> {
        let mut purged = 0;
        loop {
            match self.claims.purge(5).await? {
                0 => return Ok(purged),
                some => purged += some,
            }
        }
    }

    /// Moves the settlement of all changes `days` into the past.
    pub async fn let_days_pass(&self, days: i32) -> Result<()> {
        let sql = "UPDATE change SET settled_at = settled_at - make_interval(days => $1)";
        query(sql).bind(days).execute(&self.pool).await?;
        Ok(())
    }
}

/// Makes five changes of one order.
async fn sell(sale: &mut PgConnection, order: i64) -> Result<()> {
    for sql in [
        "INSERT INTO orders VALUES ($1, 'customer-' || $1)",
        "INSERT INTO order_line VALUES ($1, 'apple', 30)",
        "INSERT INTO order_line VALUES ($1, 'pear', 50)",
        "INSERT INTO payment VALUES ($1, 60)",
        "UPDATE orders SET customer = upper(customer) WHERE id = $1",
    ] {
        query(sql).bind(order).execute(&mut *sale).await?;
    }
    Ok(())
}
