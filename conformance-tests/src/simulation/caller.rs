//! What the callers of one client do, drawn from the seed.

use std::sync::Arc;
use std::time::Duration;

use fastrand::Rng;
use leasehold_api::{
    AcquireOptions, DEFAULT_WAIT, Error, ErrorKind, FencingToken, HolderId, Lock, LockGuard, LockKey,
    OnCooldown, Validity,
};
use tokio::time::{Instant, sleep, timeout};

use super::backends::LONGEST_TTL;
use super::client::ClientTurns;
use super::coverage::Sometimes;
use super::disturbance::Disturbance as D;
use super::judge::Book;

/// What a caller asked for.
#[derive(Clone, Debug)]
pub(crate) struct Asked {
    /// `None` waits for ever, zero is a try.
    pub(crate) budget: Option<Duration>,
    pub(crate) cooldown: bool,
    /// Whether it is told of a cooldown instead of waiting for it.
    pub(crate) not_due: bool,
    pub(crate) gives_up: bool,
    pub(crate) max_hold: Option<Duration>,
    /// Whether it only tries.
    pub(crate) tries: bool,
    /// Its lease, where the store has leases.
    pub(crate) ttl: Option<Duration>,
    /// Of how many keys.
    pub(crate) keys: u32,
}

/// One caller: a task of a client.
pub(crate) struct Caller {
    pub(crate) client: u64,
    pub(crate) lock: Arc<dyn Lock>,
    pub(crate) book: Arc<Book>,
    pub(crate) turns: Arc<ClientTurns>,
    pub(crate) keys: Vec<LockKey>,
    pub(crate) dice: Rng,
    /// Whether a lease may be so long that nothing is seen to end by itself.
    pub(crate) long_leases: bool,
    /// Nothing new is begun from then on.
    pub(crate) until: Instant,
}

/// A call that is under way. Dropped unanswered, it was cancelled.
struct Question {
    book: Arc<Book>,
    calls: Vec<u64>,
}

impl Question {
    fn granted(mut self, guards: &[LockGuard]) {
        for (call, guard) in std::mem::take(&mut self.calls).into_iter().zip(guards) {
            self.book.granted(call, guard);
        }
    }

    fn refused(mut self) {
        std::mem::take(&mut self.calls).into_iter().for_each(|call| self.book.refused(call));
    }

    fn failed(mut self, error: &Error) {
        std::mem::take(&mut self.calls).into_iter().for_each(|call| self.book.failed(call, error));
    }
}

impl Drop for Question {
    fn drop(&mut self) {
        self.calls.iter().for_each(|call| self.book.cancelled(*call));
    }
}

/// A guard in the hands of a caller. Dropped, its end is noted.
struct Hand {
    book: Arc<Book>,
    holder: HolderId,
    guard: Option<LockGuard>,
}

impl Hand {
    fn new(book: &Arc<Book>, guard: LockGuard) -> Self {
        Self { book: Arc::clone(book), holder: guard.holder(), guard: Some(guard) }
    }
}

impl Drop for Hand {
    fn drop(&mut self) {
        self.book.look();
        drop(self.guard.take());
        self.book.dropped(self.holder);
    }
}

impl Caller {
    pub(crate) async fn run(mut self) {
        let steps = self.dice.u32(1..6);
        for _ in 0..steps {
            let pause = self.ms(&[0, 30, 300, 2_000]);
            sleep(pause).await;
            if Instant::now() >= self.until {
                return;
            }
            if self.step().await.is_err() {
                // The lock is closed.
                return;
            }
        }
    }

