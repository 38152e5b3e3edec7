//! The page of results, made of the JSON file alone.

use std::fs;
use std::path::Path;

use crate::record::{Contest, Costs, Entry, Group, Record};
use crate::report::{self, Row, compact, quantile, table, thousands};
use crate::svg;

/// Folder of the charts, beside the page.
const CHARTS: &str = "performance";

/// Writes the page `performance.md` and its charts into the folder of documents.
///
/// # Errors
///
/// A message, if the run was shortened, or a chart or a file cannot be written.
pub fn publish(record: &Record, folder: &Path) -> Result<(), String> {
    if record.smoke {
        return Err("the figures of a shortened run mean nothing; measure again without --smoke".to_owned());
    }
    let write = |path: &Path, text: &str| {
        fs::write(path, text).map_err(|error| format!("cannot write {}: {error}", path.display()))
    };
    let charts = folder.join(CHARTS);
    fs::create_dir_all(&charts).map_err(|error| format!("cannot create {}: {error}", charts.display()))?;
    for chart in record.groups.iter().flat_map(|group| &group.charts) {
        write(&charts.join(format!("{}.svg", chart.file)), &svg::draw(chart)?)?;
    }
    write(&folder.join("performance.md"), &page(record))
}

/// Returns the page in Markdown.
#[must_use]
pub fn page(record: &Record) -> String {
    let machine = &record.machine;
    let mut text = format!(
        "# Performance\n\n\
        The speed of locks, claims and companions beside the usual alternatives, measured in the same rounds on one \
        machine. `cargo xtask bench --publish` measures and writes this page, `cargo xtask bench GROUP` repeats one \
        group.\n\n\
        Machine: {} processors ({}), {} GiB, {}. {}.\n\n\
        {METHOD}\n",
        machine.processors,
        machine.model,
        machine.memory,
        machine.system,
        machine.programs.join("; ")
    );
    for group in &record.groups {
        text += &section(group);
    }
    text
}

const METHOD: &str = "\
## Method and bias

- A **cycle** is one acquire and one release. Contenders take turns: a round of each, repeated, in rotated order. Each
  figure is the median of the rounds. Brackets contain the middle half of the rounds.
- A ratio is the median of the ratios of each round, so load on the machine affects both sides.
- Clients and servers share the processors of one machine, over loopback, without TLS. A network adds round trips to
  every cycle, so the chart over round-trip time is closer to your system. Replicas, poolers and other server versions
  were not measured.
- The authors of this library chose the work and wrote the statements by hand. Postgres keeps its defaults except for
  larger buffers and rare checkpoints, with every commit flushed. etcd syncs the disks of its three members, which
  share one disk here, and starts an election after 2.5 s (default 1 s), so gaps are longer here. Redis writes nothing to disk.
- The calls of `etcdctl lock` are a lease, a lock, an unlock and a revoke on an open connection. The command also starts
  a process and leaves the revoke to the server.
- Absolute figures belong to this machine. A virtual machine wakes its processors slowly, so a task alone varies up to
  three times between runs.

Choose a peer instead if its promise is enough for you:

- Inside one process, `tokio::sync::Mutex` costs a fraction of every lock here.
- A bare statement on a dedicated connection is quicker for a task alone, because it skips the engine.
- etcd's `v3lock` gets more cycles from one lease for all locks, without renewals.
- Redis without a disk skips the flush, by which a lease row survives a crash of the server.
- `flock(1)` starts quicker than our command, and is enough without labels, timeouts and inspection.

Causes of missed goals:

- One client makes one request per key at a time, so each of its permits, and each of its readers without `share_for`,
  takes a round trip.
- A call for 64 keys waits for the client, the server and the client in turn.
- `leasehold list` reads each used key, and `leasehold run` starts more processes than `flock(1)`.
";

