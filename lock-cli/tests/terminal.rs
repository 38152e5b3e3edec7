//! On a terminal, a run behaves like its command: the foreground, Ctrl-C and job control work unchanged.
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs)]
#![cfg(target_os = "linux")]

#[path = "support/command.rs"]
mod support;

use std::io::{Read as _, Write as _};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use rustix::process::{Signal, kill_process};
use support::{Store, is_running, pid};
use test_bounds::Bound;

/// Longer than any step takes.
const PATIENCE: Duration = Duration::from_secs(60);

/// Prompt of the shells. Tests wait for it, because a Ctrl-C can discard text that is typed earlier.
const PROMPT: &str = "ready> ";

/// Returns the command of an interactive shell with that prompt. `env` sets `PS1`, because the outer shell would unset it.
fn shell() -> String {
    format!("env PS1='{PROMPT}' bash --norc -i")
}

/// Prints its start, its resumption after a stop, and the line it read. Before the stop it starts no process, because a
/// waiting shell does not stop. It also reads nothing, because it could take text typed for the outer shell.
const JOB: &str = r#"trap resumed=1 CONT; echo in-$((2+1)); until [ "$resumed" ]; do :; done
echo resumed-$((5+5)); read line; echo got-$line"#;

/// A program on a separate terminal, created by `script`.
struct Terminal {
    child: Child,
    output: Receiver<Vec<u8>>,
    seen: String,
}

impl Terminal {
    fn start(store: &Store, command: &str) -> Self {
        // `exec` replaces the shell that `script` starts, because that shell would also receive Ctrl-C.
        let command = format!("exec {}", command.replace("leasehold", env!("CARGO_BIN_EXE_leasehold")));
        // Resets signals, because tests that run in the background ignore Ctrl-C, and their children would inherit that.
        let version = Command::new("script").arg("--version").stdout(Stdio::null()).status();
        version.expect("needs the program `script` (apt-get install bsdutils)");
        let mut script = Command::new("env");
        script.args(["--default-signal=HUP,INT,QUIT,TERM", "script", "-qec", &command, "/dev/null"]);
        script.env("LEASEHOLD_URL", store.url());
        script.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = script.spawn().expect("the program `env`");
        let mut stdout = child.stdout.take().unwrap();
        let (sender, output) = channel();
        std::thread::spawn(move || {
            let mut piece = [0; 4096];
            while let Ok(length @ 1..) = stdout.read(&mut piece) {
                let _ = sender.send(piece[..length].to_vec());
            }
        });
        Self { child, output, seen: String::new() }
    }

    fn type_in(&mut self, text: &str) {
        let stdin = self.child.stdin.as_mut().unwrap();
        stdin.write_all(text.as_bytes()).unwrap();
        stdin.flush().unwrap();
    }

    /// Waits until `text` is shown after the previously awaited text.
    fn shows(&mut self, text: &str) {
        self.until(text);
    }

    /// Waits until `text` is shown. Returns the text before it.
    fn until(&mut self, text: &str) -> String {
        let at = loop {
            if let Some(at) = self.seen.find(text) {
                break at;
            }
            let piece = self.output.recv_timeout(PATIENCE);
            let piece = piece.unwrap_or_else(|_| panic!("no {text:?} in {:?}", self.seen));
            self.seen += &String::from_utf8_lossy(&piece);
        };
        let mut before: String = self.seen.drain(..at + text.len()).collect();
        before.truncate(at);
        before
    }

    /// Runs the job by `runner` under the lock on "k", stops it by Ctrl-Z, and resumes it.
    fn stop_and_continue(&mut self, store: &Store, runner: &str) {
        let job = store.path("job");
        std::fs::write(&job, JOB).unwrap();
        self.type_in(&format!("{runner} {}\n", job.display()));
        self.shows("in-3");
        self.type_in("\x1a");
        self.shows("Stopped");
        self.shows(PROMPT);
        assert!(!store.is_free("k"));
        self.type_in("fg\n");
        self.shows("resumed-10");
    }

