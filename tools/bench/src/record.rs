//! The results of a run, as they are written to the JSON file and read for the page.

use serde::{Deserialize, Serialize};

use crate::machine::Machine;
use crate::report::{Row, Series};

/// All results of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// The machine, and the versions of the measured programs.
    pub machine: Machine,
    /// Whether measurements were shortened. Such figures mean nothing.
    pub smoke: bool,
    /// The groups in their order.
    pub groups: Vec<Group>,
}

/// The results of a group.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Group {
    /// Name of the group on the command line.
    pub name: String,
    /// Work with a floor, and mostly with a goal.
    pub rows: Vec<Row>,
    /// Contests with peers.
    pub contests: Vec<Contest>,
    /// Charts made of the same rounds.
    pub charts: Vec<Chart>,
    /// Sentences about gaps and findings of this run.
    pub notes: Vec<String>,
    /// Duration of the measurement, seconds.
    pub seconds: f64,
}

impl Group {
    /// Returns a group without results.
    #[must_use]
    pub fn new(name: &str) -> Self {
        Self { name: name.to_owned(), ..Self::default() }
    }

    /// Prints the sentence and records it for the page.
    pub fn note(&mut self, sentence: impl Into<String>) {
        let sentence = sentence.into();
        println!("{sentence}");
        self.notes.push(sentence);
    }
}

/// Contenders that did the same work in the same rounds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Contest {
    /// The work.
    pub title: String,
    /// Name of the entry that the others are compared with.
    pub baseline: String,
    /// The contenders.
    pub entries: Vec<Entry>,
}

impl Contest {
    /// Returns how many times the baseline's rate the entry reached.
    #[must_use]
    pub fn ratio(&self, entry: &Entry) -> Option<f64> {
        let baseline = self.entries.iter().find(|entry| entry.series.name == self.baseline)?;
        let ratio = entry.series.ratio(&baseline.series);
        ratio.is_finite().then_some(ratio)
    }
}

/// The results of a contender.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Entry {
    /// The contender, with its cycles per second in each round. Without rounds it was missing on this machine.
    pub series: Series,
    /// Its promises, and the gaps in them.
    pub promise: String,
    /// Median and 99th percentile of a cycle, microseconds.
    pub p50: Option<f64>,
    /// See `p50`.
    pub p99: Option<f64>,
    /// Its costs on the server.
    pub costs: Costs,
}

/// The costs of a contender. `None` if nothing counts them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Costs {
    /// Connections, with all tasks at work.
    pub connections: Option<f64>,
    /// Private memory of the server's processes for these connections, KiB.
    pub memory: Option<f64>,
    /// Statements or commands per cycle, with all tasks at work.
    pub statements: Option<f64>,
    /// Round trips per cycle, with all tasks at work.
    pub trips: Option<f64>,
    /// Round trips per cycle of a task alone.
    pub trips_alone: Option<f64>,
}

/// A chart of lines.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Chart {
    /// Name of its file without the extension.
    pub file: String,
    /// Its title.
    pub title: String,
    /// The horizontal axis.
    pub x: Axis,
    /// The vertical axis.
    pub y: Axis,
    /// The lines.
    pub lines: Vec<Line>,
}

/// An axis of a chart.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Axis {
    /// Its quantity and unit.
    pub label: String,
    /// Whether equal distances are equal ratios.
    pub logarithmic: bool,
}

impl Axis {
    /// Returns an axis with equal distances.
    #[must_use]
    pub fn linear(label: &str) -> Self {
        Self { label: label.to_owned(), logarithmic: false }
    }

    /// Returns a logarithmic axis.
    #[must_use]
    pub fn logarithmic(label: &str) -> Self {
        Self { label: label.to_owned(), logarithmic: true }
    }
}

/// A line of a chart.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Line {
    /// The contender.
    pub name: String,
    /// Points from left to right.
    pub points: Vec<(f64, f64)>,
}

impl Line {
    /// Returns the distribution of `values`: for each of a hundred shares in percent, the value below which this share
    /// lies.
    #[must_use]
    pub fn distribution(name: &str, values: &[f64]) -> Self {
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        let last = sorted.len().saturating_sub(1);
        let point = |percent: usize| {
            let value = sorted.get(last * percent / 100)?;
            Some((*value, percent as f64))
        };
        Self { name: name.to_owned(), points: (0..=100).filter_map(point).collect() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_read_as_they_were_written() {
        let series = Series { name: "ours".to_owned(), rounds: vec![1.5, 2.0] };
        let entry = Entry { series: series.clone(), p50: Some(0.25), ..Entry::default() };
        let chart = Chart {
            file: "f".to_owned(),
            title: "t".to_owned(),
            x: Axis::linear("x"),
            y: Axis::logarithmic("y"),
            lines: vec![Line { name: "ours".to_owned(), points: vec![(1.0, 2.0)] }],
        };
        let group = Group {
            rows: vec![Row { series: vec![series], met: Some(true), ..Row::default() }],
            contests: vec![Contest {
                title: "c".to_owned(),
                baseline: "ours".to_owned(),
                entries: vec![entry],
            }],
            charts: vec![chart],
            notes: vec!["n".to_owned()],
            ..Group::new("memory")
        };
        let record = Record { machine: Machine::default(), smoke: true, groups: vec![group] };
        let text = serde_json::to_string(&record).unwrap();
        assert_eq!(serde_json::from_str::<Record>(&text).unwrap(), record);
    }

    #[test]
    fn a_missing_contender_has_no_ratio() {
        let entry = |name: &str, rounds: &[f64]| Entry {
            series: Series { name: name.to_owned(), rounds: rounds.to_vec() },
            ..Entry::default()
        };
        let entries = vec![entry("ours", &[4.0]), entry("base", &[2.0]), entry("missing", &[])];
        let contest = Contest { title: String::new(), baseline: "base".to_owned(), entries };
        let ratios: Vec<_> = contest.entries.iter().map(|entry| contest.ratio(entry)).collect();
        assert_eq!(ratios, [Some(2.0), Some(1.0), None]);
    }

    #[test]
    fn a_distribution_rises_from_the_least_to_the_greatest_value() {
        let values: Vec<f64> = (0..1000).rev().map(f64::from).collect();
        let line = Line::distribution("x", &values);
        assert_eq!(line.points.len(), 101);
        assert_eq!((line.points[0], line.points[100]), ((0.0, 0.0), (999.0, 100.0)));
        assert_eq!(line.points[50], (499.0, 50.0));
        assert!(Line::distribution("none", &[]).points.is_empty());
    }
}
