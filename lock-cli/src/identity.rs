//! How this process is named in lists of locks.

/// Maximum length of a label in the stores.
const LONGEST: usize = 256;

/// Maximum length of an application name on a Postgres server.
const LONGEST_NAME: usize = 63;

/// Returns the default label of a hold: `USER@HOST PROGRAM pid N`.
pub(crate) fn label(program: &str) -> String {
    compose(&user_at_host(), program, std::process::id())
}

/// Returns the application name of the sessions on a Postgres server: `leasehold USER@HOST`.
pub(crate) fn application_name() -> String {
    let mut name = format!("leasehold {}", user_at_host());
    name.truncate(name.floor_char_boundary(LONGEST_NAME));
    name
}

fn user_at_host() -> String {
    let user = whoami::username().unwrap_or_else(|_| "?".to_owned());
    let host = whoami::hostname().unwrap_or_else(|_| "?".to_owned());
    format!("{user}@{host}")
}

fn compose(us: &str, program: &str, pid: u32) -> String {
    let end = format!(" pid {pid}");
    let start: String = format!("{us} {program}").chars().filter(|c| *c != '\0').collect();
    // Cuts only the start of the label, because the end distinguishes two processes.
    let kept = start.floor_char_boundary(LONGEST - end.len());
    format!("{}{end}", &start[..kept])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_label_fits_whatever_the_program_is_called() {
        assert_eq!(compose("app@web1", "report.sh", 42), "app@web1 report.sh pid 42");
        for program in ["\u{e9}".repeat(300), "x".repeat(300)] {
            let label = compose("app@web1", &program, u32::MAX);
            assert!(label.len() <= LONGEST && label.ends_with(" pid 4294967295"), "{label}");
        }
    }
}
