//! The results as a table.

use std::time::Duration;

/// A row of the table.
#[derive(Debug)]
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
}

/// Prints the table in Markdown with aligned columns.
pub fn print(rows: &[Row]) {
    let head = ["work", "measured", "floor, same rounds", "ratio", "goal", "met"].map(str::to_owned);
    let cells = |row: &Row| {
        let met = row.met.map_or("", |met| if met { "yes" } else { "NO" });
        let Row { work, measured, floor, ratio, goal, .. } = row;
        [work.clone(), measured.clone(), floor.clone(), ratio.clone(), goal.clone(), met.to_owned()]
    };
    let lines: Vec<[String; 6]> = std::iter::once(head).chain(rows.iter().map(cells)).collect();
    let width = |at: usize| lines.iter().map(|line| line[at].chars().count()).max().unwrap_or(0);
    let widths: [usize; 6] = std::array::from_fn(width);
    for (number, line) in lines.iter().enumerate() {
        let cells: Vec<_> = line.iter().zip(widths).map(|(cell, width)| format!("{cell:width$}")).collect();
        println!("| {} |", cells.join(" | "));
        if number == 0 {
            println!("|{}|", widths.map(|width| "-".repeat(width + 2)).join("|"));
        }
    }
}

/// The results of one contender, round by round.
#[derive(Debug)]
pub struct Series {
    /// The contender.
    pub name: String,
    /// One figure per round.
    pub rounds: Vec<f64>,
}

impl Series {
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

    /// Returns the name with the median as a rate, for the table.
    #[must_use]
    pub fn rate(&self) -> String {
        format!("{} {}/s", self.name, thousands(self.median()))
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

/// Formats a rate in thousands with its significant digits.
#[must_use]
pub fn thousands(rate: f64) -> String {
    match rate {
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
