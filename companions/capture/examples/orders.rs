//! A search table that is kept up to date from three source tables.
//!
//! Triggers on orders, order lines and payments record each change in a table of changes, in the transaction
//! of the change, so that none is lost and none is there that was rolled back. One claim has all changes of
//! an order, however many there are, and its row of the search table is made anew once, in the transaction
//! that settles the claim. Changes stay for 30 days, as a history that can be searched, and are purged then.
//! Everything is in a schema of its own, which is made anew each time.
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

/// Only a broken server needs this long.
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
        operation text NOT NULL
    );
    CREATE TABLE order_search (
        order_id bigint PRIMARY KEY,
        words text NOT NULL,
        open_amount bigint NOT NULL,
        rebuilt bigint NOT NULL DEFAULT 1
    )";

/// Builds the row of an order anew from what is there now, and counts how often that was done.
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
    INSERT INTO change (order_id, source, operation)
    SELECT id, 'all', 'TRUNCATE' FROM (SELECT id FROM orders UNION SELECT order_id FROM order_search) o";

#[tokio::main]
async fn main() -> Result<()> {
    let url = std::env::var("DATABASE_URL").map_err(|_| "set DATABASE_URL to a database to try this in")?;
    let shop = Shop::set_up(&url).await?;
    shop.sell().await?;
    println!("{} changes are recorded", shop.changes().await?);
    println!("an order at a time, with so many changes each: {:?}", shop.rebuild(3).await?);
    shop.search().await?.iter().for_each(|row| println!("  {row:?}"));
    shop.clear_out().await?;
    println!("after a DELETE and a TRUNCATE: {:?}", shop.rebuild(4).await?);
    shop.search().await?.iter().for_each(|row| println!("  {row:?}"));
    println!("{} changes are purged at once", shop.purge().await?);
    shop.let_days_pass(31).await?;
    println!("{} changes are purged after 31 days", shop.purge().await?);
    Ok(())
}

/// Changes of an order are one claim, and settled ones stay for 30 days.
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
        // Each sale would wait for the commits of all others.
        .notify_on_insert(false)
        .build()
}

/// Where changes come from. An order has the same number in each table, under different names.
fn capture() -> Result<Capture, ClaimError> {
    let source = |table: &str, order: &str| {
        let source = Source::new(Table::new(table)?).copy("order_id", order);
        Ok::<_, ClaimError>(source.constant("source", table).operation("operation"))
    };
    Capture::into(Table::new("change")?)
        .source(source("orders", "id")?)
        .source(source("order_line", "order_id")?)
        .source(source("payment", "order_id")?)
        .build()
}

/// The tables, and the claims on changes.
#[derive(Debug)]
pub struct Shop {
    pool: PgPool,
    claims: PgClaims,
}

/// A row of the search table: the order, its words, what is still to be paid, how often it was made anew.
pub type Found = (i64, String, i64, i64);

impl Shop {
    /// Makes the tables and the triggers.
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

    /// Changes of three orders, and some of a fourth that are rolled back.
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

    /// An order is deleted, and all payments at once.
    pub async fn clear_out(&self) -> Result<()> {
        query("DELETE FROM orders WHERE id = 3").execute(&self.pool).await?;
        query("TRUNCATE payment").execute(&self.pool).await?;
        Ok(())
    }

    /// Works on so many claims. Answers how many changes each had.
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

    /// The row and the end of the claim are in one transaction: both are there, or neither.
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
            // A change of each order, because only who has the claim of an order makes its row anew.
            None => {
                query(SPREAD).execute(&mut *transaction).await?;
                self.claims.notify(&mut transaction).await?;
            }
        }
        claim.settle_with(&self.claims, transaction, Outcome::Done).await?;
        Ok(())
    }

    /// The search table.
    pub async fn search(&self) -> Result<Vec<Found>> {
        let sql = "SELECT order_id, words, open_amount, rebuilt FROM order_search ORDER BY order_id";
        Ok(query_as(sql).fetch_all(&self.pool).await?)
    }

    /// How many changes there are, settled or not.
    pub async fn changes(&self) -> Result<i64> {
        Ok(query_scalar("SELECT count(*) FROM change").fetch_one(&self.pool).await?)
    }

    /// Whether a change waits for somebody.
    pub async fn is_behind(&self) -> Result<bool, ClaimError> {
        self.claims.pending(&Take::up_to(1)).await
    }

    /// Deletes changes that were settled long ago, a few at a time.
    pub async fn purge(&self) -> Result<u64, ClaimError> {
        let mut purged = 0;
        loop {
            match self.claims.purge(5).await? {
                0 => return Ok(purged),
                some => purged += some,
            }
        }
    }

    /// As if the changes had been settled `days` earlier.
    pub async fn let_days_pass(&self, days: i32) -> Result<()> {
        let sql = "UPDATE change SET settled_at = settled_at - make_interval(days => $1)";
        query(sql).bind(days).execute(&self.pool).await?;
        Ok(())
    }
}

/// Five changes of one order.
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
