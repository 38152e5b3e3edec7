//! Sources of the choices of a schedule: a seed, an enumerator of all schedules, and bytes.

use fastrand::Rng;

/// A source of the choices of a schedule.
pub trait Choices {
    /// Returns the next choice among `ways`, a number below it. There are at least two ways.
    fn choose(&mut self, ways: usize) -> usize;
}

/// Choices at random, determined by a seed.
#[derive(Clone, Debug)]
pub struct SeededChoices(Rng);

impl SeededChoices {
    /// Makes the choices of `seed`.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(super::network::stream(seed, 0, 0))
    }
}

impl Choices for SeededChoices {
    fn choose(&mut self, ways: usize) -> usize {
        self.0.usize(..ways)
    }
}

/// Choices from bytes, for example from the choices of an earlier schedule, which they repeat. After the last byte the choice is the first way.
#[derive(Clone, Debug)]
pub struct ByteChoices<'a>(std::slice::Iter<'a, u8>);

impl<'a> ByteChoices<'a> {
    /// Makes the choices of `bytes`.
    #[must_use]
    pub fn new(bytes: &'a [u8]) -> Self {
        Self(bytes.iter())
    }
}

impl Choices for ByteChoices<'_> {
    fn choose(&mut self, ways: usize) -> usize {
        self.0.next().map_or(0, |byte| usize::from(*byte) % ways)
    }
}

/// Plays all schedules that start with the same choices, one after another. Each schedule has the choices of the one
/// before it up to a place, and the next way there.
///
/// ```
/// use leasehold_conformance::simulation::{Choices, Enumerator};
///
/// let (mut all, mut schedules) = (Enumerator::after(&[]), 0);
/// while all.starts() {
///     // Two choices among two ways, or one choice alone.
///     if all.choose(2) == 0 {
///         all.choose(2);
///     }
///     schedules += 1;
/// }
/// assert_eq!(schedules, 3);
/// ```
#[derive(Clone, Debug)]
pub struct Enumerator {
    /// The choices of the present schedule.
    path: Vec<Choice>,
    /// The number of choices that all schedules start with.
    fixed: usize,
    /// The number of choices that the present schedule has made.
    made: usize,
    has_started: bool,
    has_diverged: bool,
}

#[derive(Clone, Copy, Debug)]
struct Choice {
    way: usize,
    /// The number of ways. `None` until a schedule comes here.
    ways: Option<usize>,
}

impl Enumerator {
    /// Makes the enumerator of the schedules that start with the choices `fixed`.
    #[must_use]
    pub fn after(fixed: &[usize]) -> Self {
        let path: Vec<_> = fixed.iter().map(|way| Choice { way: *way, ways: None }).collect();
        Self { fixed: path.len(), path, made: 0, has_started: false, has_diverged: false }
    }

    /// Starts the next schedule. Returns whether there is one.
    pub fn starts(&mut self) -> bool {
        if !std::mem::replace(&mut self.has_started, true) {
            return true;
        }
        // The path is longer than the schedule only if earlier choices led elsewhere this time.
        self.has_diverged |= self.made != self.path.len();
        while self.path.len() > self.fixed {
            if let Some(last) =
                self.path.last_mut().filter(|last| last.ways.is_some_and(|n| last.way + 1 < n))
            {
                last.way += 1;
                self.made = 0;
                return true;
            }
            self.path.pop();
        }
        false
    }

    /// Returns whether the same choices have led to different schedules. Then the schedules are not all that there are.
    #[must_use]
    pub fn has_diverged(&self) -> bool {
        self.has_diverged
    }

    /// Returns the number of ways of the choice after the fixed ones, in the present schedule. `None` if that schedule
    /// had no further choice.
    #[must_use]
    pub fn ways_after_fixed(&self) -> Option<usize> {
        self.path.get(self.fixed)?.ways
    }
}

impl Choices for Enumerator {
    fn choose(&mut self, ways: usize) -> usize {
        let at = self.made;
        self.made += 1;
        match self.path.get_mut(at) {
            Some(choice) => {
                self.has_diverged |= choice.way >= ways || choice.ways.is_some_and(|known| known != ways);
                choice.ways = Some(ways);
                choice.way.min(ways - 1)
            }
            None => {
                self.path.push(Choice { way: 0, ways: Some(ways) });
                0
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Plays all orders of the steps of two clients, in which each client keeps its own order.
    fn orders(choices: &mut Enumerator, steps: [usize; 2]) -> Vec<Vec<usize>> {
        let mut orders = Vec::new();
        while choices.starts() {
            let (mut left, mut order) = (steps, Vec::new());
            while left != [0, 0] {
                let ready: Vec<_> = (0..2).filter(|client| left[*client] > 0).collect();
                let next = if ready.len() == 1 { ready[0] } else { ready[choices.choose(ready.len())] };
                left[next] -= 1;
                order.push(next);
            }
            orders.push(order);
        }
        assert!(!choices.has_diverged());
        orders
    }

    #[test]
    fn all_orders_of_two_times_four_steps_are_played_once() {
        let all = orders(&mut Enumerator::after(&[]), [4, 4]);
        assert_eq!(all.len(), 70);
        let distinct: std::collections::BTreeSet<_> = all.iter().collect();
        assert_eq!(distinct.len(), 70);
    }

    #[test]
    fn schedules_after_each_first_choice_are_all_schedules() {
        let parts: usize = (0..2).map(|first| orders(&mut Enumerator::after(&[first]), [4, 4]).len()).sum();
        assert_eq!(parts, 70);
    }

    #[test]
    fn another_number_of_ways_is_noticed() {
        let mut choices = Enumerator::after(&[]);
        for ways in [2, 3] {
            assert!(choices.starts());
            choices.choose(ways);
        }
        assert!(choices.has_diverged());
    }

    #[test]
    fn bytes_repeat_choices_and_end_with_first_ways() {
        let mut choices = ByteChoices::new(&[1, 5]);
        assert_eq!([2, 3, 4].map(|ways| choices.choose(ways)), [1, 2, 0]);
        let [mut one, mut other] = [7, 7].map(SeededChoices::new);
        assert_eq!([9; 20].map(|ways| one.choose(ways)), [9; 20].map(|ways| other.choose(ways)));
    }
}
