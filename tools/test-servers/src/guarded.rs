//! A server process with its directory, and the guard that removes both when this process ends.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::Outcome;
use crate::user::{Medium, User};

/// Time limit for the start or end of a server, including crash recovery. An end waits for connections that have sent
/// nothing, for `authentication_timeout`, which is a minute.
const LIMIT: Duration = Duration::from_secs(120);

/// Time limit for an immediate end. Postgres gives its own processes five seconds.
const QUITS: Duration = Duration::from_secs(8);

/// Interval of polls.
const PAUSE: Duration = Duration::from_millis(10);

/// Waits until its input ends, which happens when this process ends in any way. Then it stops the server and removes
/// the directory.
///
/// The removal of the server's own lock file shows its end, because the pid stays if no process reaps orphans. A
/// server still starting either writes its pid or fails, because its directory is gone.
const GUARD: &str = r#"
trap '' INT TERM HUP QUIT
while read -r _; do :; done
cd /
tries=0
while :; do
    pid=$(cat "$1/pid" 2>/dev/null)
    signal=QUIT
    [ $tries -gt 80 ] && signal=KILL
    if [ -n "$pid" ] && [ $tries -lt 150 ] && kill -$signal "$pid" 2>/dev/null; then
        kill -CONT "$pid" 2>/dev/null
        if [ -e "$1/$2" ]; then
            tries=$((tries + 1))
            sleep 0.1
            continue
        fi
    fi
    rm -rf "$1" 2>/dev/null
    [ -e "$1" ] || exit 0
    tries=$((tries + 1))
    [ $tries -gt 250 ] && exit 1
    sleep 0.1
done
"#;

/// Becomes the server. The file contains the pid before the server runs.
const LAUNCH: &str = r#"echo $$ >"$0" && exec "$@""#;

#[derive(Debug)]
pub(crate) struct Guarded {
    user: User,
    directory: PathBuf,
    guard: Child,
    /// Environment variables of the server only.
    environment: Vec<(String, String)>,
    /// Input of the guard, held open only by this process (close-on-exec). The guard acts when it closes.
    lifeline: Option<ChildStdin>,
    server: Option<Running>,
}

#[derive(Debug)]
struct Running {
    child: Child,
    /// Disconnects when the server and all its forked processes have ended, because they share the original standard
    /// output.
    gone: Receiver<()>,
}

impl Guarded {
    /// Creates the directory and its guard. `lock_file` is the file in it that the server removes when it ends.
    pub(crate) fn new(prefix: &str, lock_file: &str, medium: Medium) -> Outcome<Self> {
        let user = User::for_servers();
        let directory = user.directory(prefix, medium)?;
        let mut guard = user
            .command("sh", &directory)
            .args(["-c", GUARD, "guard"])
            .arg(&directory)
            .arg(lock_file)
            .stdin(Stdio::piped())
            .spawn()
            .map_err(|error| format!("cannot start sh: {error}"))?;
        let lifeline = guard.stdin.take();
        Ok(Self { user, directory, guard, environment: Vec::new(), lifeline, server: None })
    }

    pub(crate) fn with_environment(mut self, environment: Vec<(String, String)>) -> Self {
        self.environment = environment;
        self
    }

    pub(crate) fn environment(&self) -> &[(String, String)] {
        &self.environment
    }

    pub(crate) fn directory(&self) -> &Path {
        &self.directory
    }

    pub(crate) fn pid(&self) -> Option<Pid> {
        self.server.as_ref().map(|running| Pid::from_child(&running.child))
    }

    /// Writes a file in the directory, readable by the server.
    pub(crate) fn write(&self, name: &str, content: &str) -> Outcome {
        let path = self.directory.join(name);
        fs::write(&path, content).map_err(|error| format!("cannot write {}: {error}", path.display()))?;
        self.user.give(&path)
    }

