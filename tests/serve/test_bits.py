# SPDX-License-Identifier: Apache-2.0
"""What the engine builds on: a sequence's logits are the same bits whatever is computed beside it, in calls of as many rows as it makes."""

from __future__ import annotations

import pytest
import torch

import nnfront as nn
from nnfront.backends.cpu.backend import CPU
from nnfront.backends.cpu.extension import NATIVE

LENGTHS = [7, 40, 100, 64, 130, 16, 200, 33] * 4


@pytest.mark.skipif(NATIVE is None, reason="products of few rows are the extension's")
@pytest.mark.parametrize("rows", [3, 8, CPU.decode_rows])
def test_a_token_on_pages_does_not_depend_on_which_and_how_many_sequences_are_beside_it(
    llm: nn.LLM, text: list[int], rows: int
) -> None:
    prompts = [torch.tensor([text[i * 31 : i * 31 + n]]) for i, n in enumerate(LENGTHS)]
    session, token = llm.session, torch.tensor([[5]])

    def decoded(chosen: list[torch.Tensor]) -> torch.Tensor:
        cache = session.make_cache(batch=len(chosen), max_seq=256, page_size=16)
        for first in range(0, max(LENGTHS), 64):  # so that pages of a sequence do not lie in a row
            for i, prompt in enumerate(chosen):
                if prompt.shape[1] > first:
                    session["prefill"](prompt[:, first : first + 64], cache.rows(i))
        logits: torch.Tensor = session["decode"](token.expand(len(chosen), 1), cache)[:, -1]
        return logits

    together = decoded(prompts[:rows])
    for i, prompt in enumerate(prompts[: min(rows, 8)]):
        assert torch.equal(together[i], decoded([prompt, prompts[0]])[0])
