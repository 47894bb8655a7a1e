# SPDX-License-Identifier: Apache-2.0
"""Steps are captured whatever a model keeps: states of recurrences, latents, biases, soft caps; and what the host does for a replayed one."""

from __future__ import annotations

from collections import Counter

import pytest
import state_place_runs
from few_of import few_of
from state_graph_runs import (
    caches_share,
    cross,
    decode,
    launches,
    prompt_launches,
    states_share,
    used_page_launches,
    wander,
)


@pytest.mark.parametrize(
    ("name", "page_size"),
    few_of(
        [
            ("mamba2", None),
            ("qwen3_5_text", None),
            ("qwen3_5_text", 16),
            ("deepseek_v3", None),
            ("deepseek_v3", 16),
            ("gemma2", 16),
            ("bloom", None),
            ("bloom", 16),
        ],
        2,
    ),
)
def test_replayed_steps_of_every_kind_of_state_give_what_the_method_gives(interpreted, name, page_size):
    interpreted(decode, name, page_size)


@pytest.mark.matrix
def test_replayed_steps_read_what_an_encoder_has_stored(interpreted):
    interpreted(cross)


def test_whatever_happens_to_states_and_tokens_replayed_steps_leave_them_as_others_do(interpreted):
    interpreted(wander)


@pytest.mark.parametrize(
    ("name", "page_size"), few_of([("llama", 16), ("llama", None), ("kernels", None)], 2)
)
def test_a_replayed_step_is_a_token_in_a_graph_and_a_result_out(interpreted, name, page_size):
    steps = interpreted(launches, name, page_size, 6)
    assert steps == [["copy_", "copy_"]] * 6


def test_a_replayed_prompt_of_any_length_is_its_tokens_lengths_and_pages_in_and_a_result_out(interpreted):
    found = Counter(interpreted(prompt_launches))
    page = {"index_fill_": 2, "_to_copy": 1, "index_put_": 1}  # keys and values of its layer, and the table
    assert found == {"copy_": 4, **page}


@pytest.mark.matrix
def test_a_new_page_is_sent_once_for_all_layers(interpreted):
    steps = interpreted(launches, "llama", 16, 14)
    (new,) = (step for step in steps if step != ["copy_", "copy_"])
    assert new.count("index_put_") == 1
    assert new.count("copy_") <= 4


def test_pages_that_were_used_before_are_named_once_for_the_buffers_of_all_layers(interpreted):
    found = Counter(interpreted(used_page_launches))
    assert found["index_fill_"] == 4  # keys and values of two layers
    assert found["lift_fresh"] == 2  # which pages, and where in the table


def test_caches_of_one_pool_of_pages_share_what_was_captured(interpreted):
    assert interpreted(caches_share, 16) == (1, 10)


def test_states_are_written_where_they_lie_by_one_graph_for_all_caches(interpreted):
    assert interpreted(states_share, "mamba2") == (1, 8, 0)


PAGED, FLOAT8 = (("page_size", 16),), (("stored_as", "float8_e4m3fn"),)
# Of two layers: states that torch reads and writes, keys and values that it reads of a memory, or reads and appends; in 8 bits their scales too. In place kernels do. A pool of
# another size lies in another way, so the first step over it runs as usual.
COPIES = [
    ("mamba", (), 1, 2 * 2 * 2),
    ("mamba", (("in_place", True),), 1, 2 * 1 * 2),
    ("rwkv", (), 1, 2 * 5 * 2),
    ("t5", (), 1, 2 * (2 + 2 + 2)),
    ("t5", PAGED, 2, 2 * (2 + 2 + 2)),
    ("t5", FLOAT8, 1, 2 * (4 + 4 + 4)),
    ("whisper", (), 1, 2 * (2 + 2 + 2)),
    ("whisper", (("in_place", True),), 1, 0),
    ("t5", (*PAGED, ("in_place", True)), 2, 0),
    ("deepseek_v3", PAGED + FLOAT8, 2, 2 * (2 + 2)),
]


@pytest.mark.parametrize(("name", "options", "usual", "copies"), few_of(COPIES, 3))
def test_caches_share_what_was_captured_whatever_torch_reads_and_writes_of_them(
    interpreted, name, options, usual, copies
):
    assert interpreted(state_place_runs.share_with, name, options) == (1, usual, copies)


@pytest.mark.parametrize("name", few_of(["whisper", "t5"]))
def test_batches_of_other_sizes_that_attend_to_sources_are_replayed_in_the_rows_of_one_graph(
    interpreted, name
):
    assert interpreted(state_place_runs.pad, name) == (1, 3)


@pytest.mark.parametrize("name", few_of(["mamba", "mamba2", "qwen3_next"]))
def test_batches_of_other_sizes_whose_states_are_whole_are_replayed_in_the_rows_of_one_graph(
    interpreted, name
):
    assert interpreted(state_place_runs.pad_states, name) == (2, 3)


@pytest.mark.parametrize(("name", "caches"), few_of([("mamba", 1), ("t5", 2)]))
def test_of_another_cache_a_graph_is_told_lengths_and_where_it_lies(interpreted, name, caches):
    same, other = ["copy_"] * 2, ["copy_"] * (2 + 1 + caches)  # memories are alike in their lengths
    assert interpreted(state_place_runs.launches, name) == [same, other, same, other]
