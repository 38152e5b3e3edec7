//! Shared grants and permits of several processes. The test `another_process` plays the role given in the environment.

// The lint's exception for tests does not cover their helpers.
#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "common/backend.rs"]
mod common;
#[path = "common/process.rs"]
mod process;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, SystemTime};

use common::{LONG, attempt, contended, granted, is_process, key, open, refused, release};
use leasehold_api::{ErrorKind, FencingToken, HoldInfo, ListQuery, LossReason, Mode};
use leasehold_engine::{Attempt, Backend as _, CancellationToken, Renewed, Request};
use leasehold_file::{FileBackend, FileConfig, HeldFile};
use process::{DIR, Orphan, Other, ROLE, is_waiting, say, wait_for_the_end};
use rustix::process::{Pid, Signal};
use test_bounds::{Bound, within};

const TWO: Mode = Mode::Permit { of: 2 };

fn in_mode(mode: Mode) -> Request {
    let mut request = common::request("k");
    request.mode = mode;
    request
}

fn mode_of(role: &str) -> Mode {
    match role {
        "reader" => Mode::Shared,
        "permit" => TWO,
        _ => Mode::Exclusive,
    }
}

/// The code of the other process. A role is a mode and an action.
#[tokio::test]
async fn another_process() {
    let (Ok(role), Ok(dir)) = (std::env::var(ROLE), std::env::var(DIR)) else {
        assert!(std::env::var_os(DIR).is_none(), "a directory needs a role");
        return;
    };
    let (mode, action) = role.split_once(' ').unwrap();
    let (backend, mine) = (open(Path::new(&dir)), in_mode(mode_of(mode)));
    match action {
        "holds" => {
            let granted = granted(&backend, &mine).await;
            say(granted.token.unwrap());
            say(granted.permit.map_or(-1, i64::from));
            wait_for_the_end();
        }
        "waits" => {
            say("waiting");
            let answer = backend.wait(mine, CancellationToken::new()).await.unwrap();
            let Attempt::Granted(granted) = answer else { panic!("{answer:?}") };
            say(granted.token.unwrap());
            wait_for_the_end();
        }
        "passes its files to a child" => {
            let granted = granted(&backend, &mine).await;
            let file = granted.extension.unwrap().downcast::<HeldFile>().unwrap();
            let inherited = file.inheritable().unwrap();
            #[allow(clippy::zombie_processes, reason = "it outlives this process")]
            let child = Command::new("sleep").arg("600").stdout(Stdio::null()).spawn().unwrap();
            drop(inherited);
            say(child.id());
            wait_for_the_end();
        }
        "loops" => {
            say("looping");
            while !std::fs::exists(Path::new(&dir).join("stop")).unwrap() {
                let mine = in_mode(mode_of(mode));
                let answer = backend.wait(mine.clone(), CancellationToken::new()).await.unwrap();
                assert!(matches!(answer, Attempt::Granted(_)), "{answer:?}");
                tokio::time::sleep(Duration::from_millis(5)).await;
                assert!(release(&backend, &mine).await.was_held);
            }
        }
        other => panic!("no such action: {other}"),
    }
}

/// Starts a holder, and returns it with its token and the number of its permit.
fn holder(role: &str, dir: &Path) -> (Other, FencingToken, Option<u32>) {
    let mut other = Other::start(role, dir);
    let token = other.token();
    let permit = other.answer().parse::<i64>().unwrap();
    (other, token, u32::try_from(permit).ok())
}

async fn holders(backend: &FileBackend) -> Vec<HoldInfo> {
    backend.admin().unwrap().inspect(&key("k")).await.unwrap().holders
}

/// Waits until `backend` is granted the key.
async fn waited(backend: &FileBackend, request: &Request) -> leasehold_engine::Granted {
    let wait = backend.wait(request.clone(), CancellationToken::new());
    match within(LONG, "not ended", wait).await.unwrap() {
        Attempt::Granted(granted) => granted,
        other => panic!("not granted: {other:?}"),
    }
}

