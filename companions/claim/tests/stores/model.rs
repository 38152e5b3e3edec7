//! Random workers that take, settle, retry, put back, hold, crash and are killed, in memory and in Postgres. No row is in
//! two claims or settled twice, and epochs only grow. In the end every row is settled, exhausted or takeable.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use crate::suite::bench::{bounded, keys, pause, retry, row};
use crate::suite::hold::Hold;
use crate::suite::memory::{Bare, Memory};
use crate::suite::postgres::Postgres;
use crate::suite::{Bench, Env, Harness, LONG, Layout, Variant};
use leasehold_claim::{ClaimError, ClaimRef, Claimed, Outcome, OwnerToken, Renewal, RowKey, Settled, Take};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use test_bounds::Bound;

const WORKERS: usize = 3;
const ENTITIES: [&str; 3] = ["a", "b", "c"];

/// One step. The indices select among the existing workers and claims.
#[derive(Clone, Debug)]
enum Step {
    Insert {
        entity: Option<usize>,
        attempts: Option<i32>,
    },
    Take {
        worker: usize,
        limit: u32,
    },
    Settle {
        worker: usize,
        which: usize,
        outcome: usize,
    },
    /// The worker forgets the claim. `Late` tries to settle it afterwards.
    Forget {
        worker: usize,
        which: usize,
    },
    Late {
        which: usize,
        outcome: usize,
    },
    Expire {
        which: usize,
    },
    Renew {
        worker: usize,
    },
    Sweep {
        limit: u32,
    },
    Hold {
        worker: usize,
        limit: u32,
    },
    SettleHeld {
        worker: usize,
        which: usize,
        outcome: usize,
    },
    Commit {
        worker: usize,
    },
    Rollback {
        worker: usize,
    },
    Kill {
        worker: usize,
    },
}

fn steps(longest: usize) -> impl Strategy<Value = Vec<Step>> {
    let (worker, which, outcome, limit) = (0..WORKERS, 0..64_usize, 0..4_usize, 1..4_u32);
    let step = prop_oneof![
        3 => (prop::option::of(0..ENTITIES.len()), prop::option::of(1..4_i32))
            .prop_map(|(entity, attempts)| Step::Insert { entity, attempts }),
        5 => (worker.clone(), limit.clone()).prop_map(|(worker, limit)| Step::Take { worker, limit }),
        5 => (worker.clone(), which.clone(), outcome.clone())
            .prop_map(|(worker, which, outcome)| Step::Settle { worker, which, outcome }),
        1 => (worker.clone(), which.clone()).prop_map(|(worker, which)| Step::Forget { worker, which }),
        2 => (which.clone(), outcome.clone()).prop_map(|(which, outcome)| Step::Late { which, outcome }),
        3 => which.clone().prop_map(|which| Step::Expire { which }),
        1 => worker.clone().prop_map(|worker| Step::Renew { worker }),
        3 => limit.clone().prop_map(|limit| Step::Sweep { limit }),
        2 => (worker.clone(), limit).prop_map(|(worker, limit)| Step::Hold { worker, limit }),
        2 => (worker.clone(), which, outcome)
            .prop_map(|(worker, which, outcome)| Step::SettleHeld { worker, which, outcome }),
        1 => worker.clone().prop_map(|worker| Step::Commit { worker }),
        1 => worker.clone().prop_map(|worker| Step::Rollback { worker }),
        1 => worker.prop_map(|worker| Step::Kill { worker }),
    ];
    prop::collection::vec(step, 1..longest)
}

/// The expected state of a row.
#[derive(Debug, Default)]
struct Known {
    /// Claim of the row. It stays after the end of its lease until the sweep.
    owner: Option<OwnerToken>,
    /// Whether the lease has ended.
    is_over: bool,
    /// Worker whose transaction holds the row.
    held_by: Option<usize>,
    epoch: i64,
    settled: u32,
}

#[derive(Default)]
struct Worker {
    claims: Vec<Claimed>,
    hold: Option<Box<dyn Hold>>,
    /// Settlements of the open transaction, which take effect at its commit.
    ends: Vec<(ClaimRef, Outcome)>,
}

