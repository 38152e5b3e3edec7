//! The command that runs under the lock.
//!
//! On Linux the command must not outlive this tool, even after SIGKILL. The parent-death signal ensures this, but only
//! the child itself can request it. So this tool starts a copy of itself, which requests the signal, checks that its
//! parent still lives, and becomes the command. The signal is sent when the *thread* that started the child ends.
//! Therefore everything here runs on the main thread.

use std::ffi::{OsStr, OsString};
use std::io;
use std::path::Path;
use std::process::ExitStatus;

use leasehold::file::HeldFile;
use leasehold::{Error, ErrorKind, LockGuard};
use rustix::io::Errno;
use rustix::process::Pid;
#[cfg(target_os = "linux")]
use rustix::process::Signal;
use tokio::process::{Child, Command};

use crate::chosen_store::ChosenStore;
use crate::{exit, output, tree, waiting};

/// The hidden first argument that turns a copy of this tool into the command.
#[cfg(target_os = "linux")]
pub(crate) const EXEC: &str = "__exec";

/// A started command.
#[derive(Debug)]
pub(crate) struct Running {
    child: Child,
    pid: Pid,
    #[cfg(target_os = "linux")]
    gate: StartGate,
}

/// Keeps the copy of this tool from becoming the command, until the write end of this pipe is closed.
#[cfg(target_os = "linux")]
#[derive(Debug)]
struct StartGate {
    /// The read end. It stays open while the command runs, because the copy opens it by its number.
    _read: io::PipeReader,
    keep_shut: Option<io::PipeWriter>,
}

/// Checks that the program exists. Returns the exit code if it is missing or cannot be executed.
pub(crate) fn find(program: &OsStr) -> Result<(), u8> {
    let path = Path::new(program);
    let has_directory = path.components().count() > 1;
    // Does not fail if PATH is missing, because the system then searches default directories.
    if which::which(program).is_ok() || (!has_directory && std::env::var_os("PATH").is_none()) {
        return Ok(());
    }
    let errno = if has_directory && path.exists() { Errno::ACCESS } else { Errno::NOENT };
    Err(cannot_run(program, &errno.into()))
}

/// Starts the command under `guards`.
///
/// If the command cannot be started, the inner result is the exit code. On Linux the child reports that instead.
pub(crate) fn start(
    command: &[OsString],
    guards: &[LockGuard],
    store: &ChosenStore,
) -> Result<Result<Running, u8>, Error> {
    tree::adopt_orphans();
    #[cfg(target_os = "linux")]
    let (gate, mut process) =
        prepare(command).map_err(|error| output::system("cannot make a pipe for the command", error))?;
    #[cfg(not(target_os = "linux"))]
    let mut process = prepare(command);
    store.pass_on_to(&mut process);
    name_grants(&mut process, guards);
    // Passes the files of file locks to the child. A file lock belongs to the open file, so it stays locked while the
    // child has a descriptor.
    let files = guards.iter().filter_map(|guard| guard.extension::<HeldFile>());
    let inherited: io::Result<Vec<_>> = files.map(HeldFile::inheritable).collect();
    let inherited =
        inherited.map_err(|error| output::system("cannot pass the lock's file on to the command", error))?;
    let started = process.spawn();
    drop(inherited);
    match started {
        Ok(child) => {
            let pid = child.id().and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw);
            let pid = pid.ok_or_else(|| {
                Error::new(ErrorKind::Unavailable, "the process for the command has no usable number")
            })?;
            Ok(Ok(Running {
                child,
                pid,
                #[cfg(target_os = "linux")]
                gate,
            }))
        }
        Err(error) if cfg!(target_os = "linux") => {
            Err(output::system("cannot start the process for the command; is /proc mounted?", error))
        }
        Err(error) => Ok(Err(cannot_run(&command[0], &error))),
    }
}

/// Sets the command's keys, tokens, holders and permits in its environment. With several keys, variables of a single
/// key are not set, because the command could use one key's token for the resource of another.
fn name_grants(process: &mut Command, guards: &[LockGuard]) {
    let all =
        |of: &dyn Fn(&LockGuard) -> String, between| guards.iter().map(of).collect::<Vec<_>>().join(between);
    let token = |guard: &LockGuard| guard.token().map(|token| token.to_string());
    process.env(waiting::KEYS, all(&|guard| guard.key().to_string(), "\n"));
    process.env("LEASEHOLD_TOKENS", all(&|guard| output::or_dash(token(guard)), " "));
    let permit = |guard: &LockGuard| guard.permit().map(|permit| permit.to_string());
    let has_permits = guards.iter().any(|guard| guard.permit().is_some());
    process.env(waiting::HOLDERS, waiting::holders_with(&all(&|guard| guard.holder().to_string(), " ")));
    let single = if let [guard] = guards { Some(guard) } else { None };
    let optional = [
        ("LEASEHOLD_KEY", single.map(|guard| guard.key().to_string())),
        ("LEASEHOLD_HOLDER", single.map(|guard| guard.holder().to_string())),
        ("LEASEHOLD_TOKEN", single.and_then(token)),
        ("LEASEHOLD_PERMIT", single.and_then(permit)),
        ("LEASEHOLD_PERMITS", has_permits.then(|| all(&|guard| output::or_dash(permit(guard)), " "))),
    ];
    for (name, value) in optional {
        match value {
            Some(value) => process.env(name, value),
            // Removes the variable's value from an enclosing run.
            None => process.env_remove(name),
        };
    }
}

