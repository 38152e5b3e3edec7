//! Write first, check after, apologise: `docs/cookbook/apology.md`.

use sqlx::PgPool;

use crate::sql;

/// The page.
pub const PAGE: &str = include_str!("../../../docs/cookbook/apology.md");

const BOOK: &str = sql(PAGE, "book");
const APOLOGISE: &str = sql(PAGE, "apologise");

/// A booking, and what was taken back because of it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Booked {
    /// The new booking.
    pub booking: i64,
    /// The bookings that this check has taken back: perhaps this one, perhaps others.
    pub apologies: Vec<i64>,
}

/// Books, and takes back what is over.
///
/// # Errors
///
/// What the server answers. The booking may have been accepted without a check; the next one makes up for it.
///
/// # Cancel safety
///
/// As after an error.
pub async fn book(pool: &PgPool, event: i64) -> sqlx::Result<Booked> {
    let booking: i64 = sqlx::query_scalar(BOOK).bind(event).fetch_one(pool).await?;
    let apologies: Vec<i64> = sqlx::query_scalar(APOLOGISE).bind(event).fetch_all(pool).await?;
    Ok(Booked { booking, apologies })
}
