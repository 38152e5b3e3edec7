//! Where a single task and its server run.
//!
//! Of two processes that wake each other in turn, a scheduler keeps both on one processor, or each on one of its own,
//! whichever it began with, for seconds; on a virtual machine the second takes twice as long. That would be measured
//! instead of the contenders. On one processor nothing overlaps, so that all work counts.

pub(crate) use platform::OneProcessor;

#[cfg(target_os = "linux")]
mod platform {
    use rustix::thread::{CpuSet, Pid, sched_getaffinity, sched_setaffinity};

    /// While it lives, the threads of this process and the server's new sessions are on one processor.
    pub(crate) struct OneProcessor {
        server: Option<u32>,
        before: CpuSet,
    }

    impl OneProcessor {
        pub(crate) fn new(server: Option<u32>) -> Self {
            let before = sched_getaffinity(None).unwrap();
            let last = (0..CpuSet::MAX_CPU).rev().find(|cpu| before.is_set(*cpu)).unwrap();
            let mut one = CpuSet::new();
            one.set(last);
            place(server, &one);
            Self { server, before }
        }
    }

    impl Drop for OneProcessor {
        fn drop(&mut self) {
            place(self.server, &self.before);
        }
    }

    fn place(server: Option<u32>, set: &CpuSet) {
        let threads = std::fs::read_dir("/proc/self/task").unwrap();
        let threads = threads.map(|thread| thread.unwrap().file_name().to_str().unwrap().parse().unwrap());
        for thread in threads.chain(server.map(|pid| i32::try_from(pid).unwrap())) {
            sched_setaffinity(Pid::from_raw(thread), set).unwrap();
        }
    }
}

#[cfg(not(target_os = "linux"))]
mod platform {
    /// Only Linux says where to run.
    pub(crate) struct OneProcessor;

    impl OneProcessor {
        pub(crate) fn new(_: Option<u32>) -> Self {
            Self
        }
    }
}
