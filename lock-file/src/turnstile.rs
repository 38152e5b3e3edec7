//! The turnstile: whoever waits for a lock stands in it, and nobody overtakes.

use std::fs;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use crate::hold::{Locked, is_locked, lock_at};

/// How often a waiter shows that it is alive, and how long others believe it.
const SHOW_EVERY: Duration = Duration::from_millis(300);
const BELIEVED_FOR: Duration = Duration::from_millis(1500);

/// The turnstile of a key, while its waiter stands in it.
///
/// The waiter shows that it is alive by the time of the file. Else a waiter that was stopped would shut
/// everybody out of a lock that is free. The lock itself never depends on that time.
#[derive(Debug)]
pub(crate) struct Turnstile {
    locked: Arc<Locked>,
    shown: Instant,
}

/// What is found at a turnstile.
#[derive(Debug)]
pub(crate) enum AtTurnstile {
    Entered(Turnstile),
    /// Somebody waits in it.
    Occupied,
    /// Somebody stands in it who shows no life.
    Stalled,
}

impl Turnstile {
    /// One attempt at the turnstile at `path`.
    pub(crate) fn enter(path: &Path) -> io::Result<AtTurnstile> {
        match lock_at(path)? {
            Some(locked) => {
                locked.file().set_modified(SystemTime::now())?;
                Ok(AtTurnstile::Entered(Self { locked: Arc::new(locked), shown: Instant::now() }))
            }
            None if shows_life(path)? => Ok(AtTurnstile::Occupied),
            None => Ok(AtTurnstile::Stalled),
        }
    }

    /// Whether a waiter stands in the turnstile at `path` and is alive.
    pub(crate) fn is_occupied(path: &Path) -> io::Result<bool> {
        Ok(is_locked(path)? && shows_life(path)?)
    }

    /// Work for a thread that may wait for the disk, when it is time to show life again.
    pub(crate) fn due(&mut self) -> Option<impl FnOnce() -> io::Result<()> + Send + 'static> {
        if self.shown.elapsed() < SHOW_EVERY {
            return None;
        }
        self.shown = Instant::now();
        let locked = Arc::clone(&self.locked);
        Some(move || locked.file().set_modified(SystemTime::now()))
    }
}

impl Drop for Turnstile {
    fn drop(&mut self) {
        // A thread may be about to show life.
        self.locked.unlock();
    }
}

fn shows_life(path: &Path) -> io::Result<bool> {
    let shown = fs::metadata(path)?.modified()?;
    // A time in the future is that of a clock which has been set back since.
    let ago = SystemTime::now().duration_since(shown).unwrap_or_else(|future| future.duration());
    Ok(ago <= BELIEVED_FOR)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_waiter_is_believed_while_it_shows_life() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("next");
        assert!(!Turnstile::is_occupied(&path).unwrap());
        let AtTurnstile::Entered(mut waiter) = Turnstile::enter(&path).unwrap() else { panic!("occupied") };
        assert!(Turnstile::is_occupied(&path).unwrap());
        assert!(matches!(Turnstile::enter(&path).unwrap(), AtTurnstile::Occupied));
        for long_ago in [SystemTime::now() - 2 * BELIEVED_FOR, SystemTime::now() + 9 * BELIEVED_FOR] {
            waiter.locked.file().set_modified(long_ago).unwrap();
            assert!(!Turnstile::is_occupied(&path).unwrap());
            assert!(matches!(Turnstile::enter(&path).unwrap(), AtTurnstile::Stalled));
        }
        waiter.shown -= SHOW_EVERY;
        waiter.due().unwrap()().unwrap();
        assert!(Turnstile::is_occupied(&path).unwrap());
        drop(waiter);
        assert!(!Turnstile::is_occupied(&path).unwrap());
        assert!(matches!(Turnstile::enter(&path).unwrap(), AtTurnstile::Entered(_)));
    }
}
