//! The test suite of Signal: functions generic over the [`Backend`](signal_core::Backend), and one macro, [`suite!`],
//! that makes a `#[test]` of each.
//!
//! ```ignore
//! signal_conformance::suite!(host, signal_comm::host::open());
//! ```
//!
//! A new backend passes all of it or says in an error value why a case cannot be tried; a new protocol rule gets its
//! case here, so that every backend is held to it.
//!
//! # How a case judges
//! Outputs are compared bit by bit with [`reference::all_reduce`](signal_core::reference::all_reduce), on every rank
//! and over the whole output. Inputs are not exact in f32, so any other order of the sum shows. An output is poisoned
//! before the call, canaries stand before and behind every slice, and an out-of-place call must leave its input as it
//! was. What lies between the parts of a group's memory, around the Signal, the control block and the scratch, is filled with canaries too,
//! which are looked at when a world ends; what lies around whole buffers, a backend may watch (`suite!`'s third argument).
//!
//! # How it is driven
//! Mostly one thread enqueues for all ranks, as an engine would; some cases have a thread a rank. Cases run one at a
//! time, whatever the harness does, on GPUs, which they share, and where they watch the clock; others run beside each other on the host
//! as the harness likes. Each communicator has a short
//! deadline, and a watchdog ends the process if a case still hangs. With fewer devices than ranks, ranks share devices.
//!
//! `SIGNAL_TEST_SCALE` (1 by default) multiplies the number of rounds: below 1 for sanitizers, above for soaking.
// Test code: a panic is how a case fails.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
// A rank is the index of several things at once.
#![allow(clippy::needless_range_loop)]

#[macro_use]
mod compare;

pub mod cases;
mod exchange;
pub mod job;
mod pieces;
mod place;
mod processes;
mod rig;
pub mod rows;
mod world;

/// What [`with_dtype!`] names.
#[doc(hidden)]
pub mod element {
    pub use half::{bf16, f16};
    pub use signal_core::{Dtype, E4m3, E5m2};
}

pub use processes::{ProcessCase, run_processes};
pub use rig::{Rig, run};

