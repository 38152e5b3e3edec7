//! The places of numbers in the text of statements.

use std::sync::Arc;

use leasehold_postgres::{Identifier, KeySpace, sql::render, token};

use crate::derived::{GATE_BITS, MARK_BITS, other};
use crate::sql::IS_OPEN;

/// Renders statements for one schema and key space.
pub(crate) struct Places<'a> {
    schema: &'a Identifier,
    space: KeySpace,
}

impl<'a> Places<'a> {
    pub(crate) const fn new(schema: &'a Identifier, space: KeySpace) -> Self {
        Self { schema, space }
    }

    /// Fills in all places of a template.
    pub(crate) fn render(&self, template: &str) -> Arc<str> {
        let (own, other) = (self.space, other(self.space));
        let derived = |column: &str| arguments(other, column);
        let text = template
            .replace("{is_open}", IS_OPEN)
            .replace("{n}", &arguments(own, "o.n"))
            .replace("{mark}", &derived(&format!("(o.n # {MARK_BITS})")))
            .replace("{gate}", &derived(&format!("(o.n # {GATE_BITS})")))
            .replace("{other_n}", &derived("o.n"))
            .replace("{permit}", &derived("o.permit"))
            .replace("{total}", &derived("o.total"))
            .replace("{turn}", &derived("o.turn"))
            .replace("{gate_bits}", &GATE_BITS.to_string())
            .replace("{own_space}", column_of(own))
            .replace("{other_space}", column_of(other))
            .replace("{marked}", &token::marked());
        render(&text, self.schema)
    }
}

/// Returns a number as arguments of the server's lock functions.
fn arguments(space: KeySpace, number: &str) -> String {
    match space {
        KeySpace::Pair => format!("({number} >> 32)::integer, (({number} << 32) >> 32)::integer"),
        KeySpace::Big => number.to_owned(),
    }
}

/// Returns the value of `pg_locks.objsubid` for a key space.
const fn column_of(space: KeySpace) -> &'static str {
    match space {
        KeySpace::Big => "1",
        KeySpace::Pair => "2",
    }
}
