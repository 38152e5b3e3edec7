//! Supervises the command from its start to its end.

use std::future::Future;
use std::io;
use std::os::unix::process::ExitStatusExt as _;
use std::pin::pin;
use std::process::ExitStatus;
use std::time::Duration;

use leasehold::{LockKey, LossReason};
use rustix::process::Signal;
use tokio::signal::unix::{self, SignalKind};
use tokio::time::{Instant, sleep, sleep_until};

use crate::args::OnLoss;
use crate::child::Running;
use crate::output::{self, Notes};
use crate::signal_helpers::{Reach, SignalHelpers};
use crate::signals::{self, Signals};
use crate::tree::{self, ProcessTree};

/// The interval of checks for processes that the command has left behind.
const LOOK: Duration = Duration::from_millis(20);

/// Time limit for killed processes to end, because one in a kernel call ends only after that call.
const KILLED: Duration = Duration::from_secs(10);

/// When a command is ended before its own end.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EndPolicy {
    pub(crate) on_loss: OnLoss,
    /// The time between SIGTERM and SIGKILL after a loss.
    pub(crate) loss_grace: Duration,
    /// The same time after a request to step down, and for processes left by a command that a signal has ended.
    pub(crate) grace: Duration,
    /// The signal that ends the command, and not this tool.
    pub(crate) step_down: Option<Signal>,
    /// The action at a request to release the lock.
    pub(crate) on_ask: OnAsk,
}

/// The action on the command at a request to release its lock.
#[derive(Clone, Copy, Debug)]
pub(crate) enum OnAsk {
    /// Nothing.
    Ignore,
    /// Send it this signal.
    Signal(Signal),
    /// End it as the step-down signal does.
    StepDown,
}

/// The end of a command.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ended {
    pub(crate) status: ExitStatus,
    /// Whether the lock was lost before.
    pub(crate) is_lost: bool,
    /// Whether a signal requested the end of command and tool before.
    pub(crate) is_signalled: bool,
    /// Whether the step-down signal has ended it.
    pub(crate) has_stepped_down: bool,
}

/// Waits for the end of the command. Passes signals on, and ends the command when `lost` resolves.
pub(crate) async fn until_end(
    running: &mut Running,
    lost: impl Future<Output = (LockKey, LossReason)>,
    asked: impl Future<Output = LockKey>,
    signals: &mut Signals,
    policy: EndPolicy,
    notes: Notes,
) -> io::Result<Ended> {
    let (mut lost, mut asked) = (pin!(lost), pin!(asked));
    // Whether the processes must be dead at once after a loss.
    let has_no_time = policy.loss_grace.is_zero();
    let (mut is_signalled, mut has_stepped_down) = (false, false);
    let mut adopted = unix::signal(SignalKind::child())?;
    let (mut is_loss_reported, mut is_ending, mut kill_at) = (false, false, None);
    let mut is_asked = matches!(policy.on_ask, OnAsk::Ignore);
    // The signals that were passed on only to the first process, as bits.
    let mut passed_on = 0_u64;
    let mut helpers = SignalHelpers::start();
    running.begin();
    let mut tree = ProcessTree::new(running.pid(), helpers.pids());
    let status = loop {
        tokio::select! {
            status = running.ended() => break status?,
            (key, reason) = &mut lost, if !is_loss_reported => {
                is_loss_reported = true;
                if policy.on_loss == OnLoss::Warn {
                    notes.say(&format!("lost the lock \"{key}\" ({reason}); the command goes on"));
                } else {
                    // Kills before it writes the note, because a full pipe blocks the writer.
                    let killed = has_no_time.then(|| tree.send(Signal::KILL, Reach::Alone));
                    let action = if has_no_time { "killing" } else { "ending" };
                    notes.say(&format!("lost the lock \"{key}\" ({reason}); {action} the command"));
                    let refused = killed.unwrap_or_else(|| tree.send(Signal::TERM, Reach::Alone));
                    if !refused.is_empty() {
                        let list = refused.iter().map(|pid| pid.as_raw_pid().to_string()).collect::<Vec<_>>().join(", ");
                        output::problem(&format!(
                            "processes of another user take no signal from this one and go on without the lock: {list}"
                        ));
                    }
                    kill_at = Some(Instant::now() + policy.loss_grace);
                }
            }
            key = &mut asked, if !is_asked => {
                is_asked = true;
                match policy.on_ask {
                    OnAsk::Ignore => {}
                    OnAsk::Signal(signal) => {
                        let signal_name = name(signal);
                        notes.say(&format!("asked to release the lock \"{key}\"; sending {signal_name} to the command"));
                        if running.is_running() {
                            // Ignores errors, because the process might have just ended and then needs no signal.
                            let _ = rustix::process::kill_process(running.pid(), signal);
                        }
                    }
                    OnAsk::StepDown => {
                        notes.say(&format!("asked to release the lock \"{key}\"; ending the command"));
                        tree.send(Signal::TERM, Reach::Alone);
                        (has_stepped_down, is_ending) = (true, true);
                        kill_at.get_or_insert_with(|| Instant::now() + policy.grace);
                    }
                }
            }
            signal = signals.next() => {
                let collected = tokio::select! {
                    biased;
                    // Handles a loss first if the command has no time, because the lease can end within this wait.
                    _ = lost.as_mut(), if !is_loss_reported && has_no_time => None,
                    collected = helpers.collect(signal, signals) => Some(collected),
                };
                let Some((all, reach)) = collected else {
                    is_loss_reported = true;
                    is_signalled |= signals::is_an_end(signal);
                    kill_at = Some(Instant::now());
                    continue;
                };
                tree.set_helpers(helpers.pids());
                for signal in all {
                    if policy.step_down == Some(signal) {
                        notes.say("stepping down; ending the command");
                        tree.send(Signal::TERM, Reach::Alone);
                        (has_stepped_down, is_ending) = (true, true);
                        kill_at.get_or_insert_with(|| Instant::now() + policy.grace);
                        continue;
                    }
                    is_signalled |= signals::is_an_end(signal);
                    is_ending |= pass_on(running, &tree, signal, reach);
                    if !signals::is_an_end(signal) {
                        passed_on |= 1 << signal.as_raw();
                    }
                    notes.detail(&format!("{}{}", name(signal), delivery(reach)));
                }
            }
            _ = adopted.recv() => tree.reap_adopted(),
            () = sleep_until(kill_at.unwrap_or_else(Instant::now)), if kill_at.is_some() => {
                if !(is_loss_reported && has_no_time) {
                    notes.say("the command did not end in time; killing it");
                }
                tree.send(Signal::KILL, Reach::Alone);
                break running.ended().await?;
            }
        }
    };
    // A command that exits by itself can leave processes behind. Ends them only if the command was being ended, or if a
    // passed-on signal ended its first process.
    if !is_ending && status.signal().is_some_and(|signal| passed_on & (1 << signal) != 0) {
        tree.send_to_rest(Signal::TERM, Reach::Alone);
        is_ending = true;
    }
    if kill_at.is_some() || is_ending {
        let kill_at = kill_at.unwrap_or_else(|| Instant::now() + policy.grace);
        tokio::select! {
            biased;
            _ = lost.as_mut(), if !is_loss_reported && has_no_time => {
                is_loss_reported = true;
                end_the_rest(&mut tree, &mut helpers, signals, Instant::now(), notes).await;
            }
            () = end_the_rest(&mut tree, &mut helpers, signals, kill_at, notes) => {}
        }
    }
    helpers.end().await;
    Ok(Ended { status, is_lost: is_loss_reported, is_signalled, has_stepped_down })
}

