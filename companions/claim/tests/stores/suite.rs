//! The rules of claims as cases that run on every store of claims, by families.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::missing_panics_doc, unreachable_pub, missing_docs)]

pub mod attempts;
pub mod bench;
pub mod groups;
pub mod held;
pub mod hold;
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

pub use bench::{Bench, Harness, Layout, Variant};

/// Limit of a case's wait for an expected event.
pub const LONG: std::time::Duration = std::time::Duration::from_secs(20);

/// A case, named by its family and function.
pub struct Case {
    pub name: &'static str,
    pub run: for<'a> fn(&'a Env) -> std::pin::Pin<Box<dyn Future<Output = ()> + Send + 'a>>,
}

/// The store and the variant on which a case runs.
pub struct Env {
    pub harness: Box<dyn Harness>,
    pub variant: Variant,
}

impl Env {
    /// Creates an empty table for the spec of `layout`, in this variant.
    pub async fn table(&self, layout: Layout) -> Bench {
        let layout = layout.in_variant(self.variant);
        let spec = layout.spec();
        let table = self.harness.table(&layout, &spec).await;
        Bench { table, spec, variant: self.variant }
    }

    /// Creates a table with only states, lease and error.
    pub async fn plain(&self) -> Bench {
        self.table(Layout::new(|spec| spec)).await
    }
}

