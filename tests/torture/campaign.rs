//! One store, its workers, and a sequence of faults.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use leasehold::{Capabilities, ListQuery, Lock, LockExt as _};
use test_setup::{programs, torture as names};

use crate::checker::{self, Circumstances, Done, Findings};
use crate::clock::{self, Clock};
use crate::disk::{self, Disk};
use crate::faults::{self, Fault, Scene};
use crate::members::Members;
use crate::processes::{Commands, How, Workers};
use crate::record;
use crate::register::{self, KEYS};
use crate::server::Server;
use crate::stalls::Stalls;
use crate::worker::{self, Broken, now};

/// Tolerance beyond the declared bounds, for retried calls and a busy machine.
const SLACK: Duration = Duration::from_secs(60);
/// Extra time for faults that had no effect yet, before the campaign ends.
pub(crate) const FUTILE: Duration = Duration::from_secs(120);
/// Minimum number of grants of a meaningful campaign.
const MINIMUM: usize = 100;

/// A store and its faults.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Store {
    pub(crate) name: &'static str,
    pub(crate) place: Place,
    pub(crate) faults: &'static [Fault],
    /// Faults of a short run, if these are not all.
    pub(crate) in_short: Option<&'static [Fault]>,
    /// Faults by which the store ends holds before their holders notice.
    pub(crate) gaps: &'static [Fault],
}

/// The place of a store's locks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// A directory.
    Files,
    /// A Postgres database, with the scheme and further parameters of the store's URL.
    Postgres(&'static str, &'static str),
    /// A cluster of etcd.
    Etcd,
}

pub(crate) const STORES: [Store; 6] = [
    Store { gaps: &[], ..store(names::STORES[0], Place::Files, faults::OF_FILES) },
    store(names::STORES[1], Place::Postgres("postgres+advisory", ""), faults::OF_POSTGRES),
    store(names::STORES[2], Place::Postgres("postgres+advisory-xact", ""), faults::OF_POSTGRES),
    // Rows stay locked after a fault.
    Store { gaps: &[], ..store(names::STORES[3], Place::Postgres("postgres+row", ""), faults::OF_ROWS) },
    Store {
        gaps: faults::THAT_END_LEASES,
        ..store(names::STORES[4], Place::Postgres("postgres+ttl", "&ttl=2s"), faults::OF_POSTGRES)
    },
    Store {
        in_short: Some(faults::OF_ETCD_IN_SHORT),
        gaps: faults::THAT_REVOKE_LEASES,
        ..store(names::STORES[5], Place::Etcd, faults::OF_ETCD)
    },
];

const fn store(name: &'static str, place: Place, faults: &'static [Fault]) -> Store {
    Store { name, place, faults, in_short: None, gaps: faults::THAT_END_SESSIONS }
}

/// Settings of a campaign.
#[derive(Clone, Debug, Default)]
pub(crate) struct Settings {
    pub(crate) seed: u64,
    /// Minimum time per store. A campaign continues until each fault has taken effect.
    pub(crate) time: Duration,
    /// Wanted faults, or all that the machine supports if empty.
    pub(crate) faults: Vec<Fault>,
    pub(crate) broken: Option<Broken>,
}

/// Results of a campaign.
#[derive(Debug)]
pub(crate) struct Report {
    pub(crate) store: &'static str,
    pub(crate) elapsed: Duration,
    /// Number of times that each fault happened, and that it took effect.
    pub(crate) faults: BTreeMap<Fault, (usize, usize)>,
    /// Faults that this machine does not support, with the reason.
    pub(crate) left_out: Vec<String>,
    pub(crate) stalls: usize,
    pub(crate) findings: Findings,
}

impl Report {
    /// Returns the faults that had no effect in the whole campaign.
    pub(crate) fn without_effect(&self) -> impl Iterator<Item = &'static str> {
        self.faults.iter().filter(|(_, (_, effective))| *effective == 0).map(|(fault, _)| fault.name())
    }
}

/// Faults that this machine supports for a store, and the tools for them.
struct Means {
    faults: Vec<Fault>,
    left_out: Vec<String>,
    disk: Option<Disk>,
    faketime: Option<PathBuf>,
}

