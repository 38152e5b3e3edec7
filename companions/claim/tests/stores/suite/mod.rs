//! The rules of claims as cases that run on every store of claims: see the families.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::missing_panics_doc, unreachable_pub, missing_docs)]
#![allow(dead_code, unused_macros, unused_imports)] // Each test binary uses a part of it.

pub mod attempts;
pub mod bench;
pub mod groups;
pub mod held;
pub mod leases;
pub mod limits;
pub mod lists;
pub mod memory;
pub mod mutant;
mod mutant_hold;
pub mod passes;
pub mod postgres;
pub mod preconditions;
pub mod retention;
pub mod settle;
pub mod stats;
pub mod take;
pub mod text;
pub mod wake;

pub use bench::{Bench, Harness, Layout, Seed, Seen, StateKind, TableHarness, Tracking, Variant};

/// How long a case waits for what must come.
pub const LONG: std::time::Duration = std::time::Duration::from_secs(20);

/// A case: its family and name, and what it does.
pub struct Case {
    pub name: &'static str,
    pub run: for<'a> fn(&'a Env) -> std::pin::Pin<Box<dyn Future<Output = ()> + Send + 'a>>,
}

/// What a case runs on.
pub struct Env {
    pub harness: Box<dyn Harness>,
    pub variant: Variant,
}

impl Env {
    /// An empty table for the spec that `layout` makes, in this variant.
    pub async fn table(&self, layout: Layout) -> Bench {
        let layout = layout.in_variant(self.variant);
        let spec = layout.spec();
        let table = self.harness.table(&layout, &spec).await;
        Bench { table, spec, variant: self.variant }
    }

    /// One with nothing but states, lease and error.
    pub async fn plain(&self) -> Bench {
        self.table(Layout::new(|spec| spec)).await
    }
}

