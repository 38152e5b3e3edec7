//! Child processes that take part in a case. A child is the current test executable, started again.
//!
//! The test `child::entry` of [`suite!`](crate::suite) acts as the child if the environment variable is set.
//! It reads one command per line from stdin and answers each with one marked line on stdout.

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use leasehold_api::{AcquireOptions, Error, Lock, LockGuard, LockKey};
use tokio::sync::mpsc;

use crate::context::Context;
use crate::harness::{Factory, Time};
use crate::pace::{PACE, pace};
use crate::runner::runtime;

/// The environment variable that makes a process a child. Its value describes the store, or is empty for a
/// ping.
const SPEC: &str = "LEASEHOLD_CONFORMANCE_CHILD";
/// The prefix of an answer, because test executables print other lines too.
const MARK: &str = "@leasehold ";
/// The limit for the start of a child and for an answer, at the usual pace.
const START: Duration = Duration::from_secs(30);

// ---- the parent's side ----

/// A child process that acts on the same store.
#[derive(Debug)]
pub(crate) struct Process {
    child: Child,
    answers: mpsc::UnboundedReceiver<String>,
}

impl Process {
    /// Starts a child and waits until it has connected to the store of this case.
    pub(crate) async fn start(cx: &Context) -> Self {
        let spec = cx.harness().child().expect("the harness names a way for children");
        let test = cx.child_test().expect("a test that acts as the child is mounted");
        let mut process = Self::spawn(test, &spec).expect("the test executable starts again");
        let hello = process.answer(cx, START * pace()).await;
        assert_eq!(hello, "ready", "the child connects to the store");
        process
    }

    fn spawn(test: &str, spec: &str) -> std::io::Result<Self> {
        let mut child = Command::new(std::env::current_exe()?)
            .args([test, "--exact", "--nocapture", "--test-threads=1"])
            .env(SPEC, spec)
            .env(PACE, pace().to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()?;
        let (sender, answers) = mpsc::unbounded_channel();
        let Some(stdout) = child.stdout.take() else {
            return Err(std::io::Error::other("the child has no stdout"));
        };
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                // The test harness can start the line with the name of the test.
                if let Some(at) = line.find(MARK) {
                    if sender.send(line[at + MARK.len()..].to_owned()).is_err() {
                        return;
                    }
                }
            }
        });
        Ok(Self { child, answers })
    }

    /// Sends a command without waiting for its answer.
    pub(crate) fn tell(&mut self, command: &str) {
        let stdin = self.child.stdin.as_mut().expect("the child has a stdin");
        writeln!(stdin, "{command}").and_then(|()| stdin.flush()).expect("the child takes commands");
    }

    /// Returns the next answer. Fails the case if it takes longer than `bound`.
    pub(crate) async fn answer(&mut self, cx: &Context, bound: Duration) -> String {
        match cx.within("the child's answer", bound, self.answers.recv()).await {
            Some(answer) => answer,
            None => panic!("the child ended without an answer"),
        }
    }

    /// Sends one command and returns its answer.
    pub(crate) async fn ask(&mut self, cx: &Context, command: &str) -> String {
        self.tell(command);
        self.answer(cx, START * pace()).await
    }

    /// Sends one command and asserts its answer.
    pub(crate) async fn expect(&mut self, cx: &Context, command: &str, answer: &str) {
        let got = self.ask(cx, command).await;
        assert_eq!(got, answer, "the child's answer to {command:?}");
    }

    /// Lets the child take a free key. Returns the token.
    pub(crate) async fn take(&mut self, cx: &Context, key: &LockKey) -> u64 {
        let got = self.ask(cx, &format!("try {}", key.as_str())).await;
        match got.strip_prefix("granted ").and_then(|t| t.parse().ok()) {
            Some(token) => token,
            None => panic!("the child's try at {key:?} must be granted, it says: {got}"),
        }
    }

    /// Ends the child with SIGKILL and reaps it.
    pub(crate) fn kill(&mut self) {
        self.child.kill().expect("the child can be killed");
        self.child.wait().expect("the child can be reaped");
    }

    /// Waits until the child has ended on its own.
    pub(crate) fn reap(&mut self) {
        self.child.wait().expect("the child can be reaped");
    }

    /// Stops the child with SIGSTOP.
    #[cfg(unix)]
    pub(crate) fn stop(&self) {
        self.signal(rustix::process::Signal::STOP);
    }

    /// Continues a stopped child.
    #[cfg(unix)]
    pub(crate) fn go_on(&self) {
        self.signal(rustix::process::Signal::CONT);
    }

    #[cfg(unix)]
    fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, signal).expect("the child can be signalled");
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Fails harmlessly if the child has already ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

// ---- the child's side ----

/// Runs the test `child::entry`: acts as the child, or checks that a child can be started.
pub(crate) fn entry(factory: &dyn Factory, test: &str) {
    if !act_if_child(factory) {
        check(test);
    }
}

