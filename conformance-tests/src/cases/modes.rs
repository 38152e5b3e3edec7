//! The list of the cases of shared grants and permits.

/// Appends the cases of shared grants and permits to a list of cases, and calls the given macro with all of them.
#[doc(hidden)]
#[macro_export]
macro_rules! with_mode_cases {
    ([$($callback:tt)*] $($cases:tt)*) => {
        $($callback)*! {
            $($cases)*
            shared {
                readers_hold_together [C2 C19] [Shared];
                readers_and_a_writer_exclude_each_other [C1 C3 C19] [Shared];
                the_release_of_one_reader_ends_no_other [C2 C6 C19] [Shared];
                a_writer_is_served_after_the_last_reader [C11 C19] [Shared];
                waiting_readers_are_served_together [C11 C19] [Shared];
                a_waiting_writer_comes_before_later_readers_of_its_client [C3 C12 C19] [Shared];
                a_writer_that_gives_up_lets_the_readers_behind_it_in [C5 C11 C19] [Shared];
                a_crowd_of_readers_starves_no_writer [C12 C19] [Shared];
                nothing_is_upgraded [C4 C13 C19] [Shared];
                a_dead_reader_ends_alone [C2 C9 C10 C19] [Shared Lease Silence];
                a_short_lease_cuts_no_longer_one [C10 C19] [Shared Lease Silence];
                tokens_of_writers_are_above_those_of_readers [C8 C19] [Shared Tokens];
                several_keys_have_a_mode_each [C1 C19] [Shared];
                callers_of_several_keys_do_not_block_each_other [C11 C19] [Shared];
                dropped_readers_leave_nothing [C5 C7 C19] [Shared];
                inspection_shows_all_readers [C18 C19] [Shared Inspect];
                a_forced_release_ends_one_reader [C9 C18 C19] [Shared ForceRelease];
                a_cooldown_needs_an_exclusive_grant [C15 C19] [Shared];
                sixty_four_readers_are_one_hold_of_the_store [C6 C19] [Sharing Calls];
                readers_that_share_keep_no_remote_writer_waiting [C12 C19] [Sharing];
                a_loss_ends_all_readers_that_share_a_hold [C9 C19] [Sharing Lose];
            }
            permits {
                there_are_n_and_no_more [C3 C20] [Permits];
                each_has_a_number_of_its_own [C20] [Permits];
                a_released_one_serves_a_waiter [C11 C20] [Permits];
                a_waiter_gets_whichever_is_released [C11 C20] [Permits];
                one_is_released_once [C2 C6 C20] [Permits Script];
                a_request_that_arrives_twice_takes_one [C2 C20] [Permits Script];
                another_number_is_a_mismatch [C15 C20] [Permits];
                permits_and_the_other_modes_exclude_each_other [C1 C20] [Permits];
                an_exclusive_request_drains_them [C12 C20] [Permits];
                of_a_dead_holder_comes_back [C9 C11 C20] [Permits Lease Silence];
                the_section_never_holds_more_than_n [C1 C20] [Permits];
                bounds_are_enforced [C15 C16 C20] [Permits];
                a_look_takes_none [C18 C20] [Permits Inspect];
            }
        }
    };
}
