# SPDX-License-Identifier: Apache-2.0
"""What the kernels of recurrences share: checks of their operands, and what tokens of a chunk leave of one another.

A state stays in registers while one block walks over the tokens of a sequence, many of them as chunks whose tokens meet in products.
A captured launch serves every cache of one layout: `base` int64 [2], if given, says how many times 16 bytes behind the tensors that it was given the
state lies, the one before and the one after, and how many sequences of the launch, the last ones, are nobody's: these begin from zeros, and no state of theirs is
read or written. It is read on the device. One block reads what it writes, so both may be one.

Arithmetic is float32. Tensor cores take tokens in 16 bits as they are, and what they meet in float32 in two parts of 16 bits (`product`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from nnfront_kernels.common import KernelError

DTYPES = ("float16", "bfloat16", "float32")


def refusal(sizes: dict[str, int], most: int, batch: int) -> str | None:
    """None, or why no kernel of a recurrence takes these."""
    for name, size in sizes.items():
        if not 1 <= size <= most:
            return f"{name} must be 1 to {most}, got {size}"
    return None if batch < 2**16 else f"there must be less than 65536 sequences, got {batch}"


def block_of(size: int, most: int) -> int:
    """The power of two for a block along an axis: what holds it, at least what a product takes, at most `most`."""
    return min(max(triton.next_power_of_2(size), 16), most)


def require_shape(name: str, tensor: torch.Tensor, shape: Sequence[int]) -> None:
    """Raise KernelError unless this has the shape, and adjacent elements along its last axis."""
    if list(tensor.shape) != list(shape) or (tensor.shape[-1] > 1 and tensor.stride(-1) != 1):
        raise KernelError(
            f"{name} must be {list(shape)} with adjacent elements, got {list(tensor.shape)} with strides {list(tensor.stride())}"
        )


def require_state(
    state: torch.Tensor | None,
    after: torch.Tensor | None,
    base: torch.Tensor | None,
    shape: Sequence[int],
    dtype: torch.dtype | None,
    like: torch.Tensor,
) -> dict[str, Any]:
    """The kernel arguments that say where the state [*shape] before the first token lies, and where the one after the last is written: to `after`,
    which may be the one before, or to a new tensor. Raise KernelError unless all are dense, of `dtype` if there is one, and `base` int64 [2], with which they may
    hold fewer sequences.
    """
    for name, tensor in (("state", state), ("after", after)):
        if tensor is None:
            continue
        is_part = base is not None and len(tensor) < shape[0]
        if list(tensor.shape[is_part:]) != list(shape[is_part:]) or not tensor.is_contiguous():
            raise KernelError(
                f"{name} must be a dense {list(shape)}, got {list(tensor.shape)} with strides {list(tensor.stride())}"
            )
        if tensor.dtype != (wanted := dtype or (tensor if state is None else state).dtype):
            raise KernelError(f"{name} must be {wanted}, got {tensor.dtype}")
    if base is not None and (base.shape != (2,) or base.dtype != torch.int64):
        raise KernelError(f"base must be int64 [2], got {base.dtype} {list(base.shape)}")
    if after is None:
        kept = dtype or (like if state is None else state).dtype
        after = torch.empty(tuple(shape), dtype=kept, device=like.device)
    return {"state_ptr": state, "after_ptr": after, "base_ptr": base}


def widest(columns: int, other: int) -> int:
    """How many columns of a state a block holds: no more than leave registers for the products, with `other` rows."""
    return min(columns, 4096 // other)


@triton.jit
def theirs(size, base_ptr):
    """How much there is of an axis of the state of this block's sequence: `size`, or nothing if that is nobody's."""
    if base_ptr is not None:
        size = tl.where(tl.program_id(2) < tl.num_programs(2) - tl.load(base_ptr + 1), size, 0)
    return size


@triton.jit
def product(a, b, acc):
    """acc + a b. One of both is float32; it is taken in two parts of the other's dtype, or if that is float32 too by 11 bits of each."""
    if a.dtype == b.dtype:
        return tl.dot(a, b, acc, input_precision="tf32")
    if a.dtype == tl.float32:
        part = a.to(b.dtype)
        return tl.dot((a - part.to(tl.float32)).to(b.dtype), b, tl.dot(part, b, acc))
    part = b.to(a.dtype)
    return tl.dot(a, (b - part.to(tl.float32)).to(a.dtype), tl.dot(a, part, acc))


@triton.jit
def left_of_earlier(sums, CHUNK: tl.constexpr):
    """What token i of a chunk has left of token j [CHUNK, CHUNK], 0 for later ones; `sums` are the sums of logarithms up to each."""
    at = tl.arange(0, CHUNK)
    difference = sums[:, None] - sums[None, :]
    return tl.exp(tl.where(at[:, None] >= at[None, :], difference, float("-inf")))
