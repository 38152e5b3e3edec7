//! Faults of shared grants and permits.

/// The single fault of a [`ModesBackend`](super::ModesBackend).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum ModeFault {
    /// No fault.
    None,
    WriterJoinsReaders,
    ReaderJoinsWriter,
    ReadersExcludeEachOther,
    ReleaseEndsAll,
    RenewLengthensAll,
    ShorterTtlCutsOthers,
    DeadHolderStays,
    ReadersStarveWriter,
    ReaderTokenIsOld,
    ReaderTokenIsHigh,
    LookShowsOne,
    ForceEndsAll,
    OneMorePermit,
    PermitsAreShared,
    NumberIsConstant,
    NumberIsMissing,
    MismatchIsContention,
    NumberChangesInSilence,
    SameIdTakesTwo,
    ReleaseTwiceAddsPermit,
    JoinsBeyondShareFor,
    FirstReaderReleasesForAll,
    LossEndsOneReader,
}

use ModeFault as F;

impl ModeFault {
    /// Every fault with its name and the rules that it breaks.
    pub(crate) const ALL: &[(Self, &str, &[&str])] = &[
        (F::WriterJoinsReaders, "writer-joins-readers", &["C1", "C19"]),
        (F::ReaderJoinsWriter, "reader-joins-writer", &["C1", "C19"]),
        (F::ReadersExcludeEachOther, "readers-exclude-each-other", &["C19"]),
        (F::ReleaseEndsAll, "release-of-one-ends-all", &["C2", "C19"]),
        (F::RenewLengthensAll, "renew-lengthens-all-readers", &["C10", "C19"]),
        (F::ShorterTtlCutsOthers, "shorter-ttl-cuts-the-others", &["C10", "C19"]),
        (F::DeadHolderStays, "dead-holder-stays", &["C9", "C19", "C20"]),
        (F::ReadersStarveWriter, "readers-starve-writer", &["C12", "C19"]),
        (F::ReaderTokenIsOld, "shared-token-below-last-writer", &["C8"]),
        (F::ReaderTokenIsHigh, "exclusive-token-not-above-readers", &["C8"]),
        (F::LookShowsOne, "look-shows-one-of-many", &["C18", "C19"]),
        (F::ForceEndsAll, "force-ends-all", &["C18", "C19"]),
        (F::OneMorePermit, "n-plus-one", &["C20"]),
        (F::PermitsAreShared, "permits-are-shared", &["C20"]),
        (F::NumberIsConstant, "number-is-constant", &["C20"]),
        (F::NumberIsMissing, "number-is-missing", &["C20"]),
        (F::MismatchIsContention, "n-mismatch-is-contention", &["C15", "C20"]),
        (F::NumberChangesInSilence, "n-change-is-silent", &["C20"]),
        (F::SameIdTakesTwo, "same-id-takes-two", &["C2", "C20"]),
        (F::ReleaseTwiceAddsPermit, "release-twice-adds-a-permit", &["C2", "C20"]),
        (F::JoinsBeyondShareFor, "readers-join-beyond-share-for", &["C12", "C19"]),
        (F::FirstReaderReleasesForAll, "first-reader-releases-for-all", &["C2", "C19"]),
        (F::LossEndsOneReader, "loss-ends-one-reader-alone", &["C9", "C19"]),
    ];

    /// Returns whether the fault is in the engine's part, the sharing of one hold by several readers.
    pub(crate) const fn is_of_sharing(self) -> bool {
        matches!(self, F::JoinsBeyondShareFor | F::FirstReaderReleasesForAll | F::LossEndsOneReader)
    }
}
