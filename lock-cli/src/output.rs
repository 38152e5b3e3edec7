//! What is printed: results on stdout, notes and errors on stderr, colours on a terminal only.

use std::io::{self, Write as _};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

use anstyle::{AnsiColor, Style};
use comfy_table::Table;
use jiff::{SignedDuration, Timestamp, tz::TimeZone};
use leasehold::{Error, ErrorKind};
use serde_json::Value;

const ERROR: Style = AnsiColor::Red.on_default().bold();
const NOTE: Style = Style::new().dimmed();

/// Where notes go, if anywhere.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Notes {
    pub(crate) quiet: bool,
}

impl Notes {
    pub(crate) fn say(self, text: &str) {
        if !self.quiet {
            // Nobody who reads stderr is no reason to stop.
            let _ = writeln!(anstream::stderr(), "{NOTE}leasehold: {text}{NOTE:#}");
        }
    }
}

/// Prints an error and its causes.
pub(crate) fn error(error: &Error) {
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(source) = cause {
        let reason = source.to_string();
        if !text.contains(&reason) {
            text += &format!("\n  because: {reason}");
        }
        cause = source.source();
    }
    problem(&text);
}

pub(crate) fn problem(text: &str) {
    let _ = writeln!(anstream::stderr(), "leasehold: {ERROR}error:{ERROR:#} {text}");
}

/// An error of the operating system.
pub(crate) fn system(what: &'static str, source: io::Error) -> Error {
    Error::new(ErrorKind::Unavailable, what).with_source(source)
}

/// Prints a result for machines.
pub(crate) fn json(value: &Value) {
    line(&format!("{value:#}"));
}

/// Prints a result for people.
pub(crate) fn line(text: &str) {
    bytes(format!("{text}\n").as_bytes());
}

pub(crate) fn bytes(text: &[u8]) {
    let mut stdout = io::stdout();
    match stdout.write_all(text).and_then(|()| stdout.flush()) {
        // A reader who has seen enough (`| head`) is no failure.
        // Said once.
        Err(error)
            if error.kind() != io::ErrorKind::BrokenPipe && !INCOMPLETE.swap(true, Ordering::Relaxed) =>
        {
            problem(&format!("the output is not complete: {error}"));
        }
        _ => {}
    }
}

/// Whether something could not be written to the standard output.
static INCOMPLETE: AtomicBool = AtomicBool::new(false);

pub(crate) fn is_incomplete() -> bool {
    INCOMPLETE.load(Ordering::Relaxed)
}

/// Columns without a frame, as other tools print them.
pub(crate) fn table<R: IntoIterator<Item = String>>(
    header: &[&str],
    rows: impl IntoIterator<Item = R>,
) -> String {
    let mut table = Table::new();
    table
        .load_style(comfy_table::presets::NOTHING)
        .set_header(header.iter().copied())
        .add_rows(rows.into_iter().map(|row| row.into_iter().collect::<Vec<_>>()));
    for column in table.column_iter_mut() {
        column.set_padding((0, 2));
    }
    table.trim_fmt()
}

/// A duration as people say it: `3m 12s`; below a second in milliseconds.
pub(crate) fn duration(duration: Duration) -> String {
    let shown = if duration < Duration::from_secs(1) {
        Duration::from_millis(u64::from(duration.subsec_millis()))
    } else {
        Duration::from_secs(duration.as_secs())
    };
    SignedDuration::try_from(shown).map_or_else(|_| "for ever".to_owned(), |shown| format!("{shown:#}"))
}

/// A duration that has to pass, rounded up: who waits so long does not come too early.
pub(crate) fn left(time: Duration) -> String {
    let up = if time < Duration::from_secs(1) {
        time
    } else {
        time.saturating_add(Duration::from_nanos(999_999_999))
    };
    duration(up)
}

/// A moment in local time.
pub(crate) fn local(time: SystemTime) -> String {
    Timestamp::try_from(time).map_or_else(
        |_| "-".to_owned(),
        |time| time.to_zoned(TimeZone::system()).strftime("%Y-%m-%d %H:%M:%S").to_string(),
    )
}

/// A moment as RFC 3339 in UTC.
pub(crate) fn utc(time: SystemTime) -> Option<String> {
    Timestamp::try_from(time).ok().map(|time| time.to_string())
}

/// Milliseconds, for machines.
pub(crate) fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

pub(crate) fn or_dash(text: Option<String>) -> String {
    text.unwrap_or_else(|| "-".to_owned())
}

/// Labels and owners are other people's text: control characters must not reach the terminal.
pub(crate) fn printable(text: &str) -> String {
    text.chars()
        .flat_map(|c| if c.is_control() { c.escape_default().collect::<Vec<_>>() } else { vec![c] })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_for_people() {
        for (millis, text) in [
            (0, "0s"),
            (250, "250ms"),
            (999, "999ms"),
            (1999, "1s"),
            (192_000, "3m 12s"),
            (90_061_000, "25h 1m 1s"),
        ] {
            assert_eq!(duration(Duration::from_millis(millis)), text);
        }
        assert_eq!(duration(Duration::MAX), "for ever");
        for (millis, text) in [(0, "0s"), (250, "250ms"), (1000, "1s"), (1001, "2s"), (1999, "2s")] {
            assert_eq!(left(Duration::from_millis(millis)), text);
        }
        assert_eq!(left(Duration::MAX), "for ever");
    }

    #[test]
    fn columns_line_up() {
        let text =
            table(&["KEY", "X"], [["a".to_owned(), "1".to_owned()], ["longer".to_owned(), "2".to_owned()]]);
        let at: Vec<_> = text.lines().map(|line| line.rfind(['X', '1', '2'])).collect();
        assert_eq!(at.len(), 3, "{text}");
        assert!(at.iter().all(|column| *column == at[0]), "{text}");
    }
}
