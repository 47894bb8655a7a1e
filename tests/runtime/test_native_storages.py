# SPDX-License-Identifier: Apache-2.0
"""Decoding stays in the kernels in C whatever the cache is: contiguous, in pages, in 8 bits, or both. Torch's attention is never asked."""

from pathlib import Path
from typing import Any

import pytest
import torch

import nnfront as nn
from nnfront.backends.cpu import attention, attention_blocks
from nnfront.backends.cpu.extension import NATIVE

SHIPPED = Path(__file__).parents[2] / "examples" / "checkpoints" / "pylib-3m"
PAGES: dict[str, Any] = {"page_size": 16}
EIGHT_BITS: dict[str, Any] = {"stored_as": "float8_e4m3fn"}


@pytest.fixture(scope="module")
def session() -> nn.Session:
    return nn.LLM.load(SHIPPED).session


@pytest.mark.skipif(NATIVE is None, reason="no kernels in C")
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("storage", [{}, EIGHT_BITS], ids=["bfloat16", "8 bits"])
def test_pages_and_8_bits_are_decoded_in_c_and_pages_change_no_bit(
    session: nn.Session, storage: dict[str, Any], batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(0, 4096, (batch, 37), generator=generator)
    tokens = torch.randint(0, 4096, (20, batch, 1), generator=generator)
    caches = [session.make_cache(batch=batch, max_seq=64, **storage, **pages) for pages in ({}, PAGES)]
    for cache in caches:
        session["prefill"](prompt, cache)

    def refused(*args: object, **options: object) -> None:
        raise AssertionError("torch's attention was asked")

    for module in (attention, attention_blocks):
        monkeypatch.setattr(module, "attend", refused)
    session["prefill"](prompt, session.make_cache(batch=batch, max_seq=64, **storage))
    for token in tokens:  # over the end of a page
        contiguous, in_pages = (session["decode"](token, cache) for cache in caches)
        assert torch.equal(contiguous, in_pages)
