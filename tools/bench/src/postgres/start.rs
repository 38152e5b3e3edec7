//! Measures the command from its start to the end of its child on a lease row, beside `psql` with one statement.

use bench::record::Group;
use bench::report::times;

use crate::command::{self, Tool, alternate};

const STARTS: usize = 61;

pub(crate) fn measure(url: &str, group: &mut Group) {
    println!("starts of the command, beside psql");
    if !command::is_installed("psql") {
        group.note("The row beside `psql -c` is missing, because `psql` is not installed here.");
        return;
    }
    let lease = format!("postgres+ttl{}", url.strip_prefix("postgres").unwrap());
    let psql = Tool::new("psql -c", "psql", &["--no-psqlrc", "--quiet", "--dbname", url, "-c", "SELECT 1"]);
    let ours = ["--quiet", "--url", lease.as_str(), "run", "started", "--", "true"];
    let tools = [psql, Tool::new("leasehold", command::build(), &ours)];
    let [floor, series] = alternate(&tools, bench::or_smoke(STARTS, 3), |tool| tool.time(&[]));
    group.rows.push(times("`leasehold run`, lease row, from start to end", &series, &floor, 2.0));
}
