# SPDX-License-Identifier: Apache-2.0
"""How the calls of recurrences in C are written down: as in `tape_rows`, with the predicates of `recurrent`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import torch

from nnfront.backends.cpu.recurrent import MOST_KEYS, are_taps, conv_activation, delta_scale, is_step
from nnfront.backends.cpu.tape_builder import TapeBuilder, Value, Write, demand, place_of
from nnfront.lower import Run


def _demand_step(x: Value, *wide: Value | None) -> None:
    """One token, beside tensors that C wants in float32."""
    demand(is_step(x.dtype, x.shape[1], prod(x.shape)))
    demand(all(value is None or value.dtype == torch.float32 for value in wide))


def _causal_conv1d(
    builder: TapeBuilder, run: Run, x: Value, weight: Value, bias: Value | None, state: Value | None
) -> Sequence[Value]:
    _demand_step(x)
    kept = x.dtype if state is None else state.dtype
    demand(are_taps(weight.dtype, None if bias is None else bias.dtype, kept))
    (batch, _, channels), width = x.shape, weight.shape[1]
    made = (
        builder.make(run.outputs[0], x.shape),
        builder.make(run.outputs[1], (batch, channels, width - 1), kept),
    )
    kind = conv_activation(run), weight.dtype == torch.float32, kept == torch.float32, builder.threads
    places = map(place_of, (x, weight, bias, state, *made))
    builder.call("causal_conv1d_step", batch, channels, width, *kind, *places)
    return made


def _ssm_scan(
    builder: TapeBuilder,
    run: Run,
    x: Value,
    dt: Value,
    a: Value,
    b: Value,
    c: Value,
    d: Value | None,
    state: Value | None,
) -> Sequence[Value]:
    _demand_step(x, dt, a, d, state)
    demand(b.dtype == c.dtype == x.dtype and prod(b.shape) > 0)
    (batch, _, heads, size), (groups, states) = x.shape, b.shape[2:]
    made = (
        builder.make(run.outputs[0], x.shape),
        builder.make(run.outputs[1], (batch, heads, size, states), torch.float32),
    )
    places = map(place_of, (x, dt, a, b, c, d, state, *made))
    builder.call("ssm_scan_step", batch, heads, groups, size, states, builder.threads, *places)
    return made


def _gated_delta_rule(
    builder: TapeBuilder,
    run: Run,
    q: Value,
    k: Value,
    v: Value,
    g: Value,
    beta: Value,
    state: Value | None,
) -> Sequence[Value]:
    _demand_step(q, g, beta, state)
    demand(k.dtype == v.dtype == q.dtype and q.shape[-1] <= MOST_KEYS)
    (batch, _, groups, key_size), (heads, value_size) = q.shape, v.shape[2:]
    made = (
        builder.make(run.outputs[0], v.shape),
        builder.make(run.outputs[1], (batch, heads, key_size, value_size), torch.float32),
    )
    kind = len(g.shape) == 4, run.attrs.get("qk_l2norm", False), builder.threads, delta_scale(run, key_size)
    places = map(place_of, (q, k, v, g, beta, state, *made))
    builder.call("gated_delta_rule_step", batch, groups, heads, key_size, value_size, *kind, *places)
    return made


RECURRENT: Mapping[str, Write] = {
    "causal_conv1d_step": _causal_conv1d,
    "ssm_scan_step": _ssm_scan,
    "gated_delta_rule_step": _gated_delta_rule,
}
"""Their writers, by kernel. They are of one token."""
