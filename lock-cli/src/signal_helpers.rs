//! Finds out which processes a signal was sent to.
//!
//! A signal sent only to this process must be passed on to the command. One sent to the whole process group (`killpg`,
//! timeout(1), a terminal), or to every process of a unit (systemd), has already reached the command. Many programs
//! take a second signal for impatience and end without saving their state.
//!
//! The kernel does not report the target. So two helper processes run beside the command, one in the process group of
//! this process and one in a separate group. A signal that ended a helper was sent to the helper as well. A helper is
//! `cat` on a pipe without input, so it ends with this process in any case. It is not a copy of this tool, because
//! programs that find processes by their file (pidof, start-stop-daemon) would also signal the helpers.

use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::process::Stdio;
use std::time::Duration;

use rustix::process::{Pid, Signal};
use tokio::process::{Child, Command};
use tokio::time::{sleep, timeout};

use crate::signals::{self, Signals};

/// How long to wait until a sender has signalled all its targets, because timeout(1) makes two calls and systemd one
/// per process.
pub(crate) const SETTLE: Duration = Duration::from_millis(200);

/// Time limit for the end of a helper, which is immediate unless the helper is stopped.
const END: Duration = Duration::from_secs(5);

/// The targets of a signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reach {
    /// The signal was sent to this process only.
    Alone,
    /// The signal was sent to the process group of this process.
    Group,
    /// The signal was sent to all processes around this one, in any group.
    Everybody,
}

/// The helper processes.
#[derive(Debug)]
pub(crate) struct SignalHelpers {
    in_group: Option<Child>,
    apart: Option<Child>,
}

impl SignalHelpers {
    /// Starts the helpers. Call it between the start of the command's process and its
    /// [`begin`](crate::child::Running::begin). Any signal to a helper has then reached that process as well, and the
    /// command begins with the helpers running.
    pub(crate) fn start() -> Self {
        Self { in_group: helper(false), apart: helper(true) }
    }

    /// Returns the process ids of the helpers.
    pub(crate) fn pids(&self) -> Vec<Pid> {
        let children = [&self.in_group, &self.apart].into_iter().flatten();
        children.filter_map(|child| Pid::from_raw(i32::try_from(child.id()?).ok()?)).collect()
    }

    /// Waits until the sender of `first` has had time to send all its signals. Returns every signal received, each
    /// once, and its targets. Signals other than `first` count as sent by the same sender.
    pub(crate) async fn collect(&mut self, first: Signal, signals: &mut Signals) -> (Vec<Signal>, Reach) {
        sleep(SETTLE).await;
        let (in_group, apart) = tokio::join!(end(self.in_group.take()), end(self.apart.take()));
        let mut all = vec![first];
        all.extend(signals.drain().await.into_iter().filter(|signal| *signal != first));
        *self = Self::start();
        let is_one = |end: HelperEnd| matches!(end, HelperEnd::Signal(number) if all.iter().any(|signal| signal.as_raw() == number));
        let reach = match in_group {
            _ if is_one(apart) => Reach::Everybody,
            _ if is_one(in_group) => Reach::Group,
            // Decides without the helper: a signal typed at a terminal was sent to the group.
            HelperEnd::Unknown if signals::is_typed(first) => Reach::Group,
            _ => Reach::Alone,
        };
        (all, reach)
    }

    /// Ends the helpers.
    pub(crate) async fn end(self) {
        tokio::join!(end(self.in_group), end(self.apart));
    }
}

/// How a helper ended.
#[derive(Clone, Copy, Debug)]
enum HelperEnd {
    /// The helper ended by this signal.
    Signal(i32),
    /// The helper ended because its input ended.
    Input,
    /// The helper was missing, or does not end.
    Unknown,
}

/// Ends a helper, unless a signal has ended it. A signal sent to the helper takes effect before the end of its input.
async fn end(helper: Option<Child>) -> HelperEnd {
    let Some(mut helper) = helper else { return HelperEnd::Unknown };
    drop(helper.stdin.take());
    match timeout(END, helper.wait()).await {
        Ok(Ok(status)) => status.signal().map_or(HelperEnd::Input, HelperEnd::Signal),
        Ok(Err(_)) | Err(_) => HelperEnd::Unknown,
    }
}

/// Starts a helper, with `is_apart` in a separate process group. `None` if that fails. Signals are then treated as sent
/// only to this process.
fn helper(is_apart: bool) -> Option<Child> {
    let mut process = std::process::Command::new(which::which("cat").ok()?);
    process.env_clear().current_dir("/");
    // Sets the group id that the helper has anyway, because that makes the standard library fork instead of spawning in
    // one step (vfork). With vfork, a Ctrl-Z before the helper's program is loaded would stop the helper, and this
    // process would hang without being stopped.
    process.gid(rustix::process::getegid().as_raw());
    process.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
    if is_apart {
        process.process_group(0);
    }
    let helper = Command::from(process).kill_on_drop(true).spawn().ok()?;
    #[cfg(target_os = "linux")]
    leaves_no_core(&helper);
    Some(helper)
}

/// Prevents a core dump of `helper` on SIGQUIT.
#[cfg(target_os = "linux")]
fn leaves_no_core(helper: &Child) {
    use rustix::process::{Resource, Rlimit, prlimit};

    let pid = helper.id().and_then(|id| Pid::from_raw(i32::try_from(id).ok()?));
    // Ignores errors, because an extra core dump has no other consequence.
    let _ = pid.map(|pid| prlimit(Some(pid), Resource::Core, Rlimit { current: Some(0), maximum: Some(0) }));
}
