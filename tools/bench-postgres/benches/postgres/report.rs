//! What was measured, as people read it.

use std::time::Duration;

/// One line of the table.
pub(crate) struct Row {
    pub(crate) work: String,
    pub(crate) measured: String,
    pub(crate) floor: String,
    pub(crate) ratio: String,
    pub(crate) goal: String,
    /// `None` where there is no goal: for comparison only.
    pub(crate) met: Option<bool>,
}

/// The table, in Markdown, with columns that line up.
pub(crate) fn print(rows: &[Row]) {
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

/// What one contender did, round by round.
#[derive(Debug)]
pub(crate) struct Series {
    pub(crate) name: String,
    pub(crate) rounds: Vec<f64>,
}

impl Series {
    pub(crate) fn median(&self) -> f64 {
        quantile(&self.rounds, 0.5)
    }

    /// The median of the rounds' ratios: what the machine does between two rounds does not count.
    pub(crate) fn ratio(&self, floor: &Self) -> f64 {
        let ratios: Vec<f64> =
            self.rounds.iter().zip(&floor.rounds).map(|(ours, theirs)| ours / theirs).collect();
        quantile(&ratios, 0.5)
    }

    pub(crate) fn rate(&self) -> String {
        format!("{} {}/s", self.name, thousands(self.median()))
    }
}

/// `share` 0.5 is the median.
pub(crate) fn quantile(values: &[f64], share: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let last = sorted.len().saturating_sub(1);
    sorted.get((last as f64 * share).round() as usize).copied().unwrap_or(f64::NAN)
}

pub(crate) fn thousands(rate: f64) -> String {
    match rate {
        rate if rate >= 100_000.0 => format!("{:.0}k", rate / 1000.0),
        rate if rate >= 10_000.0 => format!("{:.1}k", rate / 1000.0),
        rate => format!("{:.2}k", rate / 1000.0),
    }
}

pub(crate) fn micros(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e6
}
