# SPDX-License-Identifier: Apache-2.0
"""Heads of few tokens, each with a matrix of its own, in C: what latent attention does with its up-projections.

One token, 16 heads of 128 x 512: torch's batched product takes several times as long as reading the matrices.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from nnfront.backends.cpu.in_c import by_reference, kernel
from nnfront.backends.cpu.tape_builder import Operand, TapeBuilder, Value, demand_bfloat16
from nnfront.backends.kernel import ACCEPTED, Context
from nnfront.lower import Run
from nnfront.lower.reference import reference

# Tokens up to which each is multiplied by itself.
MOST_TOKENS = 8


def _is_transposed(run: Run) -> bool | None:
    """Whether matrices are [heads, in, out], not [heads, out, in]; None if it is another sum."""
    given, _, result = run.attrs["subscripts"].replace(" ", "").partition("->")
    x, _, weight = given.partition(",")
    if len(x) < 3 or len({*x, *weight}) != len(x) + 1 or len(weight) != 3 or weight[0] != x[-2]:
        return None
    *rest, head, column = x
    output = next(letter for letter in weight if letter not in x) if column in weight[1:] else ""
    return weight[1] == column if result == "".join([*rest, head, output]) else None


def _of_heads(run: Run, context: Context) -> str:
    return "it is not of heads with a matrix each" if _is_transposed(run) is None else ACCEPTED


def _write(builder: TapeBuilder, run: Run, x: Value, weight: Value) -> Sequence[Operand]:
    *rest, heads, columns = x.shape
    is_transposed = bool(_is_transposed(run))
    outputs, tokens = weight.shape[2 if is_transposed else 1], prod(rest)
    demand_bfloat16(weight=weight, x=x)
    builder.limit(
        0 < tokens <= MOST_TOKENS and prod(weight.shape) > 0, f"there are more than {MOST_TOKENS} tokens"
    )
    y = builder.make(run.outputs[0], (*rest, heads, outputs))
    sizes = tokens, heads, columns, outputs, is_transposed, builder.threads
    builder.call("multiply_heads", *sizes, weight, x, y)
    return (y,)


KERNELS = (
    kernel(
        "einsum_heads",
        "einsum",
        _write,
        reference,
        "few tokens: the matrix of each head at the speed of memory",
        _of_heads,
        held=by_reference,
    ),
)