async fn until(what: &str, is_so: impl Fn() -> bool) {
    let started = Bound::new(LONG);
    while !is_so() {
        started.check(what);
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

#[tokio::test]
async fn a_killed_reader_ends_alone() {
    let dir = tempfile::tempdir().unwrap();
    let backend = open(dir.path());
    let (first, token, _) = holder("reader holds", dir.path());
    let (second, same, permit) = holder("reader holds", dir.path());
    assert_eq!((token, permit), (same, None), "readers of one phase have one token");
    let shown = holders(&backend).await;
    assert!(shown.iter().all(|hold| hold.mode == Mode::Shared && hold.permit.is_none()), "{shown:?}");
    for reader in [&first, &second] {
        let pid = reader.child.id();
        assert_eq!(
            shown.iter().filter(|hold| is_process(hold.owner.as_deref(), pid)).count(),
            1,
            "{shown:?}"
        );
    }
    first.kill();
    contended(&backend, &in_mode(Mode::Exclusive)).await;
    let left = holders(&backend).await;
    assert_eq!(left.len(), 1);
    assert!(is_process(left[0].owner.as_deref(), second.child.id()), "{left:?}");
    second.kill();
    let writer = in_mode(Mode::Exclusive);
    assert!(granted(&backend, &writer).await.token.unwrap() > token);
    contended(&backend, &in_mode(Mode::Shared)).await;
    assert!(release(&backend, &writer).await.was_held);
}

#[tokio::test]
async fn the_permit_of_a_killed_holder_comes_back_with_its_number() {
    let dir = tempfile::tempdir().unwrap();
    let backend = open(dir.path());
    let (first, _, number) = holder("permit holds", dir.path());
    let (second, _, other) = holder("permit holds", dir.path());
    assert_eq!(BTreeSet::from([number, other]), BTreeSet::from([Some(0), Some(1)]));
    for mode in [TWO, Mode::Shared, Mode::Exclusive] {
        contended(&backend, &in_mode(mode)).await;
    }
    let shown = holders(&backend).await;
    assert_eq!(
        shown.iter().map(|hold| (hold.mode, hold.permit)).collect::<Vec<_>>(),
        [(TWO, Some(0)), (TWO, Some(1))]
    );
    first.kill();
    let mine = in_mode(TWO);
    assert_eq!(granted(&backend, &mine).await.permit, number);
    assert_eq!(granted(&backend, &mine).await.permit, number, "the request sent twice takes one");
    contended(&backend, &in_mode(TWO)).await;
    assert!(release(&backend, &mine).await.was_held);
    assert!(!release(&backend, &mine).await.was_held, "it is released once");
    second.kill();
    let all = [in_mode(TWO), in_mode(TWO)];
    for request in &all {
        granted(&backend, request).await;
    }
    contended(&backend, &in_mode(TWO)).await;
}

#[tokio::test]
async fn another_number_of_permits_is_refused_at_once_and_in_a_wait() {
    let dir = tempfile::tempdir().unwrap();
    let backend = open(dir.path());
    let (first, ..) = holder("permit holds", dir.path());
    let eight = in_mode(Mode::Permit { of: 8 });
    assert_eq!(refused(&backend, &eight).await.kind(), ErrorKind::ModeMismatch);
    let answer = within(LONG, "not ended", backend.wait(eight.clone(), CancellationToken::new())).await;
    let Ok(Attempt::Refused(error)) = answer else { panic!("{answer:?}") };
    assert_eq!((error.kind(), error.key()), (ErrorKind::ModeMismatch, Some(&key("k"))));
    assert!(error.to_string().contains('2') && error.to_string().contains('8'), "{error}");
    first.kill();
    assert_eq!(granted(&backend, &eight).await.permit, Some(0));
}

#[tokio::test]
async fn a_waiting_permit_is_whichever_is_released_first() {
    let dir = tempfile::tempdir().unwrap();
    let backend = open(dir.path());
    for leaves in 0..2 {
        let all = [in_mode(TWO), in_mode(TWO)];
        for request in &all {
            granted(&backend, request).await;
        }
        let wanted = in_mode(TWO);
        let released = async {
            until("nobody waits", || is_waiting(dir.path())).await;
            assert!(release(&backend, &all[leaves]).await.waiters);
        };
        let (granted, ()) = tokio::join!(waited(&backend, &wanted), released);
        assert_eq!(granted.permit, u32::try_from(leaves).ok());
        for request in [&wanted, &all[1 - leaves]] {
            assert!(release(&backend, request).await.was_held);
        }
    }
}

#[tokio::test]
async fn a_crowd_of_readers_of_other_processes_starves_no_writer() {
    let dir = tempfile::tempdir().unwrap();
    let backend = open(dir.path());
    let mut crowd: Vec<_> = (0..6).map(|_| Other::start("reader loops", dir.path())).collect();
    crowd.iter_mut().for_each(|reader| assert_eq!(reader.answer(), "looping"));
    let mut last = None;
    for _ in 0..20 {
        let writer = in_mode(Mode::Exclusive);
        let token = waited(&backend, &writer).await.token;
        assert!(token > last, "{token:?} after {last:?}");
        last = token;
        contended(&backend, &in_mode(Mode::Shared)).await;
        assert_eq!(holders(&backend).await.len(), 1, "the writer alone");
        assert!(release(&backend, &writer).await.was_held);
    }
    std::fs::write(dir.path().join("stop"), "").unwrap();
    crowd.into_iter().for_each(Other::end);
}

#[tokio::test]
async fn a_stopped_writer_at_the_head_keeps_no_reader_out() {
    let dir = tempfile::tempdir().unwrap();
    let backend = open(dir.path());
    let first = in_mode(Mode::Shared);
    granted(&backend, &first).await;
    let mut writer = Other::start("writer waits", dir.path());
    assert_eq!(writer.answer(), "waiting");
    until("the writer does not wait", || is_waiting(dir.path())).await;
    writer.stop();
    let second = in_mode(Mode::Shared);
    let started = Bound::new(LONG);
    let token = loop {
        match attempt(&backend, &second).await.unwrap() {
            Attempt::Granted(granted) => break granted.token.unwrap(),
            Attempt::Contended(_) => started.check("the stopped writer keeps readers out"),
            other => panic!("{other:?}"),
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    };
    writer.signal(Signal::CONT);
    for reader in [&first, &second] {
        assert!(release(&backend, reader).await.was_held);
    }
    assert!(writer.token() > token, "it goes on waiting");
}

#[tokio::test]
async fn a_stopped_process_at_the_head_keeps_no_permit_from_the_next() {
    let dir = tempfile::tempdir().unwrap();
    let backend = open(dir.path());
    let all = [in_mode(TWO), in_mode(TWO)];
    for request in &all {
        granted(&backend, request).await;
    }
    let mut stopped = Other::start("permit waits", dir.path());
    assert_eq!(stopped.answer(), "waiting");
    until("the process does not wait", || is_waiting(dir.path())).await;
    stopped.stop();
    release(&backend, &all[0]).await;
    let next = in_mode(TWO);
    assert_eq!(waited(&backend, &next).await.permit, Some(0));
    stopped.signal(Signal::CONT);
    release(&backend, &next).await;
    stopped.token();
}

#[tokio::test]
async fn what_a_child_inherited_stays_held_after_the_death_of_its_parent() {
    for (role, mode) in [("reader", Mode::Shared), ("permit", TWO)] {
        let dir = tempfile::tempdir().unwrap();
        let backend = open(dir.path());
        let mut parent = Other::start(&format!("{role} passes its files to a child"), dir.path());
        let child = Orphan(Pid::from_raw(parent.answer().parse().unwrap()).unwrap());
        parent.kill();
        for _ in 0..20 {
            contended(&backend, &in_mode(Mode::Exclusive)).await;
        }
        let shown = holders(&backend).await;
        assert_eq!(shown.iter().map(|hold| hold.mode).collect::<Vec<_>>(), [mode], "it is shown");
        #[cfg(target_os = "linux")]
        assert!(
            is_process(
                shown[0].owner.as_deref().map(|owner| owner.split(',').next().unwrap()),
                u32::try_from(child.0.as_raw_nonzero().get()).unwrap()
            ),
            "{shown:?}"
        );
        let beside = in_mode(mode);
        let number = granted(&backend, &beside).await.permit;
        assert_eq!(number, (mode == TWO).then_some(1), "the child has the first one");
        release(&backend, &beside).await;
        drop(child);
        waited(&backend, &in_mode(Mode::Exclusive)).await;
    }
}

#[tokio::test]
async fn a_request_and_a_label_are_for_one_of_many_readers() {
    let dir = tempfile::tempdir().unwrap();
    let (a, b) = (open(dir.path()), open(dir.path()));
    let readers = [in_mode(Mode::Shared), in_mode(Mode::Shared), in_mode(Mode::Shared)];
    for reader in &readers {
        granted(&a, reader).await;
    }
    let admin = b.admin().unwrap();
    assert!(admin.ask(&key("k"), readers[1].holder).await.unwrap());
    assert!(!admin.ask(&key("k"), in_mode(Mode::Shared).holder).await.unwrap(), "not a holder");
    assert_eq!(a.relabel(readers[2].hold(), "third".into()).await.unwrap(), Renewed::Extended);
    let shown = holders(&b).await;
    let expected = [(false, None), (true, None), (false, Some("third"))];
    for (reader, (asked, label)) in readers.iter().zip(expected) {
        let hold = shown.iter().find(|hold| hold.holder == Some(reader.holder)).unwrap();
        assert_eq!((hold.asked, hold.label.as_deref()), (asked, label), "{hold:?}");
    }
    let listed = admin.list(&ListQuery::new()).await.unwrap();
    assert_eq!(listed.iter().map(|info| info.holders.len()).collect::<Vec<_>>(), [3], "{listed:?}");
    let error = admin.force_release(&key("k"), readers[2].holder).await.unwrap_err();
    assert!(error.to_string().contains(&format!("end pid {}", std::process::id())), "{error}");
}

/// Returns the file of a part of the only key.
fn part(dir: &Path, number: u32, extension: &str) -> PathBuf {
    let end = format!("-{number}.{extension}");
    let mut files = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    files.find(|path| path.to_str().unwrap().ends_with(&end)).unwrap()
}

#[tokio::test]
async fn a_removed_part_ends_its_holder_alone() {
    let dir = tempfile::tempdir().unwrap();
    let backend = open(dir.path());
    let readers = [in_mode(Mode::Shared), in_mode(Mode::Shared)];
    for reader in &readers {
        granted(&backend, reader).await;
    }
    std::fs::remove_file(part(dir.path(), 1, "lock")).unwrap();
    let confirmed = backend.renew(readers.iter().map(Request::hold).collect()).await;
    let confirmed: Vec<_> = confirmed.into_iter().map(Result::unwrap).collect();
    assert_eq!(confirmed, [Renewed::Extended, Renewed::Gone(LossReason::Gone)]);
    assert!(!release(&backend, &readers[1]).await.was_held);
    contended(&backend, &in_mode(Mode::Exclusive)).await;
    assert!(release(&backend, &readers[0]).await.was_held);
    granted(&backend, &in_mode(Mode::Exclusive)).await;
}

#[tokio::test]
async fn parts_are_removed_with_their_key_and_not_while_one_is_held() {
    let dir = tempfile::tempdir().unwrap();
    let backend = open(dir.path());
    let readers = [in_mode(Mode::Shared), in_mode(Mode::Shared), in_mode(Mode::Shared)];
    let mut before = None;
    for reader in &readers {
        before = granted(&backend, reader).await.token;
    }
    let collect = || FileConfig::new(dir.path()).collect_garbage(Duration::ZERO).unwrap();
    release(&backend, &readers[0]).await;
    let kept = collect();
    assert_eq!((kept.removed, kept.kept), (0, 1), "one key, which is held");
    for reader in &readers[1..] {
        assert!(release(&backend, reader).await.was_held);
    }
    for entry in std::fs::read_dir(dir.path()).unwrap() {
        let path = entry.unwrap().path();
        if !path.file_name().unwrap().to_str().unwrap().contains('-') {
            std::fs::File::open(path).unwrap().set_modified(SystemTime::now() - 2 * LONG).unwrap();
        }
    }
    let used = FileConfig::new(dir.path()).collect_garbage(LONG).unwrap();
    assert_eq!((used.removed, used.kept), (0, 1), "its readers ended just now");
    assert_eq!(collect().removed, 1);
    let mut left: Vec<_> =
        std::fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    left.sort();
    assert_eq!(left, ["leasehold-floor", "leasehold-format"]);
    assert!(granted(&backend, &in_mode(Mode::Shared)).await.token > before);
}

#[cfg(target_os = "linux")]
#[tokio::test]
async fn a_writer_waits_in_the_kernel_for_one_reader_after_the_other() {
    use std::os::unix::fs::MetadataExt as _;
    let dir = tempfile::tempdir().unwrap();
    let backend = open(dir.path());
    let readers = [in_mode(Mode::Shared), in_mode(Mode::Shared)];
    for reader in &readers {
        granted(&backend, reader).await;
    }
    let writer = in_mode(Mode::Exclusive);
    let blocked = |number| {
        let inode = std::fs::metadata(part(dir.path(), number, "seen")).unwrap().ino();
        let locks = std::fs::read_to_string("/proc/locks").unwrap();
        let is_at = |line: &&str| line.contains("-> FLOCK") && line.contains(&format!(":{inode} "));
        locks.lines().filter(is_at).count()
    };
    let leaving = async {
        for number in 0..2 {
            until("the writer does not wait", || blocked(number) == 1).await;
            assert_eq!(blocked(1 - number), 0);
            assert!(release(&backend, &readers[usize::try_from(number).unwrap()]).await.waiters);
        }
    };
    tokio::join!(waited(&backend, &writer), leaving);
}