struct World<'a> {
    bench: &'a Bench,
    rows: BTreeMap<RowKey, Known>,
    workers: [Worker; WORKERS],
    /// Forgotten claims, whose workers might still try to settle them.
    lost: Vec<Claimed>,
}

impl World<'_> {
    async fn step(&mut self, step: Step) {
        match step {
            Step::Insert { entity, attempts } => {
                let mut seed = row(i64::try_from(self.rows.len()).unwrap());
                seed.entity = entity.map(|entity| ENTITIES[entity]);
                seed.attempts = attempts;
                let key = self.bench.insert(seed).await;
                self.rows.insert(key, Known::default());
            }
            Step::Take { worker, limit } => {
                let taken = self.bench.take(limit).await;
                assert!(taken.len() <= usize::try_from(limit).unwrap());
                for claimed in taken {
                    self.begin(&claimed, None);
                    self.workers[worker].claims.push(claimed);
                }
            }
            Step::Settle { worker, which, outcome } => {
                if let Some(claimed) = pick(&mut self.workers[worker].claims, which) {
                    self.settle(&claimed.claim, outcome).await;
                    self.lost.push(claimed);
                }
            }
            Step::Forget { worker, which } => {
                let claimed = pick(&mut self.workers[worker].claims, which);
                self.lost.extend(claimed);
            }
            Step::Late { which, outcome } => {
                if let Some(claimed) = pick(&mut self.lost, which) {
                    self.settle(&claimed.claim, outcome).await;
                    self.lost.push(claimed);
                }
            }
            Step::Expire { which } => {
                let taken: Vec<_> = self.rows.iter().filter(|(_, row)| row.owner.is_some()).collect();
                if let Some(key) = taken.get(which % taken.len().max(1)).map(|(key, _)| (*key).clone()) {
                    self.bench.expire(&key).await;
                    self.known(&key).is_over = true;
                }
            }
            Step::Renew { worker } => self.renew(worker).await,
            Step::Sweep { limit } => self.sweep(limit).await,
            Step::Hold { worker, limit } => self.hold(worker, limit).await,
            Step::SettleHeld { worker, which, outcome } => self.settle_held(worker, which, outcome).await,
            Step::Commit { worker } => self.commit(worker).await,
            Step::Rollback { worker } => {
                if let Some(hold) = self.workers[worker].hold.take() {
                    bounded(hold.rollback()).await.unwrap();
                    self.let_go(worker);
                }
            }
            Step::Kill { worker } => self.kill(worker).await,
        }
    }

    fn known(&mut self, key: &RowKey) -> &mut Known {
        self.rows.get_mut(key).unwrap_or_else(|| panic!("row {key} was never inserted"))
    }

    /// Records a new claim and checks that no other claim has its rows.
    fn begin(&mut self, claimed: &Claimed, holder: Option<usize>) {
        for row in &claimed.rows {
            let known = self.known(&row.key);
            assert_eq!(known.owner, None, "row {} is in two claims", row.key);
            assert_eq!(known.held_by, None, "row {} is held and claimed", row.key);
            assert_eq!(known.settled, 0, "row {} was settled before", row.key);
            match holder {
                Some(worker) => known.held_by = Some(worker),
                None => {
                    assert!(
                        row.epoch > known.epoch,
                        "epoch {} of row {} after {}",
                        row.epoch,
                        row.key,
                        known.epoch
                    );
                    (known.owner, known.epoch, known.is_over) = (Some(claimed.claim.owner), row.epoch, false);
                }
            }
        }
    }

    /// Returns whether the claim still has all of its rows.
    fn has(&self, claim: &ClaimRef) -> bool {
        let of = |(key, epoch): &(RowKey, i64)| {
            self.rows.get(key).is_some_and(|row| row.owner == Some(claim.owner) && row.epoch == *epoch)
        };
        claim.rows.iter().all(of)
    }

    async fn settle(&mut self, claim: &ClaimRef, outcome: usize) {
        let is_mine = self.has(claim);
        let outcome = self.outcome(outcome);
        let answer: Result<Settled, ClaimError> = self.bench.settle(claim, outcome.clone()).await;
        match answer {
            Ok(_) => {
                assert!(is_mine, "a claim was settled that had lost its rows: {claim:?}");
                self.ended(claim, &outcome);
            }
            Err(ClaimError::Superseded { row, current_epoch, .. }) => {
                assert!(!is_mine, "a claim with all its rows was refused: {claim:?}");
                assert!(claim.rows.iter().any(|(key, _)| *key == row));
                let shown = self.known(&row);
                if let (Some(current), Some(_)) = (current_epoch, shown.owner) {
                    assert_eq!(current, shown.epoch);
                }
            }
            other => panic!("{other:?}"),
        }
    }

    fn ended(&mut self, claim: &ClaimRef, outcome: &Outcome) {
        for (key, _) in &*claim.rows {
            let known = self.known(key);
            (known.owner, known.is_over, known.held_by) = (None, false, None);
            if matches!(outcome, Outcome::Done | Outcome::Failed(_)) {
                known.settled += 1;
                assert_eq!(known.settled, 1, "row {key} was settled twice");
            }
        }
    }

    fn outcome(&self, which: usize) -> Outcome {
        match which {
            0 => Outcome::Done,
            1 if self.bench.variant.failed().is_some() => Outcome::Failed("no".to_owned()),
            2 => retry(),
            _ => Outcome::PutBack,
        }
    }

    async fn renew(&mut self, worker: usize) {
        let claims: Vec<ClaimRef> =
            self.workers[worker].claims.iter().map(|claimed| claimed.claim.clone()).collect();
        let answers = bounded(self.bench.client().renew(&claims, Duration::from_secs(60))).await.unwrap();
        assert_eq!(answers.len(), claims.len());
        for (claim, answer) in claims.iter().zip(answers) {
            assert_eq!(answer == Renewal::Renewed, self.has(claim), "{claim:?}: {answer:?}");
            if answer == Renewal::Renewed {
                claim.rows.iter().for_each(|(key, _)| self.known(key).is_over = false);
            }
        }
    }

    async fn sweep(&mut self, limit: u32) {
        let swept = bounded(self.bench.client().sweep(limit)).await.unwrap();
        assert!(swept.returned.len() + swept.exhausted.len() <= usize::try_from(limit).unwrap());
        for key in &swept.returned {
            let known = self.known(key);
            assert!(known.owner.is_some() && known.is_over, "row {key} was swept though its lease lasts");
            assert_eq!(known.settled, 0);
        }
        for key in swept.returned.iter().chain(&swept.exhausted) {
            let known = self.known(key);
            assert!(known.owner.is_none() || known.is_over);
            (known.owner, known.is_over) = (None, false);
        }
    }

    async fn hold(&mut self, worker: usize, limit: u32) {
        if self.workers[worker].hold.is_some() {
            return;
        }
        let hold = bounded(self.bench.holder().hold(&Take::up_to(limit))).await.unwrap();
        for claimed in hold.iter().flat_map(|hold| &hold.taken().claims) {
            self.begin(claimed, Some(worker));
        }
        self.workers[worker].hold = hold;
    }

    async fn settle_held(&mut self, worker: usize, which: usize, outcome: usize) {
        let outcome = self.outcome(outcome);
        let Some(hold) = &mut self.workers[worker].hold else { return };
        let claims = &hold.taken().claims;
        let claim = claims[which % claims.len()].claim.clone();
        let again = self.workers[worker].ends.iter().any(|(ended, _)| *ended == claim);
        match bounded(hold.settle(&claim, &outcome)).await {
            Ok(_) => {
                assert!(!again, "a held claim was settled twice");
                self.workers[worker].ends.push((claim, outcome));
            }
            Err(ClaimError::Superseded { .. }) => assert!(again),
            other => panic!("{other:?}"),
        }
    }

    async fn commit(&mut self, worker: usize) {
        let Some(hold) = self.workers[worker].hold.take() else { return };
        bounded(hold.commit()).await.unwrap();
        for (claim, outcome) in std::mem::take(&mut self.workers[worker].ends) {
            self.ended(&claim, &outcome);
        }
        self.let_go(worker);
    }

    /// Records the end of the worker's transaction.
    fn let_go(&mut self, worker: usize) {
        self.workers[worker].ends.clear();
        self.rows.values_mut().filter(|row| row.held_by == Some(worker)).for_each(|row| row.held_by = None);
    }

    async fn kill(&mut self, worker: usize) {
        let claims = std::mem::take(&mut self.workers[worker].claims);
        self.lost.extend(claims);
        if self.workers[worker].hold.take().is_some() {
            // The rollback happens a little later, so no row is expected to be free yet.
            self.let_go(worker);
        }
    }

    /// Kills all workers and ends all leases. Then each row must be settled or exhausted, or a new worker can finish it.
    async fn rest(mut self) {
        for worker in 0..WORKERS {
            self.kill(worker).await;
        }
        let leased: Vec<RowKey> =
            self.rows.iter().filter(|(_, row)| row.owner.is_some()).map(|(key, _)| key.clone()).collect();
        for key in &leased {
            self.bench.expire(key).await;
            self.known(key).is_over = true;
        }
        self.sweep(1000).await;
        assert!(bounded(self.bench.client().taken(10)).await.unwrap().is_empty(), "nobody has anything");
        let deadline = Bound::new(LONG);
        loop {
            let taken = self.bench.take(100).await;
            if taken.is_empty() {
                // A dropped transaction might not have ended yet.
                if !self.bench.is_pending().await {
                    break;
                }
                deadline.check("rows stay locked");
                pause().await;
            }
            for claimed in taken {
                self.begin(&claimed, None);
                self.settle(&claimed.claim, 0).await;
            }
        }
        let exhausted = bounded(self.bench.client().exhausted(1000)).await.unwrap();
        for (key, known) in &self.rows {
            let is_exhausted = exhausted.contains(key);
            assert_eq!(known.settled + u32::from(is_exhausted), 1, "row {key} is lost: {known:?}");
            let state = self.bench.state(key).await;
            let settled = [Some(self.bench.variant.done()), self.bench.variant.failed()];
            assert!(is_exhausted || settled.contains(&Some(state.as_str())), "row {key} is {state}");
        }
        assert!(!self.bench.is_pending().await);
        for claimed in std::mem::take(&mut self.lost) {
            assert!(!self.has(&claimed.claim), "{:?} still has rows", keys(&claimed));
        }
    }
}

