//! Several processes on one directory. This test binary runs itself as the other process. Its test `another_process`
//! plays the role given in the environment.

// The lint's exception for tests does not cover their helpers.
#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "common/backend.rs"]
mod common;
#[path = "common/process.rs"]
mod process;

use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use common::{LONG, attempt, contended, granted, is_process, key, open, release, request, token};
use leasehold_api::ListQuery;
use leasehold_engine::{Attempt, Backend as _, CancellationToken};
use leasehold_file::HeldFile;
use process::{DIR, Orphan, Other, ROLE, is_waiting, say, wait_for_the_end};
use rustix::process::{Pid, Signal};
use test_bounds::{Bound, within};

/// The code of the other process.
#[tokio::test]
async fn another_process() {
    let (Ok(role), Ok(dir)) = (std::env::var(ROLE), std::env::var(DIR)) else {
        assert!(std::env::var_os(DIR).is_none(), "a directory needs a role");
        return;
    };
    let backend = open(Path::new(&dir));
    match role.as_str() {
        "hold" | "hold with cooldown" => {
            let mut mine = request("k");
            mine.cooldown = (role != "hold").then_some(Duration::from_secs(3600));
            say(token(&backend, &mine).await);
            wait_for_the_end();
        }
        "wait" => {
            say("waiting");
            let answer = backend.wait(request("k"), CancellationToken::new()).await.unwrap();
            let Attempt::Granted(granted) = answer else { panic!("{answer:?}") };
            say(granted.token.unwrap());
            wait_for_the_end();
        }
        "hand on to a child" => {
            let granted = granted(&backend, &request("k")).await;
            let file = granted.extension.unwrap().downcast::<HeldFile>().unwrap();
            let inherited = file.inheritable().unwrap();
            let mut child = Command::new("sleep").arg("600").stdout(Stdio::null()).spawn().unwrap();
            drop(inherited);
            say(child.id());
            wait_for_the_end();
            child.kill().unwrap();
            child.wait().unwrap();
        }
        "hold all it can" => {
            let limit = rustix::process::Rlimit { current: Some(64), maximum: Some(64) };
            rustix::process::setrlimit(rustix::process::Resource::Nofile, limit).unwrap();
            let mut holds = Vec::new();
            let error = loop {
                let mine = request(&format!("k{}", holds.len()));
                match attempt(&backend, &mine).await {
                    Ok(Attempt::Granted(_)) => holds.push(mine),
                    Ok(Attempt::Refused(error)) => break error,
                    other => panic!("{other:?}"),
                }
            };
            assert!(holds.len() > 10, "{}", holds.len());
            assert_eq!(error.kind(), leasehold_api::ErrorKind::Capacity, "{error}");
            for hold in &holds {
                assert!(release(&backend, hold).await.was_held);
            }
            granted(&backend, &request("after")).await;
        }
        "look" => {
            let admin = backend.admin().unwrap();
            say("looking");
            let query = ListQuery::new().include_ended();
            while !std::fs::exists(Path::new(&dir).join("stop")).unwrap() {
                admin.inspect(&key("k")).await.unwrap();
                admin.list(&query).await.unwrap();
            }
        }
        "count" => {
            let file = Path::new(&dir).join("counter");
            for _ in 0..50 {
                let mine = request("k");
                let answer = backend.wait(mine.clone(), CancellationToken::new()).await.unwrap();
                let Attempt::Granted(granted) = answer else { panic!("{answer:?}") };
                let text = std::fs::read_to_string(&file).unwrap();
                let token = granted.token.unwrap().as_u64();
                std::fs::write(&file, format!("{text}{token}\n")).unwrap();
                assert!(release(&backend, &mine).await.was_held);
            }
        }
        other => panic!("no such role: {other}"),
    }
}

#[tokio::test]
async fn a_killed_holder_frees_at_once_and_its_token_is_not_used_again() {
    let dir = tempfile::tempdir().unwrap();
    let backend = open(dir.path());
    let mut holder = Other::start("hold", dir.path());
    let theirs = holder.token();
    contended(&backend, &request("k")).await;
    let info = backend.admin().unwrap().inspect(&key("k")).await.unwrap();
    let hold = info.holder().unwrap();
    assert!(is_process(hold.owner.as_deref(), holder.child.id()), "{hold:?}");
    assert_eq!(hold.token, Some(theirs));
    holder.kill();
    // The first attempt succeeds, because the kernel releases a process's locks before its parent can reap it.
    assert!(token(&backend, &request("k")).await > theirs);
    let info = backend.admin().unwrap().inspect(&key("k")).await.unwrap();
    assert_ne!(info.holder().unwrap().token, Some(theirs));
}