fn section(group: &Group) -> String {
    let mut text = format!("\n## {}\n", title(&group.name));
    if group.seconds > 0.0 {
        text += &format!("\n`cargo xtask bench {}` took {:.0} s here.\n", group.name, group.seconds);
    }
    for chart in &group.charts {
        text += &format!("\n![{}]({CHARTS}/{}.svg)\n", chart.title, chart.file);
    }
    for contest in &group.contests {
        let (head, rows) = contenders(contest);
        text += &format!("\n{}:\n\n{}", contest.title, compact(&head, &rows));
    }
    let promises = promises(group);
    if !promises.is_empty() {
        text += &format!("\n{}", compact(&["Contender", "Promise"], &promises));
    }
    if !group.rows.is_empty() {
        let rows: Vec<_> = group.rows.iter().map(Row::cells).collect();
        text += &format!("\n{}", compact(&report::HEAD, &rows));
    }
    if !group.notes.is_empty() {
        text.push('\n');
        for note in &group.notes {
            text += &format!("- {note}\n");
        }
    }
    text
}

/// Returns the heading of a group.
fn title(name: &str) -> String {
    let mut letters = name.chars();
    let first = letters.next().map(|letter| letter.to_uppercase().to_string()).unwrap_or_default();
    first + letters.as_str()
}

/// Returns each contender of the group with its promise.
fn promises(group: &Group) -> Vec<Vec<String>> {
    let mut rows: Vec<Vec<String>> = Vec::new();
    for entry in group.contests.iter().flat_map(|contest| &contest.entries) {
        let row = vec![entry.series.name.clone(), entry.promise.clone()];
        if !entry.promise.is_empty() && !rows.contains(&row) {
            rows.push(row);
        }
    }
    rows
}

