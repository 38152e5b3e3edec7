//! The command `leasehold man`: the help text, and details beyond the help.

use std::fmt::Write as _;

use clap::{Command, CommandFactory as _};
use leasehold::{Error, ErrorKind};

use crate::args::Args;
use crate::{exit, output};

const ENVIRONMENT: &[(&str, &str)] = &[
    ("LEASEHOLD_URL", "The store, where --url does not name one."),
    (
        "LEASEHOLD_URL_FILE",
        "A file with the URL of the store in its first line. Not together with LEASEHOLD_URL.",
    ),
    (
        "LEASEHOLD_KEY, LEASEHOLD_TOKEN, LEASEHOLD_HOLDER",
        "Set for the command of `run`: the key, the fencing token and the id of the holder. Of --url, LEASEHOLD_URL is set too, unless it has a password.",
    ),
    (
        "LEASEHOLD_KEYS, LEASEHOLD_TOKENS",
        "Set for the command of `run`: its keys, one in a line, and their fencing tokens in the same order, with spaces between them (- for none). Of several keys, LEASEHOLD_KEY, LEASEHOLD_TOKEN and LEASEHOLD_HOLDER are not set.",
    ),
    (
        "LEASEHOLD_PERMIT, LEASEHOLD_PERMITS",
        "Set for the command of `run --slots`: the number of its slot, from 0, which no other run has at that time; of several keys all numbers, with spaces between them.",
    ),
    (
        "LEASEHOLD_HOLDERS",
        "Set for the command of `run`: the ids of the holders of all runs around it, the innermost first, with spaces between them. A run that would wait for one of them says so and exits.",
    ),
    ("STATE_DIRECTORY, RUNTIME_DIRECTORY", "The directories of a systemd unit, for locks without a URL."),
    (
        "PGUSER, PGPASSWORD, PGHOST, PGPORT, PGDATABASE, PGSSLMODE, PGAPPNAME, PGCONNECT_TIMEOUT",
        "What a Postgres URL leaves out.",
    ),
    ("NO_COLOR", "No colours, also on a terminal."),
];

const FILES: &[(&str, &str)] = &[
    ("$XDG_STATE_HOME/leasehold, ~/.local/state/leasehold", "The locks where no URL is given."),
    ("~/.pgpass", "Passwords for Postgres, as psql reads them."),
];

const SEE_ALSO: &str = "flock(1), timeout(1), systemd.timer(5), crontab(5), psql(1)";

/// Prints the manual page of the tool or of one of its subcommands.
pub(crate) fn manual(subcommand: Option<&str>) -> Result<u8, Error> {
    let mut tool = Args::command();
    tool.build();
    let command = match subcommand {
        None => tool,
        Some(name) => tool.find_subcommand(name).cloned().ok_or_else(|| {
            let message = format!("there is no subcommand {name:?}; `leasehold --help` lists them");
            Error::new(ErrorKind::InvalidOption, message)
        })?,
    };
    let page = page(command).map_err(|error| output::system("cannot render the manual", error))?;
    output::bytes(&page);
    Ok(0)
}

fn page(mut command: Command) -> std::io::Result<Vec<u8>> {
    let usage = command.render_usage().to_string();
    let usage: Vec<_> = usage.trim_start_matches("Usage:").lines().map(str::trim).collect();
    let examples = examples(&command);
    let is_whole = command.has_subcommands() && command.get_name() == "leasehold";
    let man = clap_mangen::Man::new(command);
    let mut page = Vec::new();
    man.render_title(&mut page)?;
    man.render_name_section(&mut page)?;
    page.extend(preformatted("SYNOPSIS", &usage.join("\n")).bytes());
    man.render_description_section(&mut page)?;
    man.render_options_section(&mut page)?;
    let mut rest = String::new();
    if is_whole {
        man.render_subcommands_section(&mut page)?;
        let codes = exit::HELP.split_once('\n').map_or("", |(_, codes)| codes);
        rest += &preformatted("EXIT STATUS", codes);
        rest += &listed("ENVIRONMENT", ENVIRONMENT);
        rest += &listed("FILES", FILES);
    } else {
        rest += ".SH \"EXIT STATUS\"\nSee leasehold(1).\n";
    }
    rest += &preformatted("EXAMPLES", &examples);
    let pages = if is_whole { String::new() } else { "leasehold(1), ".to_owned() };
    let _ = writeln!(rest, ".SH \"SEE ALSO\"\n{}", escaped(&format!("{pages}{SEE_ALSO}")));
    page.extend(rest.bytes());
    Ok(page)
}

/// Returns the example of a command, or of each of its subcommands.
fn examples(command: &Command) -> String {
    let of = |command: &Command| {
        let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
        let example =
            help.split("\n\n").next().and_then(|first| first.strip_prefix("Example:\n")).map(str::to_owned);
        example.map(|example| format!("{}\n", example.trim_end()))
    };
    of(command).unwrap_or_else(|| command.get_subcommands().filter_map(of).collect())
}

/// Returns a section with unchanged lines.
fn preformatted(title: &str, text: &str) -> String {
    let lines = text.trim_matches('\n').lines().map(|line| escaped(line.strip_prefix("  ").unwrap_or(line)));
    format!(".SH \"{title}\"\n.nf\n{}\n.fi\n", lines.collect::<Vec<_>>().join("\n"))
}

fn listed(title: &str, entries: &[(&str, &str)]) -> String {
    let entries =
        entries.iter().map(|(name, text)| format!(".TP\n\\fB{}\\fR\n{}\n", escaped(name), escaped(text)));
    format!(".SH \"{title}\"\n{}", entries.collect::<String>())
}

/// Escapes characters with a special meaning in roff.
fn escaped(text: &str) -> String {
    let text = text.replace('\\', "\\e").replace('-', "\\-");
    if text.starts_with(['.', '\'']) { format!("\\&{text}") } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_page_has_a_synopsis_and_an_example() {
        let mut tool = Args::command();
        tool.build();
        let names: Vec<_> = tool.get_subcommands().map(|command| command.get_name().to_owned()).collect();
        assert!(names.len() >= 9, "{names:?}");
        for name in names.iter().filter(|name| *name != "help") {
            let command = tool.find_subcommand(name).unwrap().clone();
            let page = String::from_utf8(page(command).unwrap()).unwrap();
            let example = page.split(".SH \"EXAMPLES\"\n.nf\n").nth(1).unwrap();
            assert!(example.contains("leasehold "), "{name}: {page}");
            assert!(page.contains(".SH \"SYNOPSIS\"\n.nf\nleasehold "), "{name}: {page}");
        }
    }
}
