# SPDX-License-Identifier: Apache-2.0
"""Caches that are NaN wherever nobody may look, and attention head by head in float64 for one query."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from kernel_checks import EPS32, SUM, surrounded

NAN = float("nan")


def normal(generator: torch.Generator, *size: int) -> torch.Tensor:
    return torch.randn(*size, generator=generator, dtype=torch.float64)


def placed(rows: torch.Tensor, shape: tuple[int, ...], gap: int) -> torch.Tensor:
    """A cache [*shape, size] whose rows lie `gap` elements apart in a buffer that is NaN elsewhere."""
    return surrounded(rows, gap, 0).unflatten(0, shape)


def quantized(tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of tokens [kv_heads, length, size] in 8 bits, in float64, and their scales [kv_heads, length]."""
    scales = (tokens.abs().amax(-1) / 448).float()
    return (tokens / scales[..., None]).clamp(-448, 448).to(torch.float8_e4m3fn).double(), scales


def uneven(generator: torch.Generator, tokens: torch.Tensor, powers: int) -> torch.Tensor:
    """Tokens of different magnitudes, up to 2^powers and down to 2^-powers of what they were."""
    return tokens * torch.exp2(
        torch.randint(-powers, powers + 1, (*tokens.shape[:2], 1), generator=generator).double()
    )


def cache(
    generator: torch.Generator,
    tokens: list[torch.Tensor],
    first_used: list[int],
    page: int,
    gap: int,
    dtype: torch.dtype = torch.float16,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Sequences [kv_heads, length, size] as a cache that is NaN wherever there is no token that a query may see."""
    kv_heads, _, size = tokens[0].shape
    longest = max(t.shape[1] for t in tokens)
    batch = len(tokens)
    if not page:
        slots = longest + 3
        rows = torch.full((batch, kv_heads, slots, size), NAN).to(dtype)
        for b, (t, first) in enumerate(zip(tokens, first_used, strict=True)):
            rows[b, :, first : t.shape[1]] = t[:, first:].to(dtype)
        return placed(rows.flatten(0, 2), (batch, kv_heads, slots), gap), None
    per = max(-(-longest // page), 1)
    order = torch.randperm(batch * per + 1, generator=generator)[: batch * per].view(batch, per).int()
    rows = torch.full((batch * per + 1, kv_heads, page, size), NAN).to(dtype)
    for b, (t, first) in enumerate(zip(tokens, first_used, strict=True)):
        for p in range(first, t.shape[1]):
            rows[order[b, p // page], :, p % page] = t[:, p].to(dtype)
        order[b, : first // page] = -1
        order[b, -(-t.shape[1] // page) :] = -1
    return placed(rows.flatten(0, 2), (batch * per + 1, kv_heads, page), gap), order


@dataclass(frozen=True)
class Stored:
    """Keys or values as a cache holds them, and what that stands for: [kv_heads, length, size] for each sequence, float64."""

    cache: torch.Tensor
    tokens: list[torch.Tensor]
    pages: torch.Tensor | None
    scales: torch.Tensor | None = None  # as stored
    token_scales: list[torch.Tensor] | None = None  # [kv_heads, length] for each sequence


def stored(
    generator: torch.Generator,
    kv_heads: int,
    lengths: list[int],
    size: int,
    first_used: list[int],
    page: int,
    gap: int,
    fp8: bool,
    magnitude: float = 1.0,
) -> Stored:
    """Random tokens in a cache; whatever the generator's state, the pages are the same."""
    tokens = [normal(generator, kv_heads, n, size) * magnitude for n in lengths]
    order = torch.Generator().manual_seed(len(lengths))
    if not fp8:
        rounded = [t.half().double() for t in tokens]
        rows, pages = cache(order, rounded, first_used, page, gap)
        return Stored(rows, rounded, pages)
    made = [quantized(uneven(generator, t, 3)) for t in tokens]
    rows, pages = cache(order, [codes for codes, _ in made], first_used, page, gap, torch.float8_e4m3fn)
    order.manual_seed(len(lengths))
    scales = [scale for _, scale in made]
    stored_scales, _ = cache(order, [s[..., None] for s in scales], first_used, page, 0, torch.float32)
    exact = [codes * scale.double()[..., None] for codes, scale in made]
    return Stored(rows, exact, pages, stored_scales[..., 0], scales)


def answer(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seen: torch.Tensor,
    case: Any,
    sinks: torch.Tensor | None,
    value_scales: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """y [heads, size] for one query, head by head, and how far a computation with float16 weights may drift. bias [heads, length].

    With value_scales [kv_heads, length] the weights in float16 are relative to the largest weight times scale, and small
    features of q are rounded relative to its largest.
    """
    shared = q.shape[0] // k.shape[0]
    rows, drifts = [], []
    scale = case.size**-0.5 if case.scale is None else case.scale
    for h in range(q.shape[0]):
        keys, values = k[h // shared][seen], v[h // shared][seen]
        z = (keys @ q[h]) * scale
        size = (keys.abs() @ q[h].abs()) * abs(scale)
        off = SUM * EPS32 * math.sqrt(case.size) * size
        if value_scales is not None:
            off = off + 2.0**-25 * q[h].abs().max() * keys.abs().sum(1) * abs(scale)
        if case.soft_cap is not None:
            z = case.soft_cap * torch.tanh(z / case.soft_cap)
            off = off + 8 * EPS32 * case.soft_cap
        if bias is not None and bias.dtype == torch.bool:
            z = z.masked_fill(~bias[h][seen], -math.inf)
        elif bias is not None:
            z = z + bias[h][seen].double()
        e = torch.exp(z)
        total = e.sum() + (math.exp(sinks[h]) if sinks is not None else 0.0)
        weights = e / total if total > 0 else e
        rows.append(weights @ values)
        worst = float((off + 4 * EPS32 * z.abs().nan_to_num(posinf=0.0)).max()) if len(z) else 0.0
        relative = 2.0**-11 + 2 * worst + SUM * EPS32 * math.sqrt(len(z) + 64)
        smallest = 2.0**-25 * values.abs()
        if value_scales is not None and len(z):
            scales = value_scales[h // shared][seen].double()
            smallest = 2.0**-24 * (weights * scales).max() * values.abs() / scales[:, None]
        drifts.append(relative * (weights @ values.abs()) + smallest.sum(0))
    return torch.stack(rows), torch.stack(drifts)


def biases(
    lengths: tuple[int, ...], heads: int, seq: int, dtype: torch.dtype = torch.float16
) -> torch.Tensor:
    """What ALiBi adds, by head: [batch, heads, seq, positions], NaN where no query may look."""
    slope = torch.arange(1, heads + 1)[None, :, None, None] / heads
    distance = torch.arange(max(lengths)).expand(len(lengths), 1, seq, max(lengths)) - max(lengths)
    made = slope * distance
    for b, n in enumerate(lengths):
        made[b, :, :, n:] = NAN
    return made.to(dtype)
