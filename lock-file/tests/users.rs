//! A directory that several users share. Tests that act as other users need the superuser.

// The lint's exception for tests does not cover their helpers.
#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "common/backend.rs"]
mod common;

use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, chown};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use common::{attempt, contended, granted, request, token};
use leasehold_api::{ErrorKind, KeyInfo, Lock as _, LockExt as _};
use leasehold_engine::{Attempt, Backend as _, Engine};
use leasehold_file::{FileBackend, FileConfig};
use test_bounds::within;

const DIR: &str = "LEASEHOLD_FILE_TEST_SHARED";
const STEP: &str = "LEASEHOLD_FILE_TEST_STEP";

/// IDs of two users and a group, which exist on no machine.
const USERS: [u32; 2] = [61_001, 61_002];
const GROUP: u32 = 61_000;

fn open(dir: &Path, mode: u32) -> FileBackend {
    FileConfig::new(dir).mode(mode).backend().unwrap()
}

/// Runs the test `another_user` in a process of `user` and `group`, with a umask that excludes all other users.
fn as_user(user: u32, group: u32, step: &str, dir: &Path) -> Output {
    let program = std::env::current_exe().unwrap();
    // Copies the program, because other users might be unable to read the build directory.
    let copy = dir.parent().unwrap().join("program");
    if !copy.exists() {
        // `cp` writes the copy. If this process did, concurrently started children would inherit the writable file,
        // and it could not be executed.
        assert!(Command::new("cp").arg(program).arg(&copy).status().unwrap().success());
        fs::set_permissions(&copy, Permissions::from_mode(0o755)).unwrap();
    }
    Command::new("sh")
        .args(["-c", "umask 077; exec \"$0\" --exact another_user --nocapture --test-threads=1"])
        .arg(copy)
        .env(DIR, dir)
        .env(STEP, step)
        .current_dir("/")
        .stdin(Stdio::null())
        .uid(user)
        .gid(group)
        .output()
        .expect("acting as another user needs the superuser")
}

fn succeeds(user: u32, group: u32, step: &str, dir: &Path) {
    let output = as_user(user, group, step, dir);
    assert!(output.status.success(), "{step} as {user}: {output:?}");
}

fn is_superuser() -> bool {
    rustix::process::geteuid().is_root()
}

/// Creates a directory that other users can enter. Returns it and the path of a store in it.
fn place() -> (tempfile::TempDir, std::path::PathBuf) {
    let root = tempfile::tempdir().unwrap();
    fs::set_permissions(root.path(), Permissions::from_mode(0o755)).unwrap();
    let store = root.path().join("store");
    (root, store)
}

#[tokio::test]
async fn another_user() {
    let (Some(dir), Ok(step)) = (std::env::var_os(DIR), std::env::var(STEP)) else {
        assert!(std::env::var_os(STEP).is_none(), "a step needs a directory");
        return;
    };
    let config = FileConfig::new(&dir);
    match step.as_str() {
        "found it contended" => {
            contended(&config.backend().unwrap(), &request("k")).await;
        }
        // Exits like a process that dies, without a release.
        "take it" => {
            token(&config.backend().unwrap(), &request("k")).await;
        }
        "take it with a cooldown" => {
            let mut mine = request("cooled");
            mine.cooldown = Some(std::time::Duration::from_secs(3600));
            granted(&config.backend().unwrap(), &mine).await;
        }
        "find it cooling" => {
            let answer = contended(&config.backend().unwrap(), &request("cooled")).await;
            assert!(answer.cooling_for.is_some());
        }
        "look" => {
            let backend = config.clone().read_only().backend().unwrap();
            let info = backend.admin().unwrap().inspect(&common::key("k")).await.unwrap();
            assert!(info.is_held());
            assert!(matches!(attempt(&backend, &request("k")).await, Ok(Attempt::Refused(_))));
        }
        "observe without rights" => {
            let holder = config.connect().unwrap();
            let observer = Engine::start(config.read_only().backend().unwrap()).unwrap();
            let guard = holder.key("k").acquire().await.unwrap();
            let admin = observer.admin().unwrap();
            let changed = async |seen: &KeyInfo| {
                within(common::LONG, "no answer", admin.changed(seen, common::LONG)).await
            };
            let may_enter = |bits| fs::set_permissions(&dir, Permissions::from_mode(bits)).unwrap();
            let held = changed(&KeyInfo::free(guard.key().clone())).await.unwrap().unwrap();
            assert_eq!(held.holder().unwrap().holder, Some(guard.holder()));
            may_enter(0o000);
            let error = changed(&held).await.unwrap_err();
            assert_eq!(
                (error.kind(), error.key()),
                (ErrorKind::PermissionDenied, Some(guard.key())),
                "{error}"
            );
            may_enter(0o700);
            guard.release().await.unwrap();
            assert!(changed(&held).await.unwrap().unwrap().is_free());
        }
        "be refused" => {
            let error = config.backend().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::PermissionDenied, "{error}");
            assert!(error.to_string().contains("?mode=0660"), "{error}");
            assert!(error.to_string().contains("user with ID 61001"), "{error}");
            let looking = config.read_only().backend();
            // A user who can enter a directory can find its marker without being able to read it.
            let error = looking.unwrap_err();
            assert!(error.to_string().contains("user with ID 61001"), "{error}");
        }
        other => panic!("no such step: {other}"),
    }
}

