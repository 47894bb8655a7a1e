# SPDX-License-Identifier: Apache-2.0
"""What an instruction costs: bytes read and written, and floating-point operations, as sizes over the method's dims.

Bytes count each operand and each result once, as if all came from memory and nothing was fused. A multiplication and an
addition are two operations; other elementwise arithmetic counts one for each element of the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from nnfront import dtypes
from nnfront.dims import Size, ceildiv, product, total
from nnfront.ir import OPS, StateLayerType, TensorType
from nnfront.lower.instructions import PACK, Run, Slot

Tensors: TypeAlias = list[TensorType]


def bytes_of(run: Run, slots: Sequence[Slot]) -> Size:
    """Bytes that the operands and results have; 0 for a view."""
    if run.is_view:
        return 0
    sizes = [
        product([*t.shape, dtypes.size_bytes(t.dtype)]) for t in _tensors((*run.inputs, *run.outputs), slots)
    ]
    if run.op == "take":  # reads as many elements as it writes, not the whole table
        sizes = sizes[1:] + sizes[-1:]
    for i in dict.fromkeys(run.inputs):
        layer = slots[i].type
        if isinstance(layer, StateLayerType) and _attends(run):  # its buffers, as far as they can be filled
            sizes += [
                product([layer.batch, layer.max_seq, *b.shape, dtypes.size_bytes(b.dtype)])
                for b in layer.per_token
            ]
    return total(sizes)


def sent_of(run: Run, slots: Sequence[Slot]) -> Size:
    """Bytes that a rank sends to others in a collective: of n ranks in a ring, each sends its part of a result n - 1 times, and of a sum before that as often."""
    world: int = run.attrs["world"]
    (x,) = _tensors(run.inputs, slots)
    size = product([*x.shape, dtypes.size_bytes(x.dtype)])
    if run.op == "all_gather":
        return size * (world - 1)
    times = 2 if run.op == "all_reduce" else 1
    return ceildiv(size * times * (world - 1), world)


def _attends(run: Run) -> bool:
    inside = run.body.walk() if run.body is not None else (run,)
    return any(isinstance(each, Run) and each.op == "attention" for each in inside)


def flops_of(run: Run, slots: Sequence[Slot]) -> Size:
    """Floating-point operations; for a region those of all that it stands for."""
    if run.body is not None:
        return total([flops_of(each, slots) for each in run.body.walk() if isinstance(each, Run)])
    op = OPS.get(run.attrs.get("kind", run.op))  # a product says which op it is
    if run.op == PACK or (op is not None and op.moves):
        return 0
    operands, results = _tensors(run.inputs, slots), _tensors(run.outputs, slots)
    if op is not None and op.flops is not None:
        return op.flops(operands, results, op.full_attrs(run.attrs))
    counted = (
        results if results and len(results[0].shape) >= len((operands or results)[0].shape) else operands
    )
    return total([product(t.shape) for t in counted[:1]])


def _tensors(indices: Sequence[int], slots: Sequence[Slot]) -> Tensors:
    return [t for i in indices if isinstance(t := slots[i].type, TensorType)]
