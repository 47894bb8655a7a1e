# SPDX-License-Identifier: Apache-2.0
"""Decoding a token on a CPU is one call of kernels in C from the first layer on, for every shipped decoder; or it is said here what is not."""

from __future__ import annotations

import dataclasses
import importlib
import re
from pathlib import Path

import nnfront_models
import pytest
import torch
from configurations import is_decoder
from few_of import few_of

import nnfront as nn
from nnfront.backends.cpu import tape
from nnfront.backends.cpu.extension import NATIVE
from nnfront.session import Session

FILES = sorted(path.stem for path in Path(nnfront_models.__file__).parent.glob("[!_]*.py"))
# What torch computes between calls of C, by the words of why.
WITHOUT_C = {
    "keys that another layer has stored": "attention_stored gelu getitem reshape",
    "experts with biases, or without a gate": "moe_mlp_sorted reshape",
    "a norm by a weight of ones": "ones reshape",
    "a scan with rates for each channel": "cache_read cache_write_owned selective_scan split",
    "a limited rate of a scan": "cache_read cache_write_owned causal_conv1d_step clip reshape split",
    "a recurrence of the author's own": "cache_read cache_write getitem scan unsqueeze",
}
OUTSIDE = {
    "gemma4_text": ["keys that another layer has stored"],
    "gpt_oss": ["experts with biases, or without a gate"],
    "llama4_text": ["a norm by a weight of ones"],
    "mamba": ["a scan with rates for each channel"],
    "nemotron_h": ["a limited rate of a scan", "experts with biases, or without a gate"],
    "rwkv": ["a recurrence of the author's own"],
}

pytestmark = pytest.mark.skipif(NATIVE is None, reason="no kernels in C")


def decoding(name: str) -> Session:
    """A tiny model in bfloat16 that has decoded a token."""
    file = importlib.import_module(f"nnfront_models.{name}")
    config = dataclasses.replace(file.TINY, dtype="bfloat16")
    model = file.build(config)
    torch.manual_seed(0)
    weights = {
        n: (torch.randn(tuple(p.shape)) * 0.1).to(getattr(torch, p.dtype))
        for n, p in model.named_parameters()
    }
    methods = {n: m for n, m in file.export_spec(config).items() if n in ("prefill", "decode")}
    session = nn.compile(nn.passes.lift_transform_params(model.export(methods), shared_transform=True)).load(
        weights
    )
    cache = session.make_cache(batch=1, max_seq=16)
    session["prefill"](torch.arange(3)[None], cache)
    session["decode"](torch.tensor([[5]]), cache)
    return session


def calls(session: Session) -> list[set[str]]:
    """What the steps of decoding are, in order: kernels of torch, or nothing for a call of C."""
    (step,) = (s for s in session["decode"]._route.code.steps if isinstance(s, tape.TapeStep))
    *_, plan = step.plans.values()
    return [
        set() if isinstance(part, tape.TapePart) else {run.kernel for run in part.args[0].instructions}
        for part in plan
    ]


def first_layer(session: Session) -> int:
    """Which of the steps the first layer begins in."""
    (step,) = (s for s in session["decode"]._route.code.steps if isinstance(s, tape.TapeStep))
    *_, plan = step.plans.values()
    codes = [part.steps if isinstance(part, tape.TapePart) else part.args[0] for part in plan]
    modules = [{run.module for run in code.instructions} for code in codes]
    return next(i for i, of in enumerate(modules) if any(re.search(r"\.0(\.|$)", name) for name in of))


@pytest.mark.parametrize("name", few_of([name for name in FILES if is_decoder(name)], 15))
def test_decoding_is_one_call_of_c_from_the_first_layer_on(name):
    session = decoding(name)
    found = calls(session)
    # Rows of embeddings and, of some, numbers of positions may be taken before.
    layers = found[first_layer(session) :]
    assert set().union(*layers) == {
        kernel for why in OUTSIDE.get(name, []) for kernel in WITHOUT_C[why].split()
    }
    assert name in OUTSIDE or len(layers) == 1
    # A large weight in pieces would be read by other kernels, and a small one copied for every token.
    assert all(weight.is_contiguous() for weight in session.weights.values())
