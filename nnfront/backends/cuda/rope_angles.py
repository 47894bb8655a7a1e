# SPDX-License-Identifier: Apache-2.0
"""Cosines and sines of a step's positions on CUDA: one launch for all layers, of the lengths that a cache holds, in the place of torch's
calls for positions, their conversion, their product with frequencies, cosines, sines and factors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from nnfront.backends.cuda.kernel_package import kernel_module
from nnfront.backends.kernel import NOTHING, Context, Kernel
from nnfront.ir import TensorType, TupleType
from nnfront.lower import Run
from nnfront.state.layer import CacheLayer


@dataclass(frozen=True)
class _Angles:
    """How a cosine or a sine came to be: of the positions of how many next tokens, and whose; frequencies; what it was multiplied by."""

    seq: int
    cache: int
    inv_freq: int
    factor: float


def with_angles(run: Run, cos: int, sin: int, cache: int, context: Context) -> tuple[int, int]:
    """Slots of cosines and sines for a call over a layer of a cache: made by the kernel where `cos` and `sin` are those of its next tokens, else these."""
    found = _angles("cos", cos, context)
    if found is None or found != _angles("sin", sin, context) or _cache_of(cache, context) != found.cache:
        return cos, sin
    key = ("rope_angles", cos, sin)
    made = context.shared.get(key)
    if made is None:
        types = TupleType((context.tensor(cos), context.tensor(sin)))
        attrs = {"seq": found.seq, "factor": found.factor}
        given = (cache, found.inv_freq)
        made = context.emit(run, "rope_angles", given, attrs, types, kernel=KERNELS[0].name)
        context.shared[key] = made
    first, second = made
    return first, second


def _angles(op: str, slot: int, context: Context) -> _Angles | None:
    """What says how the cosine or sine in a slot came to be; None if not by these steps."""
    factor, maker = 1.0, context.makers.get(slot)
    if maker is not None and maker.op == "multiply":
        slot, given = maker.inputs
        value = context.frame.slots[given].value
        if not isinstance(value, (int, float)):
            return None
        factor, maker = float(value), context.makers.get(slot)
    if maker is None or maker.op != op:
        return None
    product = context.makers.get(maker.inputs[0])
    if product is None or product.op != "multiply":
        return None
    turned, inv_freq = product.inputs
    frequencies = context.frame.slots[inv_freq]
    chain = [*_before(turned, ("unsqueeze", "astype", "cache_positions"), context)]
    is_row = isinstance(frequencies.type, TensorType) and frequencies.type.ndim == 1
    if frequencies.kind != "constant" or not is_row or len(chain) != 3:
        return None
    unsqueeze, astype, positions = chain
    cache = _cache_of(positions.inputs[0], context)
    seq = positions.attrs.get("seq")
    is_last = unsqueeze.attrs["dim"] in (-1, 2)
    floats = {astype.attrs["dtype"], context.tensor(inv_freq).dtype, context.tensor(slot).dtype}
    if cache is None or not isinstance(seq, int) or not is_last or floats != {"float32"}:
        return None
    return _Angles(seq, cache, inv_freq, factor)


def _before(slot: int, ops: tuple[str, ...], context: Context) -> Iterator[Run]:
    """The calls that made a value one out of the other, the last one first, as long as they are of these ops."""
    for op in ops:
        maker = context.makers.get(slot)
        if maker is None or maker.op != op:
            return
        yield maker
        slot = maker.inputs[0]


def _cache_of(layer: int, context: Context) -> int | None:
    """The cache whose layer a slot holds as the call was given it: nothing has been appended to it yet."""
    maker = context.makers.get(layer)
    return maker.inputs[0] if maker is not None and maker.op == "cache_split" else None


def _rope_angles(run: Run) -> Callable[..., Any]:
    kernel, seq, factor = kernel_module("rope_angles"), run.attrs["seq"], run.attrs["factor"]

    def triton_rope_angles(layer: CacheLayer, inv_freq: torch.Tensor) -> Any:
        return kernel.launch(layer.lengths.counts(), inv_freq, seq, factor=factor)

    return triton_rope_angles


KERNELS = (Kernel("triton_rope_angles", "", _rope_angles, "one launch for all layers", workspace=NOTHING),)
