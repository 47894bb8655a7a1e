# SPDX-License-Identifier: Apache-2.0
"""Generation whose steps are captured with their draws, for `test_generation.py`: torch's kernels and the sampler's, in float32."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from graph_runs import captured_by
from state_graph_runs import Counting, launching
from tape import TapeCapture

import nnfront as nn
from nnfront.backends.cuda import attention as cuda_attention
from nnfront.engine.params import Sampling
from nnfront.llm.sampling import Sampler

FOLDER = Path(__file__).parents[2] / "examples/checkpoints/pylib-3m"
PROMPTS = [torch.tensor([7, 8, 9, 300]), torch.tensor([7, 8])]
WAYS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.8},
    {"temperature": 0.9, "top_k": 40, "seed": 2},
    {"temperature": 0.9, "top_k": 40, "seed": 5},
    {"temperature": 1.2, "repetition_penalty": 1.3, "seed": 1},
]


def pair() -> tuple[nn.LLM, nn.LLM, TapeCapture]:
    """Two models: one whose steps are captured, one whose steps run as usual; a kernel draws for both."""
    torch.set_num_threads(1)
    cuda_attention.MIN_BUCKET = 16  # all of these texts, in few rows to copy
    capturer = TapeCapture()
    with launching():
        with captured_by(capturer):
            one = nn.LLM.load(FOLDER, "cuda", dtype="float32")
        with captured_by(None):
            other = nn.LLM.load(FOLDER, "cuda", dtype="float32")
    return one, other, capturer


def drawing() -> Any:
    patch = pytest.MonkeyPatch()
    patch.setattr("nnfront.llm.language_model.Sampler", partial(Sampler, on_kernel=True))
    return patch


def generations(first: int, count: int, rounds: int) -> tuple[list[bool], int]:
    """Of so many ways to draw, each so often: whether each of some generations has the tokens of one that is not captured, and how many captures with a draw there were."""
    one, other, capturer = pair()
    patch = drawing()
    try:
        same = []
        for way in WAYS[first : first + count] * rounds:
            found, expected = (llm.generate_ids(PROMPTS, max_new_tokens=3, **way) for llm in (one, other))
            same.append([row.tolist() for row in found] == [row.tolist() for row in expected])
    finally:
        patch.undo()
    return same, sum("sampling_kernel" in tape.names for tape in capturer.tapes)


def ahead() -> None:
    """When a token is handed out, the step behind it is under way; the last one has none, and one that is not wanted does no harm."""
    one, _, _ = pair()
    sampler = Sampler(Sampling(), PROMPTS, on_kernel=True)
    steps = one._steps(PROMPTS, 3, sampler)
    seen = []
    for _ in steps:
        stepping = steps.gi_frame.f_locals["stepping"]
        seen.append(stepping.cache.lengths)
    assert seen == [[5, 3], [6, 4], [6, 4]]
    whole = one.generate_ids(PROMPTS, max_new_tokens=4)
    ends = int(whole[0][1])
    ended = one.generate_ids(PROMPTS[:1], max_new_tokens=4, eos_token_id=ends)
    assert ended[0].tolist() == whole[0].tolist()[: len(ended[0])]
    assert [row.tolist() for row in one.generate_ids(PROMPTS, max_new_tokens=4)] == [
        row.tolist() for row in whole
    ]


def given_for_a_token() -> list[str]:
    """What the host gives a device for one more token, besides the graph, which does nothing here."""
    one, _, capturer = pair()
    patch, way, counted = drawing(), {"temperature": 0.9, "top_k": 40, "seed": 2}, []
    try:
        one.generate_ids(PROMPTS, max_new_tokens=8, **way)
        one.generate_ids(PROMPTS, max_new_tokens=8, **way)
        for tape in capturer.tapes:
            tape.entries.clear()
        for count in (4, 5):
            with Counting() as counting:
                for _ in one._steps(PROMPTS, count, Sampler(Sampling(**way), PROMPTS, on_kernel=True)):
                    pass
            counted.append(counting.names)
    finally:
        patch.undo()
    few, more = counted
    return more[len(few) :]
