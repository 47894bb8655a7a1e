# SPDX-License-Identifier: Apache-2.0
"""IR to Program: flat instructions over slots.

Read in this order: `instructions` and `program` (the data), `signature` (who binds each dim), `lower` (IR to instructions),
`schedule` (what is dead, what moves to load time, when memory is given back), `cost` (flops and bytes).
"""

from nnfront.ir import (  # the types in a program, for those who run it
    Buffer,
    ScalarType,
    ShapeType,
    StateLayerType,
    StateType,
    TensorType,
    TupleType,
    Type,
    kv_layer,
    type_text,
)
from nnfront.lower.function_value import FunctionValue
from nnfront.lower.instructions import (
    ONE_PIECE,
    PACK,
    Block,
    Branch,
    Instruction,
    Match,
    Run,
    Slot,
    Structure,
    place,
)
from nnfront.lower.lower import as_references, lower_function, lower_weights
from nnfront.lower.program import Argument, DimBinding, MethodProgram, Place, Program
from nnfront.lower.rank import Part, of_rank, part_taken, world_of
from nnfront.lower.reference import name_of, op_of, reference
from nnfront.lower.signature import bound_at_load, places
from nnfront.ops.collective import RANK
from nnfront.ops.layer import LayerLike, by_position
from nnfront.ops.returned import check_returned, is_foreign, value_text
