# SPDX-License-Identifier: Apache-2.0
"""Recurrences on a CPU: a few tokens of each sequence in C, one after the other, more of them by the references, in chunks.

A state is read and written as a whole for each token, as much memory as keys and values of a long context: torch makes about a dozen passes over it,
C one or two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from typing import Any

import torch

from nnfront.backends.cpu.activations import GATES, NO_ACTIVATION
from nnfront.backends.cpu.decode_attention import Scores
from nnfront.backends.cpu.elementwise import copied
from nnfront.backends.cpu.in_c import by_reference, kernel
from nnfront.backends.cpu.tape_builder import TapeBuilder, Value, demand, demand_bfloat16
from nnfront.backends.kernel import Bind
from nnfront.lower import Run
from nnfront.lower.reference import reference

FEW = 8  # tokens of a sequence that are taken one after the other
MOST_KEYS = 1024  # features of a key of the delta rule in C


def _demand_step(builder: TapeBuilder, x: Value, state: Value | None, *tokens: Value) -> None:
    """One token in bfloat16, beside a state in float32."""
    builder.limit(
        x.shape[1] == 1 and prod(x.shape) > 0, "there is more than one token of a sequence, or none"
    )
    for token in (x, *tokens):
        demand_bfloat16(token=token)
    demand(state is None or state.dtype == torch.float32, "the state is not float32")


def _made(
    builder: TapeBuilder, run: Run, y: Sequence[int], state: Sequence[int], kept: torch.dtype = torch.float32
) -> tuple[Value, Value]:
    """The places of results of these shapes; of the state in the dtype in which it is kept."""
    return builder.make(run.outputs[0], y), builder.make(run.outputs[1], state, kept)


@contextmanager
def _in_float(builder: TapeBuilder, *rates: Value | None) -> Iterator[list[Value | None]]:
    """Rates as C wants them, in float32."""
    wide = [r if r is None or r.dtype == torch.float32 else copied(builder, r, torch.float32) for r in rates]
    yield wide
    for made, rate in zip(wide, rates, strict=True):
        if made is not None and made is not rate:
            builder.release(made.place)


def _causal_conv1d(
    builder: TapeBuilder, run: Run, x: Value, weight: Value, bias: Value | None, state: Value | None
) -> Sequence[Value]:
    _demand_step(builder, x, None)
    kept = x.dtype if state is None else state.dtype
    demand(bias is None or bias.dtype == weight.dtype, "weight and bias differ in dtype")
    demand(
        {weight.dtype, kept} <= {torch.bfloat16, torch.float32},
        f"weight and state are {weight.dtype} and {kept}",
    )
    (batch, _, channels), width = x.shape, weight.shape[1]
    made = _made(builder, run, x.shape, (batch, channels, width - 1), kept)
    name = run.attrs.get("activation")
    activation = NO_ACTIVATION if name is None else GATES.index(name)
    kind = activation, weight.dtype == torch.float32, kept == torch.float32, builder.threads
    builder.call("causal_conv1d_step", batch, channels, width, *kind, x, weight, bias, state, *made)
    return made


def _ssm_scan(
    builder: TapeBuilder,
    run: Run,
    x: Value,
    dt: Value | None,
    a: Value | None,
    b: Value,
    c: Value,
    d: Value | None,
    state: Value | None,
) -> Sequence[Value]:
    _demand_step(builder, x, state, b, c)
    demand(prod(b.shape) > 0, "there is no state")
    (batch, _, heads, size), (groups, states) = x.shape, b.shape[2:]
    made = _made(builder, run, x.shape, (batch, heads, size, states))
    with _in_float(builder, dt, a, d) as (dt, a, d):
        sizes = batch, heads, groups, size, states, builder.threads
        builder.call("ssm_scan_step", *sizes, x, dt, a, b, c, d, state, *made)
    return made


def _gated_delta_rule(
    builder: TapeBuilder,
    run: Run,
    q: Value,
    k: Value,
    v: Value,
    g: Value | None,
    beta: Value | None,
    state: Value | None,
) -> Sequence[Value]:
    _demand_step(builder, q, state, k, v)
    demand(q.shape[-1] <= MOST_KEYS, f"keys have more than {MOST_KEYS} features")
    (batch, _, groups, key_size), (heads, value_size) = q.shape, v.shape[2:]
    made = _made(builder, run, v.shape, (batch, heads, key_size, value_size))
    assert g is not None
    scale, _ = Scores.of(run).reals(key_size)
    kind = len(g.shape) == 4, run.attrs.get("qk_l2norm", False), builder.threads, scale
    with _in_float(builder, g, beta) as (g, beta):
        sizes = batch, groups, heads, key_size, value_size, *kind
        builder.call("gated_delta_rule_step", *sizes, q, k, v, g, beta, state, *made)
    return made


def _one_by_one(step: Bind, tokens: Sequence[int]) -> Bind:
    """A few tokens as a step for each, which carries the state, the last operand, to the next; the operands at `tokens` have an axis of them."""

    def bind(run: Run) -> Callable[..., Any]:
        one = step(run)

        def call(*operands: Any) -> Any:
            if not 1 < operands[0].shape[1] <= FEW:
                return one(*operands)
            given, made = list(operands), []
            for t in range(operands[0].shape[1]):
                for i in tokens:
                    given[i] = operands[i][:, t : t + 1]
                y, given[-1] = one(*given)
                made.append(y)
            return torch.cat(made, 1), given[-1]

        return call

    return bind


_STEPS = "a few tokens: the state is read and written once or twice for each"
KERNELS = tuple(
    replace(step, bind=_one_by_one(step.bind, tokens))
    for op, write, tokens in (
        ("causal_conv1d", _causal_conv1d, (0,)),
        ("ssm_scan", _ssm_scan, (0, 1, 3, 4)),
        ("gated_delta_rule", _gated_delta_rule, (0, 1, 2, 3, 4)),
    )
    for step in (kernel(f"{op}_step", op, write, reference, _STEPS, held=by_reference),)
)