    /// Asks once, and does with the grant what there is to do. `Err` once the lock is closed.
    async fn step(&mut self) -> Result<(), ()> {
        let several = self.dice.u8(..6) == 0 && self.keys.len() > 1;
        let mut keys = self.keys.clone();
        self.dice.shuffle(&mut keys);
        keys.truncate(if several { self.dice.usize(2..=keys.len()) } else { 1 });
        let tries = self.dice.u8(..4) == 0;
        let mut options = AcquireOptions::new();
        let budget = match self.dice.u8(..8) {
            _ if tries => Some(Duration::ZERO),
            0 => None,
            1 if self.dice.bool() => Some(DEFAULT_WAIT),
            1 => Some(Duration::ZERO),
            2 => Some(Duration::from_millis(200)),
            3..=5 => Some(Duration::from_secs(2)),
            _ => Some(Duration::from_secs(15)),
        };
        options = match budget {
            Some(DEFAULT_WAIT) => options,
            Some(budget) => options.wait(budget),
            None => options.wait_forever(),
        };
        let lease = self.lock.capabilities().lease;
        if lease.is_some() && self.dice.bool() {
            let longest = lease.map(|bounds| bounds.max).filter(|_| self.long_leases);
            let ttl = [800, 1_500, 5_000, 600_000][self.dice.usize(..4)];
            options = options.ttl(Duration::from_millis(ttl).min(longest.unwrap_or(LONGEST_TTL)));
        }
        let max_hold =
            (self.dice.u8(..6) == 0).then(|| self.ms(&[200, 900, 2_500]) + Duration::from_millis(1));
        if let Some(most) = max_hold {
            options = options.max_hold(most);
        }
        let cools = !several && !self.book.cooldown.is_zero() && self.dice.u8(..3) == 0;
        let not_due = cools && self.dice.bool();
        if cools {
            options = options.cooldown(self.book.cooldown);
            if not_due {
                options = options.on_cooldown(OnCooldown::NotDue);
            }
        }
        let gives_up = self.dice.u8(..5) == 0;
        if gives_up {
            options = options.give_up_on_failure();
        }
        let asked = Asked {
            budget,
            cooldown: cools,
            not_due,
            gives_up: gives_up || budget == Some(Duration::ZERO),
            max_hold,
            tries,
            ttl: lease.and_then(|lease| options.ttl.or(lease.default)),
            keys: u32::try_from(keys.len()).unwrap_or(1),
        };
        let patience = (self.dice.u8(..4) == 0).then(|| self.ms(&[5, 120, 1_200]));
        let patience = patience.filter(|_| self.book.weather.happens(D::Cancel));
        let book = Arc::clone(&self.book);
        let calls = keys.iter().map(|key| book.ask(self.client, key, asked.clone(), &self.turns)).collect();
        let question = Question { book: Arc::clone(&book), calls };
        let lock = Arc::clone(&self.lock);
        let call = async {
            match (&keys[..], tries) {
                ([key], true) => lock.try_acquire(key, &options).await.map(|guard| guard.map(|g| vec![g])),
                ([key], false) => lock.acquire(key, &options).await.map(|guard| Some(vec![guard])),
                (_, true) => {
                    let guards = lock.try_acquire_all(&keys, &options).await;
                    guards.map(|guards| guards.map(|guards| guards.into_iter().collect()))
                }
                (_, false) => {
                    let guards = lock.acquire_all(&keys, &options).await;
                    guards.map(|guards| Some(guards.into_iter().collect()))
                }
            }
        };
        let outcome = match patience {
            None => call.await,
            Some(patience) => match timeout(patience, call).await {
                Ok(outcome) => outcome,
                Err(_) => return Ok(()),
            },
        };
        match outcome {
            Ok(Some(guards)) => {
                question.granted(&guards);
                if guards.len() > 1 {
                    self.book.note(Sometimes::Several);
                }
                let hands = guards.into_iter().map(|guard| Hand::new(&self.book, guard)).collect();
                self.hold(hands, options.ttl).await;
            }
            Ok(None) => question.refused(),
            Err(error) => {
                question.failed(&error);
                if error.kind() == ErrorKind::Closed {
                    return Err(());
                }
            }
        }
        Ok(())
    }

    async fn hold(&mut self, hands: Vec<Hand>, ttl: Option<Duration>) {
        for mut hand in hands {
            let Some(guard) = hand.guard.take() else { continue };
            let (key, token) = (guard.key().clone(), guard.token());
            let read = self.book.read(&guard);
            let first = self.ms(&[0, 20, 400, 3_000]);
            hand.guard = Some(guard);
            sleep(first).await;
            let Some(guard) = &hand.guard else { continue };
            if self.dice.u8(..3) == 0 {
                let another = ttl.filter(|_| self.dice.bool());
                let another = another.map(|_| Duration::from_millis(self.dice.u64(600..6_000)));
                let asked = Instant::now();
                let outcome = match another {
                    Some(another) => {
                        self.book.renews_for_another(guard);
                        guard.renew_for(another).await
                    }
                    None => guard.renew().await,
                };
                if outcome.is_ok() {
                    self.book.renewed(guard);
                    if let Some(another) = another {
                        self.book.renewed_for(guard, another, asked);
                    }
                }
            }
            if guard.validity() == Validity::Valid {
                // It is on its way for a while, and nothing here can call it back.
                let (book, number) = (Arc::clone(&self.book), token.map_or(0, FencingToken::as_u64));
                let way = self.ms(&[1, 1, 50, 5_000]);
                tokio::spawn(async move {
                    sleep(way).await;
                    book.write(&key, number, read);
                });
            }
            if self.dice.u8(..5) == 0 {
                // Held until it is lost, or for long.
                let lost = timeout(Duration::from_secs(8), guard.lost()).await.is_ok();
                if lost && guard.validity().is_held() {
                    self.book.wrong("C9", "lost() has fired and the guard reads held");
                }
            } else {
                let second = self.ms(&[0, 0, 500]);
                sleep(second).await;
            }
            if guard.token() != token {
                self.book.wrong("C8", format!("the token of {} changed while it was held", guard.key()));
            }
            if guard.validity() == Validity::Lost {
                // What reads lost says so.
                if timeout(Duration::from_secs(2), guard.lost()).await.is_err() {
                    self.book.wrong("C9", format!("{} reads lost, and lost() does not fire", guard.key()));
                }
            }
            self.let_go(hand).await;
        }
    }

    async fn let_go(&mut self, mut hand: Hand) {
        let how = self.dice.u8(..10);
        let Some(guard) = hand.guard.take() else { return };
        if how == 0 {
            hand.guard = Some(guard);
            return;
        }
        if how == 3 && self.book.weather.happens(D::Cancel) {
            // Begun, and never polled.
            drop(guard.into_grant().release());
            return;
        }
        let holder = guard.holder();
        self.book.releasing(&guard);
        let release = guard.release();
        if how <= 2 && self.book.weather.happens(D::Cancel) {
            let patience = self.ms(&[0, 2, 200]);
            if let Ok(answer) = timeout(patience, release).await {
                self.book.released(holder, &answer);
            }
            return;
        }
        let answer = release.await;
        self.book.released(holder, &answer);
    }

    /// Up to one of these.
    fn ms(&mut self, most: &[u64]) -> Duration {
        let most = most[self.dice.usize(..most.len())];
        Duration::from_millis(self.dice.u64(..=most))
    }
}