#[tokio::test]
async fn users_of_one_group_exclude_each_other_and_others_stay_out() {
    assert!(is_superuser(), "acting as other users needs the superuser: run this test as one");
    let (_root, store) = place();
    let backend = open(&store, 0o660);
    chown(&store, None, Some(GROUP)).unwrap();
    for entry in fs::read_dir(&store).unwrap() {
        chown(entry.unwrap().path(), None, Some(GROUP)).unwrap();
    }
    // Each user locks and writes files of the other user and of the superuser.
    for user in [USERS[0], USERS[1], USERS[0]] {
        succeeds(user, GROUP, "take it", &store);
    }
    let mine = request("k");
    granted(&backend, &mine).await;
    succeeds(USERS[1], GROUP, "found it contended", &store);
    succeeds(USERS[1], GROUP, "look", &store);
    assert!(!as_user(USERS[1], USERS[1], "found it contended", &store).status.success(), "not of the group");
}

#[tokio::test]
async fn everybody_excludes_everybody_in_a_sticky_directory_and_tokens_and_cooldowns_are_shared() {
    assert!(is_superuser(), "acting as other users needs the superuser: run this test as one");
    let (_root, store) = place();
    let backend = open(&store, 0o666);
    assert_eq!(fs::metadata(&store).unwrap().mode() & 0o7777, 0o1777);
    succeeds(USERS[0], USERS[0], "take it", &store);
    let mine = request("k");
    let first = token(&backend, &mine).await;
    succeeds(USERS[1], USERS[1], "found it contended", &store);
    common::release(&backend, &mine).await;
    // The key's record and ceiling belong to the first user, and no other user can replace them.
    succeeds(USERS[1], USERS[1], "take it", &store);
    assert!(token(&backend, &mine).await > first);
    succeeds(USERS[1], USERS[1], "take it with a cooldown", &store);
    succeeds(USERS[0], USERS[0], "find it cooling", &store);
    for entry in fs::read_dir(&store).unwrap() {
        let entry = entry.unwrap();
        assert_eq!(entry.metadata().unwrap().mode() & 0o777, 0o666, "{entry:?}");
    }
}

#[test]
fn a_second_user_of_a_private_directory_is_told_how_to_share_one() {
    assert!(is_superuser(), "acting as other users needs the superuser: run this test as one");
    let (_root, store) = place();
    drop(FileConfig::new(&store).backend().unwrap());
    for path in [store.join("leasehold-format"), store.clone()] {
        chown(path, Some(USERS[0]), None).unwrap();
    }
    succeeds(USERS[1], USERS[1], "be refused", &store);
    // The same if all users can write to the directory.
    fs::set_permissions(&store, Permissions::from_mode(0o1777)).unwrap();
    succeeds(USERS[1], USERS[1], "be refused", &store);
}

