//! The suite on Postgres, at the three isolation levels.

mod read_committed {
    use leasehold_idempotency::Isolation;

    crate::suite::suite!(crate::common::isolated(Isolation::ReadCommitted).await);
}

mod repeatable_read {
    use leasehold_idempotency::Isolation;

    crate::suite::suite!(crate::common::isolated(Isolation::RepeatableRead).await);
}

mod serializable {
    use leasehold_idempotency::Isolation;

    crate::suite::suite!(crate::common::isolated(Isolation::Serializable).await);
}
