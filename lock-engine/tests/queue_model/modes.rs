//! The queue with shared grants and permits.

use std::sync::Arc;
// Not loom's own, because the counters only check. Fewer of its operations leave fewer interleavings to try.
use std::sync::atomic::{AtomicUsize, Ordering};

use leasehold_api::Mode;
use loom::future::block_on;
use loom::thread;

use super::acquire::queue::GrantOutcome;
use super::{Plain, Readers, key, model, named, permit, permit_as, waiter, waiter_as};

/// Grants a shared hold and passes the permit on, as the engine does.
fn join(queues: &Arc<Plain>, serial: u64) {
    let permit = block_on(permit_as(queues, named(Mode::Shared, serial))).unwrap();
    queues.join(&key(), named(Mode::Shared, serial), None);
    drop(permit);
}

fn leave(queues: &Arc<Plain>, serial: u64) {
    drop(queues.membership(&key(), serial, GrantOutcome::Released));
}

/// Counts the present readers and writers.
#[derive(Default)]
struct Room {
    readers: AtomicUsize,
    writers: AtomicUsize,
}

#[test]
fn readers_and_a_writer_exclude_each_other_and_all_are_served() {
    model(|| {
        let (queues, room) = (Plain::new(), Arc::new(Room::default()));
        let reader = |serial| {
            let (queues, room) = (Arc::clone(&queues), Arc::clone(&room));
            thread::spawn(move || {
                let permit = block_on(permit_as(&queues, named(Mode::Shared, serial))).unwrap();
                room.readers.fetch_add(1, Ordering::AcqRel);
                assert_eq!(room.writers.load(Ordering::Acquire), 0, "a reader beside the writer");
                queues.join(&key(), named(Mode::Shared, serial), None);
                drop(permit);
                thread::yield_now();
                room.readers.fetch_sub(1, Ordering::AcqRel);
                leave(&queues, serial);
            })
        };
        let readers = [reader(1), reader(2)];
        let permit = block_on(permit(&queues)).unwrap();
        room.writers.fetch_add(1, Ordering::AcqRel);
        thread::yield_now();
        assert_eq!(room.readers.load(Ordering::Acquire), 0, "the writer beside a reader");
        room.writers.fetch_sub(1, Ordering::AcqRel);
        drop(permit);
        readers.into_iter().for_each(|reader| reader.join().unwrap());
        let (ended, live) = queues.count(|_| true);
        assert_eq!((ended.released, live, queues.len()), (2, 0, 0));
    });
}

#[test]
fn the_last_of_two_readers_that_leave_lets_the_writer_in() {
    model(|| {
        let queues = Plain::new();
        (1..=2).for_each(|serial| join(&queues, serial));
        let writer = waiter(&queues);
        let leaving = [1, 2].map(|serial| {
            let queues = Arc::clone(&queues);
            thread::spawn(move || leave(&queues, serial))
        });
        drop(block_on(writer).unwrap());
        leaving.into_iter().for_each(|leaving| leaving.join().unwrap());
        assert_eq!(queues.len(), 0);
    });
}

#[test]
fn a_writer_that_gives_up_lets_the_readers_behind_it_in() {
    model(|| {
        let queues = Plain::new();
        join(&queues, 1);
        let (writer, reader) = (waiter(&queues), waiter_as(&queues, named(Mode::Shared, 2)));
        let quitting = thread::spawn(move || drop(writer));
        let leaving = {
            let queues = Arc::clone(&queues);
            thread::spawn(move || leave(&queues, 1))
        };
        drop(block_on(reader).unwrap());
        quitting.join().unwrap();
        leaving.join().unwrap();
        assert_eq!(queues.len(), 0);
    });
}

/// The writer waits behind the joining reader, and gets the permit when both readers have left.
#[test]
fn a_reader_that_joins_while_the_last_one_leaves_parks_the_writer_once() {
    model(|| {
        let queues = Plain::new();
        join(&queues, 1);
        let permit = block_on(permit_as(&queues, named(Mode::Shared, 2))).unwrap();
        let writer = waiter(&queues);
        let leaving = {
            let queues = Arc::clone(&queues);
            thread::spawn(move || leave(&queues, 1))
        };
        queues.join(&key(), named(Mode::Shared, 2), None);
        drop(permit);
        let ending = {
            let queues = Arc::clone(&queues);
            thread::spawn(move || leave(&queues, 2))
        };
        drop(block_on(writer).unwrap());
        leaving.join().unwrap();
        ending.join().unwrap();
        assert_eq!(queues.len(), 0);
    });
}

/// Grants the first reader of one hold of the store, which others share.
fn first_reader(queues: &Arc<Plain>) -> Arc<Readers> {
    let share = Arc::new(Readers::default());
    assert!(share.add());
    let permit = block_on(permit_as(queues, named(Mode::Shared, 1))).unwrap();
    queues.join(&key(), named(Mode::Shared, 1), Some(Arc::clone(&share)));
    drop(permit);
    share
}

