//! The signals that end a wait or are passed on to the child.

use std::fs::File;
use std::future::poll_fn;
use std::io;
use std::task::Poll;
use std::time::Duration;

use rustix::process::{Pid, Signal};
use tokio::signal::unix::{self, SignalKind};
use tokio::time::Instant;

/// Listens for the signals that would end this process, and then do not.
#[derive(Debug)]
pub(crate) struct Signals {
    streams: Vec<(Signal, unix::Signal)>,
    /// When the store was first waited for to confirm.
    waits_since: Option<Instant>,
    /// One has come that nobody waits behind.
    is_over: bool,
}

/// Signals that come sooner belong to the one that ended the command: timeout(1) sends each twice, to the process and to
/// its group, and a lease that is not given back for that stays held.
const ONE_SIGNAL: Duration = Duration::from_secs(1);

impl Signals {
    /// Begins to listen, except for signals that whoever started us has had ignored (`nohup`,
    /// background jobs): the child is to ignore them as well.
    pub(crate) fn listen() -> io::Result<Self> {
        let ignored = ignored();
        let mut streams = Vec::new();
        // A file that may not grow (`ulimit -f`) is an error of the store then, and not the end of this process.
        drop(unix::signal(SignalKind::from_raw(Signal::XFSZ.as_raw()))?);
        for signal in [Signal::TERM, Signal::HUP, Signal::INT, Signal::QUIT, Signal::USR1, Signal::USR2] {
            if ignored & (1 << (signal.as_raw() - 1)) == 0 {
                streams.push((signal, unix::signal(SignalKind::from_raw(signal.as_raw()))?));
            }
        }
        Ok(Self { streams, waits_since: None, is_over: false })
    }

    /// The next signal. Dropping the future loses none.
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

    /// Somebody does not want to wait for the store to confirm; from then on nobody does.
    pub(crate) async fn impatience(&mut self) {
        let since = *self.waits_since.get_or_insert_with(Instant::now);
        while !self.is_over {
            self.is_over = is_an_end(self.next().await) && since.elapsed() >= ONE_SIGNAL;
        }
    }

    /// Takes the signals that have arrived until now, each once.
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

/// Whether `signal` can come from a terminal in whose foreground this process is. What is typed there reaches all processes
/// of the group in the foreground.
pub(crate) fn is_typed(signal: Signal) -> bool {
    [Signal::INT, Signal::QUIT].contains(&signal)
        && in_the_foreground_of_a_terminal(rustix::process::getpgrp())
}

/// Whether `signal` asks the command to come to its end. The others are for its first process to understand.
pub(crate) fn is_an_end(signal: Signal) -> bool {
    [Signal::TERM, Signal::INT, Signal::QUIT].contains(&signal)
}

fn in_the_foreground_of_a_terminal(group: Pid) -> bool {
    File::open("/dev/tty").is_ok_and(|terminal| {
        rustix::termios::tcgetpgrp(&terminal).is_ok_and(|foreground| foreground == group)
    })
}

/// The signals that this process was started with as ignored, as bits. Only Linux tells without unsafe code.
fn ignored() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    status
        .lines()
        .find_map(|line| line.strip_prefix("SigIgn:"))
        .and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
        .unwrap_or(0)
}
