# SPDX-License-Identifier: Apache-2.0
"""What a few tokens of each sequence cost besides products, in C: rope, storing them in the cache, attention.

Between products that leave nothing in the caches each call of torch costs several times what it does. Attention alone: 14 heads of 64 in 2 groups at
540 tokens take 66 us in torch's flash attention and 27 here, 32 heads in 8 groups 160 and 60 (2 threads, EPYC with AVX512_BF16).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

import torch

from nnfront.backends.cpu.extension import NATIVE
from nnfront.lower import Run
from nnfront.memory.layout import Layer
from nnfront.state.layer import CacheLayer, Storage

# A tensor, or bytes behind its begin.
Operand: TypeAlias = torch.Tensor | tuple[torch.Tensor, int]

BYTES = 2  # of an element
FEW = 8
"""Tokens of a sequence that attend in one call of C, each as it would alone."""
# Features of a key and a value that C has room for in 8 bits.
MOST_FEATURES = 4096


@dataclass(frozen=True)
class Scores:
    """What attention does with scores: as `op.attention` has it."""

    scale: float | None = None
    window: int | None = None
    softcap: float | None = None
    value_size: int | None = None

    @classmethod
    def of(cls, run: Run) -> Scores:
        """Return that of an instruction: of the op or of a region."""
        return cls(*(run.attrs.get(name) for name in ("scale", "window", "softcap", "value_size")))

    def reals(self, size: int) -> tuple[float, float]:
        """The scale and the soft cap that C wants for queries of `size` features."""
        return float(size**-0.5 if self.scale is None else self.scale), float(self.softcap or 0.0)

    def seen(self, layer: CacheLayer | Layer) -> int:
        """How many tokens of a layer a query sees, 0 for all."""
        return min((limit for limit in (self.window, layer.window) if limit is not None), default=0)


def are_for_c(tokens: int, features: int, sinks: torch.dtype | None, bias: torch.dtype | None = None) -> bool:
    """Whether C attends with so many tokens of a sequence and features of a key and a value, with sinks and a bias of these dtypes or without."""
    floats = (torch.bfloat16, torch.float32)
    are_few = 0 < tokens <= FEW and features <= MOST_FEATURES
    return are_few and sinks in (None, *floats) and bias in (None, torch.bool, *floats)


def bias_sizes(shape: Sequence[int] | None, itemsize: int) -> tuple[int, int, int, int, int]:
    """What C wants to know of a bias [1 or batch, 1 or heads, 1 or tokens, positions]: positions, elements from a sequence, from a head and from a
    token to the next, bytes.
    """
    if shape is None:
        return 0, 0, 0, 0, 0
    batch, heads, seq, positions = shape
    each = seq * positions
    return positions, heads * each * (batch > 1), each * (heads > 1), positions * (seq > 1), itemsize


def are_tables(shape: tuple[int, ...], rows: int, size: int) -> bool:
    """Whether tables of this shape turn heads of `size` features, all rows alike or each by its own."""
    rotated = shape[-1]
    return 0 < rotated <= size and rotated % 2 == 0 and prod(shape) in (rotated, rows * rotated)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None,
    layer: CacheLayer,
    scores: Scores,
    sinks: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """Store the tokens k and v [batch, seq, groups, size] and attend: q and the result [batch, seq, heads, size]. Without v values are the first
    `value_size` features of the keys. bias [1 or batch, 1 or heads, 1 or seq, positions].

    Where this cannot be done, nothing is, and the result is None.
    """
    _, seq, heads, size = q.shape
    tokens = [q, k] if v is None else [q, k, v]
    if seq > FEW or not _reads(q) or not all(token.numel() for token in tokens):
        return None
    if not all(map(_has_tokens_in_a_row, tokens)):
        return None
    value_size = scores.value_size if v is None else v.shape[3]
    assert value_size is not None
    q_step, k_step, *steps = (token.stride(0 if seq == 1 else 1) for token in tokens)
    strides = q_step, k_step, *(steps or [0])
    sizes = len(q), seq, heads, k.shape[2], size, value_size
    return _attend((q, k, v), strides, sizes, layer, scores, sinks, bias)


def attend_rotated(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    heads: int,
    groups: int,
    layer: CacheLayer,
    scores: Scores,
    sinks: torch.Tensor | None = None,
    *,
    is_interleaved: bool = False,
) -> torch.Tensor | None:
    """Rotate q and k and do what `attend` does: qkv [batch, seq, (heads + 2 * groups) * size], float32 tables [batch, seq, 1, rotated] or of one token.

    Places are found by adding up, as views would cost as much as all the rest.
    """
    batch, seq, width = qkv.shape
    size, rotated = width // (heads + 2 * groups), cos.shape[-1]
    rows = batch * seq
    if seq > FEW or not _reads(qkv) or not qkv.numel() or not qkv.is_contiguous():
        return None
    if cos.dtype != torch.float32 or not are_tables(cos.shape, rows, size) or not _are_whole(cos, sin):
        return None
    assert NATIVE is not None
    turned = torch.empty((rows, heads + groups, size), dtype=torch.bfloat16)
    next_table, next_turned = 0 if cos.numel() == rotated else rotated, (heads + groups) * size
    sizes = rows, heads + groups, size, rotated, is_interleaved, width, next_table
    NATIVE.rotate(*sizes, torch.get_num_threads(), qkv, cos, sin, turned)
    operands = turned, (turned, BYTES * heads * size), (qkv, BYTES * next_turned)
    strides = next_turned, next_turned, width
    return _attend(operands, strides, (batch, seq, heads, groups, size, size), layer, scores, sinks)


def _are_whole(*tensors: torch.Tensor) -> bool:
    return all(map(torch.Tensor.is_contiguous, tensors))


def _reads(x: torch.Tensor) -> bool:
    """Whether C can read a tensor: a GPU's back end has the kernels of this one for what it has none of its own."""
    return NATIVE is not None and x.dtype == torch.bfloat16 and x.is_cpu


