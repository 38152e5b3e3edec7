//! A program that takes a lock and whose `main` returns. Its arguments are the [way](main) in which `main` ends, the URL
//! of the store, and the key.

use std::cell::RefCell;
use std::mem::forget;
use std::sync::OnceLock;
use std::sync::mpsc;
use std::thread;

use leasehold::Error;
use leasehold::blocking::{Lock, LockGuard, connect};

static LOCK: OnceLock<Lock> = OnceLock::new();
static GUARD: OnceLock<LockGuard> = OnceLock::new();

thread_local! {
    static OF_THE_THREAD: RefCell<Option<LockGuard>> = const { RefCell::new(None) };
}

fn main() -> Result<(), Error> {
    let mut arguments = std::env::args().skip(1);
    let (Some(way), Some(url), Some(key)) = (arguments.next(), arguments.next(), arguments.next()) else {
        panic!("arguments: WAY URL KEY");
    };
    // Used before any variable of tokio, and so dropped after them.
    OF_THE_THREAD.set(None);
    let lock = connect(&url)?;
    match &*way {
        "guard in a variable" => {
            let _guard = lock.key(key).acquire()?;
            Ok(())
        }
        "guard that outlives its lock" => {
            let _guard = lock.key(key).acquire()?;
            drop(lock);
            Ok(())
        }
        "guards of several keys" => {
            let _guards = lock.keys([format!("{key}, and another"), key]).acquire()?;
            Ok(())
        }
        "lock in a static" => {
            let _guard = LOCK.get_or_init(|| lock).key(key).acquire()?;
            Ok(())
        }
        "guard in a thread-local" => {
            OF_THE_THREAD.set(Some(lock.key(key).acquire()?));
            Ok(())
        }
        "panic" => {
            let _guard = lock.key(key).acquire()?;
            panic!("on purpose");
        }
        "guard in a static" => {
            let guard = lock.key(key).acquire()?;
            GUARD.get_or_init(|| guard);
            Ok(())
        }
        "forgotten guard" => {
            forget(lock.key(key).acquire()?);
            Ok(())
        }
        "guard of a thread that runs" => {
            let guard = lock.key(key).acquire()?;
            let (sender, works) = mpsc::channel();
            thread::spawn(move || {
                let _guard = guard;
                drop(sender);
                loop {
                    thread::park();
                }
            });
            // Returns when the thread has the guard.
            let _ = works.recv() as Result<(), _>;
            Ok(())
        }
        "closed lock, and a guard in a static" => {
            let guard = lock.key(key).acquire()?;
            GUARD.get_or_init(|| guard);
            lock.close()
        }
        _ => panic!("{way}?"),
    }
}
