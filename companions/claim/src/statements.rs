//! What statements on the claimed table are made of, and what is read from their answers: the same for claims under leases and
//! for claims that an open transaction holds.

pub(crate) mod expression;
mod group_key;
pub(crate) mod groups;
pub(crate) mod order;
pub(crate) mod parts;
pub(crate) mod payload;
pub(crate) mod pick;
mod preconditions;
pub(crate) mod query;
pub(crate) mod row;
pub(crate) mod settle;
pub(crate) mod settled;
pub(crate) mod stats;
pub(crate) mod take;
pub(crate) mod tenants;
mod work;

pub use group_key::group_number;
pub(crate) use group_key::group_number_sql;
pub use payload::inserted;

pub(crate) const TAKE: &str = "take rows";
pub(crate) const SETTLE: &str = "settle a claim";
