//! Prints a migration for `psql`: a new column, a constraint on it and an index. Needs no server:
//!
//! ```text
//! cargo run -p leasehold-table-schema --example print | psql "$DATABASE_URL"
//! ```

use leasehold_table_schema::{Column, MigrationStep, Table, TableError, sql, write_script};

fn main() -> Result<(), TableError> {
    println!("{}", script()?);
    Ok(())
}

/// Returns the script.
pub fn script() -> Result<String, TableError> {
    let (table, amount) = (Table::new("invoice")?.in_schema("billing")?, Column::new("amount")?);
    let (name, column) = (table.quoted(), amount.quoted());
    let missing = format!("NOT {}", sql::has_column(&table, amount.as_str()));
    let add = format!("ALTER TABLE {name} ADD COLUMN {column} bigint NOT NULL DEFAULT 0");
    let mut steps =
        vec![MigrationStep::only_if("No row is rewritten, because the default is constant.", &missing, &add)];

    let condition = format!("{column} >= 0");
    let constraint = sql::derived(&[table.name(), amount.as_str(), "not_negative"]);
    steps.extend(MigrationStep::check("Amounts are not negative.", &table, &constraint, &condition));

    let index = sql::derived(&[table.name(), amount.as_str(), "idx"]);
    let definition = format!("({column})");
    steps.extend(MigrationStep::index("Invoices are found by amount.", &table, &index, false, &definition));

    let mut script = String::new();
    // Writing into a string cannot fail.
    let _ = write_script(&mut script, &steps);
    Ok(script)
}
