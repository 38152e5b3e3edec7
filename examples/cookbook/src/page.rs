//! Reads SQL statements from the pages of the cookbook.

/// Returns the SQL block that `page` has under `-- name`, without that line.
///
/// # Panics
///
/// If the block does not exist. A constant fails at compile time.
#[must_use]
pub const fn sql(page: &'static str, name: &str) -> &'static str {
    let mut at = 0;
    while at < page.len() {
        if let Some(start) = after(page, at, "```sql\n-- ")
            && let Some(start) = after(page, start, name)
            && let Some(start) = after(page, start, "\n")
        {
            let mut end = start;
            while end < page.len() {
                if after(page, end, "\n```").is_some() {
                    return page.split_at(end).0.split_at(start).1;
                }
                end += 1;
            }
        }
        at += 1;
    }
    panic!("the page has no statement of this name")
}

/// Returns the position after `text`, if `page` contains `text` at `at`.
const fn after(page: &str, at: usize, text: &str) -> Option<usize> {
    let (page, text) = (page.as_bytes(), text.as_bytes());
    let mut i = 0;
    while i < text.len() {
        if at + i >= page.len() || page[at + i] != text[i] {
            return None;
        }
        i += 1;
    }
    Some(at + i)
}