/// Makes a module of tests, one for each case of the suite, on the backend that the expression opens.
///
/// `suite!(name, open)`: `open` is an expression of type `signal_core::Result<B>`, evaluated once for each test. `suite!(name, open,
/// check)`: `check` takes a `&B` behind each case, and panics if that shows that something is wrong.
#[macro_export]
macro_rules! suite {
    ($name:ident, $open:expr) => {
        $crate::suite!($name, $open, |_| ());
    };
    ($name:ident, $open:expr, $check:expr) => {
        mod $name {
            #[allow(unused_imports)] // only needed where `open` names something of the parent
            use super::*;

            $crate::suite_tests! { $open, $check;
                layout:
                    layout_init_sets_every_word,
                    layout_pointers_follow_the_structure,
                    layout_refuses_small_and_misaligned_buffers,
                    layout_refuses_what_is_not_a_signal;
                peer:
                    prove_peer_between_all_pairs,
                    plan_is_the_same_on_every_rank;
                tuning:
                    tuning_gives_plans,
                    tuning_refused;
                trace:
                    trace_tells_of_every_call,
                    trace_names_who_was_late;
                pinned:
                    pinned_random_programs,
                    pinned_alloc_and_split,
                    pinned_needs_a_peer;
                register:
                    register_is_read_in_place,
                    register_again_and_again,
                    register_refuses;
                norm:
                    norm_behind_an_all_reduce,
                    norm_around_the_region,
                    norm_forms,
                    norm_windows,
                    norm_fast_is_close,
                    norm_rows_do_not_know_each_other,
                    norm_in_graphs_and_between_calls,
                    norm_misuse,
                    norm_names_the_missing_rank;
                user:
                    user_kernels_between_calls,
                    user_kernels_refused,
                    user_kernels_name_the_missing_rank,
                    user_kernels_are_checked;
                barrier:
                    barrier_every_world_and_domain,
                    barrier_waits_for_the_last_rank,
                    barrier_probe_worlds_and_grids,
                    barrier_probe_long,
                    barrier_probe_every_domain_at_once,
                    barrier_probe_widest_grid;
                matches:
                    all_reduce_matches_small_sizes,
                    all_reduce_matches_around_grid_limits,
                    all_reduce_matches_windows,
                    all_reduce_matches_every_world,
                    all_reduce_matches_every_memory,
                    all_reduce_matches_default_plan,
                    all_reduce_matches_on_every_domain,
                    all_reduce_matches_with_a_thread_a_rank,
                    all_reduce_matches_raw_halves_of_one_buffer,
                    all_reduce_matches_memory_of_others,
                    all_reduce_same_bits_in_every_algorithm;
                special:
                    all_reduce_special_pairs,
                    all_reduce_special_halves,
                    all_reduce_special_mixtures,
                    all_reduce_special_negative_zero,
                    all_reduce_special_order_and_rounding;
                operators:
                    operators_of_every_type,
                    operators_special_values,
                    operators_canonical_results,
                    misuse_lamport_types;
                exchanges:
                    exchanges_match_small_sizes,
                    exchanges_match_windows,
                    exchanges_match_around_grid_limits,
                    exchanges_between_some_ranks,
                    exchanges_inputs_are_overwritten;
                exchange_rules:
                    lines_count_wraps,
                    lines_limits,
                    misuse_exchanges,
                    misuse_exchanges_raw,
                    exchanges_raw,
                    exchanges_find_other_sizes,
                    exchanges_name_who_is_missing,
                    exchanges_in_graphs;
                overwrite:
                    input_overwritten_symmetric,
                    input_overwritten_staged,
                    input_overwritten_in_place,
                    input_overwritten_by_the_next_call,
                    input_freed_behind_the_call;
                program:
                    random_programs,
                    random_programs_from_one_thread,
                    counter_wrap;
                graph:
                    graph_replays_with_changing_inputs,
                    graph_mixes_with_eager_calls,
                    graph_on_one_rank_only,
                    graph_keeps_its_buffers;
                lamport:
                    lamport_flag_wraps,
                    lamport_sizes_follow_each_other,
                    lamport_ten_thousand_calls,
                    lamport_words_like_the_sentinel,
                    lamport_waits_for_an_early_producer,
                    misuse_lamport;
                counted:
                    counted_all_to_all,
                    counted_all_to_all_in_graphs,
                    counted_all_to_all_misuse;
                two_shot:
                    two_shot_sizes,
                    two_shot_and_lamport_follow_each_other,
                    two_shot_out_of_step,
                    two_shot_takes_what_the_region_takes;
                fault:
                    timeout_names_missing_rank,
                    timeout_in_wide_blocks,
                    timeout_leaves_other_communicators_alone,
                    timeout_names_late_rank,
                    timeout_in_mid_call,
                    timeout_leaves_staged_data_alone,
                    timeout_ends_different_calls,
                    timeout_ends_a_graph_once,
                    abort_from_another_thread;
                recover:
                    recover_after_a_missing_rank,
                    recover_with_a_late_rank,
                    recover_with_a_thread_a_rank,
                    recover_after_a_stop_at_every_point,
                    recover_after_an_abort,
                    misuse_recover;
                domains:
                    domains_on_threads_at_once,
                    domains_do_not_wait_for_each_other,
                    domains_stay_in_order_from_handle_to_handle,
                    domains_share_a_fault,
                    domains_outlive_their_communicator,
                    misuse_domain_handles;
                split:
                    split_rows_and_columns,
                    split_with_a_thread_a_rank,
                    split_by_key_and_again,
                    split_waits_for_all,
                    split_divides_the_blocks,
                    split_beside_another_communicator,
                    misuse_split;
                blocks:
                    max_blocks_is_a_budget,
                    max_blocks_of_domains;
                check:
                    check_names_both_calls,
                    check_lets_equal_calls_through;
                misuse:
                    misuse_lengths_and_ranges,
                    misuse_buffers,
                    misuse_domains,
                    misuse_grids,
                    misuse_shared_stream,
                    misuse_busy_domain_under_capture,
                    misuse_wrong_device,
                    misuse_unequal_alloc,
                    misuse_capture_state;
                raw:
                    misuse_raw_pointers,
                    misuse_raw_overlap,
                    misuse_raw_too_large,
                    misuse_raw_nothing_to_do;
                setup:
                    misuse_world_sizes,
                    misuse_different_settings,
                    misuse_unusable_settings,
                    misuse_shared_device;
                streams:
                    streams_second_stream_is_ordered,
                    streams_domains_run_at_once,
                    streams_two_communicators_at_once,
                    streams_drop_behind_the_call,
                    streams_drop_one_rank_early,
                    streams_drop_idle_communicators,
                    streams_buffers_come_and_go,
                    streams_one_thread_cannot_run_ahead,
                    streams_fast_threads_wait;
            }

            $crate::process_tests! { $open, $check;
                processes_random_programs,
                processes_replay_graphs,
                processes_register,
                processes_leave_nothing_behind,
                processes_recover,
                processes_refuse_differences,
                processes_two_groups,
                processes_split,
                processes_kill_one_while_they_split,
                processes_kill_one
            }
        }
    };
}

/// The expansion of [`suite!`].
#[doc(hidden)]
#[macro_export]
macro_rules! suite_tests {
    ($open:expr, $check:expr; $($module:ident: $($case:ident),+;)+) => {
        $($(
            #[test]
            fn $case() {
                $crate::run(stringify!($case), || $open, $check, $crate::cases::$module::$case);
            }
        )+)+
    };
}

/// The part of [`suite!`]'s expansion whose cases have processes for ranks.
#[doc(hidden)]
#[macro_export]
macro_rules! process_tests {
    ($open:expr, $check:expr; $($case:ident),+) => {
        $(
            #[test]
            fn $case() {
                let path = concat!(module_path!(), "::", stringify!($case));
                $crate::run_processes(stringify!($case), path, || $open, $check, $crate::cases::processes::$case());
            }
        )+
    };
}
