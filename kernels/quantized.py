# SPDX-License-Identifier: Apache-2.0
"""How quantised weights are stored, in torch: made once when weights are prepared, and undone exactly.

int4: a weight row of K nibbles n in 0..15 stands for (n - zero) * scale, with one scale and one zero for each group of
K; symmetric means zero = 8. A group of G nibbles becomes G // 2 bytes: the first half of the group in the low nibbles,
the second half in the high ones, and in both the four neighbours k, k + 1, k + 2, k + 3 lie in bytes k, k + 2, k + 1,
k + 3. Then `word >> 4 * i & 0x000F000F` on four bytes is a pair of neighbours in two 16-bit lanes, for i = 0 to 3.

int8: a weight row of K bytes q in -128..127 stands for q * scale, one scale for each group of K or for the whole row.

Their scales are stored [K // G, N] and zeros likewise, so that the scales of one group are adjacent along N.

fp8: e4m3 without infinities ("e4m3fn": largest 448, NaN 0x7F and 0xFF). A matrix [R, K] has one float32 scale for each
block of `rows` x `columns`, stored [ceil(R / rows), ceil(K / columns)]; a block may be the whole matrix, a row, 1 x 128
or 128 x 128.
"""

from __future__ import annotations

import torch
from nnfront_kernels.common import KernelError, require_matrix

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


def require_scales(scales: torch.Tensor, n: int, k: int) -> int:
    """How many elements along K share a scale. Raise KernelError unless scales are [K // G, N], adjacent along N."""
    if scales.ndim != 2 or not scales.shape[0] or k % scales.shape[0]:
        raise KernelError(f"scales must have shape [K / group, N] for K = {k}, got {list(scales.shape)}")
    require_matrix("scales", scales, scales.shape[0], n, None)
    return k // scales.shape[0]


def dequantize_int8(
    q: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """The weight [N, K] that int8 values stand for, in `dtype`."""
    return q.to(dtype) * _per_weight(scales.to(dtype), q.shape[1] // scales.shape[0])


FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
# A block whose largest magnitude is below this counts as having it: no division by zero.
FP8_SMALLEST = 2.0**-100


def quantize_fp8(x: torch.Tensor, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Round [R, K] to fp8 [R, K] and scales [ceil(R / rows), ceil(K / columns)]. The largest magnitude becomes 448."""
    depth = x.shape[1]
    down, across = -(-x.shape[0] // rows), -(-depth // columns)
    padded = x.new_zeros(down * rows, across * columns, dtype=torch.float32)
    padded[: x.shape[0], :depth] = x
    blocks = padded.reshape(down, rows, across, columns)
    largest = blocks.abs().amax(dim=(1, 3)).clamp(min=FP8_SMALLEST)
    inverse = torch.full_like(largest, FP8_MAX) / largest  # torch rounds `448 / largest` twice
    q = (blocks * inverse[:, None, :, None]).clamp(-FP8_MAX, FP8_MAX).to(FP8)
    return q.reshape(padded.shape)[: x.shape[0], :depth].contiguous(), largest / FP8_MAX


def dequantize_fp8(
    q: torch.Tensor, scales: torch.Tensor, rows: int, columns: int, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """The matrix [R, K] that fp8 values stand for, in `dtype`."""
    per_value = scales.repeat_interleave(rows, 0)[: q.shape[0]].repeat_interleave(columns, 1)[:, : q.shape[1]]
    return q.to(dtype) * per_value.to(dtype)


def _per_weight(values: torch.Tensor, group: int) -> torch.Tensor:
    """[K // group, N] to [N, K]."""
    return values.T.repeat_interleave(group, dim=1)