impl Running {
    /// Lets the command start. Before this call a signal ends it without an effect. On systems other than Linux the
    /// command has started already.
    pub(crate) fn begin(&mut self) {
        #[cfg(target_os = "linux")]
        drop(self.gate.keep_shut.take());
    }

    /// Waits for the end of the command. If dropped, the wait can be repeated.
    pub(crate) async fn ended(&mut self) -> io::Result<ExitStatus> {
        self.child.wait().await
    }

    /// Returns the command's first process, even after its end.
    pub(crate) fn pid(&self) -> Pid {
        self.pid
    }

    /// Returns whether the first process has not been reaped yet.
    pub(crate) fn is_running(&self) -> bool {
        self.child.id().is_some()
    }
}

/// Returns the exit code that reports how the command ended.
pub(crate) fn exit_code(status: ExitStatus) -> u8 {
    use std::os::unix::process::ExitStatusExt as _;
    match (status.code(), status.signal()) {
        (Some(code), _) => u8::try_from(code).unwrap_or(u8::MAX),
        (None, signal) => exit::of_signal(signal.unwrap_or(0)),
    }
}

#[cfg(target_os = "linux")]
fn prepare(command: &[OsString]) -> io::Result<(StartGate, Command)> {
    use std::os::fd::AsRawFd as _;

    let (read, write) = io::pipe()?;
    // Starts the copy by this link and not by path, because an update might have replaced the file during the wait.
    let mut process = Command::new("/proc/self/exe");
    process.arg0("leasehold").arg(EXEC).arg(std::process::id().to_string());
    process.arg(read.as_raw_fd().to_string()).args(command);
    Ok((StartGate { _read: read, keep_shut: Some(write) }, process))
}

#[cfg(not(target_os = "linux"))]
fn prepare(command: &[OsString]) -> Command {
    let mut process = Command::new(&command[0]);
    process.args(&command[1..]);
    process
}

/// Turns the copy of this tool into the command, or reports why this failed.
#[cfg(target_os = "linux")]
pub(crate) fn become_command(mut arguments: impl Iterator<Item = OsString>) -> std::process::ExitCode {
    use std::os::unix::process::CommandExt as _;

    let parent = arguments.next().and_then(|text| text.to_str()?.parse().ok()).and_then(Pid::from_raw);
    let (Some(parent), Some(gate), Some(program)) = (parent, arguments.next(), arguments.next()) else {
        return exit::USAGE.into();
    };
    if let Err(error) = rustix::process::set_parent_process_death_signal(Some(Signal::KILL)) {
        output::error(&output::system("cannot tie the command to this tool", error.into()));
        return exit::NOT_EXECUTABLE.into();
    }
    if rustix::process::getppid() != Some(parent) {
        // Exits, because the tool was killed before the signal was requested, so the lock is not held.
        return exit::LOST.into();
    }
    // Waits at the gate. If the pipe cannot be opened, the command starts slightly early.
    let gate = std::fs::File::open(Path::new("/proc").join(parent.to_string()).join("fd").join(gate));
    let _ = gate.and_then(|mut gate| io::copy(&mut gate, &mut io::sink()));
    let mut command = std::process::Command::new(&program);
    command.args(arguments);
    name_process(&mut command, parent, rustix::process::getpid());
    let error = command.exec();
    cannot_run(&program, &error).into()
}

/// Changes systemd's process variables from `tool` to `own`, the future command, because the command inherits the
/// sockets and compares the process id with its own.
#[cfg(target_os = "linux")]
fn name_process(command: &mut std::process::Command, tool: Pid, own: Pid) {
    let tool = tool.as_raw_pid().to_string();
    for name in ["LISTEN_PID", "WATCHDOG_PID", "SYSTEMD_EXEC_PID"] {
        if std::env::var(name).is_ok_and(|pid| pid == tool) {
            command.env(name, own.as_raw_pid().to_string());
            // Removes the newer variable that also identifies the tool. Without it, systemd's library compares the
            // process id.
            command.env_remove(format!("{name}FDID"));
        }
    }
}

fn cannot_run(program: &OsStr, error: &io::Error) -> u8 {
    output::problem(&format!("cannot run {}: {error}{}", program.display(), tip(program, error)));
    if error.kind() == io::ErrorKind::NotFound { exit::NOT_FOUND } else { exit::NOT_EXECUTABLE }
}

fn tip(program: &OsStr, error: &io::Error) -> &'static str {
    match Errno::from_io_error(error) {
        Some(Errno::NOENT) if program.as_encoded_bytes().contains(&b' ') => {
            "; a line for the shell goes behind -c: leasehold run KEY -c STRING"
        }
        // Explains the error, because the C library did not pass a file of unknown format to the shell.
        Some(Errno::NOEXEC) => "; a script needs a first line that names its interpreter, such as #!/bin/sh",
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_that_cannot_be_run_gets_a_tip() {
        let tip = |program: &str, errno: Errno| tip(program.as_ref(), &errno.into());
        assert!(tip("./script", Errno::NOEXEC).contains("#!/bin/sh"));
        assert!(tip("echo a | cat", Errno::NOENT).contains("-c STRING"));
        assert_eq!((tip("./script", Errno::ACCESS), tip("cat", Errno::NOENT)), ("", ""));
    }
}
