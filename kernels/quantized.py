# SPDX-License-Identifier: Apache-2.0
"""How quantised weights are stored, in torch: made once when weights are prepared, and undone exactly.

int4: a weight row of K nibbles n in 0..15 stands for (n - zero) * scale, with one scale and one zero for each group of
K; symmetric means zero = 8. A group of G nibbles becomes G // 2 bytes: the first half of the group in the low nibbles,
the second half in the high ones, and in both the four neighbours k, k + 1, k + 2, k + 3 lie in bytes k, k + 2, k + 1,
k + 3. Then `word >> 4 * i & 0x000F000F` on four bytes is a pair of neighbours in two 16-bit lanes, for i = 0 to 3.

int8: a weight row of K bytes q in -128..127 stands for q * scale, one scale for each group of K or for the whole row.

Scales are stored [K // G, N] and zeros likewise, so that the scales of one group are adjacent along N.
"""

from __future__ import annotations

import torch
from nnfront_kernels.common import KernelError

GROUPS = (32, 64, 128)
# Byte i of four holds neighbour ORDER[i]; swapping the middle two undoes itself.
ORDER = (0, 2, 1, 3)


def pack_int4(nibbles: torch.Tensor, group: int) -> torch.Tensor:
    """[N, K] of integers in 0..15 to [N, K // 2] uint8. K is a multiple of the group, 32, 64 or 128."""
    if group not in GROUPS or nibbles.ndim != 2 or nibbles.shape[1] % group:
        raise KernelError(
            f"int4 groups are 32, 64 or 128 and divide K, got group {group} and shape {list(nibbles.shape)}"
        )
    if nibbles.numel() and (int(nibbles.min()) < 0 or int(nibbles.max()) > 15):
        raise KernelError(f"int4 values must be in 0..15, got {int(nibbles.min())}..{int(nibbles.max())}")
    rows, depth = nibbles.shape
    halves = nibbles.to(torch.uint8).reshape(rows, depth // group, 2, group // 8, 4)[..., ORDER]
    low, high = halves.unbind(2)
    return (low | high << 4).reshape(rows, depth // 2)


def unpack_int4(packed: torch.Tensor, group: int) -> torch.Tensor:
    """The inverse of `pack_int4`: [N, K // 2] uint8 to [N, K] uint8 in 0..15."""
    rows, size = packed.shape
    quads = packed.reshape(rows, 2 * size // group, group // 8, 4)
    return torch.stack([quads & 15, quads >> 4], dim=2)[..., ORDER].reshape(rows, 2 * size)


def quantize_int4(
    w: torch.Tensor, group: int, *, zero_points: bool = False, dtype: torch.dtype = torch.float16
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Round [N, K] to the nearest representable: packed [N, K // 2], scales [K // G, N], zeros [K // G, N] uint8 or None.

    Symmetric scales map the largest magnitude of a group to 7; zero points map its range, widened to hold 0, to 0..15.
    """
    groups = _grouped(w, group)
    if zero_points:
        low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
        scales = _nonzero((high - low) / 15).to(dtype)
        zeros = (-low / scales.float()).round().clamp(0, 15)
    else:
        scales = _nonzero(groups.abs().amax(2) / 7).to(dtype)
        zeros = torch.full_like(scales, 8, dtype=torch.float32)
    nibbles = (groups / scales.float()[..., None] + zeros[..., None]).round().clamp(0, 15)
    packed = pack_int4(nibbles.flatten(1).to(torch.uint8), group)
    return packed, scales.T.contiguous(), zeros.to(torch.uint8).T.contiguous() if zero_points else None


def dequantize_int4(
    packed: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    group: int,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """The weight [N, K] that a packed one stands for, in `dtype`."""
    nibbles = unpack_int4(packed, group).to(dtype)
    offset = 8 if zeros is None else _per_weight(zeros.to(dtype), group)
    return (nibbles - offset) * _per_weight(scales.to(dtype), group)


def quantize_int8(
    w: torch.Tensor, group: int = 0, dtype: torch.dtype = torch.float16
) -> tuple[torch.Tensor, torch.Tensor]:
    """Round [N, K] to int8 [N, K] and scales [K // G, N], or [1, N] where group is 0. The largest magnitude becomes 127."""
    groups = _grouped(w, group or w.shape[1])
    scales = _nonzero(groups.abs().amax(2) / 127).to(dtype)
    q = (groups / scales.float()[..., None]).round().clamp(-127, 127).to(torch.int8)
    return q.flatten(1), scales.T.contiguous()


def dequantize_int8(
    q: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """The weight [N, K] that int8 values stand for, in `dtype`."""
    return q.to(dtype) * _per_weight(scales.to(dtype), q.shape[1] // scales.shape[0])


def _grouped(w: torch.Tensor, group: int) -> torch.Tensor:
    """[N, K] to float32 [N, K // group, group]."""
    if w.ndim != 2 or w.shape[1] % group:
        raise KernelError(f"the group must divide K, got group {group} and shape {list(w.shape)}")
    return w.float().unflatten(1, (-1, group))


def _per_weight(values: torch.Tensor, group: int) -> torch.Tensor:
    """[K // group, N] to [N, K]."""
    return values.T.repeat_interleave(group, dim=1)


def _nonzero(scales: torch.Tensor) -> torch.Tensor:
    """A group of zeros gets scale 1; a scale that float16 would round to zero, the smallest it can hold."""
    return torch.where(scales == 0, torch.ones_like(scales), scales.clamp(min=2.0**-24))
