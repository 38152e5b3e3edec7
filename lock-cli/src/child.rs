//! The command that runs under the lock.
//!
//! On Linux it must not outlive this tool, even when that is killed with SIGKILL. What does that is
//! the parent-death signal, which only the child itself can ask for. So this tool starts itself once
//! more, that copy asks for the signal, makes sure that its parent still lives, and becomes the
//! command. The signal is sent when the *thread* that started the child ends, which is why everything
//! here runs on the main thread.

use std::ffi::{OsStr, OsString};
use std::io;
use std::path::Path;
use std::process::ExitStatus;

use leasehold::file::HeldFile;
use leasehold::{Error, ErrorKind, LockGuard, MultiGuard};
use rustix::io::Errno;
use rustix::process::Pid;
#[cfg(target_os = "linux")]
use rustix::process::Signal;
use tokio::process::{Child, Command};

use crate::chosen_store::ChosenStore;
use crate::{exit, output, tree, waiting};

/// The hidden first argument that makes a copy of this tool become the command.
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

/// Keeps the copy of this tool from becoming the command, until the other end of the pipe is closed.
#[cfg(target_os = "linux")]
#[derive(Debug)]
struct StartGate {
    /// The copy opens it by its number, so it stays open while the command runs.
    _read: io::PipeReader,
    keep_shut: Option<io::PipeWriter>,
}

/// Whether there is such a program; the exit code if there is none, or it cannot be executed.
pub(crate) fn find(program: &OsStr) -> Result<(), u8> {
    let path = Path::new(program);
    let has_directory = path.components().count() > 1;
    // Without PATH the system has directories of its own to look into.
    if which::which(program).is_ok() || (!has_directory && std::env::var_os("PATH").is_none()) {
        return Ok(());
    }
    let errno = if has_directory && path.exists() { Errno::ACCESS } else { Errno::NOENT };
    Err(cannot_run(program, &errno.into()))
}

/// Starts the command under `guards`.
///
/// `Err` inside `Ok` is the exit code when the command cannot be started; on Linux that shows in the
/// child instead.
pub(crate) fn start(
    command: &[OsString],
    guards: &MultiGuard,
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
    // A file lock belongs to the open file: while the child has a descriptor of it, it is not free.
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

/// Lets the command know its keys, tokens and holders. What is of a single key is not set where there are several: nobody is
/// to send the token of one key along to what another one protects.
fn name_grants(process: &mut Command, guards: &MultiGuard) {
    let all =
        |of: &dyn Fn(&LockGuard) -> String, between| guards.iter().map(of).collect::<Vec<_>>().join(between);
    let token = |guard: &LockGuard| guard.token().map(|token| token.to_string());
    process.env(waiting::KEYS, all(&|guard| guard.key().to_string(), "\n"));
    process.env("LEASEHOLD_TOKENS", all(&|guard| output::or_dash(token(guard)), " "));
    process.env(waiting::HOLDERS, waiting::holders_with(&all(&|guard| guard.holder().to_string(), " ")));
    let single = if let [guard] = &**guards { Some(guard) } else { None };
    let of_single = [
        ("LEASEHOLD_KEY", single.map(|guard| guard.key().to_string())),
        ("LEASEHOLD_HOLDER", single.map(|guard| guard.holder().to_string())),
        ("LEASEHOLD_TOKEN", single.and_then(token)),
    ];
    for (name, value) in of_single {
        match value {
            Some(value) => process.env(name, value),
            // Not that of a run around this one.
            None => process.env_remove(name),
        };
    }
}

impl Running {
    /// Lets the command begin. Until then a signal ends it before it has done anything. Elsewhere than on Linux it has begun.
    pub(crate) fn begin(&mut self) {
        #[cfg(target_os = "linux")]
        drop(self.gate.keep_shut.take());
    }

    /// Waits for the end. Dropping the future loses nothing.
    pub(crate) async fn ended(&mut self) -> io::Result<ExitStatus> {
        self.child.wait().await
    }

    /// Its first process, also after that has ended.
    pub(crate) fn pid(&self) -> Pid {
        self.pid
    }

    /// Whether its first process has not been waited for.
    pub(crate) fn is_running(&self) -> bool {
        self.child.id().is_some()
    }
}

/// The exit code that passes on how the command ended.
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
    // Not by path: the file may have been replaced by another version since we began to wait.
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

/// In the copy of this tool: becomes the command, or says why not.
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
        // The tool was killed before the signal was asked for: nobody holds the lock for us.
        return exit::LOST.into();
    }
    // Where it cannot be opened, the command begins a moment early.
    let gate = std::fs::File::open(Path::new("/proc").join(parent.to_string()).join("fd").join(gate));
    let _ = gate.and_then(|mut gate| io::copy(&mut gate, &mut io::sink()));
    let mut command = std::process::Command::new(&program);
    command.args(arguments);
    name_process(&mut command, parent, rustix::process::getpid());
    let error = command.exec();
    cannot_run(&program, &error).into()
}

/// Has the variables by which systemd names the process it has started name `own`, which becomes the command, where they
/// name `tool`: the command has inherited the sockets, and compares the number with its own.
#[cfg(target_os = "linux")]
fn name_process(command: &mut std::process::Command, tool: Pid, own: Pid) {
    let tool = tool.as_raw_pid().to_string();
    for name in ["LISTEN_PID", "WATCHDOG_PID", "SYSTEMD_EXEC_PID"] {
        if std::env::var(name).is_ok_and(|pid| pid == tool) {
            command.env(name, own.as_raw_pid().to_string());
            // It names the tool too, by a number that only a newer systemd knows; without it the process id counts.
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
        // Where the C library does not hand such a file to the shell.
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