/// Returns head and cells of the table of a contest. A column without any figure is left out.
fn contenders(contest: &Contest) -> (Vec<&'static str>, Vec<Vec<String>>) {
    let columns: [(&'static str, Column); 9] = [
        ("Contender", |_, entry| entry.series.name.clone()),
        ("Cycles/s", |_, entry| rate(entry)),
        ("Ratio", |contest, entry| ratio(contest, entry)),
        ("p50, us", |_, entry| figure(entry.p50)),
        ("p99, us", |_, entry| figure(entry.p99)),
        ("Connections", |_, entry| figure(entry.costs.connections)),
        ("Server, KiB", |_, entry| figure(entry.costs.memory)),
        ("Statements per cycle", |_, entry| figure(entry.costs.statements)),
        ("Round trips per cycle (alone)", |_, entry| trips(&entry.costs)),
    ];
    let is_used = |cell: &Column| contest.entries.iter().any(|entry| !cell(contest, entry).is_empty());
    let used: Vec<_> = columns.into_iter().filter(|(_, cell)| is_used(cell)).collect();
    let head = used.iter().map(|(head, _)| *head).collect();
    let row = |entry: &Entry| used.iter().map(|(_, cell)| cell(contest, entry)).collect::<Vec<String>>();
    (head, contest.entries.iter().map(row).collect())
}

/// The cell of an entry.
type Column = fn(&Contest, &Entry) -> String;

fn rate(entry: &Entry) -> String {
    if entry.series.rounds.is_empty() {
        return "missing here".to_owned();
    }
    format!("{} ({})", thousands(entry.series.median()), entry.series.spread())
}

/// Returns the ratio to the baseline, which is the first entry of each table.
fn ratio(contest: &Contest, entry: &Entry) -> String {
    contest.ratio(entry).map(|ratio| format!("{ratio:.2}")).unwrap_or_default()
}

fn trips(costs: &Costs) -> String {
    match (costs.trips, costs.trips_alone) {
        (None, None) => String::new(),
        (all, alone) => format!("{} ({})", figure(all), figure(alone)),
    }
}

/// Formats a figure with three digits, or nothing.
fn figure(value: Option<f64>) -> String {
    match value {
        None => String::new(),
        Some(value) if value >= 100.0 => format!("{value:.0}"),
        Some(value) if value >= 10.0 => format!("{value:.1}"),
        Some(value) => format!("{value:.2}"),
    }
}

/// Prints the results of a group.
pub fn print(group: &Group) {
    for contest in &group.contests {
        let (head, rows) = contenders(contest);
        println!("\n{}\n{}", contest.title, table(&head, &rows));
    }
    if !group.rows.is_empty() {
        println!();
        report::print(&group.rows);
    }
    for chart in &group.charts {
        println!("\n{} ({} over {}):", chart.title, chart.y.label, chart.x.label);
        for line in &chart.lines {
            println!("    {:44} {}", line.name, values(&line.points));
        }
    }
}

/// Returns the points of a line, or of a long one a few shares.
fn values(points: &[(f64, f64)]) -> String {
    let shown: Vec<_> = if points.len() > 20 {
        let xs: Vec<f64> = points.iter().map(|point| point.0).collect();
        [0.5, 0.9, 0.99]
            .map(|share| format!("{:.0} % within {:.0}", share * 100.0, quantile(&xs, share)))
            .to_vec()
    } else {
        points.iter().map(|(x, y)| format!("{x}: {}", figure(Some(*y)))).collect()
    };
    shown.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::Machine;
    use crate::record::{Axis, Chart, Line};
    use crate::report::Series;

    fn entry(name: &str, rounds: &[f64]) -> Entry {
        let series = Series { name: name.to_owned(), rounds: rounds.to_vec() };
        Entry { series, promise: "fenced".to_owned(), p50: Some(120.4), ..Entry::default() }
    }

    fn record() -> Record {
        let chart = Chart {
            file: "tasks".to_owned(),
            title: "Cycles over tasks".to_owned(),
            x: Axis::logarithmic("tasks"),
            y: Axis::logarithmic("cycles/s"),
            lines: vec![Line { name: "ours".to_owned(), points: vec![(1.0, 5.0), (8.0, 50.0)] }],
        };
        let group = Group {
            rows: vec![Row { work: "a cycle".to_owned(), met: Some(false), ..Row::default() }],
            contests: vec![Contest {
                title: "64 tasks".to_owned(),
                baseline: "ours".to_owned(),
                entries: vec![entry("ours", &[2_000.0]), entry("peer", &[1_000.0]), entry("absent", &[])],
            }],
            charts: vec![chart],
            notes: vec!["npm was missing.".to_owned()],
            seconds: 12.3,
            ..Group::new("peers")
        };
        Record { machine: Machine { processors: 2, ..Machine::default() }, smoke: false, groups: vec![group] }
    }

    #[test]
    fn the_page_has_a_section_with_charts_tables_and_notes_for_each_group() {
        let page = page(&record());
        for text in [
            "Machine: 2 processors",
            "## Peers",
            "![Cycles over tasks](performance/tasks.svg)",
            "64 tasks:",
            "\n|a cycle|",
            "|NO|",
            "|peer|fenced|",
            "`cargo xtask bench peers` took 12 s here.",
            "- npm was missing.",
        ] {
            assert!(page.contains(text), "{text} is missing in {page}");
        }
    }

    #[test]
    fn a_contest_shows_ratios_names_a_missing_peer_and_leaves_empty_columns_out() {
        let record = record();
        let (head, rows) = contenders(&record.groups[0].contests[0]);
        assert_eq!(head, ["Contender", "Cycles/s", "Ratio", "p50, us"]);
        assert_eq!(rows[0], ["ours", "2.00k (2.00k to 2.00k)", "1.00", "120"]);
        assert_eq!((rows[1][2].as_str(), rows[2][1].as_str()), ("0.50", "missing here"));
    }

    #[test]
    fn a_page_keeps_its_text_short_because_all_documents_have_a_limit_together() {
        let words = METHOD.split_whitespace().count();
        assert!(words < 400, "{words} words about the method");
    }

    #[test]
    fn a_shortened_run_is_not_published_and_another_writes_page_and_charts() {
        let folder = tempfile::tempdir().unwrap();
        let short = Record { smoke: true, ..record() };
        assert!(publish(&short, folder.path()).is_err_and(|error| error.contains("--smoke")));
        assert!(!folder.path().join("performance.md").exists());
        publish(&record(), folder.path()).unwrap();
        assert_eq!(fs::read_to_string(folder.path().join("performance.md")).unwrap(), page(&record()));
        assert!(folder.path().join("performance/tasks.svg").is_file());
    }
}
