# SPDX-License-Identifier: Apache-2.0
"""When special cases apply: what every room says about them in the same words.

Read the files in this order; each imports only from those above it:

    conditions  what a user writes for a dim or an argument, its text, its plain form
    coverage    what cases say about one another
    values      what a condition asks of a number or a torch tensor
    attributes  the cases in a function's attributes, when its dims and arguments change

`nnfront.passes.special_cases` makes the variants and the choice among them; `nnfront.runtime.cases` counts and explains.
"""

from nnfront.cases.attributes import DECLARED, LISTED, settled
from nnfront.cases.conditions import (
    Case,
    Causal,
    Conditions,
    DimCase,
    ValueCase,
    Zeros,
    case_text,
    causal,
    condition_text,
    dim_bounds,
    from_plain,
    joined,
    multiple_of,
    parts_of,
    read_case,
    to_plain,
    zeros,
)
from nnfront.cases.coverage import covers, is_covered, overlap, refuse_unreachable
from nnfront.cases.values import asked_for, meets

__all__ = [
    "DECLARED",
    "LISTED",
    "Case",
    "Causal",
    "Conditions",
    "DimCase",
    "ValueCase",
    "Zeros",
    "asked_for",
    "case_text",
    "causal",
    "condition_text",
    "covers",
    "dim_bounds",
    "from_plain",
    "is_covered",
    "joined",
    "meets",
    "multiple_of",
    "overlap",
    "parts_of",
    "read_case",
    "refuse_unreachable",
    "settled",
    "to_plain",
    "zeros",
]
