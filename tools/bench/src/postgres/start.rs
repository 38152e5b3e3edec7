//! Measures the command from its start to the end of its child on a lease row, beside `psql` with one statement.

use bench::report::{Row, Series, millis, times};

use crate::command::{self, Tool};

const STARTS: usize = 61;

pub(crate) async fn measure(url: &str, rows: &mut Vec<Row>) {
    println!("starts of the command, beside psql");
    let lease = format!("postgres+ttl{}", url.strip_prefix("postgres").unwrap());
    let psql = Tool::new("psql -c", "psql", &["--no-psqlrc", "--quiet", "--dbname", url, "-c", "SELECT 1"]);
    let ours = Tool::new(
        "leasehold",
        command::build(),
        &["--quiet", "--url", lease.as_str(), "run", "started", "--"],
    );
    let [mut floor, mut series] = [psql.name, ours.name].map(Series::new);
    for round in 0..bench::or_smoke(STARTS, 3) {
        if round % 2 == 0 {
            floor.rounds.push(millis(psql.time(&[])));
        }
        series.rounds.push(millis(ours.time(&["true"])));
        if round % 2 == 1 {
            floor.rounds.push(millis(psql.time(&[])));
        }
    }
    rows.push(times("`leasehold run`, lease row, from start to end", &series, &floor, 2.0));
}
