//! A process that acquires locks and records each critical section.

use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use leasehold::{ErrorKind, FencingToken, Lock, LockExt as _, LockGuard, Mode, Modes, Validity};
use rustix::process::{Pid, getppid};
use rustix::time::{ClockId, clock_gettime};

use crate::record::Held;
use crate::register::{self, KEYS};

/// Variables of a worker: its seed, the URL of the store, and the directory of its records.
pub(crate) const SEED: &str = "LEASEHOLD_TORTURE_WORKER";
pub(crate) const URL: &str = "LEASEHOLD_TORTURE_URL";
pub(crate) const DIR: &str = "LEASEHOLD_TORTURE_DIR";
/// Variable with the worker's own fault, which the checker must find. See [`Broken`].
pub(crate) const BROKEN: &str = "LEASEHOLD_TORTURE_BROKEN";
/// Variable with the record of a command under `leasehold run`.
pub(crate) const RECORD: &str = "LEASEHOLD_TORTURE_RECORD";
/// Variable with the mode of that command: `shared`, `slots`, or exclusive if it is not set.
pub(crate) const MODE: &str = "LEASEHOLD_TORTURE_MODE";
/// File that makes workers end gracefully.
pub(crate) const STOP: &str = "stop";
/// Number of callers in one worker, which share its client.
pub(crate) const CALLERS: usize = 4;

/// Number of permits of each key, on stores that have permits.
const PERMITS: u32 = 3;

/// Wait budget of each acquire.
const PATIENCE: Duration = Duration::from_millis(500);

/// Faults of the worker itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Broken {
    /// Every second worker locks another key than it records.
    OtherKey,
    /// Ignores losses: records all holds as valid and released.
    Deaf,
    /// Records all holds as exclusive.
    OtherMode,
}

impl Broken {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::OtherKey => "other-key",
            Self::Deaf => "deaf",
            Self::OtherMode => "other-mode",
        }
    }

    fn of_this_process() -> Option<Self> {
        let name = std::env::var(BROKEN).ok()?;
        [Self::OtherKey, Self::Deaf, Self::OtherMode].into_iter().find(|broken| broken.name() == name)
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn worker() {
    let Ok(seed) = std::env::var(SEED) else { return };
    let seed: u64 = seed.parse().unwrap();
    let dir = PathBuf::from(std::env::var(DIR).unwrap());
    let (url, parent) = (std::env::var(URL).unwrap(), getppid());
    let clock = tokio::spawn(watch_the_clock(clock_record(&dir, seed)));
    let lock = loop {
        match leasehold::connect(&url).await {
            Ok(lock) => break lock,
            Err(_) if is_over(&dir, parent) => return,
            // The server might be unavailable.
            Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
        }
    };
    let callers: Vec<_> =
        (0..CALLERS).map(|n| tokio::spawn(caller(lock.clone(), seed, n, dir.clone(), parent))).collect();
    for caller in callers {
        caller.await.unwrap();
    }
    // Waits for releases of dropped guards. If the server is unavailable, the end of the process ends the sessions.
    let _ = lock.close().await;
    clock.abort();
}

/// Records steps of this process's wall clock.
async fn watch_the_clock(path: PathBuf) {
    let off = || {
        let wall = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default();
        wall.abs_diff(Duration::from_nanos(now()))
    };
    let mut record = File::create(path).unwrap();
    let mut known = off();
    loop {
        tokio::time::sleep(Duration::from_millis(20)).await;
        let seen = off();
        if seen.abs_diff(known) > Duration::from_secs(60) {
            line(&mut record, "C");
        }
        known = seen;
    }
}

/// Returns whether the stop file exists or the parent has died.
fn is_over(dir: &Path, parent: Option<Pid>) -> bool {
    dir.join(STOP).exists() || getppid() != parent
}

async fn caller(lock: Arc<dyn Lock>, seed: u64, number: usize, dir: PathBuf, parent: Option<Pid>) {
    let broken = Broken::of_this_process();
    let mut caller = Caller {
        record: File::create(record(&dir, seed, number)).unwrap(),
        random: fastrand::Rng::with_seed(seed * 64 + number as u64),
        suffix: if broken == Some(Broken::OtherKey) && seed.is_multiple_of(2) { "-other" } else { "" },
        is_deaf: broken == Some(Broken::Deaf),
        hides_modes: broken == Some(Broken::OtherMode),
        modes: modes(lock.capabilities().modes),
        dir: &dir,
    };
    while !is_over(&dir, parent) {
        #[cfg(feature = "election")]
        if caller.random.u8(..4) == 0 {
            caller.campaign(&lock).await;
            continue;
        }
        caller.section(&lock).await;
    }
}

/// Returns the modes of a store from which a caller chooses: half of its sections write, and the others have its further
/// modes.
pub(crate) fn modes(has: Modes) -> Vec<Mode> {
    let mut modes = Vec::new();
    modes.extend(has.shared.then_some(Mode::Shared));
    modes.extend((has.max_permits >= PERMITS).then_some(Mode::Permit { of: PERMITS }));
    let writes = modes.len().max(1);
    modes.extend(std::iter::repeat_n(Mode::Exclusive, writes));
    modes
}

/// Returns the path of a worker's record of clock steps.
pub(crate) fn clock_record(dir: &Path, seed: u64) -> PathBuf {
    dir.join(format!("clock-{seed}.record"))
}

/// Returns the path of the record of one caller of one worker.
pub(crate) fn record(dir: &Path, seed: u64, number: usize) -> PathBuf {
    dir.join(format!("worker-{seed}-{number}.record"))
}

struct Caller<'a> {
    record: File,
    random: fastrand::Rng,
    suffix: &'static str,
    is_deaf: bool,
    hides_modes: bool,
    modes: Vec<Mode>,
    dir: &'a Path,
}