fn pick<T>(from: &mut Vec<T>, which: usize) -> Option<T> {
    (!from.is_empty()).then(|| from.swap_remove(which % from.len()))
}

fn layout(grouped: bool) -> Layout {
    if grouped {
        Layout::new(|spec| spec.attempts("attempts_left").group("entity").grouped())
    } else {
        Layout::new(|spec| spec.attempts("attempts_left").group("entity"))
    }
}

async fn play(harness: Box<dyn Harness>, variant: Variant, grouped: bool, steps: Vec<Step>) {
    let env = Env { harness, variant };
    let bench = env.table(layout(grouped)).await;
    let mut world =
        World { bench: &bench, rows: BTreeMap::new(), workers: Default::default(), lost: Vec::new() };
    for step in steps {
        world.step(step).await;
    }
    world.rest().await;
}

fn check(cases: u32, longest: usize, variants: &'static [Variant], run: impl Fn(Variant, bool, Vec<Step>)) {
    let config = Config { cases, failure_persistence: None, ..Config::default() };
    let input = (prop::sample::select(variants), any::<bool>(), steps(longest));
    let result = TestRunner::new(config).run(&input, |(variant, grouped, steps)| {
        run(variant, grouped, steps);
        Ok(())
    });
    if let Err(error) = result {
        panic!("{error}");
    }
}

#[test]
fn no_row_is_lost_in_memory() {
    const ALL: &[Variant] = &[Variant::TEXT, Variant::BOOLEAN, Variant::SIDE, Variant::BOOLEAN_SIDE];
    check(1500, 120, ALL, |variant, grouped, steps| {
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
        runtime.block_on(play(Box::new(Memory(Arc::new(Bare))), variant, grouped, steps));
    });
}

#[test]
fn no_row_is_lost_in_postgres() {
    const ALL: &[Variant] = &[Variant::TEXT, Variant::BOOLEAN, Variant::SIDE, Variant::ENUM];
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    check(40, 60, ALL, |variant, grouped, steps| {
        runtime.block_on(play(Box::new(Postgres), variant, grouped, steps));
    });
}
