//! The exit codes of the tool.

use leasehold::ErrorKind;

/// For `inspect`: the key is free. For `release`: that holder does not hold the key.
pub(crate) const NOT_HELD: u8 = 1;
/// The request is invalid: arguments, key, URL, or a feature that the store lacks.
pub(crate) const USAGE: u8 = 64;
/// The store is down or cannot be used.
pub(crate) const UNAVAILABLE: u8 = 69;
/// The output could not be written.
pub(crate) const OUTPUT_LOST: u8 = 74;
/// Another client held the lock for the whole wait.
pub(crate) const CONFLICT: u8 = 75;
/// The lock was lost while the command ran, for example because its maximum hold had passed.
pub(crate) const LOST: u8 = 76;
/// The command cannot be executed.
pub(crate) const NOT_EXECUTABLE: u8 = 126;
/// The command does not exist.
pub(crate) const NOT_FOUND: u8 = 127;

/// The section of the help and the manual about exit codes.
pub(crate) const HELP: &str = "\
Exit codes:
  0      done; `run --once-per`: also when it was not due
  1      `inspect`: the key is free; `release`: that holder does not hold it
  64     bad arguments, key or URL, or a feature that the store does not have;
         `run`, `lock`: the key is in use with another number of --slots
  69     the store was down or could not be used for all of --wait, or has not confirmed
         that an unanswered attempt is undone
  74     the output is not complete, because it could not be written
  75     `run`, `lock`: not granted within --wait, usually because another client holds the
         lock (another code with --conflict-exit-code); `lock --once-per`: not due
  76     `run`, `lock`: the lock was lost before the end, also by --max-hold;
         `elect`: while its last command ended
  126    `run`, `elect`: the command cannot be executed
  127    `run`, `elect`: the command does not exist
  128+N  `run`, `elect`: signal N ended the command; `run`, `lock`, `elect`: the wait for
         the lock

`run` passes on any other exit code of its command, `elect` that of its last one.";

/// Returns the exit code for an end by signal `number`.
pub(crate) fn of_signal(number: i32) -> u8 {
    u8::try_from(128 + number).unwrap_or(u8::MAX)
}

/// Returns the exit code for an error of this kind.
pub(crate) fn of_error(kind: ErrorKind) -> u8 {
    match kind {
        ErrorKind::InvalidKey
        | ErrorKind::InvalidOption
        | ErrorKind::Unsupported
        | ErrorKind::ModeMismatch => USAGE,
        ErrorKind::Timeout => CONFLICT,
        ErrorKind::Lost => LOST,
        _ => UNAVAILABLE,
    }
}
