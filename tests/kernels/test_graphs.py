# SPDX-License-Identifier: Apache-2.0
"""Captured decode steps, replayed without any Python of the method, give bit for bit what the method gives."""

from __future__ import annotations

import pytest
from few_of import few_of
from graph_cache_runs import bound, live, refuse_when_full, share, wander
from graph_runs import bake, chunks, decode, fail, pad, pad_contiguous, prompts, whole


@pytest.mark.parametrize(
    ("batch", "page_size", "stored_as"), few_of([(2, 16, None), (1, None, "float8_e4m3fn")])
)
def test_decode_steps_that_are_replayed_give_the_bits_of_the_method(interpreted, batch, page_size, stored_as):
    interpreted(decode, batch, page_size, stored_as)


@pytest.mark.matrix
def test_batches_of_other_sizes_are_replayed_in_the_rows_of_one_graph(interpreted):
    interpreted(pad)


def test_batches_without_pages_are_replayed_in_the_rows_of_one_graph_and_write_no_row_more(interpreted):
    interpreted(pad_contiguous)


@pytest.mark.parametrize(
    ("page_size", "stored_as"), few_of([(16, None), (None, None), (16, "float8_e4m3fn")])
)
def test_prompts_of_other_lengths_are_replayed_in_the_tokens_of_one_graph(interpreted, page_size, stored_as):
    interpreted(prompts, page_size, stored_as)


def test_chunks_of_a_prompt_can_be_replayed_as_well(interpreted):
    interpreted(chunks)


@pytest.mark.parametrize("page_size", few_of([16, None]))
def test_what_happens_to_a_cache_between_calls_is_seen_by_graphs(interpreted, page_size):
    interpreted(live, page_size)


@pytest.mark.parametrize(
    ("page_size", "stored_as"), few_of([(None, None), (16, None), (None, "float8_e4m3fn")])
)
def test_conversations_in_caches_of_their_own_share_what_one_of_them_has_captured(
    interpreted, page_size, stored_as
):
    interpreted(share, page_size, stored_as)


@pytest.mark.matrix
def test_every_kernel_of_a_step_can_be_replayed(interpreted):
    interpreted(whole)


def test_a_length_that_a_graph_took_from_the_host_would_show(interpreted):
    interpreted(bake)


def test_what_cannot_be_captured_runs_as_usual_and_says_so_once(interpreted):
    interpreted(fail)


@pytest.mark.parametrize("page_size", few_of([16, None]))
def test_a_full_cache_is_refused_before_anything_is_replayed(interpreted, page_size):
    interpreted(refuse_when_full, page_size)


def test_graphs_are_few_and_hold_no_cache(interpreted):
    interpreted(bound)


@pytest.mark.parametrize("page_size", few_of([16, None]))
def test_whatever_happens_to_caches_replayed_steps_leave_them_as_others_do(interpreted, page_size):
    interpreted(wander, page_size)
