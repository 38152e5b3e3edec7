//! Recipes of `docs/cookbook`, as functions that the tests race on Postgres.
