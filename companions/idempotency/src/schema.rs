//! The tables of keys and journeys, and their installation.

use leasehold_table_schema::Installation;

/// Installs the tables of keys and journeys. The last argument checks for the objects that are created last.
pub(crate) const TABLES: Installation = Installation::new(
    "Idempotency keys of leasehold. It can be run again.",
    include_str!("schema.sql"),
    "EXISTS (
    SELECT FROM pg_catalog.pg_trigger t WHERE t.tgrelid = to_regclass(E'{schema}.idempotency')
    AND t.tgname = 'idempotency_finished') AND to_regclass(E'{schema}.journey_expires') IS NOT NULL",
);
