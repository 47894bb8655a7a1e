# SPDX-License-Identifier: Apache-2.0
"""What a launch must do at least: arithmetic, and bytes to and from device memory with each tensor moved once."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from nnfront_kernels import Kernel, Plan
from nnfront_kernels.tiles import cdiv
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class Cost:
    """The operations of a launch, and its bytes."""

    flops: int
    bytes: int


def _products(s: Any) -> int:
    return 2 * s.m * s.n * s.k


def _attention(s: Any) -> int:
    """Two products for each pair of a query and a key that it sees."""
    both = s.size + (s.value_size or s.size)
    if hasattr(s, "causal"):
        total = s.before + s.seq
        seen = [min(p + 1 if s.causal else total, s.window or total) for p in range(s.before, total)]
    else:
        seen = [min(s.longest - t, s.window or s.longest) for t in range(getattr(s, "seq", 1))]
    return 2 * s.batch * s.heads * sum(seen) * both


OPERATIONS: dict[str, Callable[[Any], int]] = {
    "grouped_matmul": lambda s: 2 * s.tokens * s.top_k * s.n * s.k,
    "add_low_rank": lambda s: 2 * s.rows * s.rank * (s.n + s.k),
    **dict.fromkeys(("attention_decode", "attention_latent", "attention_prefill"), _attention),
    "ssm_scan": lambda s: 6 * s.batch * s.seq * s.heads * s.size * s.states,
    "gated_delta_rule": lambda s: 7 * s.batch * s.seq * s.heads * s.key_size * s.value_size,
    "causal_conv1d": lambda s: 2 * s.batch * s.seq * s.channels * s.width,
    **dict.fromkeys(("moe_routing", "copy_rows"), lambda s: 0),
    "moe_combine": lambda s: 2 * s.tokens * s.top_k * s.width,
    "rms_norm": lambda s: (4 + s.residual) * s.rows * s.size,
    "layer_norm": lambda s: (7 + s.residual) * s.rows * s.size,
    "softmax": lambda s: 5 * s.rows * s.size,
    "gated_activation": lambda s: 6 * s.rows * s.size,
    **dict.fromkeys(("sampling", "sampling_parts"), lambda s: 10 * s.rows * s.vocab),
    "rope": lambda s: 6 * s.batch * s.tokens * (s.heads + s.kv_heads) * s.pairs,
    "rope_append": lambda s: 6 * s.batch * s.tokens * (s.heads + s.kv_heads) * s.pairs,
    "rope_angles": lambda s: 5 * s.batch * s.seq * s.pairs,
    "unpack_weight": lambda s: 2 * s.n * s.k,
    "quantize_fp8": lambda s: (1 + 4 * s.norm) * s.m * s.k,
}
"""By the kernel; others are products of two matrices."""

CACHE = ("keys", "values", "key_scales", "value_scales", "latents")


def cost(
    kernel: Kernel, shape: Any, arguments: tuple[Any, ...], options: dict[str, Any], plans: Iterable[Plan]
) -> Cost:
    """The cost of a kernel's launches on operands: for caches as long as they may be, and weights of as many experts and adapters as there can be."""
    given = inspect.signature(kernel.plan).bind(*arguments, **options).arguments
    moved: dict[int, int] = {}
    for name, value in {**given, **given.get("options", {}), **given.get("given", {})}.items():
        for tensor in tree_leaves(value):
            if isinstance(tensor, torch.Tensor):
                part, whole = _touched(kernel.name, shape, name, tensor)
                moved[id(tensor)] = tensor.nbytes * part // whole
    for plan in plans:
        for made in (plan.output, *(plan.arguments[name] for name in plan.also)):
            moved.setdefault(id(made), made.nbytes)
    return Cost(OPERATIONS.get(kernel.name, _products)(shape), sum(moved.values()))


def _touched(kernel: str, s: Any, name: str, tensor: torch.Tensor) -> tuple[int, int]:
    """The share of an operand that is moved."""
    if name in CACHE and kernel in ("attention_decode", "attention_latent", "rope_append"):
        last = getattr(s, "seq", 1) - 1
        seen = s.tokens if kernel == "rope_append" else min(s.longest, (s.window or s.longest) + last)
        return s.batch * seen, len(tensor) * tensor.shape[2]
    if kernel == "rope_append" and name == "q":  # without a rotation it is not touched
        return int(s.pairs > 0), 1
    if kernel == "grouped_matmul" and name == "w":
        return min(s.experts, s.tokens * s.top_k), s.experts
    if kernel == "add_low_rank" and name in ("a", "b"):
        return min(cdiv(s.rows, s.seq), s.adapters), s.adapters
    return 1, 1
