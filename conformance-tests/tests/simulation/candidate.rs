//! Candidates of the package `leasehold-election`.

use std::convert::Infallible;
use std::future::pending;
use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::time::Duration;

use fastrand::Rng;
use leasehold_api::{BoxFuture, Error, Lock as _};
use leasehold_conformance::simulation::{Candidate, CandidateEnvironment};
use leasehold_election::{Election, Next, OnLoss, Term, TermResult};
use tokio::time::sleep;

/// The candidates, which are correct or break a rule.
pub(crate) struct Elections(pub(crate) Option<Broken>);

/// A rule that the candidates break.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Broken {
    /// They show at any time that they lead.
    AlwaysLeads,
    /// A loss does not end their bodies.
    OutlivesLoss,
    /// They release the key while their bodies last.
    KeepsBody,
}

impl Candidate for Elections {
    fn campaign(&self, environment: CandidateEnvironment) -> BoxFuture<'static, Result<(), Error>> {
        Box::pin(campaign(Arc::new(environment), self.0))
    }
}

async fn campaign(environment: Arc<CandidateEnvironment>, broken: Option<Broken>) -> Result<(), Error> {
    let mut dice = Rng::with_seed(environment.seed());
    let lock = environment.lock();
    let has_leases = lock.capabilities().lease.is_some();
    let on_loss = if dice.u8(..4) == 0 { OnLoss::Tell } else { OnLoss::Drop };
    let mut election = Election::new(lock, environment.key().clone()).on_loss(on_loss);
    if dice.bool() {
        election = election.step_down_if_asked(ms(&mut dice, 0..3_000));
        environment.steps_down_if_asked();
    }
    if has_leases && dice.bool() {
        election = election.ttl(ms(&mut dice, 800..6_000));
    }
    let (handle, shown) = (election.handle(), election.handle());
    environment.shows(move || broken == Some(Broken::AlwaysLeads) || shown.state().is_leading());
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
            let is_dropped = on_loss == OnLoss::Drop || broken == Some(Broken::OutlivesLoss);
            let body = environment.body(is_dropped, body);
            if broken == Some(Broken::KeepsBody) {
                return ManuallyDrop::new(Box::pin(body)).as_mut().await;
            }
            body.await
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