impl Caller<'_> {
    async fn section(&mut self, lock: &Arc<dyn Lock>) {
        let key = KEYS[self.random.usize(..KEYS.len())];
        let mode = self.modes[self.random.usize(..self.modes.len())];
        let request = lock.key(format!("{key}{}", self.suffix)).mode(mode).wait(PATIENCE);
        let guard = match request.acquire().await {
            Ok(guard) => guard,
            Err(error) if error.kind() == ErrorKind::Timeout => return,
            Err(_) => {
                line(&mut self.record, &format!("F {}", now()));
                // A pause, because a refused connection fails at once.
                return tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        self.body(key).run(&guard).await;
        if self.random.u8(..20) == 0 {
            return drop(guard);
        }
        if guard.release().await.is_ok() || self.is_deaf {
            line(&mut self.record, "R");
        }
    }

    /// Campaigns for a key until a term is over, or gives up as a section does. The body of the term is a section.
    #[cfg(feature = "election")]
    async fn campaign(&mut self, lock: &Arc<dyn Lock>) {
        use leasehold::election::{Election, Next, State};

        let key = KEYS[self.random.usize(..KEYS.len())];
        let election = Election::new(Arc::clone(lock), format!("{key}{}", self.suffix));
        let handle = election.handle();
        let campaign = election.lead_boxed(|term| {
            let mut body = self.body(key);
            Box::pin(async move {
                body.run(term.guard()).await;
                Ok(Next::Done)
            })
        });
        let given_up = async {
            loop {
                tokio::time::sleep(PATIENCE).await;
                if !matches!(handle.state(), State::Leading { .. } | State::InDoubt { .. }) {
                    return;
                }
            }
        };
        let led = tokio::select! {
            led = campaign => led,
            () = given_up => return,
        };
        match led {
            Ok(()) => line(&mut self.record, "R"),
            // Another caller of this client campaigns for the key.
            Err(error) if error.kind() == ErrorKind::InvalidOption => {}
            Err(_) => line(&mut self.record, &format!("F {}", now())),
        }
    }

    fn body(&mut self, key: &'static str) -> Body {
        // A quarter of the sections takes longer.
        let pause = Duration::from_micros(if self.random.u8(..4) == 0 { self.random.u64(..4000) } else { 0 });
        let (dir, is_deaf, hides_modes) = (self.dir.to_owned(), self.is_deaf, self.hides_modes);
        Body { record: self.record.try_clone().unwrap(), dir, key, pause, is_deaf, hides_modes }
    }
}

/// The work of one section.
struct Body {
    record: File,
    dir: PathBuf,
    key: &'static str,
    pause: Duration,
    is_deaf: bool,
    hides_modes: bool,
}

impl Body {
    async fn run(&mut self, guard: &LockGuard) {
        let Self { key, pause, .. } = *self;
        let token = guard.token().map(FencingToken::as_u64);
        let held = if self.hides_modes { Held::Exclusive } else { Held::of(guard) };
        line(&mut self.record, &format!("B {key} {} {} {held}", now(), or_dash(token)));
        let (mut plain, mut fenced) = (None, None);
        if Held::of(guard) == Held::Exclusive {
            plain = register::add_one(&self.dir, key, None, pause).await;
            if token.is_some() {
                fenced = register::add_one(&self.dir, key, token, pause).await;
            }
        } else {
            // Holds for a time, because a reader does nothing else.
            tokio::time::sleep(pause).await;
        }
        // Reads the clock first, because a guard that is valid afterwards was valid at that time.
        let at = now();
        let validity = if guard.validity() == Validity::Valid || self.is_deaf { "valid" } else { "lost" };
        end(&mut self.record, at, validity, fenced, plain);
    }
}

/// The command of `leasehold run`: one section, with its key and token from the environment.
#[tokio::test]
async fn command() {
    let Ok(path) = std::env::var(RECORD) else { return };
    let (key, dir) = (std::env::var("LEASEHOLD_KEY").unwrap(), std::env::var(DIR).unwrap());
    let token = std::env::var("LEASEHOLD_TOKEN").ok().map(|token| token.parse().unwrap());
    let held = match std::env::var(MODE).as_deref() {
        Ok("shared") => Held::Shared,
        Ok("slots") => {
            let number = std::env::var("LEASEHOLD_PERMIT").unwrap().parse().unwrap();
            Held::Permit { number, of: PERMITS }
        }
        _ => Held::Exclusive,
    };
    let mut record = OpenOptions::new().append(true).create(true).open(path).unwrap();
    line(&mut record, &format!("B {key} {} {} {held}", now(), or_dash(token)));
    let pause = Duration::from_millis(fastrand::u64(..10));
    let (mut plain, mut fenced) = (None, None);
    if held == Held::Exclusive {
        plain = register::add_one(dir.as_ref(), &key, None, pause).await;
        if token.is_some() {
            fenced = register::add_one(dir.as_ref(), &key, token, pause).await;
        }
    } else {
        tokio::time::sleep(pause).await;
    }
    end(&mut record, now(), "-", fenced, plain);
}

fn end(record: &mut File, at: u64, validity: &str, fenced: Option<u64>, plain: Option<u64>) {
    line(record, &format!("E {at} {validity} {} {}", or_dash(fenced), plain.unwrap_or_default()));
}

fn or_dash(number: Option<u64>) -> String {
    number.map_or_else(|| "-".to_owned(), |number| number.to_string())
}

/// Appends a line in one write, so a kill cannot truncate it before a later line.
pub(crate) fn line(record: &mut File, line: &str) {
    record.write_all(format!("{line}\n").as_bytes()).unwrap();
}

/// Returns the monotonic time in nanoseconds, which is the same for all processes of the machine.
pub(crate) fn now() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    u64::try_from(now.tv_sec).unwrap() * 1_000_000_000 + u64::try_from(now.tv_nsec).unwrap()
}