#[tokio::test]
async fn a_cooldown_survives_the_kill_of_its_holder() {
    let dir = tempfile::tempdir().unwrap();
    let backend = open(dir.path());
    let mut holder = Other::start("hold with cooldown", dir.path());
    holder.token();
    holder.kill();
    assert!(contended(&backend, &request("k")).await.cooling_for.is_some());
}

#[tokio::test]
async fn a_killed_waiter_holds_up_nobody() {
    let dir = tempfile::tempdir().unwrap();
    let backend = open(dir.path());
    let mine = request("k");
    granted(&backend, &mine).await;
    let mut waiter = Other::start("wait", dir.path());
    assert_eq!(waiter.answer(), "waiting");
    let started = Bound::new(LONG);
    while !is_waiting(dir.path()) {
        started.check("the other process does not wait");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    waiter.kill();
    assert!(!release(&backend, &mine).await.waiters);
    granted(&backend, &request("k")).await;
}

#[tokio::test]
async fn a_stopped_waiter_shuts_nobody_out() {
    let dir = tempfile::tempdir().unwrap();
    let (backend, next) = (open(dir.path()), open(dir.path()));
    let mine = request("k");
    granted(&backend, &mine).await;
    let mut waiter = Other::start("wait", dir.path());
    assert_eq!(waiter.answer(), "waiting");
    while !is_waiting(dir.path()) {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    waiter.stop();
    release(&backend, &mine).await;
    let wanted = request("k");
    let answer =
        within(LONG, "not ended", next.wait(wanted.clone(), CancellationToken::new())).await.unwrap();
    let Attempt::Granted(granted) = answer else { panic!("{answer:?}") };
    waiter.signal(Signal::CONT);
    assert!(release(&next, &wanted).await.was_held);
    assert!(waiter.token() > granted.token.unwrap(), "it goes on waiting");
}

#[cfg(target_os = "linux")]
#[tokio::test]
async fn waiters_wait_in_the_kernel_and_one_of_them_for_the_holder() {
    let dir = tempfile::tempdir().unwrap();
    let backend = open(dir.path());
    let mine = request("k");
    granted(&backend, &mine).await;
    let mut waiters: Vec<_> = (0..4).map(|_| Other::start("wait", dir.path())).collect();
    waiters.iter_mut().for_each(|waiter| assert_eq!(waiter.answer(), "waiting"));
    let started = Instant::now();
    let blocked_at = |extension: &str| {
        let path = common::file(dir.path(), "lock").with_extension(extension);
        std::fs::metadata(path).map_or(0, |meta| blocked(meta.ino()))
    };
    // Three wait for their turn, the fourth for the holder.
    while (blocked_at("next"), blocked_at("seen")) != (3, 1) {
        assert!(started.elapsed() < LONG, "{:?}", (blocked_at("next"), blocked_at("seen")));
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert_eq!(blocked_at("lock"), 0, "whoever gave up there would be granted all the same");
    release(&backend, &mine).await;
    // Each waiter is granted when the previous one ends.
    let mut last = None;
    while !waiters.is_empty() {
        let info = backend.admin().unwrap().inspect(&key("k")).await.unwrap();
        let is_holder = |waiter: &Other| {
            is_process(info.holder().and_then(|hold| hold.owner.as_deref()), waiter.child.id())
        };
        if let Some(index) = waiters.iter().position(is_holder) {
            let mut holder = waiters.remove(index);
            let token = Some(holder.token());
            assert!(token > last, "{token:?} after {last:?}");
            last = token;
            holder.kill();
        }
        assert!(started.elapsed() < LONG);
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// Returns how many calls of all processes are blocked at a lock of the file with this inode.
#[cfg(target_os = "linux")]
fn blocked(inode: u64) -> usize {
    let locks = std::fs::read_to_string("/proc/locks").unwrap();
    let is_at = |line: &&str| line.contains("-> FLOCK") && line.contains(&format!(":{inode} "));
    locks.lines().filter(is_at).count()
}

#[tokio::test]
async fn a_waiter_of_another_process_is_granted_after_a_release_and_after_a_kill() {
    let dir = tempfile::tempdir().unwrap();
    let backend = open(dir.path());
    let mine = request("k");
    let first = token(&backend, &mine).await;
    let mut waiter = Other::start("wait", dir.path());
    assert_eq!(waiter.answer(), "waiting");
    release(&backend, &mine).await;
    let second = waiter.token();
    assert!(second > first);
    contended(&backend, &request("k")).await;
    let wanted = request("k");
    let waiting =
        tokio::spawn(async move { (backend.wait(wanted, CancellationToken::new()).await, backend) });
    waiter.kill();
    let (answer, _backend) = within(LONG, "not ended", waiting).await.unwrap();
    let Attempt::Granted(granted) = answer.unwrap() else { panic!("not granted") };
    assert!(granted.token > Some(second));
}

#[tokio::test]
async fn the_lock_of_a_killed_parent_lasts_as_long_as_its_child() {
    let dir = tempfile::tempdir().unwrap();
    let backend = open(dir.path());
    let mut parent = Other::start("hand on to a child", dir.path());
    let child = Orphan(Pid::from_raw(parent.answer().parse().unwrap()).unwrap());
    #[cfg(target_os = "linux")]
    let dead = parent.child.id();
    parent.kill();
    for _ in 0..20 {
        contended(&backend, &request("k")).await;
    }
    let info = backend.admin().unwrap().inspect(&key("k")).await.unwrap();
    assert!(info.is_held(), "what keeps others out is shown");
    #[cfg(target_os = "linux")]
    {
        let owner = info.holder().unwrap().owner.clone().unwrap();
        let child = child.0.as_raw_nonzero();
        assert_eq!(owner, format!("pid {child} (sleep), left by pid {dead}"));
        let listed = backend.admin().unwrap().list(&ListQuery::new()).await.unwrap();
        assert_eq!(listed, [info]);
    }
    drop(child);
    let answer =
        within(LONG, "not ended", backend.wait(request("k"), CancellationToken::new())).await.unwrap();
    assert!(matches!(answer, Attempt::Granted(_)));
}

#[tokio::test]
async fn a_process_out_of_files_is_told_so() {
    let dir = tempfile::tempdir().unwrap();
    Other::start("hold all it can", dir.path()).end();
}

#[tokio::test]
async fn looking_never_makes_a_try_fail_nor_a_free_key_look_held() {
    let dir = tempfile::tempdir().unwrap();
    let (backend, mut onlookers) = (open(dir.path()), Vec::new());
    for _ in 0..2 {
        let mut onlooker = Other::start("look", dir.path());
        assert_eq!(onlooker.answer(), "looking");
        onlookers.push(onlooker);
    }
    let admin = backend.admin().unwrap();
    for i in 0..4_000 {
        let mine = request("k");
        assert!(matches!(attempt(&backend, &mine).await, Ok(Attempt::Granted(_))), "try {i}");
        assert!(release(&backend, &mine).await.was_held);
        if i % 10 == 0 {
            assert!(admin.inspect(&key("k")).await.unwrap().is_free(), "look {i}");
        }
    }
    std::fs::write(dir.path().join("stop"), "").unwrap();
    onlookers.into_iter().for_each(Other::end);
}

#[tokio::test]
async fn processes_take_turns_and_see_each_other_s_writes() {
    let dir = tempfile::tempdir().unwrap();
    let counter = dir.path().join("counter");
    open(dir.path());
    std::fs::write(&counter, "").unwrap();
    let others: Vec<_> = (0..3).map(|_| Other::start("count", dir.path())).collect();
    others.into_iter().for_each(Other::end);
    let text = std::fs::read_to_string(&counter).unwrap();
    let tokens: Vec<u64> = text.lines().map(|l| l.parse().unwrap()).collect();
    assert_eq!(tokens.len(), 150, "no write was lost");
    assert!(tokens.is_sorted_by(|a, b| a < b), "{tokens:?}");
}
