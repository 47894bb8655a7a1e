# SPDX-License-Identifier: Apache-2.0
"""How a cache stores what it keeps of tokens: as it is, or in 8 bits with a scale for each token, over the last axis of a buffer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import torch

from nnfront.errors import RunError
from nnfront.lower import Buffer
from nnfront.memory.layout import Layer

FLOAT8 = "float8_e4m3fn"
LARGEST = 448.0  # that float8_e4m3fn holds


@dataclass(frozen=True, slots=True)
class Parts:
    """A tensor for each buffer of a token; in 8 bits (bytes) the scales as well, whose last axis is 1."""

    buffers: tuple[torch.Tensor, ...]
    scales: tuple[torch.Tensor, ...] = ()

    @property
    def all(self) -> tuple[torch.Tensor, ...]:
        """All tensors."""
        return self.buffers + self.scales

    @property
    def nbytes(self) -> int:
        """Their bytes."""
        return sum(part.nbytes for part in self.all)

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Parts:
        """What a function makes of each."""
        return Parts(tuple(map(function, self.buffers)), tuple(map(function, self.scales)))


def is_quantized(stored_as: str | None) -> bool:
    """Whether a cache stores tokens in 8 bits. Raises RunError for a way to store that there is not."""
    if stored_as not in (None, FLOAT8):
        raise RunError(f"make_cache: stored_as is {stored_as!r}, expected {FLOAT8!r} or nothing")
    return stored_as is not None


def allocate(
    buffers: Sequence[Buffer],
    outer: Sequence[int],
    tokens: Sequence[int],
    coded: bool,
    device: torch.device,
) -> Parts:
    """Zeroed memory for buffers [*lead, last]: [*outer, *lead, *tokens, last].

    Zeroed, as attention multiplies empty slots by 0 and 0 times what happens to lie in memory may be NaN.
    """

    def zeros(buffer: Buffer, last: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(*outer, *buffer.shape[:-1], *tokens, last, dtype=dtype, device=device)

    if not coded:
        return Parts(tuple(zeros(b, b.shape[-1], getattr(torch, b.dtype)) for b in buffers))
    return Parts(
        tuple(zeros(b, b.shape[-1], torch.uint8) for b in buffers),
        tuple(zeros(b, 1, torch.float32) for b in buffers),
    )


def token_bytes(layer: Layer, coded: bool) -> int:
    """The bytes of one token of one sequence."""
    if not coded:
        return layer.token_bytes
    return sum(prod(b.shape[:-1]) * (b.shape[-1] + 4) for b in layer.type.per_token)


def encode(new: Sequence[torch.Tensor], coded: bool) -> Parts:
    """What is stored of tokens: themselves, or codes and scales. The largest of each token is the largest code."""
    if not coded:
        return Parts(tuple(new))
    codes, scales = zip(*map(_encode, new), strict=True)
    return Parts(codes, scales)


def _encode(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    wide = x.float()
    scales = wide.abs().amax(-1, keepdim=True) / LARGEST
    scales.masked_fill_(scales == 0, 1.0)
    codes = (wide / scales).clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return codes.view(torch.uint8), scales


def decode(
    parts: Parts,
    index: int,
    dtype: str,
    view: Callable[[torch.Tensor], torch.Tensor] = lambda part: part,
) -> torch.Tensor:
    """A view of a buffer as it is multiplied, in its dtype."""
    stored = view(parts.buffers[index])
    if not parts.scales:
        return stored
    wide = stored.view(torch.float8_e4m3fn).float()
    return wide.mul_(view(parts.scales[index])).to(getattr(torch, dtype))
