//! Directories that are missing, wrong, full, of another user, or removed.

// The lint's exception for tests does not cover their helpers.
#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "common/backend.rs"]
mod common;

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::sync::Barrier;
use std::thread;

use common::{file, granted, open, refused, release, request, token};
use leasehold_api::{Error, ErrorKind, LossReason};
use leasehold_engine::{Backend as _, Renewed};
use leasehold_file::FileConfig;

fn refused_dir(dir: &Path) -> Error {
    FileConfig::new(dir).backend().unwrap_err()
}

#[test]
fn a_missing_directory_is_made_for_its_user_alone() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("a/b/c");
    open(&dir);
    for made in [&dir, &root.path().join("a")] {
        assert_eq!(fs::metadata(made).unwrap().permissions().mode() & 0o777, 0o700, "{made:?}");
    }
    assert_eq!(fs::read_to_string(dir.join("leasehold-format")).unwrap(), "leasehold file store, format 1\n");
    assert_eq!(fs::read_dir(&dir).unwrap().count(), 1, "no temporary file is left");
    open(&dir);
}

#[test]
fn what_is_not_a_directory_is_refused_by_name() {
    let root = tempfile::tempdir().unwrap();
    let plain = root.path().join("plain");
    fs::write(&plain, "x").unwrap();
    for wrong in [plain.clone(), plain.join("below"), "".into(), "/proc/no-such/store".into()] {
        let error = refused_dir(&wrong);
        assert_eq!(error.kind(), ErrorKind::InvalidOption, "{wrong:?}: {error}");
        assert!(error.to_string().contains(wrong.to_str().unwrap()), "{error}");
    }
    assert_eq!(fs::read(&plain).unwrap(), b"x");
}

#[test]
fn a_directory_that_cannot_be_written_is_refused_when_it_is_opened() {
    // Not even a superuser, who ignores permission bits, can write here.
    #[cfg(target_os = "linux")]
    {
        let error = refused_dir(Path::new("/sys/kernel"));
        assert_eq!(error.kind(), ErrorKind::PermissionDenied, "{error}");
        assert!(error.to_string().contains("/sys/kernel"), "{error}");
    }
    let root = tempfile::tempdir().unwrap();
    open(root.path());
    fs::set_permissions(root.path(), fs::Permissions::from_mode(0o500)).unwrap();
    let is_superuser = fs::write(root.path().join("probe"), "").is_ok();
    match FileConfig::new(root.path()).backend() {
        Ok(_) => assert!(is_superuser, "opened without write access"),
        Err(error) => assert_eq!(error.kind(), ErrorKind::PermissionDenied, "{error}"),
    }
    fs::set_permissions(root.path(), fs::Permissions::from_mode(0o700)).unwrap();
}

#[test]
fn another_format_is_refused_and_left_alone() {
    let root = tempfile::tempdir().unwrap();
    let marker = root.path().join("leasehold-format");
    for (text, kind, advice) in [
        ("leasehold file store, format 2\n", ErrorKind::SchemaMissing, "same version"),
        ("leasehold file store, format 2", ErrorKind::Corrupt, "another directory"),
        ("leasehold file st", ErrorKind::Corrupt, "remove that file"),
        ("", ErrorKind::Corrupt, "remove that file"),
        ("\u{feff}something else", ErrorKind::Corrupt, "another directory"),
    ] {
        fs::write(&marker, text).unwrap();
        let error = refused_dir(root.path());
        assert_eq!(error.kind(), kind, "{text:?}");
        assert!(error.to_string().contains(advice), "{error}");
        assert!(error.store().unwrap().starts_with("file:///"), "{error}");
        assert_eq!(fs::read_to_string(&marker).unwrap(), text);
    }
}

#[test]
fn all_may_open_a_new_directory_at_once() {
    for _ in 0..20 {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("store");
        let barrier = Barrier::new(8);
        thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    barrier.wait();
                    open(&dir);
                });
            }
        });
        assert_eq!(fs::read_dir(&dir).unwrap().count(), 1);
    }
}

