# SPDX-License-Identifier: Apache-2.0
"""Which caches generations use: on a GPU one that is free again serves the next, as steps are captured for its memory."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from nnfront_models import llama

import nnfront as nn
from nnfront.artefact.manifest import TextModel

CONFIG = dataclasses.replace(llama.TINY, num_hidden_layers=1, max_position_embeddings=4096)


def language_model(target: str) -> nn.LLM:
    model = llama.build(CONFIG)
    ir = nn.passes.lift_transform_params(model.export(llama.export_spec(CONFIG)), shared_transform=True)
    weights = {name: torch.zeros([int(s) for s in p.shape]) for name, p in model.named_parameters()}
    session = nn.compile(ir, target=target).load(weights)
    return nn.LLM(session, TextModel("llama", CONFIG.vocab_size, 4096), CONFIG, Path())


@pytest.fixture
def on_gpu(monkeypatch) -> nn.LLM:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    return language_model("cuda")


def test_a_cache_serves_the_next_generation_that_fits(on_gpu):
    with on_gpu._stepping(2, 10) as first:
        assert (first.cache.batch, first.cache.max_seq) == (2, 1024)
        first.cache[0].take(7)
    with on_gpu._stepping(2, 1000) as second:
        assert second is first
        assert second.cache.lengths == [0, 0]


@pytest.mark.parametrize(("batch", "length", "room"), [(2, 1025, 2048), (3, 10, 1024), (2, 4000, 4096)])
def test_another_one_is_made_where_it_does_not_do(on_gpu, batch, length, room):
    with on_gpu._stepping(2, 10) as first:
        pass
    with on_gpu._stepping(batch, length) as second:
        assert second is not first
        assert (second.cache.batch, second.cache.max_seq) == (batch, room)


def test_a_generation_that_is_not_over_keeps_its_cache(on_gpu):
    with on_gpu._stepping(1, 10) as first, on_gpu._stepping(1, 10) as second:
        assert second is not first
    with pytest.raises(ValueError, match="half way"), on_gpu._stepping(1, 10) as third:
        raise ValueError("half way")
    with on_gpu._stepping(1, 10) as fourth:
        assert fourth is third


def test_on_a_cpu_a_cache_is_as_long_as_it_must_be_and_not_kept():
    llm = language_model("cpu")
    with llm._stepping(1, 10) as first:
        assert first.cache.max_seq == 10
    with llm._stepping(1, 10) as second:
        assert second is not first
