# SPDX-License-Identifier: Apache-2.0
"""The sampler with its kernel, in the interpreter: what it draws, what it remembers, and what it says of logits without a token."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from nnfront_kernels import sampling_parts
from nnfront_kernels.common import planning_for
from tape import TapeCapture

import nnfront as nn
from nnfront.backends.cuda.sampling import DeviceSampler, takes
from nnfront.engine.params import Sampling
from nnfront.errors import RunError
from nnfront.llm.sampling import Sampler, tokens_of

FOLDER = Path(__file__).parents[2] / "examples/checkpoints/pylib-3m"


def on_kernel(prompts: tuple[torch.Tensor, ...] = (), **options: float) -> Sampler:
    return Sampler(Sampling(**options), prompts, on_kernel=True)


def drawn(seed: int, steps: int, rows: int = 2) -> list[list[int]]:
    sampler = on_kernel(temperature=1.5, seed=seed)
    return [sampler(torch.zeros(rows, 50)).tolist() for _ in range(steps)]


def test_the_same_seed_draws_the_same_tokens_and_another_seed_row_or_step_others(interpreted):
    first = interpreted(drawn, 3, 3)
    assert first == interpreted(drawn, 3, 3)
    assert first != interpreted(drawn, 4, 3)
    assert len({token for row in first for token in row}) > 3


@pytest.mark.parametrize("seed", [-1, 2**64 - 1, -(2**63)])
def test_every_seed_of_64_bits_will_do(interpreted, seed):
    assert len(interpreted(drawn, seed, 1)) == 1


def two_batches() -> tuple[list[list[int]], list[list[int]]]:
    sampler = on_kernel(temperature=1.5, seed=3)
    return [sampler(torch.zeros(n, 50)).tolist() for n in (2, 3, 2)], drawn(3, 3, 3)


def test_another_batch_goes_on_with_the_steps(interpreted):
    got, expected = interpreted(two_batches)
    assert got == [expected[0][:2], expected[1], expected[2][:2]]


def greedy_with_a_penalty(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    prompts = tuple(torch.randint(0, 40, (n,)) for n in (3, 9))
    device = on_kernel(prompts, repetition_penalty=1.7)
    host = Sampler(Sampling(repetition_penalty=1.7), prompts)
    marked = torch.zeros(2, 40, dtype=torch.bool)
    for _ in range(4):
        logits = torch.randn(2, 40).round().to(dtype)
        token = host(logits)
        assert torch.equal(device(logits), token)
        for row, prompt, drawn in zip(marked, prompts, token, strict=True):
            row[[*prompt.tolist(), int(drawn)]] = True
        assert torch.equal(device._seen, marked)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_greedy_tokens_with_a_penalty_are_those_of_the_cpu(interpreted, dtype):
    interpreted(greedy_with_a_penalty, dtype)


def limits_with_a_penalty() -> None:
    """A token that may be drawn only once is drawn once: the penalty takes it out of the top k."""
    sampler = on_kernel(
        (torch.tensor([0]),), temperature=1.0, top_k=1, top_p=0.9, min_p=0.1, repetition_penalty=8.0
    )
    logits = torch.tensor([[9.0, 8.0, 7.0, 6.0]])
    assert [sampler(logits).item() for _ in range(3)] == [1, 2, 3]


def test_drawn_tokens_are_remembered_on_the_device(interpreted):
    interpreted(limits_with_a_penalty)


def of_nan(temperature: float) -> torch.Tensor:
    logits = torch.zeros(2, 8)
    logits[1, 5] = math.nan
    return on_kernel(temperature=temperature)(logits)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_with_nan_is_told_when_the_numbers_are_read(interpreted, temperature):
    token = interpreted(of_nan, temperature)
    with pytest.raises(RunError, match="logits hold NaN, or no token to draw"):
        tokens_of(token)


def strided() -> None:
    logits = torch.randn(40, 2).T
    assert torch.equal(on_kernel()(logits), logits.argmax(-1))
    last = torch.randn(2, 3, 40)[:, -1]
    assert torch.equal(on_kernel()(last), last.argmax(-1))


def test_logits_may_be_strided(interpreted):
    interpreted(strided)


def buffers() -> None:
    sampler = DeviceSampler({"temperature": 1.0, "top_k": 3, "top_p": None, "min_p": None}, 5)
    sampler(torch.zeros(2, 8), None)
    before = dict(sampler._buffers)
    sampler(torch.zeros(2, 8), None)
    assert all(sampler._buffers[name] is value for name, value in before.items())
    assert before["state"].tolist() == [[5, 2], [5, 2**32 + 2]]


def test_every_draw_of_a_batch_uses_the_same_buffers(interpreted):
    interpreted(buffers)


def captured(given: tuple[tuple[str, Any], ...]) -> tuple[list[int], list[int], set[str]]:
    """What replays of a captured draw from a large vocabulary give, what calls as usual give, and which kernels were captured."""
    options = dict(given)
    patch = pytest.MonkeyPatch()
    patch.setattr(sampling_parts, "LEAST", 64)  # as a large one in all but the time that it takes here
    try:
        return _captured(options)
    finally:
        patch.undo()


def _captured(options: dict[str, Any]) -> tuple[list[int], list[int], set[str]]:
    logits = torch.randn(3, 1, 200, generator=torch.Generator().manual_seed(0)) * 4
    one, other = (DeviceSampler({**LIMITS, **options}, 5) for _ in range(2))
    place, seen, drawn = logits[0].clone(), torch.zeros(1, logits.shape[2], dtype=torch.bool), []
    marked = seen.clone() if options.get("temperature") else None
    expected = [int(other(row, seen if marked is not None else None)) for row in logits]
    drawn.append(int(one(place, marked)))
    changed = [*one.state(), *([] if marked is None else [marked])]
    before = [tensor.clone() for tensor in changed]
    made: list[torch.Tensor] = []
    capturer = TapeCapture()
    replay = capturer.capture(lambda: made.append(one(place, marked)))
    for tensor, content in zip(changed, before, strict=True):
        tensor.copy_(content)
    for row in logits[1:]:
        place.copy_(row)
        replay()
        drawn.append(int(made[0]))
    return drawn, expected, {name for name in capturer.tapes[0].names if name.endswith("_kernel")}


LIMITS = {"top_k": None, "top_p": None, "min_p": None}


@pytest.mark.matrix
@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"temperature": 1.0, "top_k": 50}], ids=str)
def test_a_captured_draw_from_a_large_vocabulary_goes_on_as_calls_do(interpreted, options):
    drawn, expected, kernels = interpreted(captured, tuple(options.items()))
    assert drawn == expected
    assert len(set(drawn)) > 1
    assert kernels == {"largest_in_parts_kernel"} | (
        {"draw_in_parts_kernel"} if options["temperature"] else set()
    )


def taken(dtype: torch.dtype, arch: str) -> bool:
    with planning_for(arch):
        return takes(torch.zeros(2, 8, dtype=dtype))


@pytest.mark.parametrize(
    ("dtype", "arch", "expected"),
    [
        (torch.bfloat16, "sm_90", True),
        (torch.float32, "sm_100", True),
        (torch.float64, "sm_90", False),
        (torch.float32, "sm_75", False),
    ],
    ids=str,
)
def test_a_gpu_or_dtype_that_the_kernel_was_not_made_for_is_left_to_torch(interpreted, dtype, arch, expected):
    assert interpreted(taken, dtype, arch) is expected


def texts(folder: str) -> None:
    """A language model's tokens, drawn by the kernel: greedy ones are the CPU's, and drawn ones the same every time."""
    llm = nn.LLM.load(folder)
    prompts = [torch.tensor([7, 8, 9, 300]), torch.tensor([7, 8])]
    greedy = {"max_new_tokens": 4, "repetition_penalty": 1.8}
    random = {"max_new_tokens": 3, "temperature": 0.9, "top_k": 40, "seed": 2}
    expected = llm.generate_ids(prompts, **greedy)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nnfront.llm.language_model.Sampler", partial(Sampler, on_kernel=True))
        got = llm.generate_ids(prompts, **greedy)
        assert [row.tolist() for row in got] == [row.tolist() for row in expected]
        first, second = llm.generate_ids(prompts, **random), llm.generate_ids(prompts, **random)
        assert [row.tolist() for row in first] == [row.tolist() for row in second]


def test_a_language_model_generates_with_the_kernel(interpreted):
    interpreted(texts, str(FOLDER))