impl Means {
    /// Finds the faults of a store. `locks` is the directory of the file store.
    fn find(store: Store, settings: &Settings, locks: &Path) -> Self {
        let (wanted, is_named) = (&settings.faults, !settings.faults.is_empty());
        let in_short = store.in_short.filter(|_| settings.time.is_zero() && !is_named);
        let is_wanted = |fault: &Fault| !is_named || wanted.contains(fault);
        let faults = in_short.unwrap_or(store.faults).iter().copied().filter(is_wanted).collect();
        let mut means = Self { faults, left_out: Vec::new(), disk: None, faketime: None };
        if means.faults.contains(&Fault::DiskFull) {
            if store.place == Place::Files {
                means.disk = means.need(Fault::DiskFull, is_named, Disk::mount(locks));
            } else {
                means.need(Fault::DiskFull, is_named, disk::prlimit());
            }
        }
        if means.faults.contains(&Fault::PutBack) {
            means.need(Fault::PutBack, is_named, programs::etcd());
        }
        if !cfg!(target_os = "linux") && means.faults.contains(&Fault::KillCommand) {
            let kills = "elsewhere than on Linux a command outlives the `leasehold run` that is killed";
            means.need(Fault::KillCommand, is_named, Err::<(), _>(kills.to_owned()));
        }
        // Without `faketime`, the ends of leases are moved instead.
        let has_instead = |fault| fault == Fault::ServerClock && store.gaps == faults::THAT_END_LEASES;
        let faketime = clock::faketime();
        for fault in [Fault::ServerClock, Fault::ClientClock] {
            if means.faults.contains(&fault) && !has_instead(fault) {
                means.need(fault, is_named, faketime.clone());
            }
        }
        means.faketime = faketime.ok();
        means
    }

    /// Returns the tool of a fault. If it is missing, fails if the fault was named, and otherwise removes the fault.
    fn need<T>(&mut self, fault: Fault, is_named: bool, means: Result<T, String>) -> Option<T> {
        let reason = match means {
            Ok(means) => return Some(means),
            Err(reason) => format!("{}: {reason}", fault.name()),
        };
        assert!(!is_named, "{reason}");
        self.faults.retain(|kind| *kind != fault);
        self.left_out.push(reason);
        None
    }
}

/// Tortures one store. `None` if none of the wanted faults can happen to it.
pub(crate) async fn torture(store: Store, settings: &Settings) -> Option<Report> {
    let home = tempfile::tempdir().unwrap();
    let (dir, locks) = (home.path().join("records"), home.path().join("locks"));
    std::fs::create_dir(&dir).unwrap();
    std::fs::create_dir(&locks).unwrap();
    let Means { faults: kinds, left_out, disk, faketime } = Means::find(store, settings, &locks);
    if kinds.is_empty() {
        return None;
    }
    let (server, members, url) = match store.place {
        Place::Files => (None, None, format!("file://{}", locks.display())),
        Place::Postgres(scheme, parameters) => {
            let (server, url) = Server::start(scheme, parameters, faketime.as_deref()).await;
            (Some(server), None, url)
        }
        Place::Etcd => {
            let (members, url) = Members::start().await;
            (None, Some(members), url)
        }
    };
    let declared = connect(&url).await.capabilities().clone();
    let (dir_of_records, modes) = (dir.clone(), worker::modes(declared.modes));
    let how = How { url: url.clone(), dir: dir_of_records, broken: settings.broken, modes };
    let commands = Commands::start(&how);
    let workers = Workers::start(how, faketime.as_deref().map(Clock::new), settings.seed);
    let mut scene =
        Scene { workers, commands, server, members, disk, has_leases: declared.lease.is_some(), dir: &dir };
    let mut circumstances = promised(&declared);
    let (stalls, begun) = (Stalls::watch(), Instant::now());
    let counts = go_on(&mut scene, &kinds, store.gaps, settings, &mut circumstances).await;
    circumstances.end = now();
    scene.commands.end();
    scene.workers.end();
    circumstances.stalls = stalls.seen();
    let elapsed = begun.elapsed();
    let sections: Vec<_> =
        faults::records(&dir).iter().flat_map(|text| record::read(text).sections).collect();
    let mut findings = checker::check(&sections, &circumstances);
    if findings.grants < MINIMUM {
        findings.violations.push(format!("{} grants prove nothing", findings.grants));
    }
    findings.violations.extend(leftovers(&url, &scene, &locks, circumstances.bound).await);
    drop(scene);
    if !findings.violations.is_empty() && settings.broken.is_none() {
        findings.violations.push(format!("the records are kept in {}", home.keep().display()));
    }
    Some(Report {
        store: store.name,
        elapsed,
        faults: counts,
        left_out,
        stalls: circumstances.stalls.len(),
        findings,
    })
}

/// Connects the harness. Retries for a minute, because the machine might be busy.
async fn connect(url: &str) -> Arc<dyn Lock> {
    let begun = Instant::now();
    loop {
        match leasehold::connect(url).await {
            Ok(lock) => return lock,
            Err(error) => assert!(begun.elapsed() < Duration::from_secs(60), "cannot connect: {error}"),
        }
    }
}

