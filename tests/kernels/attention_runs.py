# SPDX-License-Identifier: Apache-2.0
"""Models whose attention runs on the Triton kernels, for `test_device_attention.py`. A module of its own: it runs in a process with the interpreter on."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from nnfront_models import llama, qwen3_moe, whisper

import nnfront as nn
from nnfront import op, spec

FILES = {"llama": llama, "qwen3_moe": qwen3_moe}


def sessions(model: nn.Module, specs: dict[str, Any]) -> tuple[nn.Executable, Any, Any]:
    """The model compiled for CUDA, and sessions of it and of the same compiled for the CPU, with the same random weights."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    ir = nn.passes.lift_transform_params(model.export(specs), shared_transform=True)
    triton, cpu = nn.compile(ir, target="cuda"), nn.compile(ir)
    weights = {
        name: (torch.randn([int(size) for size in p.shape]) * 0.1).to(getattr(torch, p.dtype))
        for name, p in model.named_parameters()
    }
    return triton, triton.load(weights), cpu.load(weights)


def kernels(executable: nn.Executable, method: str) -> set[str]:
    return {i.kernel for i in executable.program.methods[method].body.instructions}


def far(got: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, relative to the largest value."""
    assert got.shape == expected.shape
    return float((got - expected).abs().max() / expected.abs().max())


def converse(file: str, page_size: int | None) -> None:
    """Prompts of different lengths, chunks after them, tokens, a fork, a cut: logits are those of the CPU every time."""
    module = FILES[file]
    config = dataclasses.replace(
        module.TINY,
        dtype="float16",
        head_dim=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    executable, a, b = sessions(module.build(config), module.export_spec(config))
    fused = "triton_qkv_attention" if file == "llama" else "triton_rope_attention"
    for method in ("prefill", "decode", "logits"):
        assert fused in kernels(executable, method)
        assert not {"rope_rotated", "attention_cached", "attention_fused"} & kernels(executable, method)
    pages = {} if page_size is None else {"page_size": page_size}
    mine, theirs = (s.make_cache(batch=3, max_seq=48, **pages) for s in (a, b))

    def both(method: str, ids: torch.Tensor, one: Any = mine, other: Any = theirs) -> None:
        assert far(a[method](ids, one), b[method](ids, other)) < 4e-3
        assert one.lengths == other.lengths

    tokens = torch.randint(0, config.vocab_size, (3, 40))
    both("prefill", tokens[:1, :17], mine.rows(0), theirs.rows(0))
    both("prefill", tokens[1:, :5], mine.rows(1, 3), theirs.rows(1, 3))
    both("prefill", tokens[:, 17:20])
    both("decode", tokens[:, 20:21])
    forks = mine.fork([2, 0]), theirs.fork([2, 0])
    both("decode", tokens[:2, 22:23], *forks)
    both("decode", tokens[:, 21:22])
    mine.truncate(7)
    theirs.truncate(7)
    both("prefill", tokens[:, 23:33])
    both("decode", tokens[:, 33:34], mine, theirs)
    assert far(a["logits"](tokens[:, :9]), b["logits"](tokens[:, :9])) < 4e-3
    with pytest.raises(nn.errors.RunError, match="cache is full"):
        a["prefill"](tokens, mine)
    both("decode", tokens[:2, 35:36], *forks)


class Attention(nn.Module):
    """Attention with every option, between two projections."""

    def __init__(self, heads: int, kv_heads: int, size: int, **options: Any) -> None:
        self.sizes = heads, kv_heads, size
        self.qkv = nn.Linear(32, (heads + 2 * kv_heads) * size, bias=False, dtype="float16")
        self.sinks = nn.Parameter((heads,), "float16") if options.pop("sinks", False) else None
        self.rotary_emb = nn.RotaryEmbedding(size, {"rope_type": "default", "rope_theta": 100.0})
        self.interleaved = options.pop("interleaved", False)
        self.options = options

    def step(self, x: nn.Tensor, cache: Any) -> nn.Tensor:
        """[batch, seq, 32] to [batch, seq, heads, size]."""
        batch, seq, _ = x.shape
        heads, kv_heads, size = self.sizes
        parts = op.split(self.qkv(x), [heads * size, (heads + kv_heads) * size], -1)
        q, k, v = (
            op.reshape(part, (batch, seq, n, size))
            for part, n in zip(parts, (heads, kv_heads, kv_heads), strict=True)
        )
        cos, sin = self.rotary_emb(op.cache_positions(cache[0], seq))
        q, k = (op.rope(part, cos, sin, interleaved=self.interleaved) for part in (q, k))
        return op.attention(q, k, v, cache=cache[0], sinks=self.sinks, **self.options)


def attend(
    options: tuple[tuple[str, Any], ...],
    cache_window: int | None,
    page_size: int | None,
    stored_as: str | None,
) -> None:
    """A chunk longer than a window, tokens beyond it, and chunks again: results are those of the CPU."""
    batch, seq = nn.Dim("batch", min=1), nn.Dim("seq", min=1, max=64)
    model = Attention(4, 2, 64, **dict(options))
    cache = spec.Cache(1, 2, 64, "float16", batch, nn.Dim("max_seq", min=1, max=64), window=cache_window)
    specs = {"step": {"x": spec.Tensor([batch, seq, 32], "float16"), "cache": cache}}
    executable, a, b = sessions(model, specs)
    assert "triton_qkv_attention" in kernels(executable, "step")
    pages = {} if page_size is None else {"page_size": page_size}
    mine, theirs = (s.make_cache(batch=2, max_seq=64, stored_as=stored_as, **pages) for s in (a, b))
    for length in (1, 21, 1, 9, 1):
        x = torch.randn(2, length, 32).half()
        # A value within float16's rounding of half way between two codes may be either on each side: one in a hundred, an eighth of
        # itself. A wrong scale would be off by the whole. The kernels' own tests hold them to float64.
        got, expected = a["step"](x, mine), b["step"](x, theirs)
        assert far(got, expected) < (4e-3 if stored_as is None else 3e-2)
        assert (got - expected).abs().mean() < 2e-3 * expected.abs().max()


def refuse_pages() -> None:
    config = dataclasses.replace(llama.TINY, dtype="float16", head_dim=64)
    _, a, _ = sessions(llama.build(config), llama.export_spec(config))
    with pytest.raises(nn.errors.RunError, match="page_size is 32, the kernels of this target read pages of"):
        a.make_cache(batch=1, max_seq=64, page_size=32)


def cross(page_size: int | None) -> None:
    """Tokens that attend to sources of several lengths, one of which is nothing: logits are those of the CPU."""
    heads = dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2)
    config = dataclasses.replace(whisper.TINY, dtype="float16", d_model=128, decoder_layers=1, **heads)
    executable, a, b = sessions(whisper.build(config), whisper.export_spec(config))
    assert "cross_attention" in kernels(executable, "prefill")
    assert "cross_attention" not in kernels(executable, "decode")
    pages = {} if page_size is None else {"page_size": page_size}
    made = []
    for session in (a, b):
        memory = session.make_cache("memory", batch=3, max_source=20, **pages)
        made.append((memory, session.make_cache("cache", batch=3, max_seq=16, **pages)))
    for row, length in ((0, 20), (1, 7)):
        source = torch.randn(1, 8, 40).half()
        for session, (memory, _) in zip((a, b), made, strict=True):
            session["encode"](source, memory.rows(row))
            memory.rows(row).truncate(length)
    for _ in range(2):
        token = torch.randint(0, config.vocab_size, (3, 1))
        assert far(a["decode"](token, *made[0]), b["decode"](token, *made[1])) < 4e-3
