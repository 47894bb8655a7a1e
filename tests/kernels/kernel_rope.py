# SPDX-License-Identifier: Apache-2.0
"""Rotation pair by pair as complex numbers in float64, and the operands that the kernels which rotate are run on."""

from __future__ import annotations

import torch
from kernel_attention import normal
from kernel_checks import EPS32, assert_close, surrounded


def turned(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [batch, seq, heads, size] in float64 with its first pairs rotated, and the sizes of the terms."""
    x, pairs = x.double(), cos.shape[-1]
    y, size = x.clone(), x.abs()
    angles = torch.complex(cos.double(), sin.double())[..., None, :]
    for i in range(pairs):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + pairs)
        z = torch.complex(x[..., a], x[..., b]) * angles[..., i]
        y[..., a], y[..., b] = z.real, z.imag
        size[..., a] = size[..., b] = x[..., a].abs() + x[..., b].abs()
    return y, size


def close(got: torch.Tensor, expected: torch.Tensor, sizes: torch.Tensor) -> None:
    """Raise AssertionError unless `got` is the rounding of a float32 computation of `expected`."""
    shape = (-1, got.shape[-1])
    drift = 4 * EPS32 * sizes.reshape(shape)
    assert_close(actual=got.reshape(shape), expected=expected.reshape(shape), drift=drift)


def angles(
    generator: torch.Generator, batch: int, seq: int, pairs: int, gap: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [batch, seq, pairs] of random angles, float32, in rows that are NaN apart."""
    turns = normal(generator, batch * seq, pairs) * 3
    cos, sin = (
        surrounded(f(turns).float(), gap, 0).unflatten(0, (batch, seq)) for f in (torch.cos, torch.sin)
    )
    return cos, sin


def projected(
    generator: torch.Generator,
    batch: int,
    seq: int,
    heads: tuple[tuple[int, int], ...],
    dtype: torch.dtype,
    gap: int,
    fused: bool,
) -> list[torch.Tensor]:
    """A tensor [batch, seq, heads, size] for each (heads, size): views into one projection, or each with strides of its own."""
    widths = [count * size for count, size in heads]
    if fused:
        rows = surrounded(normal(generator, batch * seq, sum(widths)).to(dtype), gap, 0)
        parts = list(rows.split(widths, 1))
    else:
        parts = [
            surrounded(normal(generator, batch * seq, width).to(dtype), gap + index, 0)
            for index, width in enumerate(widths)
        ]
    return [
        part.unflatten(0, (batch, seq)).unflatten(2, shape) for part, shape in zip(parts, heads, strict=True)
    ]
