# SPDX-License-Identifier: Apache-2.0
"""Root-mean-square and layer norms over the last axis on a CPU; bfloat16 in C.

`torch.rms_norm` makes twice as many passes over the rows. 896 features in bfloat16, one thread: 512 rows 0.25 ms against 0.65 or more; one row between
large matmuls 20 us against 35, and 15 in C.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch.nn import functional as F

from nnfront.backends.cpu.in_c import by_types, kernel
from nnfront.backends.cpu.tape_builder import Operand, Refused, TapeBuilder, Value, demand
from nnfront.backends.kernel import ACCEPTED, Accepts, Context, Kernel
from nnfront.lower import Run
from nnfront.memory.layout import Layout


@dataclass(frozen=True)
class Norm:
    """What a norm does: with `is_centered` the mean is subtracted first."""

    is_centered: bool
    epsilon: float

    @classmethod
    def of(cls, run: Run) -> Norm:
        """Return that of an instruction: of an op or of a region."""
        is_centered = "normalized_shape" in run.attrs
        return cls(is_centered, float(run.attrs.get("eps" if is_centered else "epsilon", 1e-5)))


def _write(
    builder: TapeBuilder, run: Run, x: Value, weight: Value | None, bias: Value | None
) -> Sequence[Operand]:
    return _write_of_sum(builder, run, x, None, weight, bias)


def _write_of_sum(
    builder: TapeBuilder,
    run: Run,
    x: Value | float | None,
    added: Value | float | None,
    weight: Value | None,
    bias: Value | None,
) -> Sequence[Operand]:
    """Rows in bfloat16, or float32 where nothing is added; weight and bias alike."""
    if not isinstance(x, Value) or not (added is None or isinstance(added, Value)):
        raise Refused("it is no sum of two tensors")
    is_sum = added is None or (x.shape, x.dtype) == (added.shape, added.dtype) == (x.shape, torch.bfloat16)
    demand(is_sum, "the sum is not of two tensors in bfloat16 of one shape")
    count, kinds = prod(x.shape), {vector.dtype for vector in (weight, bias) if vector is not None}
    builder.limit_count(count, None, "elements")
    are_read = len(kinds) < 2 and {x.dtype, *kinds} <= {torch.bfloat16, torch.float32}
    demand(are_read, "rows, weight and bias are of other dtypes than bfloat16 and float32")
    y, total = builder.make(run.outputs[0], x.shape, x.dtype), None
    has_sum = len(run.outputs) == 2
    if added is not None:
        total = (
            builder.make(run.outputs[1], x.shape, x.dtype)
            if has_sum
            else replace(x, place=builder.take(x.nbytes), whole=None)
        )
    norm, size, wide = Norm.of(run), x.shape[-1], torch.float32
    kind = (norm.is_centered, x.dtype == wide, wide in kinds, builder.threads, norm.epsilon)
    builder.call("norm", count // max(size, 1), size, *kind, x, added, total, weight, bias, y)
    if total is not None and not has_sum:
        builder.release(total.place)
    return (y, total) if has_sum else (y,)


def rms_norm_last(run: Run) -> Callable[..., Any]:
    """The norm of rows."""
    norm = Norm.of(run)
    zero: dict[torch.dtype, torch.Tensor] = {}

    def rms_norm_last(
        x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None
    ) -> torch.Tensor:
        size, dtype = x.shape[-1], x.dtype
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        if (
            x.numel() == size
            and weight is not None
            and weight.dtype == dtype != torch.float64
            and bias is None
        ):
            # The factor of one row is a number: x * weight * factor is one call, rounded once.
            mean = torch.linalg.vector_norm(x, dtype=wide).item() ** 2 / size + norm.epsilon
            if mean > 0:
                if dtype not in zero:
                    zero[dtype] = torch.zeros((), dtype=dtype)
                return torch.addcmul(zero[dtype], x, weight, value=mean**-0.5)
        factor = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide)
        factor = factor.square_().div_(size).add_(norm.epsilon).rsqrt_()
        y = x * factor if dtype == wide else x.to(wide).mul_(factor)
        y = y if weight is None else y.mul_(weight)
        return (y if bias is None else y.add_(bias)).to(dtype)

    return rms_norm_last


def layer_norm_last(run: Run) -> Callable[..., Any]:
    """The norm of rows without their mean."""
    norm = Norm.of(run)

    def layer_norm_last(
        x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None
    ) -> torch.Tensor:
        return F.layer_norm(x, x.shape[-1:], weight, bias, norm.epsilon)

    return layer_norm_last


def norm_of_sum(run: Run) -> Callable[..., Any]:
    """The norm of x + residual, and the sum too where others read it."""
    norm, has_sum = Norm.of(run), len(run.outputs) == 2
    of_rows = layer_norm_last(run) if norm.is_centered else rms_norm_last(run)

    def norm_of_sum(
        x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None
    ) -> Any:
        total = x + residual
        y = of_rows(total, weight, bias)
        return (y, total) if has_sum else y

    return norm_of_sum


def _rms_over_last_axis(run: Run, context: Context) -> str:
    x, *vectors = run.inputs
    if run.attrs.get("axes") != (context.tensor(x).ndim - 1,):
        return "it is not over the last axis alone"
    kinds = {context.tensor(slot).dtype for slot in vectors if not context.is_none(slot)}
    is_narrower = context.tensor(x).dtype == "float32" and kinds in ({"bfloat16"}, {"float16"})
    return ACCEPTED if is_narrower else _vectors_fit(run, context)


def _layer_over_last_axis(run: Run, context: Context) -> str:
    is_last = len(run.attrs.get("normalized_shape", ())) == 1
    return _vectors_fit(run, context) if is_last else "it is not over the last axis alone"


def _vectors_fit(run: Run, context: Context) -> str:
    x, *vectors = run.inputs
    dtype = context.tensor(x).dtype
    found = {context.tensor(slot).dtype for slot in vectors if not context.is_none(slot)}
    is_wider = dtype in ("bfloat16", "float16") and found == {"float32"}
    return ACCEPTED if found <= {dtype} or is_wider else "weight, bias and rows differ in dtype"


def _rms_norm_last_bytes(run: Run, x: Layout, weight: Layout | None, bias: Layout | None) -> int:
    """For a half type the result in float32, unless there is one row only."""
    is_row = x.count == x.shape[-1] and weight is not None and weight.dtype == x.dtype and bias is None
    return 4 * x.count if x.is_half and not is_row else 0


def _layer_norm_last_bytes(run: Run, x: Layout, weight: Layout | None, bias: Layout | None) -> int:
    """The mean and the factor of each row."""
    return 2 * x.count // max(x.shape[-1], 1) * x.item


def _norm_of_sum_bytes(
    run: Run, x: Layout, residual: Layout, weight: Layout | None, bias: Layout | None
) -> int:
    """What the norm holds, and the sum if nobody else reads it."""
    of_rows = _layer_norm_last_bytes if Norm.of(run).is_centered else _rms_norm_last_bytes
    return of_rows(run, x, weight, bias) + (0 if len(run.outputs) == 2 else x.count * x.item)


def _norm_of_sum(name: str, accepts: Accepts, attr: str, why_not: str) -> Kernel:
    """The norm of a sum that C takes, which has an attribute and is one that `accepts` takes of rows; `why_not`, if it is another kind."""

    def accepts_sum(run: Run, context: Context) -> str:
        if attr not in run.attrs:
            return why_not
        x, _, *vectors = run.inputs
        of_rows = replace(run, inputs=(x, *vectors))
        return by_types(_write_of_sum)(run, context) or accepts(of_rows, context)

    why = "the sum in the kernel of the norm"
    return kernel(
        name, "norm_residual", _write_of_sum, norm_of_sum, why, accepts_sum, held=_norm_of_sum_bytes
    )


KERNELS = (
    kernel(
        "rms_norm_last",
        "rms_norm",
        _write,
        rms_norm_last,
        "half the passes over the rows, rounded once",
        _rms_over_last_axis,
        held=_rms_norm_last_bytes,
    ),
    kernel(
        "layer_norm_last",
        "layer_norm",
        _write,
        layer_norm_last,
        "one pass over the rows, rounded once",
        _layer_over_last_axis,
        held=_layer_norm_last_bytes,
    ),
    _norm_of_sum("rms_norm_of_sum", _rms_over_last_axis, "axes", "it is a layer norm"),
    _norm_of_sum(
        "layer_norm_of_sum", _layer_over_last_axis, "normalized_shape", "it is a root-mean-square norm"
    ),
)