#[tokio::test]
async fn a_directory_that_was_taken_away_loses_its_holds_and_serves_new_ones() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("store");
    let (old, new) = (open(&dir), open(&dir));
    let (before, after) = (request("k"), request("k"));
    let earlier = token(&old, &before).await;
    fs::remove_dir_all(&dir).unwrap();
    assert!(token(&new, &after).await > earlier, "tokens grow all the same");
    let renewed = old.renew(vec![before.hold()]).await.pop().unwrap().unwrap();
    assert_eq!(renewed, Renewed::Gone(LossReason::Gone));
    assert!(!release(&old, &before).await.was_held, "and it does not claim to have been held");
    assert_eq!(new.renew(vec![after.hold()]).await.pop().unwrap().unwrap(), Renewed::Extended);
    assert!(dir.join("leasehold-format").exists());
}

#[tokio::test]
async fn a_directory_that_became_another_version_s_is_refused_when_it_is_made_anew() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("store");
    let backend = open(&dir);
    fs::remove_dir_all(&dir).unwrap();
    fs::write(&dir, "a file now").unwrap();
    let error = refused(&backend, &request("k")).await;
    assert_eq!(error.kind(), ErrorKind::InvalidOption, "{error}");
}

#[tokio::test]
async fn lock_files_are_empty_and_stay() {
    use std::os::unix::fs::MetadataExt as _;
    let root = tempfile::tempdir().unwrap();
    let backend = open(root.path());
    let mut inodes = Vec::new();
    for _ in 0..3 {
        let request = request("k");
        granted(&backend, &request).await;
        assert!(release(&backend, &request).await.was_held);
        let meta = fs::metadata(file(root.path(), "lock")).unwrap();
        assert_eq!(meta.len(), 0);
        assert_eq!(meta.permissions().mode() & 0o777, 0o600);
        inodes.push(meta.ino());
    }
    inodes.dedup();
    assert_eq!(inodes.len(), 1);
}

/// On a full disk nothing is granted, and the lock works again when there is room.
#[cfg(target_os = "linux")]
#[tokio::test]
async fn a_record_that_cannot_be_written_grants_nothing_and_breaks_nothing() {
    let root = tempfile::tempdir().unwrap();
    let backend = open(root.path());
    let first = request("k");
    let earlier = token(&backend, &first).await;
    release(&backend, &first).await;
    let record = file(root.path(), "json");
    let before = fs::read(&record).unwrap();
    // A directory in place of the temporary file makes the write fail, as on a full disk.
    let mut temporary = record.clone().into_os_string();
    temporary.push(".tmp");
    fs::create_dir(&temporary).unwrap();
    let error = refused(&backend, &request("k")).await;
    assert!(error.to_string().contains("cannot write"), "{error}");
    assert_eq!(fs::read(&record).unwrap(), before);
    // The failed attempt has released the lock.
    fs::remove_dir(&temporary).unwrap();
    assert!(token(&backend, &request("k")).await > earlier);
}

/// The child process, in which every `flock` succeeds, as on some network file systems.
#[test]
fn where_every_lock_succeeds() {
    let Some(dir) = std::env::var_os("LEASEHOLD_TEST_PRETENDING") else { return };
    let error = refused_dir(Path::new(&dir));
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
    assert!(error.to_string().contains("grants a lock that is held"), "{error}");
    println!("refused");
}

// Needs `cc`, the linker that also built this program.
#[cfg(target_os = "linux")]
#[test]
fn a_file_system_that_grants_what_is_held_is_refused() {
    use std::process::Command;

    let root = tempfile::tempdir().unwrap();
    let (source, library) = (root.path().join("flock.c"), root.path().join("flock.so"));
    fs::write(&source, "int flock(int fd, int operation) { (void)fd; (void)operation; return 0; }").unwrap();
    let made =
        Command::new("cc").args(["-shared", "-fPIC", "-o"]).args([&library, &source]).status().unwrap();
    assert!(made.success());
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "where_every_lock_succeeds", "--nocapture"])
        .env("LEASEHOLD_TEST_PRETENDING", root.path().join("store"))
        .env("LD_PRELOAD", &library)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&child.stdout);
    assert!(
        child.status.success() && text.contains("refused"),
        "{text}{}",
        String::from_utf8_lossy(&child.stderr)
    );
    // The refused attempt leaves nothing that blocks the directory on a correct file system.
    open(&root.path().join("store"));
}
