//! Several processes: they exclude each other, and the locks of a process that dies become free.

#[cfg(unix)]
pub(crate) use on_unix::*;

#[cfg(unix)]
mod on_unix {
    use std::time::Duration;

    use crate::child::{Process, bump_file};
    use crate::context::{Context, joined};
    use crate::inconclusive::Answered as _;

    fn crash_release(cx: &Context) -> Duration {
        cx.capabilities().crash_release.expect("declared")
    }

    pub(crate) async fn processes_exclude_each_other(cx: &Context) {
        let lock = cx.client().await;
        let mut child = Process::start(cx).await;
        let key = cx.key();
        child.take(cx, &key).await;
        cx.held(&lock, &key).await;
        child.expect(cx, &format!("try {}", key.as_str()), "held").await;
        child.expect(cx, "release", "released").await;
        let guard = cx.take(&lock, &key).await;
        child.expect(cx, &format!("try {}", key.as_str()), "held").await;
        cx.give(guard).await;
        child.take(cx, &key).await;
        child.expect(cx, "drop", "dropped").await;
        cx.undone(&lock, &key).await;
    }

    pub(crate) async fn a_waiter_in_another_process_is_served(cx: &Context) {
        let lock = cx.client().await;
        let mut child = Process::start(cx).await;
        let key = cx.key();
        let guard = cx.take(&lock, &key).await;
        child.tell(&format!("acquire {}", key.as_str()));
        cx.settle().await;
        cx.give(guard).await;
        let answer = child.answer(cx, cx.handover()).await;
        assert!(answer.starts_with("granted"), "{answer}");
        let waiter = cx.queue(&lock, &key).await;
        child.expect(cx, "release", "released").await;
        cx.give(waiter.granted(cx, cx.handover()).await).await;
    }

    pub(crate) async fn writes_are_seen_by_the_next_process(cx: &Context) {
        let lock = cx.client().await;
        let key = cx.key();
        // The holder id makes the path unique, because other executables and stores can run this case at the same
        // time.
        let unique = cx.take(&lock, &key).await.holder();
        let path = std::env::temp_dir().join(format!("leasehold-conformance-{unique}"));
        let path = path.to_str().expect("a printable temporary directory").to_owned();
        std::fs::write(&path, "0").expect("the temporary directory can be written");
        let rounds = 40;
        let mut children = [Process::start(cx).await, Process::start(cx).await];
        for child in &mut children {
            child.tell(&format!("bump {rounds} {} {path}", key.as_str()));
        }
        for _ in 0..rounds {
            let guard = lock.acquire(&key, &cx.patient()).await.answered("each is granted");
            bump_file(&path);
            cx.give(guard).await;
        }
        for child in &mut children {
            assert_eq!(child.answer(cx, cx.patience()).await, "bumped");
        }
        let total = std::fs::read_to_string(&path).expect("the counter can be read");
        std::fs::remove_file(&path).expect("the counter can be removed");
        assert_eq!(total, (rounds * 3).to_string(), "increments were lost between processes");
    }

    pub(crate) async fn a_killed_holder_frees(cx: &Context) {
        let lock = cx.client().await;
        let mut child = Process::start(cx).await;
        let key = cx.key();
        child.take(cx, &key).await;
        cx.held(&lock, &key).await;
        child.kill();
        cx.give(cx.free_within(&lock, &key, crash_release(cx)).await).await;
    }

    pub(crate) async fn a_killed_holder_serves_a_waiter(cx: &Context) {
        let lock = cx.client().await;
        let mut child = Process::start(cx).await;
        let key = cx.key();
        child.take(cx, &key).await;
        let waiter = cx.queue(&lock, &key).await;
        assert!(!waiter.is_done());
        child.kill();
        cx.give(waiter.granted(cx, crash_release(cx) + cx.handover()).await).await;
    }

    pub(crate) async fn a_killed_waiter_is_in_nobodys_way(cx: &Context) {
        let (a, b) = cx.two().await;
        let mut child = Process::start(cx).await;
        let key = cx.key();
        let guard = cx.take(&a, &key).await;
        child.tell(&format!("acquire {}", key.as_str()));
        cx.settle().await;
        let behind = cx.queue(&b, &key).await;
        child.kill();
        assert!(!behind.is_done(), "admitted early");
        cx.give(guard).await;
        cx.give(behind.granted(cx, crash_release(cx) + cx.handover()).await).await;
    }

