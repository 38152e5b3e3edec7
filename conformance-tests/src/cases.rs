//! The list of all cases. Each group is a module.

use crate::case::{Case, Need};

mod modes;
mod polling;

/// Calls the given macro with the list of all cases, in the form `group { case [rules] [needs]; ... } ...`.
#[doc(hidden)]
#[macro_export]
macro_rules! for_each_case {
    ($($callback:tt)*) => {
        $crate::with_mode_cases! {
            [$($callback)*]
            exclusion {
                free_key_is_granted [C1 C3] [];
                held_key_reads_held_for_another_client [C1 C3] [];
                held_key_reads_held_for_its_own_client [C1 C3 C13] [];
                acquiring_what_one_holds_waits [C13] [];
                different_keys_do_not_exclude_each_other [C1 C14] [];
                taken_and_given_back_many_times [C6 C11] [];
                one_winner_of_twenty_tries [C1 C3] [];
                no_increment_is_lost [C1] [];
                the_section_never_holds_two [C1] [];
                no_try_of_thousands_gets_a_held_key [C1 C3] [];
                writes_are_seen_by_the_next_holder [C1] [];
                an_idle_holder_keeps_the_lock [C1 C10] [];
                clients_configured_alike_exclude_each_other [C1 C2] [];
                a_try_does_not_overtake_a_local_waiter [C3 C12] [];
                a_try_does_not_overtake_those_who_wait_for_a_remote_holder [C3 C12] [];
                a_try_answers_while_others_wait [C3] [];
            }
            timeouts {
                zero_is_one_attempt [C4] [];
                zero_makes_one_call [C4] [Calls];
                fires_when_due [C4] [];
                the_budget_includes_the_local_turn [C4] [];
                a_wake_up_begins_no_new_budget [C4] [Cooldown];
                default_is_thirty_seconds [C4] [Virtual];
                a_try_looks_at_no_budget [C3 C4] [];
                huge_budgets_do_not_overflow [C4] [];
                for_ever_is_long [C4] [Virtual];
                nothing_is_left_behind [C4 C5] [];
                a_timed_out_waiter_does_not_hold_up_those_behind [C4 C11] [];
                a_timed_out_waiter_in_the_middle [C4 C12] [];
                waiting_is_no_busy_loop [C11 C16] [Calls];
                the_budget_includes_a_slow_store [C4 C5] [Script];
                the_budget_includes_a_silent_store [C4 C5] [Silence];
                the_error_names_key_and_store [C15] [];
                silence_is_not_contention [C3 C15] [Silence];
            }
            cancellation {
                dropped_tries [C5] [];
                dropped_acquires_of_a_free_key [C5] [];
                dropped_waits [C5] [];
                dropped_while_it_is_granted [C5 C11] [];
                dropped_acquires_of_several_keys [C5] [];
                dropped_releases [C5 C6] [];
                unpolled_releases [C5 C7] [];
                dropped_renewals [C5 C10] [Lease];
                dropped_runs [C5] [];
                dropped_closes [C5 C17] [];
                an_unpolled_future_does_nothing [C5] [Calls];
                a_cancelled_waiter_lets_the_next_one_in [C5 C11 C12] [];
                a_cancelled_waiter_never_owns_later [C5] [];
                a_cancel_returns_at_once [C5] [];
                a_storm_leaves_nothing [C5] [];
                dropped_acquires_of_a_disturbed_store [C5] [Script];
                dropped_while_the_request_is_on_its_way [C5] [Script];
                dropped_releases_to_a_disturbed_store [C5 C6] [Script];
                dropped_renewals_to_a_disturbed_store [C5 C10] [Lease Script];
                a_wait_that_fails_leaves_nothing [C5] [Script];
            }
            release {
                after_ok_the_next_try_succeeds [C6] [];
                after_ok_a_registered_waiter_comes_first [C6] [];
                after_ok_dropped_attempts_overtake_nobody [C5 C6 C12] [];
                after_ok_a_try_of_others_delays_nobody [C3 C6] [];
                frees_one_hold_only [C2 C6] [];
                drop_frees_within_the_bound [C5 C7] [];
                drop_hands_over_to_waiters [C7 C11] [];
                drop_needs_no_runtime [C7] [];
                drop_does_not_free_a_successor [C2 C7] [];
                any_order_over_several_keys [C6] [];
                a_failed_release_is_retried [C6] [Script];
                a_failed_drop_is_retried [C6 C7] [Script];
                a_retried_release_spares_the_successor [C2 C6] [Script];
                a_failed_release_wedges_no_local_waiter [C6 C11] [Script];
                on_a_silent_store_it_ends_with_an_error [C6 C15] [Silence];
                of_a_lost_grant_is_an_error [C6] [Lose];
                that_arrives_after_the_lease_has_ended_is_an_error [C6] [Lease Script];
                is_repeated_for_as_long_as_the_store_may_hold_the_key [C6] [Lease Script Silence];
                during_a_renewal [C6 C10] [Lease Script];
                from_another_task_and_thread [C6 C7] [];
                the_client_may_go_before_the_guard [C7] [];
                a_leaked_guard_keeps_the_key_until_close [C1 C17] [];
            }
            ownership {
                every_grant_has_a_fresh_id [C2] [];
                ids_of_several_keys_differ [C2] [];
                a_late_release_spares_the_successor [C2 C6] [Lose];
                a_late_drop_spares_the_successor [C2 C7] [Lose];
                a_failed_attempt_is_undone_not_doubled [C2 C3 C5] [Script];
                a_request_that_arrives_twice_is_one_grant [C2 C8] [Script];
                a_renewal_that_arrives_twice_is_one [C2 C10] [Lease Script];
                undoing_an_attempt_spares_the_holder [C2 C5] [Script];
                a_copy_that_arrives_after_its_release_is_refused [C23] [LateRequests];
            }
            expiry {
                an_unrenewed_lease_ends_on_time [C1 C9 C11] [Lease Silence];
                an_unrenewed_lease_does_not_end_sooner [C1 C9] [Lease Silence];
                a_waiter_needs_no_event [C11] [Lease Silence];
                a_waiter_whose_wake_ups_are_lost [C11] [Lease Silence Mute];
                the_owner_knows_before_the_store_lets_go [C1 C9] [Lease Silence];
                a_late_release_spares_the_successor [C2 C6] [Lease Silence];
                a_late_drop_spares_the_successor [C2 C7] [Lease Silence];
                a_late_renewal_spares_the_successor [C2 C10] [Lease Silence];
                an_ended_lease_is_not_revived [C6 C9 C10] [Lease Silence];
                a_new_grant_does_not_revive_the_old [C2 C9] [Lease Silence];
                validity_passes_through_doubt [C9] [Lease Silence];
                remaining_never_exceeds_the_truth [C9] [Lease Silence];
                a_clock_that_is_off_takes_nothing_early [C1 C9] [Lease Silence Skew];
                a_holder_whose_clock_is_off_knows_in_time [C9 C10] [Lease Silence Skew];
                a_late_answer_claims_no_more_than_the_truth [C9] [Lease Silence Script];
                a_grant_that_is_noticed_late_claims_no_more_than_the_truth [C1 C9] [Lease];
                bounds_are_enforced [C15 C16] [Lease];
                the_longest_ttl_does_not_overflow [C9 C16] [Lease];
                a_ttl_counts_to_the_millisecond [C1 C9 C11] [Lease Silence];
            }
            renewal {
                keeps_a_lease_for_long [C9 C10] [Lease];
                keeps_a_short_lease [C10 C16] [Lease];
                keeps_many_leases [C10] [Lease];
                by_hand_extends [C9 C10] [Lease];
                begins_the_whole_ttl_anew [C9 C10] [Lease Silence];
                may_ask_for_a_longer_ttl [C10] [Lease Silence];
                may_ask_for_a_shorter_ttl [C9 C10] [Lease Silence];
                counts_to_the_millisecond [C1 C9 C10] [Lease Silence];
                for_a_shorter_ttl_serves_a_waiter_in_time [C10 C11] [Lease Silence];
                for_a_shorter_ttl_counts_unanswered [C1 C9] [Lease Silence Script];
                another_ttl_stays_in_force [C10] [Lease];
                refuses_a_ttl_out_of_bounds [C15 C16] [Lease];
                keeps_the_token_and_the_id [C2 C8] [Lease];
                is_retried_after_a_failure [C10] [Lease Script];
                is_repeated_after_one_that_is_not_answered [C10] [Lease Script Virtual];
                a_failure_is_no_extension [C1 C9 C10] [Lease Script];
                a_failure_by_hand_is_told_and_costs_nothing [C9 C10] [Lease Script];
                stops_on_release [C5 C10] [Lease Calls];
                stops_on_loss [C10] [Lease Calls Lose];
                never_brings_back_what_was_purged [C10] [Lease Lose];
                of_a_lost_grant_spares_the_successor [C2 C10] [Lease Lose];
                by_hand_and_by_itself_together [C10] [Lease];
            }
            loss {
                quiet_in_normal_life [C9] [];
                quiet_after_a_drop [C7 C9] [];
                fires_within_the_bound [C9 C16] [Lose];
                validity_follows_without_a_listener [C9] [Lose];
                late_listeners_learn_at_once [C9] [Lose];
                is_final [C9] [Lose];
                concerns_one_key_alone [C2 C9] [Lose Alone];
                a_silent_store_does_not_delay_it [C9] [Lease Silence];
                failing_renewals_do_not_delay_it [C9] [Lease Script Virtual];
                many_are_told_together [C9] [Lease Silence];
                an_answer_in_time_ends_the_doubt [C9 C10] [Lease Silence];
                no_reconnect_adopts_an_old_hold [C9 C10] [Lease Silence];
                watching_blocks_nothing [C9] [];
                a_purge_concerns_one_key_alone [C2 C9 C10] [Lease Purge];
                a_purge_is_found_at_the_next_word [C6 C9 C10] [Lease Purge];
                a_late_word_of_an_older_grant_is_none_of_the_next [C2 C9] [LateLoss];
                forced_release_reaches_the_holder [C9 C18] [ForceRelease];
                a_handle_sees_the_end [C9] [];
                a_handle_sees_the_loss [C9] [Lose];
            }
            confirm {
                is_ok_while_it_is_held [C9] [];
                asks_after_the_call [C9] [Silence];
                asks_again_behind_a_renewal [C9 C10] [Lease Purge Script];
                finds_what_the_store_has_ended [C9] [Lose];
                of_several_names_the_lost_one [C9 C15] [Lose Alone];
                after_the_end_is_an_error [C9] [];
                dropped_confirmations_change_nothing [C5 C9] [];
            }
            max_hold {
                ends_the_hold [C9] [];
                shows_without_a_listener [C9] [];
                counts_from_the_grant [C9] [];
                may_be_longer_than_the_lease [C9 C10] [Lease];
                ends_renewal [C9 C10] [Lease Calls];
                is_kept_by_a_silent_store [C9] [Silence];
                stops_the_body [C9] [];
                concerns_each_of_several_keys [C9] [];
                concerns_its_own_grant_alone [C2 C9] [];
                outlives_a_failed_attempt [C9] [Script];
                of_zero_is_refused [C15] [];
            }
            fencing {
                grows_with_every_grant [C8] [Tokens];
                grows_across_clients [C8] [Tokens];
                grows_with_local_hand_overs [C8] [Tokens];
                grows_across_an_expiry [C8] [Tokens Lease Silence];
                grows_across_a_loss [C8] [Tokens Lose];
                grows_across_a_purge [C8] [Tokens Purge];
                grows_across_a_day_of_idleness [C8] [Tokens Virtual];
                grows_across_many_other_keys [C8] [Tokens];
                grows_across_a_forced_release [C8] [Tokens ForceRelease];
                grows_across_failed_attempts [C8] [Tokens];
                grows_across_lost_replies [C8] [Tokens Script];
                grows_across_reconnects [C8] [Tokens];
                grows_across_a_restart [C8] [DurableTokens Restart Silence];
                is_unique_and_in_order_for_many [C1 C8] [Tokens];
                of_several_keys [C8] [Tokens];
                compares_as_a_number [C8] [Tokens];
                stops_a_stale_writer [C1 C8] [Tokens Lease Silence];
            }
            fairness {
                first_come_first_served_in_one_client [C12] [];
                first_come_first_served_across_clients [C12] [Fifo];
                the_queue_comes_before_newcomers_as_a_lease_ends [C12] [Fifo Lease Silence];
                the_queue_comes_before_newcomers_as_a_cooldown_ends [C12] [Fifo Cooldown];
                one_that_leaves_as_its_turn_comes_changes_no_order [C5 C12] [];
                all_of_fifty_waiters_are_served [C11 C12] [];
                a_remote_waiter_does_not_starve [C12] [];
                a_local_waiter_does_not_starve [C12] [];
                nobody_starves_behind_a_loop_of_tries [C3 C12] [];
                nobody_starves_behind_a_loop_of_zero_waits [C4 C12] [];
                nobody_starves_behind_a_loop_of_tiny_windows [C12] [Cooldown];
                nobody_starves_behind_a_loop_of_several_keys [C12] [];
                every_looping_contender_gets_its_share [C11 C12] [];
                the_death_of_the_next_in_line_holds_up_nobody [C11 C17] [];
                the_death_of_one_granted_from_the_queue_holds_up_nobody [C11] [Lease Silence];
                one_that_gives_up_behind_a_lease_holds_up_nobody [C4 C11] [Lease Fifo Silence];
                a_crowd_makes_no_herd [C11 C16] [Calls];
                a_release_reaches_a_waiter_within_the_bound [C11] [];
                a_release_reaches_a_waiter_without_wake_ups [C11] [Mute];
                a_loss_reaches_a_waiter_within_the_bound [C11] [Lose];
            }
            keys {
                are_literal_and_distinct [C14] [];
                invalid_ones_are_refused [C14 C15] [];
                long_ones_are_not_cut [C14] [];
                composites_are_unambiguous [C14] [];
                namespaces_do_not_meet [C14] [];
                similar_ones_at_once [C14] [];
                ten_thousand_at_once [C14 C16] [];
                hashing_is_declared [C14 C16] [];
            }
            errors {
                capabilities_are_coherent [C16] [];
                no_name_shows_a_password [C15] [];
                requirements_are_compared [C16] [];
                undeclared_is_unsupported [C16] [];
                undeclared_modes_are_unsupported [C15 C16] [];
                bad_options_are_refused [C15] [];
                an_absurd_ttl_is_refused_or_kept [C15 C16] [Lease];
                a_failing_store_is_not_held [C3 C15] [Script];
                a_failure_ends_a_wait [C4 C15] [Script];
                a_silent_store_is_an_error_in_bounded_time [C3 C15] [Silence];
                contention_timeout_and_loss_are_distinct [C15] [Lose];
            }
            inspection {
                shows_who_holds [C18] [Inspect];
                shows_the_same_token_after_a_renewal [C8 C18] [Inspect Lease];
                shows_how_long_a_lease_lasts [C18] [Inspect Lease];
                a_hand_over_shows_the_new_holder [C2 C18] [Inspect];
                looking_takes_nothing [C18] [Inspect];
                listing_takes_nothing [C18] [List];
                a_free_key_never_looks_held_to_lookers [C18] [Inspect];
                no_try_fails_because_somebody_looks [C18] [Inspect];
                looking_delays_no_try [C18] [Inspect Virtual];
                looking_lengthens_nothing [C18] [Inspect Lease Silence];
                looking_disturbs_no_waiter [C18] [Inspect];
                lists_what_is_held [C18] [List];
                an_ended_lease_is_not_listed [C18] [List Lease Silence];
                a_limit_counts_what_is_listed [C18] [List Lease Silence];
                shows_the_label_of_each_grant [C18] [Inspect];
                a_label_ends_with_its_lease [C18] [Inspect Lease Silence];
                force_ends_no_lease_that_has_ended [C2 C18] [ForceRelease Lease Silence];
                a_forced_release_frees [C2 C18] [ForceRelease];
                force_names_whom_it_breaks [C2 C18] [ForceRelease];
                a_forced_release_serves_a_waiter [C8 C11] [ForceRelease];
            }
            observation {
                a_waiting_look_sees_a_grant_and_its_release [C18] [Inspect];
                a_waiting_look_sees_the_next_holder [C18] [Inspect];
                a_waiting_look_sees_the_end_of_a_lease [C18] [Inspect Lease Silence];
                a_waiting_look_sees_a_forced_release [C18] [Inspect ForceRelease];
                a_waiting_look_ends_with_its_time [C18] [Inspect];
                a_waiting_look_ends_with_its_client [C17 C18] [Inspect];
                a_waiting_look_takes_nothing [C18] [Inspect];
                a_label_can_be_changed [C18] [Relabel Inspect];
                no_label_is_changed_after_a_loss [C2] [Relabel Inspect Lose];
                no_label_of_a_successor_is_changed [C2] [Relabel Inspect Purge];
                doubt_is_told_when_it_begins_and_ends [C9] [Lease Silence Virtual];
                a_watcher_of_the_validity_is_told_of_the_end [C9] [];
            }
            asking {
                a_holder_that_is_asked_learns_of_it_and_keeps_the_lock [C18] [Ask Inspect];
                a_successor_is_not_asked [C2] [Ask Inspect];
                a_request_does_not_lengthen_a_lease [C18] [Ask Lease Silence Virtual];
            }
            cooldown {
                runs_at_most_once_per_window [C16] [Cooldown];
                outlives_many_other_keys [C16] [Cooldown];
                outlives_those_who_look [C16 C18] [Cooldown Inspect];
                one_of_many_callers_runs [C1 C16] [Cooldown];
                a_try_reads_held [C3 C16] [Cooldown];
                a_waiter_waits_for_its_end [C4 C16] [Cooldown];
                a_budget_ends_within_it [C4] [Cooldown];
                outlives_a_dropped_guard_and_its_client [C16 C17] [Cooldown];
                counts_from_the_grant [C6 C16] [Cooldown];
                is_told_while_the_job_still_runs [C13 C16] [Cooldown];
                is_told_when_the_job_begins [C13 C16] [Cooldown Script];
                holds_up_all_of_several_keys [C4 C16] [Cooldown];
                an_absurd_one_is_refused_or_kept [C15] [Cooldown];
                outlives_a_forced_release [C4 C16] [Cooldown ForceRelease];
                outlives_a_loss [C4 C16] [Cooldown Lose];
                is_moved_by_no_renewal [C4 C16] [Cooldown Lease];
                goes_with_an_attempt_that_is_undone [C5 C16] [Cooldown Script];
                is_ended_by_no_undone_attempt_of_others [C2 C5 C16] [Cooldown Script];
                goes_with_keys_that_are_given_back [C5 C16] [Cooldown];
            }
            composite {
                takes_all [C1 C4] [];
                takes_one_or_many [C2] [];
                of_no_key_at_all [C15] [];
                refuses_duplicates [C15] [];
                all_or_none [C4 C5] [];
                a_try_is_all_or_none [C3 C4] [];
                has_one_budget [C4] [];
                waits_for_all [C4 C11] [];
                opposite_orders_do_not_deadlock [C4 C11] [];
                philosophers_dine [C4 C11] [];
                a_failure_gives_all_back [C4 C5] [Script];
                an_error_names_the_key_that_failed [C15] [Keyed];
                keys_behind_one_that_is_awaited_are_free [C4 C11] [];
                an_invalid_key_spoils_all [C14 C15] [];
                each_can_be_released_alone [C2 C6] [];
                is_released_in_one_call [C6] [Script Calls];
                a_release_tells_of_the_one_that_was_lost [C6 C9] [Lose Alone];
                a_release_frees_the_others_of_one_that_was_purged [C6] [Purge Script];
            }
            scoped {
                gives_the_bodys_value [C6] [];
                holds_during_the_body [C1] [];
                says_when_it_did_not_run [C3 C4] [];
                a_panic_releases_and_goes_on [C5 C7] [];
                a_loss_stops_the_body [C9] [Lose];
                a_loss_of_one_key_stops_the_body [C9] [Lose];
                a_silent_store_stops_the_body_in_time [C9] [Lease Silence];
                a_body_that_outran_its_lock_is_told [C6 C9] [Lose];
                several_keys [C1 C6] [];
                a_finished_body_is_not_run_again [C6] [Script];
                a_finished_window_is_not_run_again [C6] [Script Cooldown];
            }
            shutdown {
                close_frees_every_hold [C17] [];
                close_tells_the_guards [C2 C9 C17] [];
                waiters_end_with_closed [C17] [];
                everything_after_is_refused [C15 C17] [];
                may_be_called_twice [C17] [];
                repeats_a_release_that_is_not_answered [C17] [Script];
                a_second_call_waits_for_the_first [C17] [Script];
                waits_for_what_was_abandoned [C5 C17] [Script];
                leaves_other_clients_alone [C17] [];
                has_a_deadline_of_its_own [C17] [Silence];
                a_lost_runtime_is_told [C9 C17] [];
            }
            hand_over {
                each_of_sixty_four_callers_has_it_alone [C1 C8 C21] [];
                the_store_is_asked_less_often_than_it_grants [C21] [HandOver Calls];
                without_it_the_store_is_asked_for_each_grant [C16 C21] [HandOverOff Calls];
                a_remote_waiter_waits_no_longer_than_declared [C12 C21] [HandOver];
                a_remote_waiter_whose_wake_ups_are_lost_is_served [C12 C21] [HandOver Mute];
                a_known_remote_waiter_ends_the_chain [C12 C21] [HandOver Virtual Mute];
                local_callers_come_in_order [C12 C21] [];
                a_try_does_not_jump_the_chain [C3 C12 C21] [];
                the_last_of_a_chain_frees_the_key [C6 C7 C21] [];
                one_that_is_called_and_leaves_passes_it_on [C5 C21] [];
                closing_in_a_chain_frees_the_key [C17 C21] [];
                closing_ends_the_present_guard [C17 C21] [];
                a_caller_of_two_keys_keeps_no_later_one [C4 C11 C21] [];
                a_caller_of_two_keys_can_get_its_last_one [C4 C21] [];
                a_loss_ends_the_present_guard_alone [C9 C21] [Lose];
                a_forced_release_of_the_shown_holder_ends_the_present_guard [C18 C21] [ForceRelease Inspect];
                a_request_to_release_reaches_the_present_holder_and_ends_the_chain [C2 C21] [Ask];
                a_maximum_hold_counts_from_each_grant [C9 C21] [];
                a_lease_is_renewed_after_it_was_handed_over [C10 C21] [Lease];
                a_lease_counts_from_its_last_confirmation [C1 C9 C21] [HandOver Lease Silence Calls Virtual];
                an_unanswered_shorter_renewal_is_not_forgotten [C1 C9 C21] [Lease Silence Script];
                another_ttl_is_granted_by_the_store [C1 C9 C21] [Lease Silence];
                a_lease_that_has_ended_is_not_handed_over [C1 C9 C21] [HandOver Lease Silence Virtual];
                a_cooldown_is_not_handed_over [C16 C21] [Cooldown];
                another_label_is_shown [C18 C21] [Inspect];
                a_changed_label_is_not_passed_on [C18 C21] [Relabel Inspect];
                an_ended_grant_fences_nothing [C8 C21] [Fence];
                a_fenced_grant_is_not_handed_over [C8 C21] [Fence];
            }
            portable {
                is_taken_by_one_client_and_released_by_another [C6 C22] [Portable];
                is_not_ended_by_the_end_of_its_first_client [C7 C17 C22] [Portable];
                is_not_ended_by_a_maximum_hold [C9 C22] [Portable Virtual];
                ends_with_its_ttl_if_nobody_adopts_it [C10 C22] [Portable];
                is_adopted_once [C2 C22] [Portable];
                is_adopted_by_one_of_two_clients_at_once [C1 C22] [Portable];
                is_not_adopted_before_it_is_given_out [C1 C22] [Portable];
                is_not_adopted_with_a_part_of_another_hold [C22] [Portable];
                is_not_adopted_after_a_forced_release [C22] [Portable ForceRelease];
                has_a_greater_token_with_each_adoption [C8 C22] [Portable];
                is_one_grant_after_a_lost_answer [C2 C22] [Portable Script];
                outlasts_its_guard_after_a_lost_answer [C1 C9 C22] [Portable Script Silence Virtual];
                is_free_after_its_adoption_was_dropped [C5 C22] [Portable Script];
                is_free_after_its_adoption_failed [C5 C22] [Portable Script];
                is_released_if_it_cannot_be_given_out [C5 C7 C22] [Portable Script];
                is_adopted_beside_a_waiter_of_the_same_client [C11 C22] [Portable];
                is_free_for_a_try_after_its_guard_was_dropped [C3 C22] [Portable];
                is_held_beside_a_key_with_the_name_of_its_holder [C14 C22] [Portable];
                is_renewed_and_ends_with_the_client_that_adopted_it [C7 C10 C17 C22] [Portable];
                is_lost_by_the_client_that_adopted_it [C9 C22] [Portable Lose];
                can_be_asked_for_after_its_adoption [C18 C22] [Portable Ask];
                has_a_lease_that_the_store_accepts [C15 C22] [Portable];
                has_no_cooldown [C16 C22] [Portable Cooldown];
                is_not_fenced [C8 C22] [Portable Fence];
                is_not_adopted_from_a_text_that_was_cut [C15 C22] [Portable];
                stays_in_its_namespace [C14 C22] [Portable];
            }
            stress {
                uneven_sections_on_two_keys [C1] [];
                a_thousand_on_one_key [C1 C15] [];
                a_hundred_keys_held_for_long [C1 C10] [];
                random_holds_of_one_client [C1 C6] [];
                everything_at_once [C1 C5] [];
                nothing_is_left_in_the_store [C5 C7] [List];
            }
            faults {
                one_way_loss [C4 C5] [Script];
                latency_changes_no_promise [C4 C9] [Script];
                lost_wake_ups_cost_time_only [C11] [Mute];
                a_client_recovers_from_a_silence [C4 C5] [Silence];
                a_failure_of_one_key_spares_the_others [C5 C15] [Script];
                a_slow_call_holds_up_no_other_key [C5 C11] [Script];
                every_fault_at_every_call [C1 C5 C6] [Script];
                a_refused_acquire_leaves_nothing_to_undo [C5 C6 C17] [Script Calls];
                an_outage_is_not_filled_with_releases [C5 C6] [Silence Calls Virtual];
                a_grant_that_comes_too_late_is_given_back [C5 C9] [Script Calls];
            }
            outage {
                an_acquire_outlives_failures [C4] [Script];
                a_waiter_outlives_failures [C4 C12] [Script];
                a_waiter_outlives_a_silence [C4] [Silence Virtual];
                the_budget_ends_in_an_outage [C4] [Script Calls];
                a_budget_that_met_a_holder_ends_with_a_timeout [C4 C15] [Script];
                an_attempt_of_ones_own_is_nobody_else [C4 C15] [Script];
                an_attempt_whose_undoing_fails_is_nobody_else [C3 C4] [Script Calls];
                a_failure_that_is_over_is_forgotten [C3 C4] [Script];
                those_who_give_up_ask_once [C3 C4] [Script Calls];
                those_who_give_up_wait_for_no_outage_of_others [C3 C4] [Script];
                a_window_that_may_have_begun_ends_the_wait [C4 C16] [Cooldown Script];
            }
            crash {
                processes_exclude_each_other [C1] [Child];
                a_waiter_in_another_process_is_served [C11] [Child];
                writes_are_seen_by_the_next_process [C1] [Child];
                a_killed_holder_frees [C11 C16] [CrashRelease Child];
                a_killed_holder_serves_a_waiter [C11] [CrashRelease Child];
                a_killed_waiter_is_in_nobodys_way [C11] [CrashRelease Child];
                an_exit_without_a_drop_frees [C11 C16] [CrashRelease Child];
                a_stopped_holder_keeps_what_has_no_lease [C1 C9] [Endless Child];
                a_stopped_holder_of_a_lease_is_overtaken_and_told [C1 C2 C9] [Lease Child];
                tokens_grow_across_processes [C8] [Tokens CrashRelease Child];
                a_new_process_inherits_nothing [C2] [CrashRelease Child];
            }
        }
    };
}

macro_rules! registry {
    ($( $group:ident { $( $case:ident [$($rule:ident)*] [$($need:ident)*]; )* } )*) => {
        $( mod $group; )*

        static CASES: &[Case] = &[ $( $(
            Case {
                name: concat!(stringify!($group), "::", stringify!($case)),
                rules: &[$(stringify!($rule)),*],
                needs: &[$(Need::$need),*],
                body: |cx| Box::pin($group::$case(cx)),
            },
        )* )* ];
    };
}

for_each_case!(registry);

/// Returns every case of the suite.
#[must_use]
pub fn all_cases() -> &'static [Case] {
    CASES
}
