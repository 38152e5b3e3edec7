//! The threads of engines: one for all drivers, and one per runtime that ends with unreleased holds.

use std::sync::OnceLock;

use tokio::runtime::{Builder, Handle, RuntimeFlavor};

/// Returns the runtime for the driver of an engine on `runtime`, or `None` for `runtime` itself.
///
/// If `runtime` has several workers, drivers run on a separate thread, one for all engines of the process.
/// Among the callers' tasks, a driver could stand still: tokio keeps a task that a worker woke in a slot that
/// other workers cannot steal from. A body that blocks its thread right after a grant would then stop the
/// driver, and the lease would end although other workers are idle. The thread only keeps time and decides.
/// Calls of the store run on `runtime`, on any idle worker.
///
/// If `runtime` has one thread, its driver runs there. A body that blocks this thread stops the store's
/// connections too, and under paused time driver and callers must see the same time. `None` also if no thread
/// can be started.
pub(crate) fn driver_runtime(runtime: &Handle) -> Option<&'static Handle> {
    match runtime.runtime_flavor() {
        RuntimeFlavor::CurrentThread => None,
        _ => thread(),
    }
}

/// Returns the thread of all drivers, which lasts until the process ends.
fn thread() -> Option<&'static Handle> {
    static THREAD: OnceLock<Option<Handle>> = OnceLock::new();
    THREAD.get_or_init(|| start(Builder::new_current_thread().enable_time(), std::future::pending())).as_ref()
}

/// Runs `work` on a separate thread and runtime with I/O, where a blocking store delays no other engine.
/// Without a thread `work` is dropped.
pub(crate) fn run_on_own_thread(work: impl Future<Output = ()> + Send + 'static) {
    start(Builder::new_current_thread().enable_all(), work);
}

/// Starts a thread that runs `work` to its end. `None` if no thread can be started.
fn start(runtime: &mut Builder, work: impl Future<Output = ()> + Send + 'static) -> Option<Handle> {
    let runtime = runtime.build().ok()?;
    let handle = runtime.handle().clone();
    let run = move || runtime.block_on(work);
    std::thread::Builder::new().name("leasehold".to_owned()).spawn(run).ok()?;
    Some(handle)
}
