//! Requests to release. Each is a line with a holder's id at the end of the key's status file, so requests of several
//! processes do not overwrite each other, and a later holder ignores the request.

use std::io;

use leasehold_api::Error;

use crate::error::io_error;
use crate::files::{append, read_end};
use crate::layout::KeyFiles;

/// Sends the holder with this id a request to release the key.
pub(crate) fn ask(files: &KeyFiles, holder: &str) -> Result<(), Error> {
    let path = files.status();
    // Begins with a line break, because a write to a full disk can have left a part of a line.
    let asked = match is_asked(files, holder) {
        Ok(false) => append(&path, format!("\n{holder}\n").as_bytes()),
        answer => answer.map(drop),
    };
    asked.map_err(|e| io_error(e, "write to", &path))
}

/// Returns whether the holder with this id has a request.
pub(crate) fn is_asked(files: &KeyFiles, holder: &str) -> io::Result<bool> {
    match read_end(&files.status()) {
        Ok(bytes) => Ok(bytes.split(|byte| *byte == b'\n').any(|line| line == holder.as_bytes())),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(e) => Err(e),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use leasehold_api::{ErrorKind, LockKey};

    use super::*;
    use crate::files::{FileMode, open_lock};

    #[test]
    fn a_request_is_for_one_holder_and_is_written_once() {
        let dir = tempfile::tempdir().unwrap();
        let files = KeyFiles::new(dir.path(), FileMode::PRIVATE, &LockKey::new("k").unwrap());
        assert!(!is_asked(&files, "1-1").unwrap());
        assert!(ask(&files, "1-1").is_err(), "a key that was never held");
        open_lock(&files.status(), FileMode::PRIVATE).unwrap();
        ask(&files, "1-1").unwrap();
        // A part of a line, as a full disk leaves it.
        append(&files.status(), b"1-").unwrap();
        ask(&files, "1-2").unwrap();
        let length = fs::metadata(files.status()).unwrap().len();
        ask(&files, "1-2").unwrap();
        assert_eq!(fs::metadata(files.status()).unwrap().len(), length);
        for (holder, asked) in [("1-1", true), ("1-2", true), ("1-", true), ("1-3", false), ("1", false)] {
            assert_eq!(is_asked(&files, holder).unwrap(), asked, "{holder}");
        }
    }

    #[test]
    fn the_last_requests_of_a_long_file_count_and_a_file_with_another_name_is_not_written() {
        let dir = tempfile::tempdir().unwrap();
        let files = KeyFiles::new(dir.path(), FileMode::PRIVATE, &LockKey::new("k").unwrap());
        fs::write(files.status(), "1-1\n".repeat(100_000)).unwrap();
        ask(&files, "1-2").unwrap();
        assert!(is_asked(&files, "1-2").unwrap());
        fs::hard_link(files.status(), dir.path().join("mine")).unwrap();
        assert_eq!(ask(&files, "1-3").unwrap_err().kind(), ErrorKind::Corrupt);
        assert!(!is_asked(&files, "1-3").unwrap());
    }
}
