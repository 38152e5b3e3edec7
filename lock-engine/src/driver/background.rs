//! The threads of engines: the one on which drivers run, and one for what outlives a runtime.

use std::sync::OnceLock;

use tokio::runtime::{Builder, Handle, RuntimeFlavor};

/// Where the driver of an engine on `runtime` runs.
///
/// On a runtime with several workers: on a thread of its own, one for all engines of the process. A task that
/// was woken by a worker stays with that worker until it yields (tokio keeps it in a slot that others cannot
/// steal from), so that a driver among the callers' tasks would stand still as long as the body that a caller
/// runs right after its grant blocks the thread, and the lease would end although other workers are idle. The
/// thread only keeps time and decides; calls of the store run on `runtime`, where any idle worker takes them.
///
/// On a runtime of one thread: there. Whoever blocks that thread stops the store's connections as well, and
/// with paused time the driver has to see the same time as its callers. `None` too where no thread can be
/// had: then drivers run among the callers.
pub(crate) fn driver_runtime(runtime: &Handle) -> Option<&'static Handle> {
    match runtime.runtime_flavor() {
        RuntimeFlavor::CurrentThread => None,
        _ => thread(),
    }
}

/// The thread of all drivers, which lasts as long as the process.
fn thread() -> Option<&'static Handle> {
    static THREAD: OnceLock<Option<Handle>> = OnceLock::new();
    THREAD.get_or_init(|| start(Builder::new_current_thread().enable_time(), std::future::pending())).as_ref()
}

/// Carries out `work` on a thread and a runtime of its own, with I/O. What blocks there delays no other
/// engine. Without a thread `work` is dropped.
pub(crate) fn run_on_own_thread(work: impl Future<Output = ()> + Send + 'static) {
    start(Builder::new_current_thread().enable_all(), work);
}

/// Starts a thread that ends with `work`, and sleeps while that has nothing to do. `None` where no thread can
/// be had.
fn start(runtime: &mut Builder, work: impl Future<Output = ()> + Send + 'static) -> Option<Handle> {
    let runtime = runtime.build().ok()?;
    let handle = runtime.handle().clone();
    let run = move || runtime.block_on(work);
    std::thread::Builder::new().name("leasehold".to_owned()).spawn(run).ok()?;
    Some(handle)
}