/// Acts as the child if this process is one. Returns whether it is.
pub(crate) fn act_if_child(factory: &dyn Factory) -> bool {
    let spec = std::env::var(SPEC);
    if let Ok(spec) = &spec {
        act(factory, spec);
    }
    spec.is_ok()
}

fn check(test: &str) {
    let mut process = Process::spawn(test, "").expect("the test executable starts again");
    let pong = process.answers.blocking_recv();
    assert_eq!(pong.as_deref(), Some("pong"), "the test {test} answers when it is started as a child");
    process.reap();
}

fn act(factory: &dyn Factory, spec: &str) {
    if spec.is_empty() {
        return say("pong");
    }
    let runtime = runtime(Time::Real).expect("a runtime for the child");
    let (sender, mut commands) = mpsc::unbounded_channel();
    std::thread::spawn(move || {
        for line in std::io::stdin().lock().lines().map_while(Result::ok) {
            if sender.send(line).is_err() {
                return;
            }
        }
        // The parent has ended, so the child ends too, even during a command.
        std::process::exit(0);
    });
    runtime.block_on(async {
        let mut actor = match factory.connect_child(spec).await {
            Ok(lock) => Actor { lock, guard: None },
            Err(error) => return say(&format!("cannot connect: {error}")),
        };
        say("ready");
        while let Some(command) = commands.recv().await {
            let answer = actor.obey(&command).await;
            say(&answer);
        }
    });
}

fn say(answer: &str) {
    let mut out = std::io::stdout().lock();
    // Fails only if the parent has ended.
    let _ = writeln!(out, "\n{MARK}{answer}").and_then(|()| out.flush());
}

struct Actor {
    lock: Arc<dyn Lock>,
    guard: Option<LockGuard>,
}

impl Actor {
    async fn obey(&mut self, command: &str) -> String {
        let (verb, rest) = command.split_once(' ').unwrap_or((command, ""));
        match verb {
            "try" => self.attempt(rest, false, None).await,
            "acquire" => self.attempt(rest, true, None).await,
            "lease" => {
                let (ttl, key) = rest.split_once(' ').unwrap_or(("0", rest));
                self.attempt(key, false, ttl.parse().ok().map(Duration::from_millis)).await
            }
            "release" => match self.guard.take() {
                Some(guard) => said(guard.release().await, "released"),
                None => "no guard".into(),
            },
            "renew" => match &self.guard {
                Some(guard) => said(guard.renew().await, "renewed"),
                None => "no guard".into(),
            },
            "drop" => {
                self.guard = None;
                "dropped".into()
            }
            "validity" => self.guard.as_ref().map_or("no guard".into(), |g| g.validity().to_string()),
            "holder" => self.guard.as_ref().map_or("no guard".into(), |g| g.holder().to_string()),
            "bump" => said(self.bump(rest).await, "bumped"),
            // Ends the process without destructors.
            "exit" => std::process::exit(0),
            other => format!("unknown command {other}"),
        }
    }

    async fn attempt(&mut self, key: &str, wait: bool, ttl: Option<Duration>) -> String {
        let mut options = AcquireOptions::new();
        options.ttl = ttl;
        let outcome = match LockKey::new(key) {
            Ok(key) if wait => self.lock.acquire(&key, &options.wait_forever()).await.map(Some),
            Ok(key) => self.lock.try_acquire(&key, &options).await,
            Err(error) => Err(error),
        };
        match outcome {
            Ok(Some(guard)) => {
                let token = guard.token().map_or(0, leasehold_api::FencingToken::as_u64);
                self.guard = Some(guard);
                format!("granted {token}")
            }
            Ok(None) => "held".into(),
            Err(error) => error.kind().to_string(),
        }
    }

    /// Increments the number in a file under the lock, repeatedly. `what` is `TIMES KEY PATH`.
    async fn bump(&self, what: &str) -> Result<(), Error> {
        let mut parts = what.splitn(3, ' ');
        let times: u32 = parts.next().and_then(|n| n.parse().ok()).unwrap_or(0);
        let key = LockKey::new(parts.next().unwrap_or_default())?;
        let path = parts.next().unwrap_or_default();
        for _ in 0..times {
            let guard = self.lock.acquire(&key, &AcquireOptions::new().wait_forever()).await?;
            bump_file(path);
            guard.release().await?;
        }
        Ok(())
    }
}

/// Increments the number in a file. Yields between read and write, so that a second holder would lose an
/// increment.
pub(crate) fn bump_file(path: &str) {
    let text = std::fs::read_to_string(path).expect("the counter can be read");
    let n: u64 = text.trim().parse().expect("the counter is a whole number");
    std::thread::yield_now();
    std::fs::write(path, (n + 1).to_string()).expect("the counter can be written");
}

fn said(outcome: Result<(), Error>, ok: &str) -> String {
    outcome.map_or_else(|error| error.kind().to_string(), |()| ok.to_owned())
}
