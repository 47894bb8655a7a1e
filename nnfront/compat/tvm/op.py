# SPDX-License-Identifier: Apache-2.0
"""TVM's ops: those of `nnfront.op` under TVM's names and with TVM's parameters, of which `name` is taken and not used."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from inspect import Parameter, Signature, signature
from typing import Any

from nnfront.compat.tvm.absent import (
    ccl_allgather,
    ccl_allreduce,
    ccl_broadcast_from_worker0,
    debug_func,
)
from nnfront.compat.tvm.core import wrap_nested
from nnfront.compat.tvm.lambdas import tensor_expr_op, tensor_ir_inplace_op, tensor_ir_op
from nnfront.dtypes import is_float
from nnfront.nn.functional import op

_NAMED = """
add arange argsort astype broadcast_to chunk concat conv1d conv1d_transpose conv2d conv3d cumsum divide empty equal exp floor full gelu
get_timestep_embedding greater greater_equal group_norm interpolate layer_norm less less_equal log matmul max maximum min minimum
multinomial_from_uniform multiply negative not_equal ones pad permute permute_dims prelu relu relu6 repeat reshape rms_norm
scaled_dot_product_attention sigmoid silu softmax softplus sort split sqrt square squeeze subtract sum take tanh topk triu unsqueeze where zeros
""".split()
_UNNAMED = "extern print_ renormalize_top_p_top_k_prob sample_top_p_top_k_from_sorted_prob".split()

# Parameters that nnfront's op has and TVM's has not: none that a ported call gives.
_OURS_ALONE = {
    "get_timestep_embedding": "dtype",
    "rms_norm": "bias",
    "scaled_dot_product_attention": "scale_dtype",
}


# TVM resizes two axes alone, and leaves out of a mode's name how many they are.
_MODES = {"linear": "bilinear", "cubic": "bicubic"}


def _gelu(x: Any, approximate: Any = None) -> Any:
    """TVM takes anything but "tanh" for the exact one, `True` too."""
    return op.gelu(x, "tanh" if approximate == "tanh" else None)


def _interpolate(x: Any, *args: Any, **kwargs: Any) -> Any:
    """TVM resizes integers as well: computed in float32, then cut off."""
    if kwargs.get("mode") in _MODES:
        kwargs["mode"] = _MODES[kwargs["mode"]]
    dtype = str(x.dtype).removeprefix("torch.")
    if is_float(dtype):
        return op.interpolate(x, *args, **kwargs)
    return op.astype(op.interpolate(op.astype(x, "float32"), *args, **kwargs), dtype)


# What takes more in TVM than here.
_ADAPTED: Mapping[str, Callable[..., Any]] = {"gelu": _gelu, "interpolate": _interpolate}


def _ported(name: str) -> Callable[..., Any]:
    ours = getattr(op, name)
    run = _ADAPTED.get(name, ours)
    parameters = [p for p in signature(ours).parameters.values() if p.name != _OURS_ALONE.get(name)]
    label = Parameter("name", Parameter.POSITIONAL_OR_KEYWORD, default=name)

    def function(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("name", None)
        has_label = len(args) == len(parameters) + 1 and isinstance(args[-1], str)
        return run(*(args[:-1] if has_label else args), **kwargs)

    functools.update_wrapper(function, ours, ("__name__", "__qualname__", "__doc__"), ())
    function.__signature__ = Signature([*parameters, label])  # type: ignore[attr-defined]
    return function


globals().update({name: _ported(name) for name in _NAMED})
globals().update({name: getattr(op, name) for name in _UNNAMED})

__all__ = [
    *_NAMED,
    *_UNNAMED,
    "ccl_allgather",
    "ccl_allreduce",
    "ccl_broadcast_from_worker0",
    "debug_func",
    "tensor_expr_op",
    "tensor_ir_inplace_op",
    "tensor_ir_op",
    "wrap_nested",
]