/// Passes the list of all cases to the macro `$do`.
macro_rules! for_each_case {
    ($do:ident) => {
        $do! {
            take {
                a_take_returns_no_more_than_its_limit, an_empty_table_gives_no_claims,
                claims_come_in_order_of_the_id, claims_come_in_order_of_a_descending_column,
                claims_come_in_order_of_time_with_null_last, claims_come_in_order_of_text,
                each_claim_has_its_own_owner, owners_can_come_from_a_sequence, epochs_grow_with_each_claim,
                epochs_of_a_sequence_grow_from_row_to_row, a_take_returns_only_the_requested_states,
                states_that_cannot_be_taken_are_refused, limits_and_leases_of_zero_are_refused,
                workers_take_disjoint_rows, a_take_returns_only_rows_of_its_queue,
                the_same_id_in_two_queues_is_two_rows, a_queue_where_there_is_none_is_refused,
                a_locked_row_is_passed_over, not_before_it_is_ready,
                work_and_dedupe_key_stay_and_the_epoch_grows, settled_and_other_states_are_never_taken,
                without_a_lease_nothing_is_taken, ids_of_every_type, each_row_can_have_its_own_timeout,
                a_claim_reports_the_row_that_it_found,
            }
            passes {
                rows_seen_in_a_pass_are_not_offered_again, the_cursor_works_across_ties_and_descending_order,
                the_cursor_works_across_nulls, the_cursor_works_across_queues,
                a_pass_is_clean_only_if_it_found_nothing, a_locked_row_keeps_the_pass_from_being_clean,
                pending_includes_rows_before_the_cursor, rows_that_are_not_ready_are_not_pending,
                passes_of_several_workers_finish_every_row_once,
            }
            settle {
                a_settled_row_is_done_and_others_are_untouched, a_failed_row_has_its_message,
                a_retried_row_is_free_at_once_and_uses_an_attempt, a_retry_can_have_a_pause, put_back,
                a_claim_can_end_along_a_transition, an_illegal_transition_changes_nothing, twice,
                by_another_owner, under_another_epoch, all_rows_of_a_claim_are_settled_or_none,
                a_worker_whose_row_was_taken_again_cannot_settle, a_worker_whose_row_was_swept_cannot_settle,
                after_the_row_was_deleted, after_the_state_was_changed_by_hand, each_claim_for_itself,
                of_nothing, while_somebody_has_the_row_locked,
                an_ended_lease_that_was_not_swept_can_be_settled, a_put_back_row_goes_to_the_next,
                what_is_lost_is_not_waited_for, each_end_names_its_claim, all_rows_of_a_claim_name_it,
                an_end_without_a_claim_names_none,
            }
            text {
                a_claim_is_settled_by_its_text, a_stale_text_is_refused, texts_of_ids_of_every_type,
                texts_of_other_tables_are_refused,
            }
            leases {
                renewed_in_time, renewing_a_lost_claim, renewing_past_a_locked_row,
                renewing_what_is_settled_or_gone, a_sweep_returns_ended_leases,
                upkeep_reports_when_the_next_lease_ends, upkeep_marks_rows_without_attempts_left_as_exhausted,
                a_sweep_returns_no_more_than_its_limit, each_row_is_swept_once_by_many_sweepers,
                a_sweep_never_touches_a_lease_that_lasts, a_renewal_uses_the_rows_own_timeout,
                without_a_lease_or_with_one_of_zero, an_ended_lease_is_taken_without_a_sweep,
                a_sweep_passes_over_locked_rows, a_swept_row_is_taken_again,
                a_lost_claim_beside_the_next_of_the_same_row,
            }
            groups {
                one_claim_has_all_rows_of_a_group, a_group_is_never_in_two_claims, the_limit_counts_groups,
                one_at_a_time_of_each_entity_in_order, groups_in_order_of_their_first_row, null_is_no_group,
                many_workers_finish_one_hot_group_one_at_a_time, attempts_count_for_each_row_of_a_group,
                the_cursor_passes_a_taken_group, a_group_is_taken_again_once_all_its_rows_are_swept,
                only_ready_rows_of_a_group_are_taken,
            }
            limits {
                no_more_of_a_tenant_than_its_limit, a_tenant_without_room_stops_nobody,
                the_cursor_passes_a_tenant_without_room,
                an_ended_lease_counts_towards_the_limit_until_the_sweep, a_locked_row_takes_no_room,
                queues_have_limits, held_and_leased_claims_share_the_limit,
            }
            preconditions {
                an_update_waits_until_its_create_is_done, a_failed_create_blocks_its_update,
                a_failed_create_can_be_ignored, a_missing_create_blocks_its_update,
                a_missing_create_can_be_ignored, an_exhausted_create_counts_as_failed,
                a_blocked_update_runs_once_its_create_is_done, only_updates_of_the_same_group_wait,
                every_create_of_the_group_must_be_done, updates_of_a_grouped_claim_wait_for_its_create,
                without_preconditions_nothing_is_blocked,
            }
            attempts {
                three_attempts_are_three_claims, a_crash_uses_an_attempt, a_claim_put_back_uses_no_attempt,
                a_snooze_uses_no_attempt, a_requeued_row_has_its_new_attempts,
                only_given_up_rows_are_requeued, failed_rows_are_requeued_at_once, requeue_all_of_a_state,
                requeued_rows_wake, rows_are_cancelled_even_while_claimed, what_is_locked_is_not_cancelled,
                null_attempts_are_without_limit, rows_without_attempts_left_are_never_taken,
                without_attempts_there_is_no_list, a_row_without_attempts_left_is_not_pending,
                the_last_attempt_can_be_settled,
            }
            retention {
                settled_rows_are_kept_by_default, settled_rows_are_purged_after_their_time,
                settled_rows_can_be_deleted_at_once, a_purge_passes_over_locked_rows,
                a_claim_is_deleted_as_a_whole,
            }
            lists {
                taken_rows_the_longest_first, taken_rows_no_more_than_the_limit,
                what_has_ended_is_still_listed, nothing_is_listed_without_a_lease,
            }
            stats {
                each_kind_of_row_is_counted, no_more_is_counted_than_the_limit, counts_of_a_queue,
                counts_without_a_lease, counts_of_what_waits, how_long_the_first_has_been_ready,
            }
            wake {
                an_insert_wakes_a_listener, no_row_is_lost_between_listening_and_waiting,
                a_wait_that_was_given_up_loses_nothing, every_listener_hears,
                a_scan_finds_rows_whose_notifications_are_lost, no_news_no_wake_up,
            }
            held {
                held_rows_are_settled_together_by_the_commit, a_rollback_leaves_no_trace,
                a_dropped_hold_leaves_no_trace, others_take_the_next_rows_without_waiting,
                what_was_not_settled_stays, held_claims_settle_once,
                a_retry_uses_an_attempt_and_a_rollback_does_not, a_snooze_in_a_transaction_uses_no_attempt,
                nothing_to_hold, a_held_group_is_closed_to_others, a_table_without_lease_columns_can_be_held,
                epochs_of_a_sequence_grow_across_a_rollback, a_row_whose_create_is_locked_is_not_held,
                held_rows_come_in_order_and_within_the_limit, held_rows_are_not_taken_under_a_lease,
                a_failure_is_written_by_the_commit, a_settled_row_is_deleted_by_the_commit,
                held_claims_of_others_are_not_settled, a_hold_does_not_block_the_rest,
                an_ended_lease_is_free_for_held_claims_too, held_and_leased_claims_continue_each_others_cursor,
                not_ready_for_either, each_end_of_a_held_claim_names_it,
                all_rows_of_a_held_claim_name_it,
            }
        }
    };
}
pub(crate) use for_each_case;

macro_rules! list_cases {
    ($( $family:ident { $( $case:ident ),* $(,)? } )*) => {
        /// All cases.
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

/// Returns the case of this name.
pub fn case(name: &str) -> &'static Case {
    CASES.iter().find(|case| case.name == name).expect("a case of this name")
}
