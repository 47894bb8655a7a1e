# SPDX-License-Identifier: Apache-2.0
"""Models whose layers keep latents, on the Triton kernels, for `test_device_attention.py`. A module of its own: it runs in a process with the interpreter on."""

from __future__ import annotations

from typing import Any

import torch
from attention_runs import far, kernels, sessions

import nnfront as nn
from nnfront import op, spec


class Latents(nn.Module):
    """Two layers over one that keeps latents: the first appends and attends, the second reads again."""

    def __init__(self, heads: int, rest: int, values: int, options: dict[str, Any], biased: bool) -> None:
        self.sizes = heads, rest + values
        self.q = nn.Linear(32, heads * (rest + values), bias=False, dtype="float16")
        self.latent = nn.Linear(32, rest + values, bias=False, dtype="float16")
        self.bias = nn.Parameter((1, heads, 1, 64), "float16") if biased else None
        self.options = {**options, "value_size": values}

    def step(self, x: nn.Tensor, cache: Any) -> nn.Tensor:
        """[batch, seq, 32] to [batch, seq, 2 * heads, values]."""
        q = op.reshape(self.q(x), (*x.shape[:2], *self.sizes))
        latent = op.unsqueeze(self.latent(x), 2)
        options = {**self.options, "bias": self.bias}
        first = op.attention(q, latent, cache=cache[0], **options)
        again = op.attention(q * 0.5, cache=cache[0], **options)
        return op.concat([first, again], 2)

    def whole(self, x: nn.Tensor) -> nn.Tensor:
        """The same without a cache."""
        q = op.reshape(self.q(x), (*x.shape[:2], *self.sizes))
        return op.attention(q, op.unsqueeze(self.latent(x), 2), **self.options)


def attend_to_latents(
    options: tuple[tuple[str, Any], ...], biased: bool, page_size: int | None, stored_as: str | None
) -> None:
    """A chunk, tokens and chunks again: results are those of the CPU, and the kernel is that of latents."""
    batch, seq = nn.Dim("batch", min=1), nn.Dim("seq", min=1, max=64)
    model = Latents(6, 16, 64, dict(options), biased)
    cache = spec.State(
        [spec.Layer({"latent": spec.Tensor([1, 80], "float16")})],
        batch,
        64 if biased else nn.Dim("max_seq", min=1, max=64),
    )
    specs = {
        "step": {"x": spec.Tensor([batch, seq, 32], "float16"), "cache": cache},
        "whole": {"x": spec.Tensor([batch, seq, 32], "float16")},
    }
    executable, a, b = sessions(model, specs)
    assert "triton_latent_attention" in kernels(executable, "step") & kernels(executable, "whole")
    assert executable.explain().count("captured, calls of") == 2
    pages: dict[str, int] = {} if page_size is None else {"page_size": page_size}
    if not biased:
        pages["max_seq"] = 64
    mine, theirs = (s.make_cache(batch=2, stored_as=stored_as, **pages) for s in (a, b))
    for length in (1, 21, 1, 9, 1):
        x = torch.randn(2, length, 32).half()
        assert far(a["step"](x, mine), b["step"](x, theirs)) < (4e-3 if stored_as is None else 3e-2)
    assert far(a["whole"](x), b["whole"](x)) < 4e-3


class Shared(nn.Module):
    """A layer of keys and values that is appended to under a bias, and read again."""

    def __init__(self, biased: bool) -> None:
        self.qkv = nn.Linear(32, (4 + 2 + 2) * 64, bias=False, dtype="float16")
        self.bias = nn.Parameter((1, 4, 1, 64), "float16") if biased else None

    def step(self, x: nn.Tensor, cache: Any) -> nn.Tensor:
        """[batch, seq, 32] to [batch, seq, 8, 64]."""
        q, k, v = (op.split_heads(part, 64) for part in op.split(self.qkv(x), [256, 384], -1))
        first = op.attention(q, k, v, cache=cache[0], bias=self.bias)
        return op.concat([first, op.attention(q * 0.5, cache=cache[0], bias=self.bias, window=7)], 2)


def attend_again(biased: bool, page_size: int | None) -> None:
    """A chunk, tokens and chunks again: results are those of the CPU, and no instruction is left to the reference."""
    batch, seq = nn.Dim("batch", min=1), nn.Dim("seq", min=1, max=64)
    cache = spec.State([spec.KV(2, 64, "float16")], batch, 64)
    specs = {"step": {"x": spec.Tensor([batch, seq, 32], "float16"), "cache": cache}}
    executable, a, b = sessions(Shared(biased), specs)
    attending = [
        i.kernel for i in executable.program.methods["step"].body.instructions if i.op == "attention"
    ]
    assert attending == ["triton_attention"] * 2
    pages = {} if page_size is None else {"page_size": page_size}
    mine, theirs = (s.make_cache(batch=2, **pages) for s in (a, b))
    for length in (1, 21, 1, 9):
        x = torch.randn(2, length, 32).half()
        assert far(a["step"](x, mine), b["step"](x, theirs)) < 4e-3
