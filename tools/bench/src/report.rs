//! Statistics of the rounds, and rows that compare a result with a floor and a goal.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// A row of the table.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// The measured work.
    pub work: String,
    /// The result of this library.
    pub measured: String,
    /// The result of the floor, which is the same work done by hand, in the same rounds.
    pub floor: String,
    /// The library's result divided by the floor's.
    pub ratio: String,
    /// The wanted ratio or figure, or empty without one.
    pub goal: String,
    /// Whether the goal is met, or `None` without a goal.
    pub met: Option<bool>,
    /// The rounds of the library and of the floor, if the row compares series.
    pub series: Vec<Series>,
}

impl Row {
    /// Returns the cells for a table with the head [`HEAD`].
    #[must_use]
    pub fn cells(&self) -> Vec<String> {
        let met = self.met.map_or("", |met| if met { "yes" } else { "NO" });
        let Self { work, measured, floor, ratio, goal, .. } = self;
        vec![work.clone(), measured.clone(), floor.clone(), ratio.clone(), goal.clone(), met.to_owned()]
    }
}

/// The head of a table of rows.
pub const HEAD: [&str; 6] = ["Work", "Measured", "Floor, same rounds", "Ratio", "Goal", "Met"];

/// Prints the rows in Markdown with aligned columns.
pub fn print(rows: &[Row]) {
    print!("{}", table(&HEAD, &rows.iter().map(Row::cells).collect::<Vec<_>>()));
}

/// Returns a table in Markdown with aligned columns.
#[must_use]
pub fn table(head: &[&str], rows: &[Vec<String>]) -> String {
    let head: Vec<String> = head.iter().map(|&cell| cell.to_owned()).collect();
    let lines: Vec<&Vec<String>> = std::iter::once(&head).chain(rows).collect();
    let width = |at: usize| {
        let cells = lines.iter().filter_map(|line| line.get(at));
        cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..head.len()).map(width).collect();
    let mut text = String::new();
    for (number, line) in lines.iter().enumerate() {
        let cells: Vec<_> = line.iter().zip(&widths).map(|(cell, width)| format!("{cell:width$}")).collect();
        text += &format!("| {} |\n", cells.join(" | "));
        if number == 0 {
            let rules: Vec<_> = widths.iter().map(|width| "-".repeat(width + 2)).collect();
            text += &format!("|{}|\n", rules.join("|"));
        }
    }
    text
}

/// Returns a table in Markdown without spaces around the cells, which is short.
#[must_use]
pub fn compact(head: &[&str], rows: &[Vec<String>]) -> String {
    let rules = "|---".repeat(head.len());
    let lines = rows.iter().map(|row| format!("|{}|\n", row.join("|")));
    format!("|{}|\n{rules}|\n{}", head.join("|"), lines.collect::<String>())
}

/// The results of one contender, round by round.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Series {
    /// The contender.
    pub name: String,
    /// One figure per round.
    pub rounds: Vec<f64>,
}

impl Series {
    /// Returns a series without rounds.
    #[must_use]
    pub fn new(name: &str) -> Self {
        Self { name: name.to_owned(), rounds: Vec::new() }
    }

    /// Returns the median of the rounds.
    #[must_use]
    pub fn median(&self) -> f64 {
        quantile(&self.rounds, 0.5)
    }

    /// Returns the median of the rounds' ratios, because a change of the machine's load between rounds must not
    /// count.
    #[must_use]
    pub fn ratio(&self, floor: &Self) -> f64 {
        let ratios: Vec<f64> =
            self.rounds.iter().zip(&floor.rounds).map(|(ours, theirs)| ours / theirs).collect();
        quantile(&ratios, 0.5)
    }

    /// Returns the range in which the middle half of the rounds lies, as rates.
    #[must_use]
    pub fn spread(&self) -> String {
        format!("{} to {}", thousands(quantile(&self.rounds, 0.25)), thousands(quantile(&self.rounds, 0.75)))
    }

    /// Returns the name with the median and the spread as rates, for the table.
    #[must_use]
    pub fn rate(&self) -> String {
        format!("{} {}/s ({})", self.name, thousands(self.median()), self.spread())
    }
}

/// Returns a row of rates, in which `ours` must reach `goal` times the floor.
#[must_use]
pub fn row(work: &str, ours: &Series, floor: &Series, goal: impl Into<Option<f64>>) -> Row {
    let (ratio, goal) = (ours.ratio(floor), goal.into());
    Row {
        work: work.to_owned(),
        measured: ours.rate(),
        floor: floor.rate(),
        ratio: format!("{ratio:.2}"),
        goal: goal.map(|goal| format!("at least {goal}")).unwrap_or_default(),
        met: goal.map(|goal| ratio >= goal),
        series: vec![ours.clone(), floor.clone()],
    }
}

