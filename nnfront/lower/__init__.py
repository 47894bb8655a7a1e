# SPDX-License-Identifier: Apache-2.0
"""IR to Program: flat instructions over slots, a kernel for each, chosen by a table.

Read in this order: `instructions` and `program` (the data), `signature` (who binds each dim), `lower` (IR to instructions), `select` (which kernel, and why),
`schedule` (what is dead, what moves to load time, when memory is given back), `cost` (flops and bytes).
"""

from nnfront.ir import (  # the types and cases in a program, for those who run it
    CacheLayerType,
    CacheType,
    Causal,
    ScalarType,
    ShapeType,
    TensorType,
    TupleType,
    Type,
    Zeros,
    condition_text,
    dim_bounds,
    from_plain,
    parts_of,
    type_text,
)
from nnfront.lower.instructions import PACK, Block, Branch, Instruction, Match, Run, Slot, Structure
from nnfront.lower.lower import lower, lower_function, lower_weights
from nnfront.lower.program import Argument, DimBinding, MethodProgram, Place, Program
from nnfront.lower.reference import reference
from nnfront.lower.select import ACCEPTED, Context, Rule, View, as_is
from nnfront.lower.signature import places
from nnfront.lower.tables import KERNEL_TABLES, add_rule, remove_rule

__all__ = [
    "ACCEPTED",
    "KERNEL_TABLES",
    "PACK",
    "Argument",
    "Block",
    "Branch",
    "CacheLayerType",
    "CacheType",
    "Causal",
    "Context",
    "DimBinding",
    "Instruction",
    "Match",
    "MethodProgram",
    "Place",
    "Program",
    "Rule",
    "Run",
    "ScalarType",
    "ShapeType",
    "Slot",
    "Structure",
    "TensorType",
    "TupleType",
    "Type",
    "View",
    "Zeros",
    "add_rule",
    "as_is",
    "condition_text",
    "dim_bounds",
    "from_plain",
    "lower",
    "lower_function",
    "lower_weights",
    "parts_of",
    "places",
    "reference",
    "remove_rule",
    "type_text",
]
