//! The measured machine, and the versions of the programs.

use std::fs;
use std::process::Command;

use serde::{Deserialize, Serialize};

/// A machine as the page describes it. Nothing in it identifies a person or a place.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Machine {
    /// Number of processors.
    pub processors: usize,
    /// Model of the processors.
    pub model: String,
    /// Memory, GiB.
    pub memory: u64,
    /// Name of the operating system, with the kernel's version.
    pub system: String,
    /// The first line with which each measured program reports its version.
    pub programs: Vec<String>,
}

/// The programs, and the arguments that make them print their version.
const PROGRAMS: [(&str, &[&str]); 5] = [
    ("rustc", &["--version"]),
    ("postgres", &["--version"]),
    ("redis-server", &["--version"]),
    ("flock", &["--version"]),
    ("node", &["--version"]),
];

impl Machine {
    /// Returns this machine. A value that the system does not report is empty or zero.
    #[must_use]
    pub fn this() -> Self {
        let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
        let (cpu, memory) = (read("/proc/cpuinfo"), read("/proc/meminfo"));
        let kib: u64 = value_of(&memory, "MemTotal", ':').trim_end_matches(" kB").parse().unwrap_or(0);
        let name = value_of(&read("/etc/os-release"), "PRETTY_NAME", '=');
        Self {
            processors: std::thread::available_parallelism().map_or(1, usize::from),
            model: value_of(&cpu, "model name", ':'),
            memory: kib.div_ceil(1024 * 1024),
            system: format!(
                "{}, Linux {}",
                name.trim_matches('"'),
                read("/proc/sys/kernel/osrelease").trim()
            ),
            programs: PROGRAMS
                .iter()
                .filter_map(|(program, arguments)| version(program, arguments))
                .collect(),
        }
    }
}

/// Returns the value in the first line `name SEPARATOR value`.
fn value_of(text: &str, name: &str, separator: char) -> String {
    let values = text.lines().filter_map(|line| line.split_once(separator));
    let mut values = values.filter(|(left, _)| left.trim() == name);
    values.next().map(|(_, value)| value.trim().to_owned()).unwrap_or_default()
}

fn version(program: &str, arguments: &[&str]) -> Option<String> {
    // Debian keeps the server's programs outside of PATH.
    let found = match program {
        "postgres" => test_setup::programs::postgres().ok()?.join(program),
        _ => program.into(),
    };
    let output = Command::new(found).args(arguments).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    text.lines().next().map(|line| line.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_is_read_from_the_first_line_with_its_name() {
        let text = "processor\t: 0\nmodel name\t: Fast 3000 @ 2:1\nmodel name\t: other";
        assert_eq!(value_of(text, "model name", ':'), "Fast 3000 @ 2:1");
        assert_eq!(value_of(text, "missing", ':'), "");
    }
}
