//! Candidates of the package `leasehold-election`.

use std::convert::Infallible;
use std::future::pending;
use std::sync::Arc;
use std::time::Duration;

use fastrand::Rng;
use leasehold_api::{BoxFuture, Error, Lock as _};
use leasehold_conformance::simulation::{Candidate, CandidateEnvironment};
use leasehold_election::{Election, Next, OnLoss, Term, TermResult};
use tokio::time::sleep;

pub(crate) struct Elections;

impl Candidate for Elections {
    fn campaign(&self, environment: CandidateEnvironment) -> BoxFuture<'static, Result<(), Error>> {
        Box::pin(campaign(Arc::new(environment)))
    }
}

async fn campaign(environment: Arc<CandidateEnvironment>) -> Result<(), Error> {
    let mut dice = Rng::with_seed(environment.seed());
    let lock = environment.lock();
    let has_leases = lock.capabilities().lease.is_some();
    let on_loss = if dice.u8(..4) == 0 { OnLoss::Tell } else { OnLoss::Drop };
    let mut election = Election::new(lock, environment.key().clone()).on_loss(on_loss);
    if dice.bool() {
        election = election.step_down_if_asked(ms(&mut dice, 0..3_000));
    }
    if has_leases && dice.bool() {
        election = election.ttl(ms(&mut dice, 800..6_000));
    }
    let (handle, shown) = (election.handle(), election.handle());
    environment.shows(move || shown.state().is_leading());
    let mut resigns = dice.fork();
    let resigns = async move {
        for _ in 0..resigns.u8(..3) {
            sleep(ms(&mut resigns, 0..6_000)).await;
            handle.step_down(ms(&mut resigns, 0..3_000));
        }
        pending::<Infallible>().await
    };
    let leads = election.lead_boxed(|term| {
        let (environment, dice) = (Arc::clone(&environment), dice.fork());
        Box::pin(async move {
            let body = body(&environment, term, on_loss, dice);
            environment.body(on_loss == OnLoss::Drop, body).await
        })
    });
    tokio::select! {
        biased;
        led = leads => led,
        never = resigns => match never {},
    }
}

/// Runs the body of a term. If it is notified of a loss, it ends a little later.
async fn body(environment: &CandidateEnvironment, term: &Term, on_loss: OnLoss, mut dice: Rng) -> TermResult {
    let goes_on = ms(&mut dice, 0..400);
    let work = work(environment, term, dice);
    if on_loss == OnLoss::Drop {
        return work.await;
    }
    tokio::select! {
        biased;
        () = term.over() => {
            sleep(goes_on).await;
            Ok(Next::Again)
        }
        result = work => result,
    }
}

async fn work(environment: &CandidateEnvironment, term: &Term, mut dice: Rng) -> TermResult {
    let longest = [20, 400, 3_000][dice.usize(..3)];
    sleep(ms(&mut dice, 0..longest)).await;
    if environment.is_over() {
        return Ok(Next::Done);
    }
    match dice.u8(..6) {
        0 => return Err("the body fails".into()),
        1 => return Ok(Next::Done),
        2 | 3 => return Ok(Next::Again),
        4 => term.step_down(ms(&mut dice, 0..3_000)),
        _ => {}
    }
    sleep(Duration::from_secs(4)).await;
    Ok(Next::Again)
}

fn ms(dice: &mut Rng, range: std::ops::Range<u64>) -> Duration {
    Duration::from_millis(dice.u64(range))
}