/// Passes `signal` on to its targets that it has not reached. Returns whether the signal requests the end of the
/// command.
fn pass_on(running: &Running, tree: &ProcessTree, signal: Signal, reach: Reach) -> bool {
    let has_command = tree::has_reached(reach, running.pid());
    if signals::is_an_end(signal) {
        // Sends nothing. A signal typed at a terminal is only for the foreground group, as without this tool.
        if has_command && reach == Reach::Group && signals::is_typed(signal) {
            return false;
        }
        tree.send(signal, reach);
        return true;
    }
    if running.is_running() && !has_command {
        // Ignores errors, because the process might have just ended and then needs no signal.
        let _ = rustix::process::kill_process(running.pid(), signal);
    }
    false
}

/// Returns the name of a signal that is passed on.
fn name(signal: Signal) -> &'static str {
    match signal {
        Signal::TERM => "SIGTERM",
        Signal::INT => "SIGINT",
        Signal::QUIT => "SIGQUIT",
        Signal::HUP => "SIGHUP",
        Signal::USR1 => "SIGUSR1",
        _ => "SIGUSR2",
    }
}

/// Returns the end of a note: to which processes a signal was delivered.
fn delivery(reach: Reach) -> &'static str {
    match reach {
        Reach::Alone => " was sent to this tool, which has passed it on",
        Reach::Group => " was sent to the process group; not passed on to its processes",
        Reach::Everybody => " was sent to every process; not passed on",
    }
}

/// Waits until the processes left by the command have ended, and kills them at `kill_at`.
async fn end_the_rest(
    tree: &mut ProcessTree,
    helpers: &mut SignalHelpers,
    signals: &mut Signals,
    kill_at: Instant,
    notes: Notes,
) {
    let mut said = false;
    while tree.has_rest() && Instant::now() < kill_at + KILLED {
        if Instant::now() >= kill_at {
            if !said {
                notes.say("processes of the command did not end in time; killing them");
                said = true;
            }
            // Repeats the signal, because a process that is just starting is not in the process table yet.
            tree.send_to_rest(Signal::KILL, Reach::Alone);
        }
        tokio::select! {
            () = sleep(LOOK) => {}
            signal = signals.next() => {
                let (all, reach) = helpers.collect(signal, signals).await;
                tree.set_helpers(helpers.pids());
                all.into_iter().for_each(|signal| tree.send_to_rest(signal, reach));
            }
        }
        tree.reap_adopted();
    }
}
