# SPDX-License-Identifier: Apache-2.0
"""Recurrences on CUDA: one launch for the tokens of all sequences, whether each has one or many. Their states come in and go out as tensors.

In a captured call, which nothing can end halfway, the state after the last token is written where the one before the first lies, and that is read on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

import torch

from nnfront.backends.cuda.kernel_package import asked, kernel_module
from nnfront.backends.kernel import ACCEPTED, Context, Kernel
from nnfront.holding import holding
from nnfront.ir import TensorType
from nnfront.lower import Run, Slot
from nnfront.lower.reference import reference
from nnfront.state.layer import here

_BASES: ContextVar[Mapping[int, torch.Tensor]] = ContextVar("bases", default=MappingProxyType({}))


def in_place(bases: Mapping[int, torch.Tensor]) -> AbstractContextManager[object]:
    """Inside of this states at these addresses are written where they lie, in this thread; `bases` say where that is when a kernel runs, int64 [2]."""
    return holding(_BASES, bases)


def _kept(state: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """A kernel's options that say where the state lies, and where the next one is written: to a new tensor but in a captured call."""
    if state is None:
        return {}
    base = _BASES.get().get(state.data_ptr())
    return {"base": here(state.device)[:2]} if base is None else {"base": base, "after": state}


def _asked(kernel: str, shape: str, context: Context, dtype: str, *sizes: Any) -> str:
    """What the kernel's own `accepts` says of one token of one sequence."""
    if not all(isinstance(size, int) for size in sizes):
        return "its sizes are no constants"
    return asked(kernel, getattr(kernel_module(kernel), shape)(1, 1, *sizes), dtype, context)


def _alike(context: Context, *slots: int) -> str:
    """Whether tokens are of one dtype."""
    dtypes = [context.tensor(slot).dtype for slot in slots]
    return ACCEPTED if len(set(dtypes)) == 1 else f"tokens are {' and '.join(dict.fromkeys(dtypes))}"


def _conv_accepts(run: Run, context: Context) -> str:
    x, weight = (context.tensor(slot) for slot in run.inputs[:2])
    return _asked("causal_conv1d", "ConvShape", context, x.dtype, x.shape[2], weight.shape[1])


def _scan_accepts(run: Run, context: Context) -> str:
    x, _, _, b, c, *_ = run.inputs
    (heads, size), (groups, states) = context.tensor(x).shape[2:], context.tensor(b).shape[2:]
    reason = _alike(context, x, b, c)
    dtype = context.tensor(x).dtype
    return reason or _asked("ssm_scan", "ScanShape", context, dtype, heads, groups, size, states)


def _delta_accepts(run: Run, context: Context) -> str:
    q, k, v, *_ = run.inputs
    (groups, key_size), (heads, value_size) = context.tensor(q).shape[2:], context.tensor(v).shape[2:]
    sizes, dtype = (groups, heads, key_size, value_size), context.tensor(q).dtype
    return _alike(context, q, k, v) or _asked("gated_delta_rule", "DeltaShape", context, dtype, *sizes)


def _adjacent(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _dense(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else x.contiguous()


def _causal_conv1d(run: Run) -> Callable[..., Any]:
    kernel, general = kernel_module("causal_conv1d"), reference(run)
    silu = run.attrs.get("activation") == "silu"

    def triton_causal_conv1d(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, state: torch.Tensor | None
    ) -> Any:
        if not x.numel():
            return general(x, weight, bias, state)
        state = _dense(state)
        return kernel.launch(_adjacent(x), _adjacent(weight), _dense(bias), state, silu=silu, **_kept(state))

    return triton_causal_conv1d


def _ssm_scan(run: Run) -> Callable[..., Any]:
    kernel, general = kernel_module("ssm_scan"), reference(run)

    def triton_ssm_scan(
        x: torch.Tensor,
        dt: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        d: torch.Tensor | None,
        state: torch.Tensor | None,
    ) -> Any:
        if not x.numel():
            return general(x, dt, a, b, c, d, state)
        x, b, c = map(_adjacent, (x, b, c))
        state = _dense(state)
        return kernel.launch(x, dt, _dense(a), b, c, _dense(d), state, **_kept(state))

    return triton_ssm_scan


def _gated_delta_rule(run: Run) -> Callable[..., Any]:
    kernel, general = kernel_module("gated_delta_rule"), reference(run)
    options = {"scale": run.attrs.get("scale"), "normed": run.attrs.get("qk_l2norm", False)}

    def triton_gated_delta_rule(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        state: torch.Tensor | None,
    ) -> Any:
        if not v.numel() or (g.ndim == 4 and q.shape[1] > 1):  # `is_launched`
            return general(q, k, v, g, beta, state)
        q, k, v, g = map(_adjacent, (q, k, v, g))
        state = _dense(state)
        return kernel.launch(q, k, v, g, beta, state, **options, **_kept(state))

    return triton_gated_delta_rule


_STATE_ONCE = "a state is read once and written once, and many tokens are taken in chunks"
KERNELS = (
    Kernel(
        "triton_causal_conv1d",
        "causal_conv1d",
        _causal_conv1d,
        "all taps in one pass, the state too",
        _conv_accepts,
    ),
    Kernel("triton_ssm_scan", "ssm_scan", _ssm_scan, _STATE_ONCE, _scan_accepts),
    Kernel("triton_gated_delta_rule", "gated_delta_rule", _gated_delta_rule, _STATE_ONCE, _delta_accepts),
)
_LAUNCHED = frozenset(kernel.name for kernel in KERNELS)


def is_launched(run: Run, slots: Sequence[Slot]) -> bool:
    """Whether this runs a kernel whenever there are tokens: its last operand is a state, and the last of what it returns the next one.

    Many tokens whose channels fade at rates of their own are no product of two matrices in a chunk.
    """
    by_channel = [
        slot.type for slot in map(slots.__getitem__, run.inputs[3:4]) if run.op == "gated_delta_rule"
    ]
    many = [g for g in by_channel if isinstance(g, TensorType) and g.ndim == 4 and g.shape[1] != 1]
    return run.kernel in _LAUNCHED and not many