/// Lists every case once, for whoever mounts or runs them.
macro_rules! for_each_case {
    ($do:ident) => {
        $do! {
            take {
                row_11_no_more_than_the_limit, row_38_nothing_from_an_empty_table, row_12_in_order_of_the_id,
                row_12_in_order_of_a_descending_column, row_12_in_order_of_time_and_null_last,
                row_12_in_order_of_text, row_10_each_claim_has_its_own_owner, row_10_owners_of_a_sequence,
                row_19_epochs_grow_with_each_claim, epochs_of_a_sequence_grow_from_row_to_row,
                row_37_only_the_states_that_were_asked_for, row_37_other_states_are_refused,
                limits_and_leases_of_zero_are_refused, row_11_disjoint_between_workers,
                row_44_only_of_the_queue, row_45_the_same_id_in_two_queues,
                a_queue_where_there_is_none_is_refused, row_11_a_locked_row_is_passed_over,
                not_before_it_is_ready, row_19_work_and_dedupe_key_stay_and_the_epoch_grows,
                settled_and_other_states_are_never_taken, without_a_lease_nothing_is_taken,
                ids_of_every_type, row_40_each_row_its_own_timeout, row_84_a_claim_says_what_it_found,
            }
            passes {
                row_13_what_was_seen_is_not_offered_again, row_13_a_line_across_ties_and_descending_order,
                row_13_a_line_across_nulls, row_13_a_line_across_queues, row_15_a_clean_pass,
                row_15_a_locked_row_keeps_the_pass_from_being_clean, row_15_pending_looks_before_the_line,
                row_15_what_is_not_ready_is_not_pending, row_18_everything_is_done_in_passes,
            }
            settle {
                row_24_done, row_25_failed_with_its_message, row_25_retry, row_25_retry_after_a_pause, put_back,
                row_39_along_a_transition, row_39_an_illegal_transition_changes_nothing, twice, by_another_owner,
                under_another_epoch, row_24_all_rows_of_a_claim_or_none, row_18_after_expiry_sweep_and_another_claim,
                row_40_after_a_sweep, after_the_row_was_deleted, after_the_state_was_changed_by_hand,
                each_claim_for_itself, of_nothing, while_somebody_has_the_row_locked,
                row_39_after_the_lease_ended_but_nobody_cared, a_put_back_row_goes_to_the_next, what_is_lost_is_not_waited_for,
            }
            text {
                a_claim_is_settled_by_its_text, a_stale_text_is_refused, texts_of_ids_of_every_type,
                texts_of_other_tables_are_refused,
            }
            leases {
                renewed_in_time, renewing_a_lost_claim, renewing_past_a_locked_row, renewing_what_is_settled_or_gone,
                row_40_a_sweep_returns_what_has_ended, row_40_upkeep_says_when_the_next_lease_ends,
                row_42_upkeep_looks_for_rows_that_lie_used_up, row_40_no_more_than_the_limit, row_40_many_sweepers,
                row_40_a_sweep_never_touches_a_lease_that_lasts, row_40_a_renewal_by_the_rows_own_timeout,
                without_a_lease_or_with_one_of_zero, row_41_expiry_on_read,
                row_40_a_sweep_passes_over_locked_rows, row_18_a_swept_row_is_taken_again,
                a_lost_claim_beside_the_next_of_the_same_row,
            }
            groups {
                row_22_one_claim_has_them_all, row_23_never_two_claims_of_a_group, the_limit_counts_groups,
                one_at_a_time_of_each_entity_in_order,
                groups_in_order_of_their_first_row, null_is_no_group, row_23_one_hot_group_and_many_workers,
                row_22_attempts_of_each_row, row_23_the_line_passes_a_group_that_is_taken,
                row_23_a_group_after_a_sweep, row_22_only_ready_rows_of_the_group,
            }
            limits {
                no_more_of_a_tenant_than_its_limit, a_tenant_without_room_stops_nobody,
                row_13_the_line_passes_a_tenant_without_room, row_40_what_a_crash_leaves_counts_until_the_sweep,
                a_locked_row_takes_no_room, row_44_queues_have_limits, row_16_held_and_leased_count_together,
            }
            preconditions {
                row_20_waits_until_it_is_done, row_20_a_failure_blocks, row_20_a_failure_may_be_passed_over,
                row_20_a_missing_one_blocks, row_20_a_missing_one_may_be_passed_over,
                row_20_an_exhausted_one_has_failed, row_20_blocked_until_it_is_done_after_all,
                row_20_only_its_group_and_its_kind, row_20_all_of_the_kind_must_be_done,
                row_22_waiting_within_a_group, without_preconditions_nothing_is_blocked,
            }
            attempts {
                row_42_three_and_no_more, row_42_a_crash_counts, row_42_put_back_does_not_count,
                row_42_a_snooze_does_not_count,
                row_42_requeue, row_42_requeue_only_what_was_given_up, row_25_requeue_what_failed,
                requeue_all_of_a_state, requeued_rows_wake,
                row_25_rows_are_cancelled_whoever_has_them, what_is_locked_is_not_cancelled, row_43_null_is_without_limit,
                row_42_used_up_rows_are_never_taken, without_attempts_there_is_no_list,
                row_42_a_used_up_row_is_not_pending, row_43_the_last_attempt_can_be_settled,
            }
            retention {
                row_29_keeps_all, row_29_keeps_for_a_time, row_29_deletes_on_settle,
                row_29_a_purge_passes_over_locked_rows, row_29_deletes_a_claim_as_a_whole,
            }
            lists {
                taken_rows_the_longest_first, taken_rows_no_more_than_the_limit, what_has_ended_is_still_listed,
                nothing_is_listed_without_a_lease,
            }
            stats {
                each_kind_of_row_is_counted, no_more_is_counted_than_the_limit, counts_of_a_queue,
                counts_without_a_lease, counts_of_what_waits, how_long_the_first_has_been_ready,
            }
            wake {
                row_6_an_insert_wakes, row_9_nothing_is_lost_between_listening_and_waiting,
                a_wait_that_was_given_up_loses_nothing, every_listener_hears, row_8_all_notifications_lost,
                no_news_no_wake_up,
            }
            held {
                row_16_all_at_once_by_the_commit, row_17_a_rollback_leaves_nothing, row_17_so_does_a_drop,
                row_11_others_take_the_next, what_was_not_settled_stays, held_claims_settle_once,
                row_42_a_retry_counts_and_a_rollback_does_not,
                row_42_a_snooze_in_the_transaction, nothing_to_hold, row_22_a_group_is_held,
                row_64_without_any_column, row_19_epochs_outlive_a_rollback, row_20_busy, row_38_in_order_and_no_more,
                held_rows_are_not_taken_under_a_lease, row_25_failed_in_the_transaction, row_29_deleted_by_the_commit,
                held_claims_of_others_are_not_settled, row_68_a_hold_does_not_stop_the_rest,
                row_41_a_lease_that_has_ended_is_free_for_both, row_13_a_line_for_both, not_ready_for_either,
            }
        }
    };
}
pub(crate) use for_each_case;

macro_rules! list_cases {
    ($( $family:ident { $( $case:ident ),* $(,)? } )*) => {
        /// Every case.
        pub const CASES: &[Case] = &[
            $($( Case {
                name: concat!(stringify!($family), "::", stringify!($case)),
                run: |env| Box::pin($family::$case(env)),
            }, )*)*
        ];
    };
}
for_each_case!(list_cases);

/// Mounts every case as a test that calls the function `start` beside it with the case's name.
macro_rules! mount_cases {
    ($( $family:ident { $( $case:ident ),* $(,)? } )*) => {
        $( mod $family { $(
            #[test]
            fn $case() {
                super::start(concat!(stringify!($family), "::", stringify!($case)));
            }
        )* } )*
    };
}
pub(crate) use mount_cases;

/// The case of this name.
pub fn case(name: &str) -> &'static Case {
    CASES.iter().find(|case| case.name == name).expect("a case of this name")
}