    pub(crate) async fn an_exit_without_a_drop_frees(cx: &Context) {
        let lock = cx.client().await;
        let mut child = Process::start(cx).await;
        let key = cx.key();
        child.take(cx, &key).await;
        child.tell("exit");
        child.reap();
        cx.give(cx.free_within(&lock, &key, crash_release(cx)).await).await;
    }

    pub(crate) async fn a_stopped_holder_keeps_what_has_no_lease(cx: &Context) {
        let lock = cx.client().await;
        let mut child = Process::start(cx).await;
        let key = cx.key();
        child.take(cx, &key).await;
        child.stop();
        cx.sleep(Duration::from_secs(1)).await;
        cx.held(&lock, &key).await;
        child.go_on();
        // The stopped process sent no confirmations, but the store keeps the hold.
        let validity = child.ask(cx, "validity").await;
        assert!(["valid", "in doubt"].contains(&&*validity), "{validity}");
        child.expect(cx, "release", "released").await;
        cx.give(cx.take(&lock, &key).await).await;
    }

    pub(crate) async fn a_stopped_holder_of_a_lease_is_overtaken_and_told(cx: &Context) {
        let (lock, other) = cx.two().await;
        let mut child = Process::start(cx).await;
        let key = cx.key();
        let lease = format!("lease {} {}", cx.ttl().as_millis(), key.as_str());
        let answer = child.ask(cx, &lease).await;
        assert!(answer.starts_with("granted"), "{answer}");
        child.stop();
        let guard = cx.free_within(&lock, &key, cx.ttl()).await;
        child.go_on();
        // The first query already reads lost, although no task of the child might have run yet.
        child.expect(cx, "validity", "lost").await;
        child.expect(cx, "renew", "lost").await;
        child.expect(cx, "release", "lost").await;
        cx.settle().await;
        cx.held(&other, &key).await;
        cx.give(guard).await;
    }

    pub(crate) async fn tokens_grow_across_processes(cx: &Context) {
        let lock = cx.client().await;
        let key = cx.key();
        let mut last = 0;
        for round in 0..3 {
            let mut child = Process::start(cx).await;
            let bound = crash_release(cx);
            let guard = cx.free_within(&lock, &key, bound).await;
            let token = guard.token().expect("every grant has a token").as_u64();
            assert!(token > last, "the token {token} comes after {last}, which another process had before");
            cx.give(guard).await;
            last = child.take(cx, &key).await;
            assert!(
                last > token,
                "a new process got the token {last} after {token}, which another process had before"
            );
            // Every other child is killed while it holds the lock.
            if round % 2 == 0 {
                child.kill();
            } else {
                child.expect(cx, "release", "released").await;
            }
        }
    }

    pub(crate) async fn a_new_process_inherits_nothing(cx: &Context) {
        let lock = cx.client().await;
        let key = cx.key();
        let mut first = Process::start(cx).await;
        first.take(cx, &key).await;
        let holder = first.ask(cx, "holder").await;
        first.kill();
        let mut second = Process::start(cx).await;
        second.expect(cx, "validity", "no guard").await;
        let waiting = tokio::spawn({
            let (lock, key, options) = (lock.clone(), key.clone(), cx.patient());
            async move { lock.acquire(&key, &options).await }
        });
        let guard = cx.within("the takeover", crash_release(cx) + cx.handover(), joined(waiting)).await;
        let guard = guard.expect("the dead holder's key becomes free");
        assert_ne!(guard.holder().to_string(), holder);
        second.expect(cx, &format!("try {}", key.as_str()), "held").await;
        cx.give(guard).await;
        second.take(cx, &key).await;
        assert_ne!(second.ask(cx, "holder").await, holder);
    }
}

#[cfg(not(unix))]
pub(crate) use elsewhere::*;

/// Empty cases for systems without Unix signals, on which the suite never runs these cases.
#[cfg(not(unix))]
mod elsewhere {
    use crate::context::Context;

    macro_rules! not_here {
        ($($case:ident)*) => { $( pub(crate) async fn $case(_: &Context) {} )* };
    }

    not_here! {
        processes_exclude_each_other
        a_waiter_in_another_process_is_served
        writes_are_seen_by_the_next_process
        a_killed_holder_frees
        a_killed_holder_serves_a_waiter
        a_killed_waiter_is_in_nobodys_way
        an_exit_without_a_drop_frees
        a_stopped_holder_keeps_what_has_no_lease
        a_stopped_holder_of_a_lease_is_overtaken_and_told
        tokens_grow_across_processes
        a_new_process_inherits_nothing
    }
}