    /// Waits for the end. Returns the exit code and the remaining output.
    fn end(&mut self) -> (i32, String) {
        let start = Bound::new(PATIENCE);
        let status = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status;
            }
            start.check(format_args!("{:?}", self.seen));
            std::thread::sleep(Duration::from_millis(5));
        };
        while let Ok(piece) = self.output.recv_timeout(PATIENCE) {
            self.seen += &String::from_utf8_lossy(&piece);
        }
        (status.code().unwrap(), std::mem::take(&mut self.seen))
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn the_command_is_in_the_foreground_and_ctrl_c_reaches_it_once() {
    let store = Store::new();
    // The fifth field is the process's group, and the eighth is the terminal's foreground group.
    let script = "trap 'echo got; stop=1' INT; set -- $(cat /proc/$$/stat); \
        [ \"$5\" = \"$8\" ] && echo in-front; until [ \"$stop\" ]; do sleep 0.05; done; sleep 0.3; exit 7";
    std::fs::write(store.path("script"), script).unwrap();
    let run = format!("leasehold run k -- sh {}", store.path("script").display());
    let mut terminal = Terminal::start(&store, &run);
    terminal.shows("in-front");
    terminal.type_in("\x03");
    let (code, shown) = terminal.end();
    assert_eq!((code, shown.matches("got").count()), (7, 1), "{shown:?}");
    assert!(store.is_free("k"));
}

#[test]
fn a_sigint_to_the_tool_alone_is_passed_on_in_the_foreground_of_a_terminal() {
    let store = Store::new();
    let script = "trap 'echo got-$((3+4)); stop=1' INT; echo in-$((2+1)); until [ \"$stop\" ]; do sleep 0.05; done; exit 7";
    std::fs::write(store.path("script"), script).unwrap();
    let run = format!("sh -c 'echo tool-$$-; exec leasehold run k -- sh {}'", store.path("script").display());
    let mut terminal = Terminal::start(&store, &run);
    terminal.shows("tool-");
    let tool = pid(&terminal.until("-"));
    terminal.shows("in-3");
    kill_process(tool, Signal::INT).unwrap();
    let (code, shown) = terminal.end();
    assert_eq!((code, shown.matches("got-7").count()), (7, 1), "{shown:?}");
}

/// The terminal sends Ctrl-C to the whole group, so the tool does not pass it. A process that ignores it is left behind, as
/// without the tool.
#[test]
fn what_a_command_leaves_in_the_background_outlives_a_ctrl_c_if_it_ignores_that() {
    let store = Store::new();
    let script = "(trap '' INT HUP; exec sleep 600) & echo deaf-$!-$((1+1)); while :; do sleep 0.05; done";
    std::fs::write(store.path("script"), script).unwrap();
    let run = format!("leasehold run k -- sh {}", store.path("script").display());
    let mut terminal = Terminal::start(&store, &run);
    terminal.shows("deaf-");
    let number = terminal.until("-2");
    let deaf = pid(&number);
    // Waits until the subshell has become `sleep`, which keeps the ignored signals.
    while !std::fs::read_to_string(format!("/proc/{number}/comm")).unwrap().starts_with("sleep") {
        std::thread::yield_now();
    }
    terminal.type_in("\x03");
    let (code, shown) = terminal.end();
    assert_eq!(code, 130, "{shown:?}");
    assert!(is_running(deaf));
    kill_process(deaf, Signal::KILL).unwrap();
}

#[test]
fn a_shell_with_job_control_works_under_the_lock() {
    let store = Store::new();
    let mut terminal = Terminal::start(&store, &format!("leasehold run k -- {}", shell()));
    terminal.shows(PROMPT);
    terminal.stop_and_continue(&store, "sh");
    terminal.type_in("\x03");
    terminal.shows(PROMPT);
    terminal.type_in("exit 5\n");
    let (code, shown) = terminal.end();
    assert_eq!(code, 5, "{shown:?}");
    assert!(store.is_free("k"));
}

#[test]
fn a_stopped_run_is_continued_by_the_shell_around_it() {
    let store = Store::new();
    let mut terminal = Terminal::start(&store, &shell());
    terminal.shows(PROMPT);
    terminal.stop_and_continue(&store, concat!(env!("CARGO_BIN_EXE_leasehold"), " run k -- sh"));
    terminal.type_in("word\n");
    terminal.shows("got-word");
    terminal.shows(PROMPT);
    terminal.type_in("exit 0\n");
    assert_eq!(terminal.end().0, 0);
    assert!(store.is_free("k"));
}
