# SPDX-License-Identifier: Apache-2.0
"""Attention to what another method has stored in a cache of its own, against torch's: contiguous, in pages, in 8 bits, of texts of different lengths."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import nnfront as nn
from nnfront import op, spec
from nnfront.errors import RunError

HEADS, GROUPS, SIZE = 4, 2, 8


class Crossing(nn.Module):
    def encode(self, k: nn.Tensor, v: nn.Tensor, memory: nn.Cache) -> None:
        op.cache_append(memory[0], k, v)

    def decode(self, q: nn.Tensor, k: nn.Tensor, memory: nn.Cache, cache: nn.Cache) -> Any:
        own = op.attention(q, k, k, cache=cache[0])
        return own, op.attention(own, cache=memory[0], is_causal=False, scale=0.3)

    def sharp(self, q: nn.Tensor, memory: nn.Cache) -> nn.Tensor:
        return op.attention(q, cache=memory[0], is_causal=False, softcap=2.0, scale=0.3)


@pytest.fixture(scope="module")
def session() -> Any:
    q, k = (spec.Tensor(["batch", "seq", heads, SIZE]) for heads in (HEADS, GROUPS))
    source = spec.Tensor(["batch", "source", GROUPS, SIZE])
    memory = spec.Cache(1, GROUPS, SIZE, max_seq="max_source")
    cache = spec.Cache(1, GROUPS, SIZE, window=16)
    methods = {
        "encode": {"k": source, "v": source, "memory": memory},
        "decode": {"q": q, "k": k, "memory": memory, "cache": cache},
        "sharp": {"q": q, "memory": memory},
    }
    return nn.compile(Crossing().export(methods)).load({})


def torchs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, scale=0.3, enable_gqa=True).transpose(1, 2)


@pytest.mark.parametrize(
    ("how", "error"), [({}, 1e-5), ({"page_size": 4}, 1e-5), ({"stored_as": "float8_e4m3fn"}, 0.1)]
)
@pytest.mark.parametrize("lengths", [(6, 6), (3, 7)])
@pytest.mark.parametrize("seq", [1, 5])
def test_it_attends_to_all_that_is_stored(
    session: Any, seq: int, lengths: tuple[int, ...], how: dict[str, Any], error: float
) -> None:
    torch.manual_seed(0)
    memory = session.make_cache("memory", batch=2, max_source=9, **how)
    cache = session.make_cache("cache", batch=2, max_seq=9)
    sources = [torch.randn(2, 1, n, GROUPS, SIZE) for n in lengths]
    for i, (k, v) in enumerate(sources):
        session["encode"](k, v, memory.rows(i))
    for _ in range(2):
        own, crossed = session["decode"](
            torch.randn(2, seq, HEADS, SIZE)[:, : seq if cache.length() == 0 else 1],
            torch.randn(2, seq, GROUPS, SIZE)[:, : seq if cache.length() == 0 else 1],
            memory,
            cache,
        )
        expected = torch.cat([torchs(own[i : i + 1], k, v) for i, (k, v) in enumerate(sources)])
        torch.testing.assert_close(crossed, expected, rtol=0, atol=error)
    assert memory.lengths == [*lengths]
    assert cache.lengths == [seq + 1] * 2


def test_its_kernel_is_torchs_unless_there_is_more_to_do(session: Any) -> None:
    table = str(session.explain(batch=1, seq=1, source=4, max_seq=8, max_source=8))
    assert [line.split()[2] for line in table.splitlines() if " attention " in line] == [
        "attention_cached",
        "cross_attention",
        "attention_stored",
    ]


def test_a_softcap_is_computed_too(session: Any) -> None:
    memory = session.make_cache("memory", batch=1, max_source=9)
    k, v = torch.randn(2, 1, 6, 1, SIZE).expand(2, 1, 6, GROUPS, SIZE)
    session["encode"](k, v, memory)
    q = torch.randn(1, 3, HEADS, SIZE)
    scores = torch.tanh(torch.einsum("bshk,btk->bhst", q, k[:, :, 0]) * 0.3 / 2) * 2
    expected = torch.einsum("bhst,btk->bshk", scores.softmax(-1), v[:, :, 0])
    torch.testing.assert_close(session["sharp"](q, memory), expected)


def test_caches_that_differ_are_asked_for_by_the_argument(session: Any) -> None:
    with pytest.raises(RunError, match="the methods take different caches") as caught:
        session.make_cache(batch=1, max_seq=4)
    assert caught.value.help == "make_cache(ARGUMENT, ...) makes the one for an argument of that name"
    with pytest.raises(RunError, match="no method takes a cache 'memoir'"):
        session.make_cache("memoir", batch=1, max_seq=4)


def test_a_layer_that_is_left_out_is_refused() -> None:
    class Partial(nn.Module):
        def encode(self, k: nn.Tensor, memory: nn.Cache) -> None:
            op.cache_append(memory[0], k, k)

    memory = spec.Cache(2, GROUPS, SIZE, max_seq="max_source")
    source = spec.Tensor(["batch", "source", GROUPS, SIZE])
    with pytest.raises(nn.errors.LowerError, match="layers of the cache 'memory' get different numbers"):
        nn.compile(Partial().export({"encode": {"k": source, "memory": memory}}))
