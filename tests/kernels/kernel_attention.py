# SPDX-License-Identifier: Apache-2.0
"""Caches that are NaN wherever nobody may look, and attention head by head in float64 for one query."""

from __future__ import annotations

import math
from typing import Any

import torch
from kernel_checks import EPS32, SUM, surrounded

NAN = float("nan")


def normal(generator: torch.Generator, *size: int) -> torch.Tensor:
    return torch.randn(*size, generator=generator, dtype=torch.float64)


def placed(rows: torch.Tensor, shape: tuple[int, ...], gap: int) -> torch.Tensor:
    """A cache [*shape, size] whose rows lie `gap` elements apart in a buffer that is NaN elsewhere."""
    return surrounded(rows, gap, 0).unflatten(0, shape)


def cache(
    generator: torch.Generator, tokens: list[torch.Tensor], first_used: list[int], page: int, gap: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Sequences [kv_heads, length, size] as a cache that is NaN wherever there is no token that a query may see."""
    kv_heads, _, size = tokens[0].shape
    longest = max(t.shape[1] for t in tokens)
    batch = len(tokens)
    if not page:
        slots = longest + 3
        rows = torch.full((batch, kv_heads, slots, size), NAN, dtype=torch.float16)
        for b, (t, first) in enumerate(zip(tokens, first_used, strict=True)):
            rows[b, :, first : t.shape[1]] = t[:, first:].half()
        return placed(rows.flatten(0, 2), (batch, kv_heads, slots), gap), None
    per = max(-(-longest // page), 1)
    order = torch.randperm(batch * per + 1, generator=generator)[: batch * per].view(batch, per).int()
    rows = torch.full((batch * per + 1, kv_heads, page, size), NAN, dtype=torch.float16)
    for b, (t, first) in enumerate(zip(tokens, first_used, strict=True)):
        for p in range(first, t.shape[1]):
            rows[order[b, p // page], :, p % page] = t[:, p].half()
        order[b, : first // page] = -1
        order[b, -(-t.shape[1] // page) :] = -1
    return placed(rows.flatten(0, 2), (batch * per + 1, kv_heads, page), gap), order


def answer(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seen: torch.Tensor,
    case: Any,
    sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """y [heads, size] for one query, head by head, and how far a computation with float16 weights may drift."""
    shared = q.shape[0] // k.shape[0]
    rows, drifts = [], []
    scale = case.size**-0.5 if case.scale is None else case.scale
    for h in range(q.shape[0]):
        keys, values = k[h // shared][seen], v[h // shared][seen]
        z = (keys @ q[h]) * scale
        size = (keys.abs() @ q[h].abs()) * abs(scale)
        off = SUM * EPS32 * math.sqrt(case.size) * size
        if case.soft_cap is not None:
            z = case.soft_cap * torch.tanh(z / case.soft_cap)
            off = off + 8 * EPS32 * case.soft_cap
        e = torch.exp(z)
        total = e.sum() + (math.exp(sinks[h]) if sinks is not None else 0.0)
        weights = e / total if len(e) else e
        rows.append(weights @ values)
        worst = float((off + 4 * EPS32 * z.abs()).max()) if len(z) else 0.0
        relative = 2.0**-11 + 2 * worst + SUM * EPS32 * math.sqrt(len(z) + 64)
        drifts.append(relative * (weights @ values.abs()) + 2.0**-25 * values.abs().sum(0))
    return torch.stack(rows), torch.stack(drifts)
