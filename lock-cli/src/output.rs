//! The output: results on stdout, notes and errors on stderr, colours only on a terminal.

use std::io::{self, IsTerminal as _, Write as _};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

use anstream::AutoStream;
use anstyle::{AnsiColor, Style};
use comfy_table::Table;
use jiff::{SignedDuration, Timestamp};
use leasehold::{Error, ErrorKind};
use serde_json::Value;

const ERROR: Style = AnsiColor::Red.on_default().bold();
const NOTE: Style = Style::new().dimmed();

/// How many notes to print.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Notes {
    pub(crate) quiet: bool,
    pub(crate) verbose: bool,
}

impl Notes {
    pub(crate) fn say(self, text: &str) {
        if !self.quiet {
            to_stderr(&format!("{NOTE}leasehold: {}{NOTE:#}", printable(text)));
        }
    }

    /// Prints a note with `--verbose` only.
    pub(crate) fn detail(self, text: &str) {
        if self.verbose {
            self.say(text);
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

/// Returns the JSON object printed instead of a result.
pub(crate) fn described(error: &Error) -> Value {
    serde_json::json!({
        "ok": false,
        "error": error.to_string(),
        "kind": error.kind().as_str(),
        "retryable": error.is_retryable(),
    })
}

pub(crate) fn problem(text: &str) {
    to_stderr(&format!("leasehold: {ERROR}error:{ERROR:#} {}", lines(text)));
}

/// Prints a line by one system call, because the pieces of several calls mix with the lines of other processes.
fn to_stderr(line: &str) {
    let mut stderr = io::stderr();
    let mut all = AutoStream::new(Vec::new(), AutoStream::choice(&stderr));
    // Ignores errors, because a closed stderr is no reason to stop.
    let _ = writeln!(all, "{line}").and_then(|()| stderr.write_all(&all.into_inner()));
}

/// Escapes a text of several lines for a terminal.
fn lines(text: &str) -> String {
    text.split('\n').map(printable).collect::<Vec<_>>().join("\n")
}

/// Creates an error of the operating system.
pub(crate) fn system(what: &'static str, source: io::Error) -> Error {
    Error::new(ErrorKind::Unavailable, what).with_source(source)
}

/// Prints a JSON result.
pub(crate) fn json(value: &Value) {
    line(&format!("{value:#}"));
}

/// Prints one line.
pub(crate) fn line(text: &str) {
    bytes(format!("{text}\n").as_bytes());
}

pub(crate) fn bytes(text: &[u8]) {
    let mut stdout = io::stdout();
    let _ = is_written(stdout.write_all(text).and_then(|()| stdout.flush()));
}

/// Returns whether the output was written and is complete so far. Reports the first failure.
pub(crate) fn is_written(outcome: io::Result<()>) -> bool {
    match outcome {
        Ok(()) => {}
        // Does not count as a failure, because the reader stopped early (`| head`).
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => UNREAD.store(true, Ordering::Relaxed),
        Err(error) if !INCOMPLETE.swap(true, Ordering::Relaxed) => {
            problem(&format!("the output is not complete: {error}"));
        }
        Err(_) => {}
    }
    !is_incomplete()
}

/// Clears the terminal before the next output.
pub(crate) fn begin_page() {
    if io::stdout().is_terminal() {
        bytes(b"\x1b[2J\x1b[H");
    }
}

/// Whether any output could not be written to stdout.
static INCOMPLETE: AtomicBool = AtomicBool::new(false);

/// Whether stdout's reader has closed it.
static UNREAD: AtomicBool = AtomicBool::new(false);

/// Returns whether further output would be useless, because the output has failed or its reader is gone.
pub(crate) fn is_over() -> bool {
    UNREAD.load(Ordering::Relaxed) || is_incomplete()
}

pub(crate) fn is_incomplete() -> bool {
    INCOMPLETE.load(Ordering::Relaxed)
}

/// Returns a text table: columns without a frame, as other tools print them.
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

/// Returns a readable duration: `3m 12s`, or milliseconds below a second.
pub(crate) fn duration(duration: Duration) -> String {
    let shown = if duration < Duration::from_secs(1) {
        Duration::from_millis(u64::from(duration.subsec_millis()))
    } else {
        Duration::from_secs(duration.as_secs())
    };
    SignedDuration::try_from(shown).map_or_else(|_| "for ever".to_owned(), |shown| format!("{shown:#}"))
}

/// Returns a remaining duration, rounded up, so a caller that waits for it is not early.
pub(crate) fn left(time: Duration) -> String {
    let up = if time < Duration::from_secs(1) {
        time
    } else {
        time.saturating_add(Duration::from_nanos(999_999_999))
    };
    duration(up)
}

/// Returns a time in UTC, with its zone.
pub(crate) fn moment(time: SystemTime) -> String {
    Timestamp::try_from(time)
        .map_or_else(|_| "-".to_owned(), |time| time.strftime("%Y-%m-%d %H:%M:%SZ").to_string())
}

/// Returns a time as RFC 3339 in UTC, in microseconds. All texts have the same length, so they sort by time.
pub(crate) fn utc(time: SystemTime) -> Option<String> {
    Timestamp::try_from(time).ok().map(|time| format!("{time:.6}"))
}

/// Returns the milliseconds, for JSON.
pub(crate) fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

pub(crate) fn or_dash(text: Option<String>) -> String {
    text.unwrap_or_else(|| "-".to_owned())
}

/// Returns a label for the output, cut to the stores' limit because other programs might have written a longer one.
pub(crate) fn label(text: &str) -> String {
    const LONGEST: usize = 256;
    let kept = printable(&text[..text.floor_char_boundary(LONGEST)]);
    if text.len() > LONGEST { kept + ".." } else { kept }
}

/// Escapes control and direction characters of foreign text, such as keys, labels and owners, because they must not
/// reach the terminal.
pub(crate) fn printable(text: &str) -> String {
    let turns = |c: char| matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    text.chars()
        .flat_map(
            |c| if c.is_control() || turns(c) { c.escape_default().collect::<Vec<_>>() } else { vec![c] },
        )
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_label_of_any_length_is_shown_in_a_line() {
        assert_eq!(label("a\x07"), "a\\u{7}");
        assert_eq!(label(&"\u{e9}".repeat(1_000_000)).len(), 258);
    }

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
    fn what_turns_a_line_around_is_escaped() {
        assert_eq!(
            printable("bidi\u{202e}evil \u{2066}\u{61c}\x1b"),
            "bidi\\u{202e}evil \\u{2066}\\u{61c}\\u{1b}"
        );
        assert_eq!(printable("\u{e9} \u{1f469}\u{200d}\u{1f527}"), "\u{e9} \u{1f469}\u{200d}\u{1f527}");
    }

    #[test]
    fn moments_have_a_zone_and_one_length() {
        for micros in [0, 1, 68_030, 775_000] {
            let time = SystemTime::UNIX_EPOCH + Duration::from_micros(micros);
            assert_eq!(utc(time).unwrap(), format!("1970-01-01T00:00:00.{micros:06}Z"));
            assert_eq!(moment(time), "1970-01-01 00:00:00Z");
        }
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
