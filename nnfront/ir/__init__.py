# SPDX-License-Identifier: Apache-2.0
"""What a program means: types, expressions, functions, modules, and their text.

Read the files in this order; each imports only from those above it:

    types     the types of values          budget   how much a text may say
    attributes, operands  what an op's may be    op       one entry of the vocabulary
    expr      expressions and bindings
    interfaces  what functions and modules show to those who print and compare them
    walk      iterate over bindings        infer    the type of an expression
    value_numbering  keys of what is the same
    visit     rewrite
    function_dims  the dims of a function       literals names and numbers as text
    printer   IR -> text, and the grammar, with `print_types`
    equal     the first difference         summary  a module on two screens
    module    `Function` and `IRModule`    builder  make a function
    callgraph which functions call which     weight_layout  how a kernel wants weights to be stored
    parser    text -> IR, with `tokens`, `parse_dims`, `parse_types`
    facts     what branches know of dims
    verify    the rules that IR keeps, with `verifier_view`, `rules_form`, `rules_types`, `rules_state`
    untrusted_text  IR for other machines, and from them: parsed, verified and of bounded size (`budget`)
"""

from nnfront.ir.budget import MAX_CHARACTERS, MAX_DIM_TERMS
from nnfront.ir.builder import FunctionBuilder, Names
from nnfront.ir.callgraph import callees_first, given_to_ops, reached
from nnfront.ir.equal import first_difference
from nnfront.ir.expr import (
    NO_ATTRS,
    ROLES,
    Atom,
    Binding,
    Block,
    Call,
    Constant,
    Expr,
    FunctionCall,
    If,
    MatchShape,
    Param,
    Projection,
    Provenance,
    Role,
    Scalar,
    Tuple,
    Var,
    canonical_call,
    tensor_type,
)
from nnfront.ir.facts import (
    NO_FACTS,
    Facts,
    branch_facts,
    branch_knows,
    facts_where,
    infer_known,
    is_true,
    map_attr,
)
from nnfront.ir.function_dims import symbols_in
from nnfront.ir.infer import call_sizes, call_type, infer, join, map_sizes, substitute_type
from nnfront.ir.interfaces import KINDS, Kind
from nnfront.ir.module import Function, IRModule
from nnfront.ir.op import OPS, DtypePolicy, Op, op
from nnfront.ir.operands import Operand, OperandType
from nnfront.ir.parser import parse, parse_function
from nnfront.ir.print_types import type_text
from nnfront.ir.printer import print_function, print_module
from nnfront.ir.same_code import same_code
from nnfront.ir.summary import summarize
from nnfront.ir.types import (
    Buffer,
    FunctionName,
    FunctionType,
    ObjectType,
    ScalarType,
    ShapeType,
    StateLayerType,
    StateType,
    TensorType,
    TupleType,
    Type,
    kv_layer,
    sizes_of,
    type_symbols,
)
from nnfront.ir.untrusted_text import admissible, admit, release
from nnfront.ir.verify import verify, violations
from nnfront.ir.visit import Mutator, are_same, map_expr, no_block, substitute_atoms, used_vars
from nnfront.ir.walk import (
    atoms_of,
    dims_in,
    functions_of,
    reachable,
    undefined_symbols,
    variables_of,
    walk_bindings,
    walk_exprs,
)
from nnfront.ir.weight_layout import Formula, Packing, WeightLayout

__all__ = [
    "KINDS",
    "MAX_CHARACTERS",
    "MAX_DIM_TERMS",
    "NO_ATTRS",
    "NO_FACTS",
    "OPS",
    "ROLES",
    "Atom",
    "Binding",
    "Block",
    "Buffer",
    "Call",
    "Constant",
    "DtypePolicy",
    "Expr",
    "Facts",
    "Formula",
    "Function",
    "FunctionBuilder",
    "FunctionCall",
    "FunctionName",
    "FunctionType",
    "IRModule",
    "If",
    "Kind",
    "MatchShape",
    "Mutator",
    "Names",
    "ObjectType",
    "Op",
    "Operand",
    "OperandType",
    "Packing",
    "Param",
    "Projection",
    "Provenance",
    "Role",
    "Scalar",
    "ScalarType",
    "ShapeType",
    "StateLayerType",
    "StateType",
    "TensorType",
    "Tuple",
    "TupleType",
    "Type",
    "Var",
    "WeightLayout",
    "admissible",
    "admit",
    "are_same",
    "atoms_of",
    "branch_facts",
    "branch_knows",
    "call_sizes",
    "call_type",
    "callees_first",
    "canonical_call",
    "dims_in",
    "facts_where",
    "first_difference",
    "functions_of",
    "given_to_ops",
    "infer",
    "infer_known",
    "is_true",
    "join",
    "kv_layer",
    "map_attr",
    "map_expr",
    "map_sizes",
    "no_block",
    "op",
    "parse",
    "parse_function",
    "print_function",
    "print_module",
    "reachable",
    "reached",
    "release",
    "same_code",
    "sizes_of",
    "substitute_atoms",
    "substitute_type",
    "summarize",
    "symbols_in",
    "tensor_type",
    "type_symbols",
    "type_text",
    "undefined_symbols",
    "used_vars",
    "variables_of",
    "verify",
    "violations",
    "walk_bindings",
    "walk_exprs",
]
