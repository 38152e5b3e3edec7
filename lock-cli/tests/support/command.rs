//! The real binary, with a separate file store.

// Each test binary uses a part of this.
#![allow(dead_code, clippy::unwrap_used, unreachable_pub)]

use std::ffi::OsStr;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use tempfile::TempDir;
use test_bounds::Bound;

/// Longer than any test takes on a slow machine.
const PATIENCE: Duration = Duration::from_secs(600);

/// A store in a directory that is removed with this value.
pub struct Store {
    dir: TempDir,
}

impl Store {
    pub fn new() -> Self {
        Self { dir: tempfile::tempdir().unwrap() }
    }

    /// Returns the directory of the locks.
    pub fn locks(&self) -> PathBuf {
        self.dir.path().join("locks")
    }

    /// Returns a path beside the locks.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Copies `from` to a program beside the locks, with these permissions. Copies in another process, because a child that
    /// another test starts at the same time would inherit the open file, and a file open for writing cannot be executed.
    pub fn program(&self, name: &str, from: &Path, mode: &str) -> PathBuf {
        let path = self.path(name);
        let copied = Command::new("install").args(["-m", mode]).arg(from).arg(&path).status();
        assert!(copied.unwrap().success());
        path
    }

    pub fn url(&self) -> String {
        format!("file://{}?poll=5ms", self.locks().display())
    }

    /// Returns the tool on this store. Splits `arguments` at spaces.
    pub fn tool(&self, arguments: &str) -> Command {
        let mut command = tool();
        command.env("LEASEHOLD_URL", self.url()).args(arguments.split_whitespace());
        command
    }

    /// Returns `leasehold run ARGUMENTS -- sh -c SCRIPT`.
    pub fn run(&self, arguments: &str, script: &str) -> Command {
        let mut command = self.tool("run");
        command.args(arguments.split_whitespace()).args(["--", "sh", "-c", script]);
        command
    }

    /// Returns whether `key` has no holder and no waiter.
    pub fn is_free(&self, key: &str) -> bool {
        match finish(&mut self.run(&format!("{key} --no-wait"), "exit 0")) {
            (0, ..) => true,
            (75, ..) => false,
            other => panic!("{other:?}"),
        }
    }

    /// Acquires `key`, and fails if it is not free within 30 s.
    pub fn take(&self, key: &str) {
        let (code, _, stderr) = finish(&mut self.run(&format!("{key} --wait 30s"), "exit 0"));
        assert_eq!(code, 0, "{stderr}");
    }
}

/// Returns the tool, independent of the tests' environment and terminal.
pub fn tool() -> Command {
    let tool = env!("CARGO_BIN_EXE_leasehold");
    let mut command = Command::new(if cfg!(target_os = "linux") { "env" } else { tool });
    if cfg!(target_os = "linux") {
        // Resets signals, because tests that run in the background or under nohup ignore them, and the tool would inherit that.
        command.args(["--default-signal=HUP,INT,QUIT,TERM", tool]);
    }
    command.env_remove("LEASEHOLD_URL").env_remove("NO_COLOR").env_remove("CLICOLOR_FORCE");
    command.stdin(Stdio::null());
    command
}

/// Runs the command to its end. Returns code, stdout and stderr.
pub fn finish(command: &mut Command) -> (i32, String, String) {
    let mut tool = Beside::start(command);
    tool.stdin = None;
    let (stdout, stderr) = (tool.rest_of_stdout(), tool.rest_of_stderr());
    (tool.code(), stdout, stderr)
}

/// Runs a command to its end while others hold its key. Returns code, stdout and stderr.
///
/// # Panics
///
/// With a [`BoundPassed`](test_bounds::BoundPassed) if the store has not answered within the command's wait budget.
pub fn finish_refused(command: &mut Command) -> (i32, String, String) {
    let refused = finish(command);
    if refused.2.contains("the wait budget ended before the store answered") {
        Bound::new(Duration::ZERO).check("the store has not answered the command");
    }
    refused
}

