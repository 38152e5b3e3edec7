//! Checks whether inserted rows are announced to workers. Without that, polls find the rows later.

use leasehold_table_schema::Column;

use super::TableCheck;
use crate::error::ClaimError;
use crate::spec::NotifyTrigger;

impl TableCheck<'_> {
    pub(super) async fn notify(&mut self) -> Result<(), ClaimError> {
        let spec = self.spec;
        let Some(wanted) = NotifyTrigger::of(spec) else { return Ok(()) };
        let table = spec.table();
        let rows = self.reader.rows(&wanted.look()).await?;
        let Some(found) = rows.first() else {
            self.warning(format!(
                "no trigger announces rows that are inserted into table {table}, so that only polls find them: run the \
                 migration, or say notify_on_insert(false)"
            ));
            return Ok(());
        };
        let (name, function, owner) = (found.text(0), found.text(3), found.text(4));
        if !found.is(1) {
            let quoted = Column::new(name).map_or_else(|_| name.to_owned(), |name| name.quoted());
            self.warning(format!(
                "trigger {name}, which announces rows that are inserted into table {table}, is disabled, so that only \
                 polls find them: ALTER TABLE {} ENABLE TRIGGER {quoted}, or say notify_on_insert(false)",
                table.quoted()
            ));
        }
        if !found.is(2) {
            self.warning(format!(
                "function {function} runs with the rights of whoever inserts into table {table}, and is not of the \
                 table's owner, so that another user can change what it does: ALTER FUNCTION {function} OWNER TO {owner}"
            ));
        }
        Ok(())
    }
}
