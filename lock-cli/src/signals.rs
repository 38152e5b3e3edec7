//! The signals that end a wait or are passed on to the command.

use std::fs::File;
use std::future::poll_fn;
use std::io;
use std::task::Poll;
use std::time::Duration;

use rustix::process::{Pid, Signal};
use tokio::signal::unix::{self, SignalKind};
use tokio::time::Instant;

/// Listens for signals that would end this process, so they no longer do.
#[derive(Debug)]
pub(crate) struct Signals {
    streams: Vec<(Signal, unix::Signal)>,
    /// The time at which the wait for the store's confirmation of the release began.
    waits_since: Option<Instant>,
    /// Whether a signal has ended the wait for the store's confirmation.
    is_over: bool,
}

/// Signals within this time after the command's end belong to the signal that ended it, because timeout(1) sends each
/// twice, to the process and to its group. If such a signal ended the tool early, an unreleased lease would stay held.
const ONE_SIGNAL: Duration = Duration::from_secs(1);

impl Signals {
    /// Starts to listen, except for signals that the parent process ignored (`nohup`, background jobs), because the
    /// command must ignore them as well.
    pub(crate) fn listen() -> io::Result<Self> {
        let ignored = ignored();
        let mut streams = Vec::new();
        // Also listens for the signal of the file size limit (`ulimit -f`). A write beyond it is then an error of the
        // store instead of the end of this process.
        drop(unix::signal(SignalKind::from_raw(Signal::XFSZ.as_raw()))?);
        for signal in [Signal::TERM, Signal::HUP, Signal::INT, Signal::QUIT, Signal::USR1, Signal::USR2] {
            if ignored & (1 << (signal.as_raw() - 1)) == 0 {
                streams.push((signal, unix::signal(SignalKind::from_raw(signal.as_raw()))?));
            }
        }
        Ok(Self { streams, waits_since: None, is_over: false })
    }

    /// Returns the next signal. Dropping the future loses none.
    pub(crate) async fn next(&mut self) -> Signal {
        poll_fn(|cx| {
            for (signal, stream) in &mut self.streams {
                if stream.poll_recv(cx).is_ready() {
                    return Poll::Ready(*signal);
                }
            }
            Poll::Pending
        })
        .await
    }

    /// Waits until a signal ends the wait for the store's confirmation. Later calls return at once.
    pub(crate) async fn impatience(&mut self) {
        let since = *self.waits_since.get_or_insert_with(Instant::now);
        while !self.is_over {
            self.is_over = is_an_end(self.next().await) && since.elapsed() >= ONE_SIGNAL;
        }
    }

    /// Returns the signals that have arrived, each once.
    pub(crate) async fn drain(&mut self) -> Vec<Signal> {
        poll_fn(|cx| {
            let mut arrived = Vec::new();
            for (signal, stream) in &mut self.streams {
                while stream.poll_recv(cx).is_ready() {
                    if arrived.last() != Some(signal) {
                        arrived.push(*signal);
                    }
                }
            }
            Poll::Ready(arrived)
        })
        .await
    }
}

/// Returns whether `signal` can come from a terminal with this process in the foreground. Such a signal reaches all
/// processes of the foreground group.
pub(crate) fn is_typed(signal: Signal) -> bool {
    [Signal::INT, Signal::QUIT].contains(&signal)
        && in_the_foreground_of_a_terminal(rustix::process::getpgrp())
}

/// Returns whether `signal` requests the end of the command. Other signals are only for its first process.
pub(crate) fn is_an_end(signal: Signal) -> bool {
    [Signal::TERM, Signal::INT, Signal::QUIT].contains(&signal)
}

fn in_the_foreground_of_a_terminal(group: Pid) -> bool {
    File::open("/dev/tty").is_ok_and(|terminal| {
        rustix::termios::tcgetpgrp(&terminal).is_ok_and(|foreground| foreground == group)
    })
}

/// Returns the signals ignored at the start of this process, as bits. Only Linux reports them without unsafe code.
fn ignored() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    status
        .lines()
        .find_map(|line| line.strip_prefix("SigIgn:"))
        .and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
        .unwrap_or(0)
}
