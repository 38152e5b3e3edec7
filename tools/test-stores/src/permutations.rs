//! Compares every permutation of concurrent statements of a table store with a small model of one key.
//!
//! In each scene, one session has a transaction of two steps. Every other session runs its statement as one step, so
//! `isolationtester` can run all permutations. A statement sent between the two steps waits for the open transaction,
//! with a snapshot from before its end.
//!
//! The sessions run the store's texts under its settings, but without a lock timeout. Their clock is a sequence, which a
//! step moves on. So a lease ends between two steps, and no result depends on the speed of the machine.

mod model;
mod output;
pub mod part_scenes;
mod parts;
pub mod scenes;
mod spec;

use leasehold_postgres::table::Dialect;
use leasehold_postgres::{DEFAULT_SCHEMA, Identifier, schema};
use test_servers::sql::run;
use test_servers::{fresh_database, isolationtester};

pub use self::parts::PartOp;
use crate::statements::rendered;

/// Seconds that a lease lasts.
const TTL: i64 = 50;
/// Seconds on the clock after [`Op::Tick`].
const LATER: i64 = 100;
/// The token of the row at the start, whose holder is `a`.
const FIRST_TOKEN: i64 = 5;

/// The row of the key when a permutation starts. Its holder is `a`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    /// The key has no row.
    Nothing,
    /// The hold was released.
    Free,
    /// The lease has ended, and was not released.
    Ended,
    /// The key is held.
    Held,
    /// The key is held, and the hold is given out.
    GivenOut,
    /// The hold was released long ago, so a purge removes the row.
    Old,
    /// The key is shared. `a` has part 0, and part 1 is free.
    Shared,
    /// The key is shared. `a` has part 0, whose lease has ended, and part 1 is out of use.
    SharedEnded,
    /// The key is shared. Part 0 is free, and part 1 is out of use.
    SharedFree,
    /// The key has two permits. `a` has the first one.
    Permits,
    /// The key has two permits, and both are free.
    PermitsFree,
}

impl Start {
    /// Returns the second at which the lease of the row ends.
    fn ends(self) -> i64 {
        match self {
            Self::Ended => -1,
            Self::Old => -30 * 24 * 3600,
            _ => TTL,
        }
    }

    fn is_released(self) -> bool {
        matches!(self, Self::Free | Self::Old)
    }
}

/// A statement. The fields name a statement of the store, and a holder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// Locks the row, as an operator can.
    Lock,
    /// Changes the label in the row. Statements that waited for it check a new version of the row.
    Touch,
    /// Moves the clock beyond the end of all leases.
    Tick,
    /// Requests the key.
    Grant(&'static str, &'static str),
    /// Renews or confirms the hold of `a`.
    Renew(&'static str),
    /// Releases a hold.
    Release(&'static str, &'static str),
    /// Releases the hold of `a` by force.
    Force,
    /// Gives the hold of `a` out.
    GiveOut,
    /// Adopts the hold that `a` has given out.
    Adopt(&'static str),
    /// Fences the transaction with the first lease of `a`.
    Fence,
    /// Removes old rows.
    Purge,
    /// A statement for shared holds and permits.
    Part(PartOp),
}

impl Op {
    /// Returns the name of the store's statement, if it is one.
    fn statement(self) -> Option<&'static str> {
        match self {
            Self::Lock | Self::Touch | Self::Tick => None,
            Self::Grant(statement, _) | Self::Renew(statement) | Self::Release(statement, _) => {
                Some(statement)
            }
            Self::Force => Some("force"),
            Self::GiveOut => Some("give_out"),
            Self::Adopt(_) => Some("adopt"),
            Self::Fence => Some("fence"),
            Self::Purge => Some("purge"),
            Self::Part(op) => op.statement(),
        }
    }

    /// Returns whether the statement can change the row.
    fn can_write(self) -> bool {
        match self {
            Self::Lock | Self::Tick | Self::Fence => false,
            Self::Part(op) => op.can_write(),
            _ => true,
        }
    }

    fn is_fence(self) -> bool {
        matches!(self, Self::Fence | Self::Part(PartOp::Fence))
    }
}

