# SPDX-License-Identifier: Apache-2.0
"""Models whose layers keep more than keys and values, on the Triton kernels, for `test_device_states.py`. A module of its own: it runs in a process with the interpreter on."""

from __future__ import annotations

import dataclasses

import torch
from attention_runs import far, kernels, sessions
from nnfront_models import deepseek_v3, kimi_linear, mamba2, qwen3_next

FILES = {"mamba2": mamba2, "qwen3_next": qwen3_next, "deepseek_v3": deepseek_v3, "kimi_linear": kimi_linear}


def converse(file: str) -> tuple[float, set[str]]:
    """A prompt, tokens, a chunk and tokens again: the largest difference from what the CPU computes, and the kernels that ran."""
    module = FILES[file]
    config = dataclasses.replace(module.TINY, dtype="float16")
    executable, a, b = sessions(module.build(config), module.export_spec(config))
    mine, theirs = (session.make_cache(batch=2, max_seq=48) for session in (a, b))
    worst = 0.0
    for method, length in (("prefill", 19), ("decode", 1), ("prefill", 3), ("decode", 1)):
        ids = torch.randint(0, config.vocab_size, (2, length))
        worst = max(worst, far(a[method](ids, mine), b[method](ids, theirs)))
    return worst, kernels(executable, "prefill") & kernels(executable, "decode")
