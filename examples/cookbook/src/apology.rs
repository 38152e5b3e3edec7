//! Writes first, checks afterwards, and apologises for revoked bookings: `docs/cookbook/apology.md`.

use sqlx::PgPool;

use crate::sql;

/// The page with this recipe and its SQL.
pub const PAGE: &str = include_str!("../../../docs/cookbook/apology.md");

const BOOK: &str = sql(PAGE, "book");
const APOLOGISE: &str = sql(PAGE, "apologise");

/// The result of a booking, with the bookings that the following check revoked.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Booked {
    /// The new booking.
    pub booking: i64,
    /// The bookings revoked by this check, which might include the new one.
    pub apologies: Vec<i64>,
}

/// Books, and revokes the bookings above the limit.
///
/// # Errors
///
/// The server's error. The booking might have been accepted without a check. The next booking checks again.
///
/// # Cancel safety
///
/// If dropped, the outcome is as after an error.
pub async fn book(pool: &PgPool, event: i64) -> sqlx::Result<Booked> {
    let booking: i64 = sqlx::query_scalar(BOOK).bind(event).fetch_one(pool).await?;
    let apologies: Vec<i64> = sqlx::query_scalar(APOLOGISE).bind(event).fetch_all(pool).await?;
    Ok(Booked { booking, apologies })
}
