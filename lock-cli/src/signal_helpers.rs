//! Finds out to whom a signal was sent besides this process.
//!
//! A signal that was sent to this process alone has to be passed on to the command. One that was sent to the whole process
//! group (`killpg`, timeout(1), a terminal), or to every process of a unit (systemd), has reached the command already. Many
//! programs take a second one for impatience and end without saving their state.
//!
//! The kernel does not say which it was. So two helper processes run beside the command, one in the process group of this
//! process and one in a group of its own: a signal that has ended a helper was sent to the helper too. A helper is `cat` at a
//! pipe that nobody writes to, so it ends with this process, however this process ends. It is not a copy of this tool,
//! because programs that find processes by their file (pidof, start-stop-daemon) would signal the helpers as well.

use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::process::Stdio;
use std::time::Duration;

use rustix::process::{Pid, Signal};
use tokio::process::{Child, Command};
use tokio::time::{sleep, timeout};

use crate::signals::{self, Signals};

/// How long a sender of signals gets to send them to all that it means: timeout(1) makes two calls, systemd one for each process.
const SETTLE: Duration = Duration::from_millis(200);

/// How long a helper may take to end, which takes no time unless the helper is stopped.
const END: Duration = Duration::from_secs(5);

/// To whom a signal was sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reach {
    /// To this process.
    Alone,
    /// To the process group of this process.
    Group,
    /// To all processes around this one, whatever their groups are.
    Everybody,
}

/// The helper processes.
#[derive(Debug)]
pub(crate) struct SignalHelpers {
    in_group: Option<Child>,
    apart: Option<Child>,
}

impl SignalHelpers {
    /// Starts the helpers. Call it between the start of the command's process and its [`begin`](crate::child::Running::begin):
    /// whatever reaches a helper has then reached that process too, and the command begins with the helpers in place.
    pub(crate) fn start() -> Self {
        Self { in_group: helper(false), apart: helper(true) }
    }

    /// The process ids of the helpers.
    pub(crate) fn pids(&self) -> Vec<Pid> {
        let children = [&self.in_group, &self.apart].into_iter().flatten();
        children.filter_map(|child| Pid::from_raw(i32::try_from(child.id()?).ok()?)).collect()
    }

    /// Waits until the sender of `first` had time to send all its signals. Returns every signal that has come, each once, and
    /// whom they have reached. Other signals than `first` count as sent by the same sender.
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
            // Without a helper, what is typed at a terminal is still recognised.
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

/// How a helper has ended.
#[derive(Clone, Copy, Debug)]
enum HelperEnd {
    /// By this signal.
    Signal(i32),
    /// By the end of its input.
    Input,
    /// There was no helper, or it does not end.
    Unknown,
}

/// Ends a helper, which a signal may have ended before. A signal that was sent to the helper comes before the end of its input.
async fn end(helper: Option<Child>) -> HelperEnd {
    let Some(mut helper) = helper else { return HelperEnd::Unknown };
    drop(helper.stdin.take());
    match timeout(END, helper.wait()).await {
        Ok(Ok(status)) => status.signal().map_or(HelperEnd::Input, HelperEnd::Signal),
        Ok(Err(_)) | Err(_) => HelperEnd::Unknown,
    }
}

/// Starts a helper. `None` if that fails: signals are then passed on as if each was sent to this process alone.
fn helper(is_apart: bool) -> Option<Child> {
    let mut process = std::process::Command::new(which::which("cat").ok()?);
    process.env_clear().current_dir("/");
    // The group that it has anyway. Naming one has the standard library fork, and not spawn in one step (vfork): a Ctrl-Z before
    // the helper's program is loaded would stop the helper then, and this process would wait for it without being stopped.
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

/// Has `helper` write no core dump when SIGQUIT ends it.
#[cfg(target_os = "linux")]
fn leaves_no_core(helper: &Child) {
    use rustix::process::{Resource, Rlimit, prlimit};

    let pid = helper.id().and_then(|id| Pid::from_raw(i32::try_from(id).ok()?));
    // A core dump too many changes nothing else.
    let _ = pid.map(|pid| prlimit(Some(pid), Resource::Core, Rlimit { current: Some(0), maximum: Some(0) }));
}