def _attend(
    operands: tuple[Operand, Operand, Operand | None],
    strides: Sequence[int],
    sizes: tuple[int, int, int, int, int, int],
    layer: CacheLayer,
    scores: Scores,
    sinks: torch.Tensor | None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """`attend` for q, k and v, tokens so many elements apart; sizes are batch, tokens, heads, groups, size and that of values."""
    assert NATIVE is not None
    batch, seq, heads, groups, size, value_size = sizes
    kinds = (None if given is None else given.dtype for given in (sinks, bias))
    if not are_for_c(seq, size + value_size, *kinds):
        return None
    storage = layer.reserve_few(seq)
    if storage is None:
        return None
    y = torch.empty((batch, seq, heads, value_size), dtype=torch.bfloat16)
    *stored, capacity, columns, pool = places(storage, layer)
    of_bias = (None, 0) if bias is None else (bias.shape, bias.itemsize)
    NATIVE.append_and_attend(
        batch,
        seq,
        groups,
        heads // groups,
        size,
        value_size,
        capacity,
        columns,
        pool,
        scores.seen(layer),
        *strides,
        *bias_sizes(*of_bias),
        sinks is not None and sinks.dtype == torch.float32,
        torch.get_num_threads(),
        *scores.reals(size),
        *operands,
        *stored,
        None if sinks is None else sinks.contiguous(),
        None if bias is None else bias.contiguous(),
        y,
    )
    return y


def places(storage: Storage, layer: CacheLayer) -> tuple[Any, ...]:
    """What C wants to know of a layer: pages, scales of keys and values, keys, values, lengths; tokens of a page or of a sequence, pages of a
    sequence at most, and of all. None is what there is not: values may be parts of the keys.
    """
    keys, values = (*storage.buffers, None)[:2]
    assert keys is not None
    key_scales, value_scales = (*storage.scales, None, None)[:2]
    columns, pool = (0, 0) if storage.pages is None else (storage.pages.shape[1], len(keys))
    scales_and_tokens = key_scales, value_scales, keys, values
    return storage.pages, *scales_and_tokens, layer.lengths.counts(), keys.shape[-2], columns, pool


PLACES = 9
"""How many these are; the last three are numbers."""


def _has_tokens_in_a_row(x: torch.Tensor) -> bool:
    """Whether the features of a head, heads, and tokens one after the other, lie at equal distances."""
    batch, seq, heads, size = x.shape
    are_even = seq == 1 or batch == 1 or x.stride(0) == seq * x.stride(1)
    return are_even and x.stride(3) == 1 and (x.stride(2) == size or heads == 1)
