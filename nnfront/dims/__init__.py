# SPDX-License-Identifier: Apache-2.0
"""Symbolic sizes. A *size* is an int or a `Dim`; a Dim is a canonical integer expression over named symbols, never a constant.

Read the files in this order; each imports only from those above it:

    symbol    names and the facts about them          work      how much all of it may take
    polynomial  the canonical form, + - *, ranges and divisors
    divide    // and %
    compare   equal, <=, divides: yes, no or unknown
    min_max   min and max
    text      form -> text        parse    text -> form        substitution
    require_comparison  comparisons that must have an answer, or raise
    dim       `Dim`: the form with Python's operators around it
    sizes     functions over sizes: what the other rooms call
    evaluate  numbers for sizes   solve    sizes from numbers, and from other sizes
"""

from nnfront.dims.dim import Dim, Size, of_symbol
from nnfront.dims.evaluate import evaluate, evaluator
from nnfront.dims.require_comparison import assuming_unequal, strict_comparisons
from nnfront.dims.sizes import (
    as_symbol,
    ceildiv,
    divides,
    equal,
    floordiv,
    is_itself,
    less,
    less_equal,
    maximum,
    minimum,
    mod,
    parse,
    product,
    same,
    same_shape,
    satisfies,
    substitute,
    symbol,
    to_size,
    to_text,
    total,
    with_facts,
)
from nnfront.dims.solve import determined, solve, unify, within
from nnfront.dims.symbol import Symbol, describe_facts, join_facts, merge_facts, names, narrowed
from nnfront.dims.work import bounded_work

__all__ = [
    "Dim",
    "Size",
    "Symbol",
    "as_symbol",
    "assuming_unequal",
    "bounded_work",
    "ceildiv",
    "describe_facts",
    "determined",
    "divides",
    "equal",
    "evaluate",
    "evaluator",
    "floordiv",
    "is_itself",
    "join_facts",
    "less",
    "less_equal",
    "maximum",
    "merge_facts",
    "minimum",
    "mod",
    "names",
    "narrowed",
    "of_symbol",
    "parse",
    "product",
    "same",
    "same_shape",
    "satisfies",
    "solve",
    "strict_comparisons",
    "substitute",
    "symbol",
    "to_size",
    "to_text",
    "total",
    "unify",
    "with_facts",
    "within",
]
