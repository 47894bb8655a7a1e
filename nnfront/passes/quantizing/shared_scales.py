# SPDX-License-Identifier: Apache-2.0
"""Weights whose outputs share scales: all of one matrix, or those of a block.

What shares a scale is brought together along one axis and quantised as one group; where it lay, its numbers are put back, and each output gets the scale.
Outputs that are fewer than a block are filled up with zeros, which change no largest element. With moments of inputs the numbers are rounded anew, by these, under the scales.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from nnfront import ops
from nnfront.ir import FunctionBuilder, Param, Projection, Var, canonical_call, tensor_type
from nnfront.quant_format import QuantFormat


def with_shared_scales(
    builder: FunctionBuilder,
    weight: Var,
    format: QuantFormat,
    names: Sequence[str],
    moments: Param | None = None,
) -> list[Var]:
    """Emit elements and scales of a weight [..., outputs, inputs] in a format, under these names: [..., outputs, inputs] and [..., outputs, groups]."""
    shape = tensor_type(weight).static_shape
    assert shape is not None
    *stack, outputs, inputs = shape
    rows, columns = format.shared_outputs or outputs, format.group_size or inputs
    missing, count = -outputs % rows, len(stack)
    whole, filled = (*stack, outputs + missing, inputs), weight
    if missing:
        filled = builder.call(ops.pad, weight, pad=(*[0] * (2 * count + 1), missing))
    blocks = (*stack, whole[-2] // rows, rows, inputs // columns, columns)
    places = (*range(count), count, count + 2, count + 1, count + 3)
    apart = builder.call(ops.permute_dims, builder.call(ops.reshape, filled, shape=blocks), axes=places)
    together = builder.call(ops.reshape, apart, shape=(*stack, blocks[-4], blocks[-2], rows * columns))
    found = builder.call(ops.quantize, together, format=format.name, axis=count + 2)
    q, scale = (builder.emit(Projection(found, place)) for place in range(2))
    # [..., blocks, groups, 1] to [..., blocks * rows, groups]
    each = builder.call(ops.repeat, scale, repeats=rows, axis=count)
    assert prod(whole[-2:]) == prod(blocks[-4:])
    scales = _first_outputs(builder, each, (*whole[:-1], blocks[-2]), outputs, names[1])
    if moments is not None:
        attrs = {"format": format.name}
        calibrated = canonical_call(ops.quantize_calibrated, [weight, moments, scales], attrs)
        return [builder.emit(calibrated, names[0]), scales]
    back = builder.call(
        ops.permute_dims,
        builder.call(ops.reshape, q, shape=(*stack, blocks[-4], blocks[-2], rows, columns)),
        axes=places,
    )
    return [_first_outputs(builder, back, whole, outputs, names[0]), scales]


def _first_outputs(builder: FunctionBuilder, x: Var, whole: tuple[int, ...], outputs: int, name: str) -> Var:
    """Emit x as [..., outputs, n] of so many outputs, under a name."""
    shaped = canonical_call(ops.reshape, [x], {"shape": whole})
    if whole[-2] == outputs:
        return builder.emit(shaped, name)
    y = builder.emit(shaped)
    index = (..., slice(0, outputs), slice(None))
    return builder.emit(canonical_call(ops.getitem, [y], {"index": index}), name)