/// A tool that runs beside the test. Its process group is killed when this value is dropped or when the tool hangs.
/// After a hang, reads from the tool end, so the test fails instead of hanging too.
pub struct Beside {
    child: Child,
    // Its drop stops the watch.
    watch: Option<Sender<()>>,
    stdin: Option<ChildStdin>,
    stdout: BufReader<ChildStdout>,
    stderr: BufReader<ChildStderr>,
}

impl Beside {
    pub fn start(command: &mut Command) -> Self {
        // A separate group, because it must not be in a terminal's foreground and is killed as a whole.
        command.process_group(0);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let (watch, called_off) = channel();
        let group = pid(&child.id().to_string());
        std::thread::spawn(move || {
            if called_off.recv_timeout(PATIENCE) == Err(RecvTimeoutError::Timeout) {
                let _ = kill_process_group(group, Signal::KILL);
            }
        });
        Self {
            watch: Some(watch),
            stdin: child.stdin.take(),
            stdout: BufReader::new(child.stdout.take().unwrap()),
            stderr: BufReader::new(child.stderr.take().unwrap()),
            child,
        }
    }

    /// Returns the next line that its command prints.
    pub fn line(&mut self) -> String {
        let mut line = String::new();
        assert_ne!(self.stdout.read_line(&mut line).unwrap(), 0, "ended: {}", self.rest_of_stderr());
        line.trim_end().to_owned()
    }

    /// Returns the next note of the tool.
    pub fn note(&mut self) -> String {
        let mut line = String::new();
        assert_ne!(self.stderr.read_line(&mut line).unwrap(), 0, "ended without a note");
        line.trim_end().to_owned()
    }

    /// Returns the next note that contains `text`. `None` if the tool ends before one.
    pub fn note_with(&mut self, text: &str) -> Option<String> {
        self.stderr.by_ref().lines().map(Result::unwrap).find(|note| note.contains(text))
    }

    /// Sends a line to a command that waits for one.
    pub fn go_on(&mut self) {
        self.stdin.as_mut().unwrap().write_all(b"\n").unwrap();
    }

    /// Closes the input of a command that reads to its end.
    pub fn close_stdin(&mut self) {
        self.stdin = None;
    }

    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_raw(i32::try_from(self.child.id()).unwrap()).unwrap(), signal).unwrap();
    }

    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Waits for the tool. Returns its exit code.
    pub fn code(&mut self) -> i32 {
        let status = self.child.wait().unwrap();
        status.code().unwrap_or_else(|| panic!("ended by signal {:?}", status.signal()))
    }

    /// Kills the tool by SIGKILL.
    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        assert_eq!(self.child.wait().unwrap().signal(), Some(9));
    }

    /// Reads the rest of stdout. Waits until the tool and its command have closed it.
    pub fn rest_of_stdout(&mut self) -> String {
        let mut rest = String::new();
        self.stdout.read_to_string(&mut rest).unwrap();
        rest
    }

    pub fn rest_of_stderr(&mut self) -> String {
        let mut rest = String::new();
        self.stderr.read_to_string(&mut rest).unwrap();
        rest
    }
}

impl Drop for Beside {
    fn drop(&mut self) {
        drop(self.watch.take());
        let _ = kill_process_group(pid(&self.id().to_string()), Signal::KILL);
        let _ = self.child.wait();
    }
}

pub fn pid(text: &str) -> Pid {
    Pid::from_raw(text.trim().parse().unwrap()).unwrap()
}

/// Returns whether a process runs. A zombie does not.
#[cfg(target_os = "linux")]
pub fn is_running(process: Pid) -> bool {
    // The file is missing only if the process was reaped.
    std::fs::read_to_string(format!("/proc/{process}/stat")).is_ok_and(|stat| {
        stat.rsplit_once(')').is_some_and(|(_, rest)| !rest.trim_start().starts_with(['Z', 'X']))
    })
}

pub fn read(path: impl AsRef<Path>) -> String {
    std::fs::read_to_string(path).unwrap()
}

/// Returns whether `text` names the rest of an hour that has just started.
pub fn nearly_an_hour(text: &str) -> bool {
    text.contains("1h") || text.contains("59m")
}

/// Runs the tool with these exact arguments.
pub fn with<S: AsRef<OsStr>>(mut command: Command, arguments: impl IntoIterator<Item = S>) -> Command {
    command.args(arguments);
    command
}
