//! Marks: how those who poll for a number show that they are there.

use std::collections::HashMap;

/// What a batch changes: a mark that is set and taken back within it is no change.
#[derive(Default)]
pub(crate) struct Marks(HashMap<i64, i32>);

impl Marks {
    pub(crate) fn add(&mut self, number: i64, set: bool) {
        *self.0.entry(number).or_default() += if set { 1 } else { -1 };
    }

    pub(crate) fn to_set(&self) -> Vec<i64> {
        self.with(|change| change)
    }

    pub(crate) fn to_take_back(&self) -> Vec<i64> {
        self.with(|change| -change)
    }

    /// Each number as often as `count` says.
    fn with(&self, count: impl Fn(i32) -> i32) -> Vec<i64> {
        let times = |(number, change): (&i64, &i32)| {
            std::iter::repeat_n(*number, usize::try_from(count(*change)).unwrap_or(0))
        };
        self.0.iter().flat_map(times).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_set_and_taken_back_is_no_change() {
        let mut marks = Marks::default();
        for (number, set) in
            [(1, true), (2, false), (3, true), (3, false), (4, false), (4, true), (5, true), (5, true)]
        {
            marks.add(number, set);
        }
        let mut set = marks.to_set();
        set.sort_unstable();
        assert_eq!((set, marks.to_take_back()), (vec![1, 5, 5], vec![2]));
    }
}
