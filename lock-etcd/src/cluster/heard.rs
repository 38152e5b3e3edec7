//! The numbers in the headers of replies.

use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};

use super::{Class, Failure};
use crate::wire::ResponseHeader;

/// The greatest revision and raft term of all replies so far, and the number of TCP connections made. A restore from a
/// backup makes none of them smaller, but later replies then have smaller ones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Heard {
    pub(crate) revision: i64,
    pub(crate) term: u64,
    pub(crate) connects: u64,
}

/// Collects the numbers of all replies.
#[derive(Debug, Default)]
pub(super) struct Ears {
    revision: AtomicI64,
    term: AtomicU64,
    connects: AtomicU64,
    /// The cluster id of the first reply. Zero before it.
    cluster_id: AtomicU64,
}

impl Ears {
    pub(super) fn heard(&self) -> Heard {
        Heard {
            revision: self.revision.load(Ordering::SeqCst),
            term: self.term.load(Ordering::SeqCst),
            connects: self.connects.load(Ordering::SeqCst),
        }
    }

    /// Notes the numbers of a reply. Fails if it is the reply of another cluster than the first one.
    pub(super) fn note(&self, header: Option<&ResponseHeader>) -> Result<(), Failure> {
        let Some(header) = header else { return Ok(()) };
        if header.cluster_id != 0 {
            let first =
                self.cluster_id.compare_exchange(0, header.cluster_id, Ordering::SeqCst, Ordering::SeqCst);
            if first.is_err_and(|first| first != header.cluster_id) {
                return Err(Failure::maybe_sent(Class::OtherCluster));
            }
        }
        self.revision.fetch_max(header.revision, Ordering::SeqCst);
        self.term.fetch_max(header.raft_term, Ordering::SeqCst);
        Ok(())
    }

    pub(super) fn connected(&self) {
        self.connects.fetch_add(1, Ordering::SeqCst);
    }

    pub(super) fn start_over(&self, header: &ResponseHeader) {
        self.revision.store(header.revision, Ordering::SeqCst);
        self.term.store(header.raft_term, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keeps_the_greatest_numbers_and_refuses_another_cluster() {
        let ears = Ears::default();
        let header = |cluster_id, revision, raft_term| ResponseHeader {
            cluster_id,
            member_id: 1,
            revision,
            raft_term,
        };
        ears.note(None).unwrap();
        ears.note(Some(&header(7, 5, 2))).unwrap();
        ears.note(Some(&header(7, 4, 3))).unwrap();
        assert!(ears.note(Some(&header(8, 99, 99))).unwrap_err().is_other_cluster());
        assert_eq!(ears.heard(), Heard { revision: 5, term: 3, connects: 0 });
        ears.start_over(&header(7, 2, 1));
        ears.connected();
        assert_eq!(ears.heard(), Heard { revision: 2, term: 1, connects: 1 });
    }
}