/// Returns a row of times in milliseconds, in which `ours` must take at most `goal` times the time of the floor.
#[must_use]
pub fn times(work: &str, ours: &Series, floor: &Series, goal: impl Into<Option<f64>>) -> Row {
    let (ratio, goal) = (ours.ratio(floor), goal.into());
    let shown = |series: &Series| {
        let [low, high] = [0.25, 0.75].map(|share| quantile(&series.rounds, share));
        format!("{} {:.2} ms ({low:.2} to {high:.2})", series.name, series.median())
    };
    Row {
        work: work.to_owned(),
        measured: shown(ours),
        floor: shown(floor),
        ratio: format!("{ratio:.2} times its time"),
        goal: goal.map(|goal| format!("at most {goal}")).unwrap_or_default(),
        met: goal.map(|goal| ratio <= goal),
        series: vec![ours.clone(), floor.clone()],
    }
}

/// Returns the value below which `share` of `values` are. 0.5 is the median.
#[must_use]
pub fn quantile(values: &[f64], share: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let last = sorted.len().saturating_sub(1);
    sorted.get((last as f64 * share).round() as usize).copied().unwrap_or(f64::NAN)
}

/// Formats a rate in thousands, or in millions, with its significant digits.
#[must_use]
pub fn thousands(rate: f64) -> String {
    match rate {
        rate if rate >= 1_000_000.0 => format!("{:.2}M", rate / 1e6),
        rate if rate >= 100_000.0 => format!("{:.0}k", rate / 1000.0),
        rate if rate >= 10_000.0 => format!("{:.1}k", rate / 1000.0),
        rate => format!("{:.2}k", rate / 1000.0),
    }
}

/// Converts a duration to microseconds.
#[must_use]
pub fn micros(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e6
}

/// Converts a duration to milliseconds.
#[must_use]
pub fn millis(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    fn series(rounds: &[f64]) -> Series {
        Series { name: "it".to_owned(), rounds: rounds.to_vec() }
    }

    #[test]
    fn a_quantile_is_one_of_the_values() {
        let values = [5.0, 1.0, 4.0, 2.0, 3.0];
        assert_eq!([0.0, 0.5, 0.99, 1.0].map(|share| quantile(&values, share)), [1.0, 3.0, 5.0, 5.0]);
        assert_eq!(quantile(&[7.0], 0.99), 7.0);
        assert!(quantile(&[], 0.5).is_nan(), "no value is no figure");
    }

    #[test]
    fn a_ratio_is_taken_round_by_round_so_that_a_slow_round_of_both_does_not_count() {
        // The medians alone would give 3 / 2.
        let (ours, floor) = (series(&[2.0, 200.0, 3.0]), series(&[1.0, 100.0, 2.0]));
        assert_eq!(ours.ratio(&floor), 2.0);
        assert_eq!(series(&[1.0, 2.0, 9.0]).median(), 2.0);
    }

    #[test]
    fn a_rate_must_reach_its_goal_and_a_time_must_not_exceed_it() {
        let (fast, slow) = (series(&[300.0]), series(&[100.0]));
        let met = |row: Row| (row.ratio, row.met);
        assert_eq!(met(row("", &fast, &slow, 3.0)), ("3.00".to_owned(), Some(true)));
        assert_eq!(met(row("", &fast, &slow, 3.1)), ("3.00".to_owned(), Some(false)));
        assert_eq!(row("", &fast, &slow, None).met, None);
        assert_eq!(times("", &slow, &fast, 1.0).met, Some(true));
        assert_eq!(times("", &fast, &slow, 2.0).met, Some(false));
    }

    #[test]
    fn rates_keep_three_digits() {
        let shown = [4_321.0, 43_210.0, 432_100.0, 4_321_000.0].map(thousands);
        assert_eq!(shown, ["4.32k", "43.2k", "432k", "4.32M"]);
    }

    #[test]
    fn a_compact_table_has_no_spaces_around_its_cells() {
        let text = compact(&["a", "longer"], &[vec!["wide cell".to_owned(), "b".to_owned()]]);
        assert_eq!(text, "|a|longer|\n|---|---|\n|wide cell|b|\n");
    }

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let text = table(&["a", "longer"], &[vec!["wide cell".to_owned(), "b".to_owned()]]);
        assert_eq!(text, "| a         | longer |\n|-----------|--------|\n| wide cell | b      |\n");
    }
}
