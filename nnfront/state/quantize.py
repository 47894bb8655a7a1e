# SPDX-License-Identifier: Apache-2.0
"""How a cache stores keys and values: as they are, or in 8 bits with a scale for each token and head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch

from nnfront.errors import RunError
from nnfront.memory.layout import Layer

FLOAT8 = "float8_e4m3fn"
LARGEST = 448.0  # that float8_e4m3fn holds

# Keys, values, and for codes the scales of keys and of values: all [..., tokens, size], a scale has size 1.
Parts: TypeAlias = tuple[torch.Tensor, ...]


def is_coded(stored_as: str | None) -> bool:
    """Whether a cache stores codes. Raises RunError for a way to store that there is not."""
    if stored_as not in (None, FLOAT8):
        raise RunError(f"make_cache: stored_as is {stored_as!r}, expected {FLOAT8!r} or nothing")
    return stored_as is not None


def buffers(shape: Sequence[int], dtype: str, coded: bool, device: torch.device) -> Parts:
    """Zeroed memory for keys and values of `shape` [..., tokens, size], codes as bytes.

    Zeroed, as attention multiplies empty slots by 0 and 0 times what happens to lie in memory may be NaN.
    """
    kept = torch.uint8 if coded else getattr(torch, dtype)
    parts = tuple(torch.zeros(*shape, dtype=kept, device=device) for _ in range(2))
    if not coded:
        return parts
    return *parts, *(torch.zeros(*shape[:-1], 1, dtype=torch.float32, device=device) for _ in range(2))


def kept_bytes(layer: Layer, coded: bool) -> int:
    """The bytes of a layer's buffers."""
    if not coded:
        return layer.size_bytes
    return 2 * layer.batch * layer.kv_heads * layer.capacity * (layer.head_size + 4)


def encode(k: torch.Tensor, v: torch.Tensor, coded: bool) -> Parts:
    """What is stored of keys and values: themselves, or codes and scales. The largest of each token and head is the largest code."""
    if not coded:
        return k, v
    codes, scales = zip(*map(_encode, (k, v)), strict=True)
    return *codes, *scales


def _encode(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    wide = x.float()
    scales = wide.abs().amax(-1, keepdim=True) / LARGEST
    scales.masked_fill_(scales == 0, 1.0)
    codes = (wide / scales).clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return codes.view(torch.uint8), scales


def decode(parts: Parts, index: int, dtype: torch.dtype) -> torch.Tensor:
    """Keys (0) or values (1) as they are multiplied."""
    if len(parts) == 2:
        return parts[index]
    return parts[index].view(torch.float8_e4m3fn).float().mul_(parts[2 + index]).to(dtype)
