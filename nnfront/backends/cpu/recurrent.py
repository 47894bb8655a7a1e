# SPDX-License-Identifier: Apache-2.0
"""Recurrences on a CPU: one token of each sequence in C, more of them by the references, in chunks.

A state is read and written as a whole for each token, as much memory as keys and values of a long context: torch makes about a dozen passes over it,
C one or two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from nnfront.backends.cpu.activations import GATES, NO_ACTIVATION
from nnfront.backends.cpu.extension import NATIVE
from nnfront.backends.kernel import ACCEPTED, Context, Kernel
from nnfront.lower import Run
from nnfront.lower.reference import reference
from nnfront.memory.allocations import Workspace, metered
from nnfront.memory.layout import Layout

MOST_KEYS = 1024  # features of a key of the delta rule in C


def is_step(x: torch.dtype, seq: int, count: int) -> bool:
    """Whether C computes tokens x, `seq` of each sequence and `count` elements."""
    return NATIVE is not None and x == torch.bfloat16 and seq == 1 and count > 0


def are_taps(weight: torch.dtype, bias: torch.dtype | None, state: torch.dtype | None) -> bool:
    """Whether C convolves with these: the weight's dtype is that of the bias too."""
    kinds = (torch.bfloat16, torch.float32)
    return weight in kinds and bias in (None, weight) and state in (None, *kinds)


def conv_activation(run: Run) -> int:
    """What C calls the activation of a convolution."""
    name = run.attrs.get("activation")
    return NO_ACTIVATION if name is None else GATES.index(name)


def delta_scale(run: Run, key_size: int) -> float:
    """The factor of queries of the delta rule."""
    scale = run.attrs.get("scale")
    return float(key_size**-0.5 if scale is None else scale)


def _dtype(tensor: torch.Tensor | None) -> torch.dtype | None:
    return None if tensor is None else tensor.dtype


def _whole(tensor: torch.Tensor | None, dtype: torch.dtype | None = None) -> torch.Tensor | None:
    return None if tensor is None else tensor.to(dtype or tensor.dtype).contiguous()


def _is_step(x: torch.Tensor) -> bool:
    return x.is_cpu and is_step(x.dtype, x.shape[1], x.numel())


def _causal_conv1d(run: Run) -> Callable[..., Any]:
    general, activation = reference(run), conv_activation(run)

    def causal_conv1d_step(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, state: torch.Tensor | None
    ) -> Any:
        if not (_is_step(x) and are_taps(weight.dtype, _dtype(bias), _dtype(state))):
            return general(x, weight, bias, state)
        assert NATIVE is not None
        batch, _, channels = x.shape
        width, kept = weight.shape[1], x.dtype if state is None else state.dtype
        y, after = torch.empty(x.shape, dtype=x.dtype), torch.empty((batch, channels, width - 1), dtype=kept)
        are_wide = weight.dtype == torch.float32, kept == torch.float32
        operands = x.contiguous(), weight.contiguous(), _whole(bias), _whole(state)
        sizes = batch, channels, width, activation, *are_wide, torch.get_num_threads()
        NATIVE.causal_conv1d_step(*sizes, *operands, y, after)
        return y, after

    return causal_conv1d_step


def _ssm_scan(run: Run) -> Callable[..., Any]:
    general = reference(run)

    def ssm_scan_step(
        x: torch.Tensor,
        dt: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        d: torch.Tensor | None,
        state: torch.Tensor | None,
    ) -> Any:
        if not (_is_step(x) and b.dtype == c.dtype == x.dtype and b.numel()):
            return general(x, dt, a, b, c, d, state)
        assert NATIVE is not None
        (batch, _, heads, size), (groups, states) = x.shape, b.shape[2:]
        y, after = torch.empty(x.shape, dtype=x.dtype), torch.empty((batch, heads, size, states))
        rates = (_whole(rate, torch.float32) for rate in (dt, a))
        tokens = (_whole(token) for token in (b, c))
        operands = x.contiguous(), *rates, *tokens, _whole(d, torch.float32), _whole(state)
        sizes = batch, heads, groups, size, states, torch.get_num_threads()
        NATIVE.ssm_scan_step(*sizes, *operands, y, after)
        return y, after

    return ssm_scan_step


def _gated_delta_rule(run: Run) -> Callable[..., Any]:
    general, is_normed = reference(run), run.attrs.get("qk_l2norm", False)

    def gated_delta_rule_step(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        state: torch.Tensor | None,
    ) -> Any:
        if not (_is_step(q) and k.dtype == v.dtype == q.dtype and q.shape[-1] <= MOST_KEYS):
            return general(q, k, v, g, beta, state)
        assert NATIVE is not None
        (batch, _, groups, key_size), (heads, value_size) = q.shape, v.shape[2:]
        y, after = torch.empty(v.shape, dtype=q.dtype), torch.empty((batch, heads, key_size, value_size))
        tokens = (_whole(token) for token in (q, k, v))
        operands = *tokens, *(_whole(rate, torch.float32) for rate in (g, beta)), _whole(state)
        kind = g.ndim == 4, is_normed, torch.get_num_threads(), delta_scale(run, key_size)
        NATIVE.gated_delta_rule_step(batch, groups, heads, key_size, value_size, *kind, *operands, y, after)
        return y, after

    return gated_delta_rule_step


def _in_bfloat16(run: Run, context: Context) -> str:
    dtype = context.tensor(run.inputs[0]).dtype
    return ACCEPTED if dtype == "bfloat16" else f"tokens are {dtype}"


def _bytes(run: Run, x: Layout, *operands: Layout | None) -> int:
    """What the reference takes of more than one token."""
    if is_step(getattr(torch, x.dtype), x.shape[1], x.count):
        return 0
    return metered(replace(run, kernel=run.op), (x, *operands), {}, (None, None)).workspace


KERNELS = tuple(
    Kernel(
        f"{op}_step",
        op,
        bind,
        "one token: its state is read and written once or twice",
        _in_bfloat16,
        workspace=Workspace(_bytes),
    )
    for op, bind in (
        ("causal_conv1d", _causal_conv1d),
        ("ssm_scan", _ssm_scan),
        ("gated_delta_rule", _gated_delta_rule),
    )
)