/// Ends a reader. Returns whether it was the last one, which has released the store's hold.
fn leave_share(queues: &Arc<Plain>, share: &Readers, serial: u64) -> bool {
    let is_last = !queues.leave_if(&key(), serial, GrantOutcome::Released, || share.remove());
    if is_last {
        leave(queues, serial);
    }
    is_last
}

/// A reader that comes as the last one leaves either shares its hold and releases that, or does not get it.
#[test]
fn exactly_one_reader_releases_the_hold_that_readers_share() {
    model(|| {
        let queues = Plain::new();
        let share = first_reader(&queues);
        let joining = {
            let (queues, share) = (Arc::clone(&queues), Arc::clone(&share));
            thread::spawn(move || {
                let joins = queues.share(&key(), named(Mode::Shared, 2), false);
                joins.then(|| leave_share(&queues, &share, 2))
            })
        };
        let first = leave_share(&queues, &share, 1);
        let second = joining.join().unwrap();
        assert_eq!(usize::from(first) + usize::from(second == Some(true)), 1, "{first} {second:?}");
        assert_eq!((queues.count(|_| true).0.released, queues.len()), (1 + u64::from(second.is_some()), 0));
    });
}

/// A reader whose store's hold was lost leaves the group without a change of the count. So the other one, which has just
/// ended, still counts it.
#[test]
fn a_reader_that_leaves_as_the_others_are_lost_lets_the_writer_in() {
    model(|| {
        let queues = Plain::new();
        let share = first_reader(&queues);
        assert!(queues.share(&key(), named(Mode::Shared, 2), false));
        let writer = waiter(&queues);
        let losing = {
            let queues = Arc::clone(&queues);
            thread::spawn(move || leave(&queues, 2))
        };
        assert!(!leave_share(&queues, &share, 1), "the other one is counted");
        drop(block_on(writer).unwrap());
        losing.join().unwrap();
        assert_eq!(queues.len(), 0);
    });
}

/// The reader does not overtake the writer, and the writer gets the permit after the last reader's release.
#[test]
fn a_reader_shares_no_hold_behind_a_waiting_writer() {
    model(|| {
        let queues = Plain::new();
        let share = first_reader(&queues);
        let writer = waiter(&queues);
        assert!(!queues.share(&key(), named(Mode::Shared, 2), false), "a reader overtook the writer");
        let leaving = {
            let (queues, share) = (Arc::clone(&queues), Arc::clone(&share));
            thread::spawn(move || assert!(leave_share(&queues, &share, 1)))
        };
        drop(block_on(writer).unwrap());
        leaving.join().unwrap();
        assert_eq!(queues.len(), 0);
    });
}

#[test]
fn a_hold_that_has_joined_counts_once_while_it_still_has_the_permit() {
    model(|| {
        let queues = Plain::new();
        let seen = || {
            let mut seen = 0;
            queues.for_each(|_| seen += 1);
            (seen, queues.count(|_| true).1, queues.len())
        };
        let permit = block_on(permit_as(&queues, named(Mode::Shared, 1))).unwrap();
        assert_eq!(seen(), (1, 1, 1));
        queues.join(&key(), named(Mode::Shared, 1), None);
        assert_eq!(seen(), (1, 1, 1));
        drop(permit);
        assert_eq!(seen(), (1, 1, 1));
        leave(&queues, 1);
        assert_eq!(seen(), (0, 0, 0));
    });
}

#[test]
fn closing_ends_a_parked_wait() {
    model(|| {
        let queues = Plain::new();
        join(&queues, 1);
        let waiting = {
            let writer = waiter(&queues);
            thread::spawn(move || drop(block_on(writer)))
        };
        let leaving = {
            let queues = Arc::clone(&queues);
            thread::spawn(move || leave(&queues, 1))
        };
        queues.close();
        waiting.join().unwrap();
        leaving.join().unwrap();
        assert_eq!(queues.len(), 0);
    });
}

#[test]
fn a_semaphore_has_room_for_its_permits_and_no_more() {
    model(|| {
        let (queues, inside) = (Plain::new(), Arc::new(AtomicUsize::new(0)));
        let holder = |serial| {
            let (queues, inside) = (Arc::clone(&queues), Arc::clone(&inside));
            move || {
                let name = || named(Mode::Permit { of: 2 }, serial);
                let permit = block_on(permit_as(&queues, name())).unwrap();
                assert!(inside.fetch_add(1, Ordering::AcqRel) < 2, "three permits of two");
                queues.join(&key(), name(), None);
                drop(permit);
                inside.fetch_sub(1, Ordering::AcqRel);
                leave(&queues, serial);
            }
        };
        let others = [thread::spawn(holder(1)), thread::spawn(holder(2))];
        holder(3)();
        others.into_iter().for_each(|other| other.join().unwrap());
        assert_eq!(queues.len(), 0);
    });
}
