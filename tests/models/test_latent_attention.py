# SPDX-License-Identifier: Apache-2.0
"""Latent attention keeps of a token one latent, and of it nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from nnfront_models import deepseek_v2, deepseek_v3

import nnfront as nn
from nnfront.ir import Buffer


@pytest.mark.parametrize("file", [deepseek_v2, deepseek_v3], ids=lambda file: file.__name__)
def test_the_released_sizes_keep_576_numbers_of_a_token_in_a_layer(file: Any) -> None:
    config = file.Config()
    layers = file.export_spec(config)["decode"]["cache"].type.layers
    assert len(layers) == config.num_hidden_layers
    for layer in layers:
        assert layer.per_token == (Buffer("latent", (1, 576), "float32"),)
        assert layer.per_sequence == ()


@pytest.mark.parametrize("file", [deepseek_v2, deepseek_v3], ids=lambda file: file.__name__)
def test_a_cache_takes_what_these_numbers_take(file: Any) -> None:
    config = file.TINY
    ir = file.build(config).export(file.export_spec(config))
    executable = nn.compile(nn.passes.lift_transform_params(ir, shared_transform=True))
    token = config.num_hidden_layers * (config.kv_lora_rank + config.qk_rope_head_dim) * 4
    assert f"caches keep {token} B a token: latent {token} B" in str(
        executable.memory(batch=3, seq=4, max_seq=20)
    )
    (transform,) = executable.program.transforms.values()
    weights = {
        w.name: torch.zeros([int(n) for n in w.type.shape], dtype=getattr(torch, w.type.dtype))
        for w in transform.weights
    }
    assert executable.load(weights).make_cache(batch=3, max_seq=20).nbytes == 3 * 20 * token
