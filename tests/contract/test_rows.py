"""Every promise has a test: the rows of the table of edge cases, and the 25 known faults.

A test is named by its file and function (Python), or by its file and Suite.Name (C++).
"""

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent.parent

# The table of edge cases, row by row.
EDGES = {
    "documents of 0, 1, 2, 127, 128, 129 tokens; several empty ones in a row, first or last": [
        "contract/test_edges.py::test_documents_of_0_1_2_127_128_129_tokens",
        "contract/test_edges.py::test_empty_documents_anywhere_contribute_nothing",
        "contract/test_edges.py::test_no_document_at_all",
    ],
    "padding filled with NaN or Inf": [
        "contract/test_edges.py::test_padding_is_never_read_and_its_results_are_zero",
        "cpp/test_cpu_edges.cpp::BothModes.PaddingIsNeverReadAndIsZero",
    ],
    "a kv block that no token selected": [
        "contract/test_edges.py::test_gradients_of_a_block_that_no_token_selected_are_exactly_zero",
        "contract/test_edges.py::test_a_kv_head_that_nobody_selects_has_zero_gradients",
    ],
    "every token selects the same block; a long document next to many short ones": [
        "contract/test_edges.py::test_every_token_selects_the_same_block",
        "contract/test_edges.py::test_many_tiny_documents_next_to_a_long_one",
        "contract/test_edges.py::test_a_million_tokens_next_to_ten_thousand_documents_of_seven",
    ],
    "K larger than the number of blocks": [
        "contract/test_edges.py::test_k_larger_than_the_number_of_blocks_equals_dense_attention",
    ],
    "offsets beyond 2^31 elements or bytes": [
        "contract/test_offsets.py::test_packed_tensors_with_strides_beyond_two_to_31",
        "contract/test_offsets.py::test_batched_tensors_with_a_batch_stride_beyond_two_to_31",
        "cpp/test_cpu_huge.cpp::FarStrides.EveryTensorOfEveryOperation",
        "cpp/test_cpu_huge.cpp::FarBatches.BatchStrideOfEveryTensor",
        "cpp/test_cpu_huge.cpp::Huge.LastKeyRowsOfTwoTo31",
    ],
    "dout non-contiguous, expanded or misaligned": [
        "contract/test_layouts.py::test_dout_of_any_stride_gives_the_same_gradients",
        "contract/test_layouts.py::test_sum_backward_gives_an_expanded_dout",
    ],
    "logits around +-30,000, all-equal logits, all-zero inputs": [
        "contract/test_edges.py::test_logits_around_30000_are_finite_and_right",
        "contract/test_edges.py::test_all_equal_logits_average_the_values",
        "contract/test_edges.py::test_all_zero_inputs",
    ],
    "NaN or Inf in one token's inputs": [
        "contract/test_edges.py::test_a_bad_number_stays_in_the_rows_that_read_it",
        "contract/test_edges.py::test_a_bad_upstream_row_stays_in_the_rows_that_feed_it",
    ],
    "external block_indices: unordered, fewer than K, all -1": [
        "contract/test_replay.py::test_unordered_selection_with_holes_and_empty_rows_is_used_as_given",
        "contract/test_replay.py::test_a_row_without_blocks_gives_zero_and_minus_infinity",
        "contract/test_replay.py::test_nothing_selected_at_all",
    ],
    "external block_indices that are wrong": [
        "contract/test_replay.py::test_checked_mode_names_the_first_wrong_entry",
        "contract/test_replay.py::test_the_cpu_always_checks",
        "contract/test_replay.py::test_unchecked_mode_counts_a_wrong_entry_as_no_block",
    ],
    "unsupported shape, dtype, device, stride, head ratio": [
        "contract/test_arguments.py::test_wrong_rank_is_refused",
        "contract/test_arguments.py::test_wrong_dtype_is_refused_with_what_is_supported",
        "contract/test_arguments.py::test_other_devices_are_refused",
        "contract/test_arguments.py::test_illegal_head_ratio_is_refused",
        "contract/test_arguments.py::test_a_refused_call_writes_nothing",
        "cpp/test_cpu_huge.cpp::Errors.CodeAndArgumentSayWhatIsWrong",
        "cpp/test_cpu_huge.cpp::Huge.StridesThatLeave64BitsAreRefused",
    ],
    "another GPU, side streams, two threads": [
        "contract/test_gpu.py::test_a_gpu_that_is_not_the_current_one",
        "contract/test_gpu.py::test_side_stream_is_the_stream_of_the_work",
        "contract/test_determinism.py::test_two_threads_at_once_do_not_disturb_each_other",
    ],
    "the same call twice in deterministic mode": [
        "contract/test_determinism.py::test_deterministic_mode_repeats_every_bit",
    ],
}

