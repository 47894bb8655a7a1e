# SPDX-License-Identifier: Apache-2.0
"""What routers do with a score for each expert, in C: softmax, sums, the largest and their places."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from nnfront.backends.cpu.elementwise import FLOATS, KINDS
from nnfront.backends.cpu.in_c import besides, by_reference, in_c
from nnfront.backends.cpu.tape_builder import Operand, TapeBuilder, Value, Write, attribute, demand
from nnfront.backends.kernel import Kernel
from nnfront.lower import Run
from nnfront.lower.reference import reference

# In the order of the enum in C.
REDUCTIONS = ("softmax", "sum", "any")
# Elements up to which a thread of C takes no longer than torch's calls.
SHORT = 1 << 14


def _reduce(builder: TapeBuilder, run: Run, x: Value) -> Sequence[Operand]:
    """Over one axis, or over several that follow one another."""
    axes, rank = attribute(run, "axis"), len(x.shape)
    axes = range(rank) if axes is None else [axes % rank] if isinstance(axes, int) else sorted(axes)
    is_one = bool(axes) and list(axes) == list(range(axes[0], axes[-1] + 1))
    demand(is_one, "axes do not follow one another")
    builder.limit_count(prod(x.shape), SHORT, "elements")
    before, size, after = x.shape[: axes[0]], x.shape[axes[0] : axes[-1] + 1], x.shape[axes[-1] + 1 :]
    dtype = torch.bool if run.op == "any" else x.dtype
    demand(x.dtype in FLOATS or (run.op == "any" and x.dtype == torch.bool), f"x is {x.dtype}")
    shape = (
        *before,
        *((1,) * len(size) if run.op != "softmax" and attribute(run, "keepdims") else ()),
        *after,
    )
    y = builder.make(run.outputs[0], x.shape if run.op == "softmax" else shape, dtype)
    sizes = REDUCTIONS.index(run.op), prod(before), prod(size), prod(after)
    builder.call("reduce", *sizes, KINDS.index(x.dtype), KINDS.index(dtype), x, y)
    return (y,)


def _topk(builder: TapeBuilder, run: Run, x: Value) -> Sequence[Operand]:
    k, axis, largest, dtype = (attribute(run, name) for name in ("k", "axis", "largest", "dtype"))
    width, shape = x.shape[-1], (*x.shape[:-1], k)
    demand(axis in (-1, len(x.shape) - 1) and largest, "it is not the largest over the last axis")
    demand(dtype == "int32" and x.dtype in FLOATS, f"x is {x.dtype}, indices are {dtype}")
    builder.limit_count(prod(x.shape) if 0 < k <= width else 0, SHORT, "elements")
    made = {
        kind: builder.make(slot, shape, dtype)
        for kind, slot, dtype in zip(_kinds(run), run.outputs, _dtypes(run, x), strict=True)
    }
    parts = map(made.get, ("values", "indices"))
    builder.call("largest", prod(x.shape) // width, width, k, KINDS.index(x.dtype), x, *parts)
    return list(made.values())


def _kinds(run: Run) -> Sequence[str]:
    kind = attribute(run, "ret_type")
    return ("values", "indices") if kind == "both" else (kind,)


def _dtypes(run: Run, x: Value) -> Sequence[torch.dtype]:
    return [x.dtype if kind == "values" else torch.int32 for kind in _kinds(run)]


def _gather(builder: TapeBuilder, run: Run, x: Value, indices: Value) -> Sequence[Operand]:
    is_last = attribute(run, "axis") == len(x.shape) - 1 and x.shape[:-1] == indices.shape[:-1]
    demand(is_last, "it is not over the last axis alone")
    are_read = x.dtype in FLOATS and indices.dtype == torch.int32
    demand(are_read, f"x is {x.dtype}, indices are {indices.dtype}")
    builder.limit_count(prod(x.shape), SHORT, "elements")
    y, width, k = builder.make(run.outputs[0], indices.shape, x.dtype), x.shape[-1], indices.shape[-1]
    kind = KINDS.index(x.dtype)
    builder.call("gather_elements", prod(x.shape) // width, width, k, kind, x, indices, y)
    return (y,)


_WRITTEN: dict[str, Write] = {**dict.fromkeys(REDUCTIONS, _reduce), "topk": _topk, "gather": _gather}
KERNELS = tuple(
    Kernel(op, op, in_c(write, reference), workspace=besides(write, by_reference), write=write)
    for op, write in _WRITTEN.items()
)