#[test]
fn an_observer_without_rights_gets_a_typed_error_and_sees_the_change_once_it_has_them() {
    assert!(is_superuser(), "acting as other users needs the superuser: run this test as one");
    let (_root, store) = place();
    fs::create_dir(&store).unwrap();
    chown(&store, Some(USERS[0]), Some(USERS[0])).unwrap();
    fs::set_permissions(&store, Permissions::from_mode(0o700)).unwrap();
    succeeds(USERS[0], USERS[0], "observe without rights", &store);
}

/// Covers, for example, a run with sudo, or a daily job that removes the files of unused keys.
#[tokio::test]
async fn what_the_superuser_makes_in_a_user_s_directory_is_the_user_s() {
    assert!(is_superuser(), "acting as other users needs the superuser: run this test as one");
    let (_root, store) = place();
    fs::create_dir(&store).unwrap();
    chown(&store, Some(USERS[0]), Some(USERS[0])).unwrap();
    fs::set_permissions(&store, Permissions::from_mode(0o700)).unwrap();
    // Existing files keep their owner, because they could be links to other files.
    let old = store.join("old");
    fs::write(&old, "").unwrap();
    let backend = FileConfig::new(&store).backend().unwrap();
    for key in ["k", "new"] {
        let mine = request(key);
        token(&backend, &mine).await;
        common::release(&backend, &mine).await;
    }
    succeeds(USERS[0], USERS[0], "take it", &store);
    let collected = FileConfig::new(&store).collect_garbage(std::time::Duration::ZERO).unwrap();
    assert_eq!(collected.removed, 2);
    assert!(store.join("leasehold-floor").exists());
    succeeds(USERS[0], USERS[0], "take it", &store);
    for entry in fs::read_dir(&store).unwrap() {
        let entry = entry.unwrap();
        let owner = if entry.path() == old { 0 } else { USERS[0] };
        assert_eq!(entry.metadata().unwrap().uid(), owner, "{entry:?}");
    }
}

#[tokio::test]
async fn without_the_superuser_all_files_have_the_mode_of_the_directory_whatever_the_umask_is() {
    let (_root, store) = place();
    let first = open(&store, 0o660);
    assert_eq!(fs::metadata(&store).unwrap().mode() & 0o7777, 0o2770);
    // The second client uses the mode of the directory.
    let second = FileConfig::new(&store).backend().unwrap();
    let mut last = None;
    for backend in [&second, &first, &second] {
        let mine = request("k");
        let token = Some(token(backend, &mine).await);
        assert!(token > last);
        last = token;
        contended(&first, &request("k")).await;
        common::release(backend, &mine).await;
    }
    let names: Vec<_> = fs::read_dir(&store).unwrap().map(|e| e.unwrap().path()).collect();
    assert_eq!(names.len(), 5, "{names:?}");
    for path in names {
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o660, "{path:?}");
    }
}

#[test]
fn a_mode_that_is_not_that_of_the_directory_or_of_no_use_is_refused() {
    let (_root, store) = place();
    open(&store, 0o660);
    open(&store, 0o660);
    let error = FileConfig::new(&store).mode(0o666).backend().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidOption);
    assert!(error.to_string().contains("0660, not 0666") && error.to_string().contains("chmod"), "{error}");
    for bits in [0, 0o777, 0o620] {
        let error = FileConfig::new(&store).mode(bits).backend().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidOption, "{error}");
    }
}

#[test]
fn looking_makes_nothing() {
    let (root, store) = place();
    let backend = FileConfig::new(&store).read_only().backend().unwrap();
    let look = async {
        let admin = backend.admin().unwrap();
        assert!(admin.inspect(&common::key("k")).await.unwrap().is_free());
        assert_eq!(admin.list(&leasehold_api::ListQuery::new()).await.unwrap(), []);
        assert_eq!(common::refused(&backend, &request("k")).await.kind(), ErrorKind::Unsupported);
    };
    tokio::runtime::Runtime::new().unwrap().block_on(look);
    assert_eq!(fs::read_dir(root.path()).unwrap().count(), 0);
}
