# SPDX-License-Identifier: Apache-2.0
"""Attention of compiled models on the Triton kernels, in the interpreter: over caches of both kinds it is what the CPU computes."""

from __future__ import annotations

import pytest
from attention_runs import attend, converse, cross, refuse_pages
from few_of import few_of
from latent_runs import attend_again, attend_to_latents


@pytest.mark.parametrize(("file", "page_size"), few_of([("llama", None), ("qwen3_moe", 16)]))
def test_a_conversation_on_the_kernels_gives_the_logits_of_the_cpu(interpreted, file, page_size):
    interpreted(converse, file, page_size)


@pytest.mark.parametrize(
    ("options", "cache_window", "page_size", "stored_as"),
    few_of(
        [
            ((), None, None, None),
            ((), 8, None, None),
            ((("window", 5),), 8, 16, None),
            ((("softcap", 2.0),), None, 16, None),
            ((("sinks", True), ("window", 4)), None, None, None),
            ((("scale", 0.3), ("interleaved", True)), None, 64, None),
            ((), None, None, "float8_e4m3fn"),
            ((("softcap", 2.0), ("window", 5)), 8, 16, "float8_e4m3fn"),
        ][::-1]
    ),
    ids=str,
)
def test_every_option_of_attention_means_on_the_kernels_what_it_means_on_the_cpu(
    interpreted, options, cache_window, page_size, stored_as
):
    interpreted(attend, options, cache_window, page_size, stored_as)


@pytest.mark.parametrize(
    ("options", "biased", "page_size", "stored_as"),
    few_of(
        [
            ((), False, None, None),
            ((("window", 5), ("softcap", 2.0)), False, 16, None),
            ((("scale", 0.3),), True, None, None),
            ((), False, None, "float8_e4m3fn"),
        ][::-1]
    ),
    ids=str,
)
def test_latents_that_are_stored_once_are_attended_to_on_the_kernel_as_on_the_cpu(
    interpreted, options, biased, page_size, stored_as
):
    interpreted(attend_to_latents, options, biased, page_size, stored_as)


@pytest.mark.parametrize(("biased", "page_size"), few_of([(True, 16), (True, None), (False, None)]))
def test_keys_and_values_under_a_bias_and_those_of_another_layer_are_attended_to_on_the_kernels(
    interpreted, biased, page_size
):
    interpreted(attend_again, biased, page_size)


@pytest.mark.parametrize("page_size", few_of([16, None]))
def test_a_token_attends_to_a_source_on_the_kernel_as_on_the_cpu(interpreted, page_size):
    interpreted(cross, page_size)


def test_a_page_size_that_no_kernel_reads_is_refused_when_the_cache_is_made(interpreted):
    interpreted(refuse_pages)
