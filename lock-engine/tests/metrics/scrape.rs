//! The program's recorder and its scraped metrics.

use std::collections::BTreeMap;
use std::sync::OnceLock;

use metrics_exporter_prometheus::{BuildError, Matcher, PrometheusBuilder, PrometheusHandle};
use tokio::sync::{Mutex, MutexGuard};

static ALONE: Mutex<()> = Mutex::const_new(());

type Labels = BTreeMap<String, String>;

pub(crate) struct Scrape {
    pub(crate) text: String,
    pub(crate) types: BTreeMap<String, String>,
    pub(crate) help: BTreeMap<String, String>,
    pub(crate) series: Vec<(String, Labels, f64)>,
}

/// Installs the recorder as `docs/metrics.md` shows.
fn install() -> Result<PrometheusHandle, BuildError> {
    let seconds =
        [0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0, 10000.0];
    let shares = [0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9];
    PrometheusBuilder::new()
        .with_recommended_naming(true)
        .set_buckets_for_metric(Matcher::Full("leasehold.lock.wait_time".into()), &seconds)?
        .set_buckets_for_metric(Matcher::Full("leasehold.lock.hold_time".into()), &seconds)?
        .set_buckets_for_metric(Matcher::Full("leasehold.lock.renewal_margin".into()), &shares)?
        .install_recorder()
}

/// Returns the recorder of this process. Call it before the first engine starts.
pub(crate) fn recorder() -> &'static PrometheusHandle {
    static RECORDER: OnceLock<PrometheusHandle> = OnceLock::new();
    RECORDER.get_or_init(|| install().unwrap())
}

/// Admits one test at a time, because the exporter can lose an observation during a scrape.
pub(crate) async fn alone() -> MutexGuard<'static, ()> {
    ALONE.lock().await
}

/// Admits one test at a time, as [`alone`], outside of a runtime.
pub(crate) fn alone_blocking() -> MutexGuard<'static, ()> {
    ALONE.blocking_lock()
}

/// Returns the current metrics.
pub(crate) fn scrape() -> Scrape {
    let text = recorder().render();
    let (mut types, mut help, mut series) = (BTreeMap::new(), BTreeMap::new(), Vec::new());
    for line in text.lines().filter(|line| !line.is_empty()) {
        let words: Vec<&str> = line.splitn(4, ' ').collect();
        match words[..] {
            ["#", "TYPE", name, what] => types.extend([(name.to_owned(), what.to_owned())]),
            ["#", "HELP", name, what] => help.extend([(name.to_owned(), what.to_owned())]),
            _ => series.push(series_of(line)),
        }
    }
    Scrape { text, types, help, series }
}

/// Parses a line such as `name{label="value",...} 1`.
fn series_of(line: &str) -> (String, Labels, f64) {
    let (series, value) = line.rsplit_once(' ').unwrap();
    let (name, labels) = series.split_once('{').unwrap_or((series, "}"));
    let labels = labels.strip_suffix('}').unwrap();
    let label = |label: &str| {
        let (name, value) = label.split_once("=\"").unwrap();
        (name.to_owned(), value.strip_suffix('"').unwrap().to_owned())
    };
    let labels = labels.split_terminator(',').map(label).collect();
    (name.to_owned(), labels, value.parse().unwrap())
}

impl Scrape {
    /// Returns the value of the series with exactly these labels.
    pub(crate) fn value(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        self.find(name, labels).unwrap_or_else(|| panic!("no {name} {labels:?} in\n{}", self.text))
    }

    fn find(&self, name: &str, labels: &[(&str, &str)]) -> Option<f64> {
        let labels: Labels = labels.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        let mut found = self.series.iter().filter(|(n, l, _)| n == name && *l == labels);
        let value = found.next().map(|(_, _, value)| *value);
        assert!(found.next().is_none(), "{name} {labels:?} twice in\n{}", self.text);
        value
    }

    /// Returns the sum over all series of `name` with at least these labels.
    pub(crate) fn sum(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        let with = |l: &Labels| labels.iter().all(|(k, v)| l.get(*k).is_some_and(|value| value == v));
        self.series.iter().filter(|(n, l, _)| n == name && with(l)).map(|(_, _, value)| value).sum()
    }
}

/// Reads the metrics of one class of keys at one store.
pub(crate) struct Of<'a> {
    pub(crate) store: &'a str,
    pub(crate) class: &'a str,
}

impl Of<'_> {
    pub(crate) fn value(&self, name: &str) -> f64 {
        scrape().value(name, &[("store", self.store), ("key_class", self.class)])
    }

    /// Returns the number of observations and their sum.
    pub(crate) fn histogram(&self, name: &str) -> (f64, f64) {
        (self.value(&format!("{name}_count")), self.value(&format!("{name}_sum")))
    }

    pub(crate) fn held(&self) -> f64 {
        self.value("leasehold_lock_held")
    }

    pub(crate) fn waiting(&self) -> f64 {
        self.value("leasehold_lock_waiting")
    }

    /// Returns the number of attempts by outcome, without zeros.
    pub(crate) fn attempts(&self) -> Vec<(String, f64)> {
        self.by("leasehold_lock_attempts_total", "outcome")
    }

    pub(crate) fn lost(&self) -> Vec<(String, f64)> {
        self.by("leasehold_lock_lost_total", "reason")
    }

    /// Asserts that no key is held, no caller waits, and each grant has ended once.
    pub(crate) fn assert_at_rest(&self) {
        assert_eq!((self.held(), self.waiting()), (0.0, 0.0), "{} {}", self.store, self.class);
        let (waited, _) = self.histogram("leasehold_lock_wait_time_seconds");
        let (held, _) = self.histogram("leasehold_lock_hold_time_seconds");
        assert_eq!(waited, held, "{} {}", self.store, self.class);
    }

    fn by(&self, name: &str, label: &str) -> Vec<(String, f64)> {
        let mut all: Vec<_> = scrape()
            .series
            .into_iter()
            .filter(|(n, l, value)| {
                n == name && l["store"] == self.store && l["key_class"] == self.class && *value > 0.0
            })
            .map(|(_, labels, value)| (labels[label].clone(), value))
            .collect();
        all.sort_by(|a, b| a.0.cmp(&b.0));
        all
    }
}

/// Returns `expected` with owned names, for comparisons.
pub(crate) fn counts(expected: &[(&str, f64)]) -> Vec<(String, f64)> {
    expected.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect()
}