fn promised(declared: &Capabilities) -> Circumstances {
    let bound = declared.crash_release.unwrap_or(declared.loss_detection) + declared.handover + SLACK;
    // Without a confirmation by the store, a hold ends with its lease. A store declares its bound for the longest lease.
    let lease = declared.lease.as_ref().and_then(|bounds| bounds.default);
    let loss = lease.map_or(declared.loss_detection, |ttl| declared.loss_detection.min(ttl));
    Circumstances { bound, loss, ..Circumstances::default() }
}

/// Runs faults in sequence until the time is over and each has taken effect. Returns the counts of each fault.
async fn go_on(
    scene: &mut Scene<'_>,
    kinds: &[Fault],
    gaps: &[Fault],
    settings: &Settings,
    circumstances: &mut Circumstances,
) -> BTreeMap<Fault, (usize, usize)> {
    let mut random = fastrand::Rng::with_seed(settings.seed);
    let mut counts: BTreeMap<Fault, (usize, usize)> = kinds.iter().map(|fault| (*fault, (0, 0))).collect();
    let mut next = kinds.to_vec();
    random.shuffle(&mut next);
    let begun = Instant::now();
    register::settle(scene.dir, SLACK).await;
    loop {
        let missing: Vec<_> =
            kinds.iter().filter(|fault| counts[fault].1 == 0 && !next.contains(fault)).copied().collect();
        let is_over = begun.elapsed() > settings.time && next.is_empty();
        if is_over && (missing.is_empty() || begun.elapsed() > settings.time + FUTILE) {
            return counts;
        }
        let fault = next.pop().unwrap_or_else(|| {
            let candidates = if is_over { &missing } else { kinds };
            candidates[random.usize(..candidates.len())]
        });
        // Longer pauses in a long run, because it also measures grants.
        let calm = if settings.time.is_zero() { 50..500 } else { 100..1500 };
        tokio::time::sleep(Duration::from_millis(random.u64(calm))).await;
        let begin = now();
        let took_effect = scene.disturb(fault, &mut random).await;
        let gap = gaps.contains(&fault).then_some(circumstances.loss);
        circumstances.faults.push(Done { fault: fault.name(), begin, end: now(), gap });
        let count = counts.entry(fault).or_default();
        *count = (count.0 + 1, count.1 + usize::from(took_effect));
        // The next fault starts during this fault's effects or after them.
        if random.bool() {
            register::settle(scene.dir, circumstances.bound + Duration::from_secs(1)).await;
        }
    }
}

/// Returns the leftovers of ended workers: held keys, keys that cannot be acquired, and the server's sessions, locks and
/// files.
async fn leftovers(url: &str, scene: &Scene<'_>, locks: &Path, bound: Duration) -> Vec<String> {
    let mut left = Vec::new();
    let lock = connect(url).await;
    let begun = Instant::now();
    let held = loop {
        // Polls, because keys of killed holders stay held for the declared time.
        let held = match lock.admin().unwrap().list(&ListQuery::new()).await {
            Ok(held) => held.iter().map(|hold| format!("is still held: {hold:?}")).collect(),
            Err(error) => vec![format!("cannot be listed: {error}")],
        };
        if held.is_empty() || begun.elapsed() > bound {
            break held;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    };
    for key in KEYS.iter().filter(|_| held.is_empty()) {
        let had = match lock.key(*key).wait(bound).acquire().await {
            Ok(guard) => guard.release().await,
            Err(error) => Err(error),
        };
        left.extend(had.err().map(|error| format!("{key} cannot be had any more: {error}")));
    }
    left.extend(held);
    lock.close().await.unwrap();
    drop(lock);
    if scene.server.is_some() || scene.members.is_some() {
        let begun = Instant::now();
        let known = loop {
            let known = match (&scene.server, &scene.members) {
                (Some(server), _) => server.leftovers().await,
                (None, Some(members)) => members.leftovers().await,
                (None, None) => Vec::new(),
            };
            if known.is_empty() || begun.elapsed() > bound {
                break known;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        };
        left.extend(known.iter().map(|known| format!("is still at the server: {known}")));
    } else {
        let names = std::fs::read_dir(locks).unwrap().map(|entry| entry.unwrap().file_name());
        let is_temporary = |name: &std::ffi::OsString| name.to_string_lossy().ends_with(".tmp");
        let temporary = names.filter(is_temporary).count();
        // A killed writer leaves at most one temporary file per key, which the next writer overwrites.
        if temporary > KEYS.len() {
            left.push(format!("{temporary} temporary files are left"));
        }
    }
    left
}