/// The end of the transaction of two steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// Its changes count.
    Commit,
    /// Its changes do not count, as if its client had died.
    Rollback,
}

/// Sessions whose steps run in every permutation.
#[derive(Clone, Debug)]
pub struct Scene {
    start: Start,
    open: Op,
    close: Vec<Op>,
    end: End,
    others: Vec<Op>,
}

impl Scene {
    /// Creates a scene with an open transaction, which runs `open`, beside sessions that run one of `others` each.
    #[must_use]
    pub fn new(start: Start, open: Op, others: &[Op]) -> Self {
        Self { start, open, close: Vec::new(), end: End::Commit, others: others.to_vec() }
    }

    /// Ends the open transaction like that.
    #[must_use]
    pub fn end(mut self, end: End) -> Self {
        self.end = end;
        self
    }

    /// Runs further statements in the last step of the open transaction, which must not begin with a fence.
    #[must_use]
    pub fn close_with(mut self, close: &[Op]) -> Self {
        assert!(!self.open.is_fence());
        self.close = close.to_vec();
        self
    }

    /// Returns the number of orders of two steps of one session and one step of each other session.
    fn permutations(&self) -> usize {
        (3..=self.others.len() + 2).product()
    }
}

/// The statements of a store.
struct Store {
    kind: &'static str,
    texts: Vec<(&'static str, String)>,
}

impl Store {
    fn text(&self, statement: &str) -> &str {
        match self.texts.iter().find(|(name, _)| *name == statement) {
            Some((_, text)) => text,
            None => panic!("the store has no statement {statement}"),
        }
    }
}

/// The result of a run.
#[derive(Debug, Default)]
pub struct Verdict {
    /// Number of permutations.
    pub permutations: usize,
    /// Number of steps that waited for another session.
    pub waits: usize,
    /// The permutations that the model does not explain, as the program printed them.
    pub unexplained: Vec<String>,
}

impl Verdict {
    /// Fails if a permutation is unexplained, if their number is a different one, or if every step ran without a wait.
    #[track_caller]
    pub fn assert_explained(&self, permutations: usize) {
        println!("{} permutations, {} waits", self.permutations, self.waits);
        let unexplained = self.unexplained.join("\n");
        assert!(self.unexplained.is_empty(), "{} wrong:\n{unexplained}", self.unexplained.len());
        assert_eq!(self.permutations, permutations);
        assert!(self.waits > 0, "no statement waited");
    }
}

/// Runs every permutation of each scene in a fresh database. `more` are statements beside those in `dialect`.
///
/// # Panics
///
/// If `isolationtester` is missing or refuses a scene.
///
/// # Cancel safety
///
/// If dropped, the program is killed.
pub async fn permute(dialect: &Dialect, more: &[(&'static str, &str)], scenes: &[Scene]) -> Verdict {
    let store = Store { kind: dialect.kind, texts: rendered(dialect, more, DEFAULT_SCHEMA) };
    let database = fresh_database().await;
    let mut conn = database.connect().await;
    schema::install(&mut conn, &Identifier::known(DEFAULT_SCHEMA)).await.unwrap();
    run(&mut conn, spec::CLOCK).await;
    let mut verdict = Verdict::default();
    for scene in scenes {
        let output = isolationtester(&database, &spec::of(&store, scene)).await;
        let permutations = output::parse(&output);
        assert_eq!(permutations.len(), scene.permutations(), "{scene:?}\n{output}");
        for permutation in permutations {
            verdict.permutations += 1;
            verdict.waits += permutation.steps.iter().filter(|step| step.waited).count();
            if !model::explains(store.kind, scene, &permutation) {
                verdict.unexplained.push(format!("{scene:?}\n{}", permutation.text));
            }
        }
    }
    verdict
}

/// Returns `text` with a change, for a test that shows its damage.
///
/// # Panics
///
/// If `text` does not contain `from` exactly once.
#[must_use]
pub fn mutant(text: &str, from: &str, to: &str) -> &'static str {
    assert_eq!(text.matches(from).count(), 1, "{from:?} in {text}");
    text.replace(from, to).leak()
}