    /// Writes a file in the directory that only the server can read.
    pub(crate) fn write_secret(&self, name: &str, content: &str) -> Outcome {
        self.write(name, content)?;
        let path = self.directory.join(name);
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600))
            .map_err(|error| format!("cannot change the mode of {}: {error}", path.display()))
    }

    /// Makes the server's user the owner of a file in the directory.
    pub(crate) fn give(&self, path: &Path) -> Outcome {
        self.user.give(path)
    }

    /// Runs a tool to its end, as the server's user.
    pub(crate) fn run(&self, program: &Path, configure: impl FnOnce(&mut Command)) -> Outcome {
        let mut command = self.user.command(program, &self.directory);
        configure(&mut command);
        let output = command
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .output()
            .map_err(|error| format!("cannot start {}: {error}", program.display()))?;
        if output.status.success() {
            return Ok(());
        }
        let said =
            String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout);
        Err(format!("{} failed ({}):\n{said}", program.display(), output.status))
    }

    /// Starts the server and waits until `is_ready`. Its output goes to the file `log`.
    pub(crate) fn start(
        &mut self,
        program: &Path,
        arguments: &[String],
        is_ready: impl Fn(&Self) -> bool,
    ) -> Outcome {
        let log_path = self.directory.join("log");
        let log = File::options().create(true).append(true).open(&log_path);
        let log = log.map_err(|error| format!("cannot open {}: {error}", log_path.display()))?;
        self.user.give(&log_path)?;
        let mut child = self
            .user
            .command("sh", &self.directory)
            .args(["-c", LAUNCH])
            .arg(self.directory.join("pid"))
            .arg(program)
            .args(arguments)
            .envs(self.environment.iter().map(|(name, value)| (name, value)))
            .stdout(Stdio::piped())
            .stderr(log)
            .spawn()
            .map_err(|error| format!("cannot start sh: {error}"))?;
        let (alive, gone) = mpsc::channel();
        if let Some(mut stdout) = child.stdout.take() {
            thread::spawn(move || {
                // Only the end of the stream matters, because the server writes nothing there.
                let _ = io::copy(&mut stdout, &mut io::sink());
                drop(alive);
            });
        }
        self.server = Some(Running { child, gone });
        let start = Instant::now();
        while !is_ready(self) {
            if let Some(status) = self.exited()? {
                return Err(format!("{} ended ({status}):\n{}", program.display(), self.log()));
            }
            if start.elapsed() > LIMIT {
                return Err(format!("{} is not ready after {LIMIT:?}:\n{}", program.display(), self.log()));
            }
            thread::sleep(PAUSE);
        }
        Ok(())
    }

    /// Returns the server's log.
    pub(crate) fn log(&self) -> String {
        fs::read(self.directory.join("log"))
            .map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
            .unwrap_or_default()
    }

    /// Signals the server's first process, if it runs.
    pub(crate) fn signal(&self, signal: Signal) {
        if let Some(pid) = self.pid() {
            send(pid, signal);
        }
    }

    /// Ends the server, if it runs, and waits until all its processes have ended.
    pub(crate) fn end(&mut self, signal: Signal) -> Outcome {
        self.end_within(LIMIT, signal)
    }

    fn end_within(&mut self, limit: Duration, signal: Signal) -> Outcome {
        self.signal(signal);
        let Some(mut running) = self.server.take() else { return Ok(()) };
        match running.gone.recv_timeout(limit) {
            Err(RecvTimeoutError::Disconnected) | Ok(()) => {}
            Err(RecvTimeoutError::Timeout) => {
                self.server = Some(running);
                return Err(format!("the server did not end within {limit:?}:\n{}", self.log()));
            }
        }
        let reaped = running.child.wait().map_err(|error| format!("cannot wait for the server: {error}"));
        // Removes the pid, because another process might get it after the reaping.
        let _ = fs::remove_file(self.directory.join("pid"));
        reaped.map(drop)
    }

    /// Returns the exit status if the server has ended on its own.
    pub(crate) fn exited(&mut self) -> Outcome<Option<ExitStatus>> {
        let Some(running) = &mut self.server else { return Ok(None) };
        let status =
            running.child.try_wait().map_err(|error| format!("cannot wait for the server: {error}"))?;
        if status.is_some() {
            self.server = None;
            let _ = fs::remove_file(self.directory.join("pid"));
        }
        Ok(status)
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        // Sends SIGTERM too, because a pooler started in the background of a script ignores SIGQUIT.
        for signal in [Signal::QUIT, Signal::TERM, Signal::CONT] {
            self.signal(signal);
        }
        let ended = self.end_within(QUITS, Signal::QUIT);
        if ended.is_err() {
            self.signal(Signal::KILL);
        }
        drop(self.lifeline.take());
        let _ = self.guard.wait();
    }
}

/// Sends a signal and ignores a process that has already ended.
pub(crate) fn send(pid: Pid, signal: Signal) {
    let _ = kill_process(pid, signal);
}
