# SPDX-License-Identifier: Apache-2.0
"""Handles of caches: taking a cache apart into its layers, where the next tokens stand, and what a layer keeps of each sequence.

A handle is a value that is used up by the op that writes it, which gives back the written one. At run time a cache iterates
over its layers, and a layer is what `nnfront.ops.layer` says; joining gives a tuple of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from nnfront.errors import InferError
from nnfront.ir.op import op
from nnfront.ir.types import StateLayerType, StateType, TensorType, TupleType
from nnfront.ops.layer import LayerLike
from nnfront.ops.rules import Length, require, require_same


@op(writes="cache", view="always", moves=True, scratch=False)
def cache_split(cache: StateType) -> TupleType:
    """A handle for each layer. The cache's own handle is used up until `cache_join` makes another."""
    return TupleType(cache.layers)


@cache_split.reference
def _(cache: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(cache)


@op(writes="layers", view="always", moves=True, scratch=False)
def cache_join(*layers: StateLayerType) -> StateType:
    """The cache of these layers. Their handles are used up."""
    return StateType(layers)


@cache_join.reference
def _(*layers: Any) -> tuple[Any, ...]:
    return layers


@op(moves=True)
def cache_positions(cache: StateLayerType, seq: Length) -> TensorType:
    """The positions of the next `seq` tokens of each sequence, counted from 0: int64 [batch, seq]. Writes nothing."""
    return TensorType((cache.batch, seq), "int64")


@cache_positions.reference
def _(cache: LayerLike, seq: int) -> torch.Tensor:
    return cache.positions(seq)


@op(is_pure=False, writes="cache", moves=True)
def cache_append(cache: StateLayerType, keys: TensorType, values: TensorType | None = None) -> StateLayerType:
    """Store what a layer keeps of `seq` more tokens, and attend to nothing: for each of its buffers, in order, a tensor [batch, seq, *shape].

    So an encoder leaves the keys and values that cross attention reads: `attention(q, cache=layer, is_causal=False)`.
    """
    parts = [part for part in (keys, values) if part is not None]
    buffers = cache.per_token
    require(
        len(parts) == len(buffers),
        "the layer keeps {} of each token, got {} tensors",
        " and ".join(repr(buffer.name) for buffer in buffers) or "nothing",
        len(parts),
    )
    for part, buffer in zip(parts, buffers, strict=True):
        wanted = TensorType((cache.batch, *keys.shape[1:2], *buffer.shape), buffer.dtype)
        _require_kept(buffer.name, part, wanted, "batch", "seq")
    return cache


@cache_append.reference
def _(cache: LayerLike, keys: torch.Tensor, values: torch.Tensor | None = None) -> LayerLike:
    cache.append(*(part for part in (keys, values) if part is not None))
    return cache


def _require_kept(name: str, value: TensorType, wanted: TensorType, *lead: str) -> None:
    """Require a tensor to be what a layer keeps under a name; `lead` is what its first axes are called."""
    axes = ", ".join([*lead, *map(str, wanted.shape[len(lead) :])])
    if value.dtype != wanted.dtype or value.ndim != wanted.ndim:
        got = f"{value.dtype} with {value.ndim} axes"
        raise InferError(f"the layer keeps {name!r} as {wanted.dtype}[{axes}], got {got}")
    for mine, size in zip(value.shape, wanted.shape, strict=True):
        require_same(mine, size, f"{name!r} is [{axes}] in the layer: {{}} is not {{}}")


def _buffer(cache: StateLayerType, name: str) -> TensorType:
    """The type of what a layer keeps of all sequences under a name."""
    found = next((buffer for buffer in cache.per_sequence if buffer.name == name), None)
    names = ", ".join(repr(buffer.name) for buffer in cache.per_sequence)
    require(
        found is not None,
        "the layer keeps no {} of each sequence",
        repr(name),
        help=f"it keeps {names}" if names else "spec.Layer(per_sequence={...}) says what a layer keeps",
    )
    assert found is not None
    return TensorType((cache.batch, *found.shape), found.dtype)


@op(moves=True)
def cache_read(cache: StateLayerType, name: str) -> TensorType:
    """What a layer keeps of each sequence under a name: [batch, *shape]; zeros before the first token. Writes nothing."""
    return _buffer(cache, name)


@cache_read.reference
def _(cache: LayerLike, name: str) -> torch.Tensor:
    return cache.read(name)


@op(is_pure=False, writes="cache", moves=True)
def cache_write(cache: StateLayerType, value: TensorType, name: str, seq: Length) -> StateLayerType:
    """Keep `value` [batch, *shape] under a name, as it is after `seq` more tokens of each sequence."""
    _require_kept(name, value, _buffer(cache, name), "batch")
    return cache


@cache_write.reference
def _(cache: LayerLike, value: torch.Tensor, name: str, seq: int) -> LayerLike:
    cache.write(name, value, seq)
    return cache