FAULTS = {
    1: [
        "contract/test_faults.py::test_case_01_one_block_chosen_by_every_token",
        "contract/test_faults.py::test_case_01_a_thousand_repeats",
    ],
    2: ["contract/test_faults.py::test_case_02_causal_pattern_as_a_block_list_equals_dense"],
    3: ["contract/test_faults.py::test_case_03_soak_of_mixed_shapes"],
    4: [
        "contract/test_autograd.py::test_backward_through_autograd_equals_the_gradients_of_one_loss"
    ],
    5: [
        "contract/test_faults.py::test_case_05_dout_row_225304_with_stride_9728",
        "cpp/test_cpu_huge.cpp::FarStrides.EveryTensorOfEveryOperation",
    ],
    6: ["contract/test_faults.py::test_case_06_fifteen_thousand_documents"],
    7: ["contract/test_faults.py::test_case_07_one_document_of_46341_tokens"],
    8: ["cpp/test_cpu_attention.cpp::CpuAttention.RowsWithoutAnyKey"],
    9: ["cpp/test_cpu_attention.cpp::CpuAttention.DocumentsWithKeysButNoQueries"],
    10: ["contract/test_faults.py::test_case_10_lengths_of_nothing_and_one"],
    11: ["contract/test_faults.py::test_case_11_946_rows_of_which_944_are_real"],
    12: ["contract/test_arguments.py::test_illegal_head_ratio_is_refused"],
    13: [
        "contract/test_layouts.py::test_dout_of_any_stride_gives_the_same_gradients",
        "contract/test_layouts.py::test_dout_strides_differ_from_those_of_out",
    ],
    14: [
        "contract/test_layouts.py::test_inputs_of_any_stride_give_the_same_result",
        "contract/test_layouts.py::test_dout_of_any_stride_gives_the_same_gradients",
    ],
    15: ["contract/test_gpu.py::test_a_gpu_that_is_not_the_current_one"],
    16: ["contract/test_faults.py::test_case_16_deterministic_mode_with_grouped_heads_twice"],
    17: [
        "contract/test_kl.py::test_student_below_exp_minus_100_keeps_value_and_gradient",
        "contract/test_kl.py::test_teacher_of_zero_counts_nothing",
    ],
    18: ["contract/test_autograd.py::test_two_forwards_outstanding_each_use_their_own_saved_state"],
    19: ["contract/test_checkpoint.py::test_recomputed_selection_is_the_same_to_the_bit"],
    20: ["contract/test_replay.py::test_checked_mode_names_the_first_wrong_entry"],
    21: ["contract/test_kl.py::test_teacher_lse_is_taken_over_the_attended_set"],
    22: [
        "contract/test_compile.py::test_every_operator_passes_opcheck",
        "contract/test_compile.py::test_fullgraph_with_dynamic_lengths_compiles_once",
    ],
    23: ["contract/test_gpu.py::test_cuda_graph_replays_with_other_data_and_selection"],
    24: [
        "contract/test_autograd.py::test_unused_kl_skips_the_work_of_the_proxy",
        "contract/test_autograd.py::test_dropped_kl_leaves_the_proxy_without_a_gradient",
        "cpp/test_cpu_edges.cpp::BothModes.UnusedKlNeverReadsTheProxy",
    ],
    25: ["contract/test_faults.py::test_case_25_last_partial_tile_leaves_the_next_rows_alone"],
}


def missing(name: str) -> bool:
    file, test = name.split("::")
    text = (TESTS / file).read_text()
    if "." in test:
        suite, test = test.split(".")
        return not re.search(rf"TEST(_P)?\({suite}, {test}\)", text)
    return not re.search(rf"^def {test}\(", text, re.MULTILINE)


def test_the_lists_are_whole():
    assert len(EDGES) == 14
    assert sorted(FAULTS) == list(range(1, 26))


@pytest.mark.parametrize("row", [*EDGES, *FAULTS], ids=str)
def test_the_tests_of_a_row_exist(row):
    names = EDGES[row] if row in EDGES else FAULTS[row]
    assert names and not [name for name in names if missing(name)]
