# SPDX-License-Identifier: Apache-2.0
"""Whether a method computes for each sequence what it would compute for it alone, so that a call may be given rows that are nobody's.

Of each value that depends on the sequences, axis 0 has to be theirs, in their order; each instruction that reads one has to be known to keep
to the rows of axis 0. What is not known is refused: such a method is captured for each number of sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nnfront.backends.cuda.graph_safety import FINDING
from nnfront.dims import Dim, Size, Symbol, equal, evaluate, of_symbol
from nnfront.ir import OPS, StateLayerType, StateType, TensorType, Type
from nnfront.lower import MethodProgram, Run

# What a batch is padded to: a graph serves all up to its own.
BATCHES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)

# Ops of one element, and others that keep to a row whatever their attributes are.
POINTWISE = frozenset(
    name
    for name, op in OPS.items()
    if op.infer.__module__.rpartition(".")[2] in ("elementwise", "activation", "logic")
)
WHOLE_ROWS = POINTWISE | {"tuple", "zeros_like", "ones_like", "full_like", "broadcast_to"}
# Those that keep to a row unless an attribute names axis 0, or none where that means all of them.
ALONG = frozenset(
    {
        *("softmax", "log_softmax", "sum", "prod", "mean", "max", "min", "any", "all", "argmax", "argmin"),
        *("topk", "sort", "argsort", "cumsum", "flip", "gather", "split", "chunk", "concat", "stack"),
        *("unsqueeze", "squeeze", "rms_norm", "layer_norm", "norm_residual"),
    }
)
# Products whose first operand has the rows and whose others are weights, but for what is added to the result.
PRODUCTS = ("linear", "product", "moe_mlp", "experts")


@dataclass(frozen=True)
class Rows:
    """Of a method that keeps to rows: the slot of the number of sequences, and the arguments and results whose axis 0 is theirs."""

    dim: int
    tensors: frozenset[int]


def independent_rows(program: MethodProgram) -> Rows | str:
    """Where the rows of sequences are, or which instruction, the first one, may not keep to them."""
    sequences = {
        layer.batch
        for argument in program.arguments
        if isinstance(argument.type, StateType)
        for layer in argument.type.layers
    }
    symbols = {*map(_symbol_of, sequences)}
    symbol = symbols.pop() if len(symbols) == 1 else None
    dim = next((binding.slot for binding in program.dims if binding.symbol == symbol), None)
    if symbol is None or dim is None:
        return "it has no caches of one number of sequences"
    return _Rows(program, symbol).found(dim)


def _symbol_of(size: Size) -> Symbol | None:
    """The symbol that a size is."""
    if isinstance(size, Dim) and size == of_symbol(size.symbols[0]):
        return size.symbols[0]
    return None


class _Refused(Exception):
    pass


class _Rows:
    """One walk over a method's instructions; `theirs` are the slots whose values depend on the sequences."""

    def __init__(self, program: MethodProgram, symbol: Symbol) -> None:
        self._program = program
        self._symbol = symbol
        self._batch = of_symbol(symbol)
        self._theirs: set[int] = set()

    def found(self, dim: int) -> Rows | str:
        try:
            for argument in self._program.arguments:
                for slot in argument.structure.leaves():
                    if self._is_of(argument.type if argument.structure.is_leaf else self._type(slot)):
                        self._add(slot, f"the argument {argument.name!r}")
            for instruction in self._program.body.walk():
                if not isinstance(instruction, Run):
                    raise _Refused("it has branches, or shapes that values say")
                self._look(instruction)
            results = [*self._program.result.leaves()]
            if not all(slot in self._theirs and isinstance(self._type(slot), TensorType) for slot in results):
                raise _Refused("it returns something that is no tensor of its sequences")
        except _Refused as refused:
            return str(refused)
        return Rows(dim, frozenset(s for s in self._theirs if isinstance(self._type(s), TensorType)))

    def _type(self, slot: int) -> Type | None:
        return self._program.slots[slot].type

    def _is_of(self, value: Any) -> bool:
        """Whether a type, or a nested list of sizes, has the number of sequences in it."""
        match value:
            case TensorType():
                return self._is_of(value.shape)
            case StateType() | StateLayerType():
                return True
            case Dim():
                return self._symbol in value.symbols
            case tuple() | list():
                return any(map(self._is_of, value))
        return False

    def _rows(self, type: Type | None) -> int | None:
        """How many rows a tensor has for each sequence; None if axis 0 alone is not theirs."""
        if not isinstance(type, TensorType) or not type.shape or self._is_of(type.shape[1:]):
            return None
        first = type.shape[0]
        if not isinstance(first, Dim) or first.symbols != (self._symbol,):
            return None
        count = evaluate(first, {self._symbol: 1})
        return count if equal(first, self._batch * count) else None

    def _add(self, slot: int, what: str) -> None:
        """Note that a value is of the sequences."""
        type = self._type(slot)
        if (
            not isinstance(type, (StateType, StateLayerType))
            and type is not None
            and self._rows(type) is None
        ):
            raise _Refused(f"{what} does not have its sequences along axis 0 alone")
        self._theirs.add(slot)

    def _look(self, run: Run) -> None:
        theirs = [slot for slot in run.inputs if slot in self._theirs]
        where = f"{run.kernel}{f' at {run.module}' if run.module else ''}"
        told = [slot for slot in run.operands if self._tells(slot)]
        if not theirs and not told:
            return
        if told and run.op not in ("reshape", "zeros", "ones", "full", "broadcast_to"):
            raise _Refused(f"{where} computes with the number of sequences")
        if not self._keeps(run, theirs):
            raise _Refused(f"{where} may not keep to the rows of a sequence")
        for slot in run.outputs:
            self._add(slot, where)

    def _tells(self, slot: int) -> bool:
        held = self._program.slots[slot]
        if held.kind == "dim":
            return held.name == self._symbol.name
        return held.kind == "size" and self._is_of(held.value)

    def _keeps(self, run: Run, theirs: list[int]) -> bool:
        """Whether rows of the results depend on the same rows of these operands alone."""
        types = [self._type(slot) for slot in theirs]
        if any(isinstance(type, (StateType, StateLayerType)) for type in types):
            return run.kernel in FINDING and self._is_step(run)
        if run.op in ("reshape", "zeros", "ones", "full"):
            return True  # rows stay in their order, and `_add` looks at how many there are
        if run.op in WHOLE_ROWS:
            return self._are_as_wide(run, theirs)
        if run.op == "rope":  # axis 0 of tables is that of x, whatever lies between it and the last
            return len({self._rows(type) for type in types}) == 1
        if run.op in ALONG or (run.op in OPS and OPS[run.op].rowwise):
            return self._is_inside(run, types)
        if run.op == "permute_dims":
            return bool(next(iter(run.attrs["axes"])) == 0)
        if run.op == "take":
            data, indices = run.inputs
            return data not in self._theirs and indices in self._theirs and not run.attrs["axis"]
        if run.op == "einsum":
            return self._einsum(run)
        if run.op == "add_low_rank":
            y, x, a, b, adapter = run.inputs
            return {y, x, adapter} <= self._theirs and self._theirs.isdisjoint((a, b))
        if run.op.endswith(PRODUCTS):
            return run.inputs[0] in self._theirs and not set(run.inputs[1:3]) & self._theirs
        return False

    def _is_step(self, run: Run) -> bool:
        """Whether attention is that of one token for each sequence: what several of a row that is nobody's would see is not there."""
        tensors = (self._type(slot) for slot in (*run.inputs[:1], *run.outputs[:1]))
        shapes = [type.shape for type in tensors if isinstance(type, TensorType)]
        return all(shape[1] == 1 for shape in shapes)

    def _are_as_wide(self, run: Run, theirs: list[int]) -> bool:
        """Whether operands have as many axes as results, so that axis 0 meets axis 0, and as many rows."""
        types = [self._type(slot) for slot in (*theirs, *run.outputs)]
        axes = {len(type.shape) for type in types if isinstance(type, TensorType)}
        return len(axes) <= 1 and len({self._rows(type) for type in types if type is not None}) <= 1

    def _is_inside(self, run: Run, types: list[Type | None]) -> bool:
        """Whether the axes that an op works along are others than axis 0."""
        given = next((run.attrs[name] for name in ("axis", "axes", "dim") if name in run.attrs), None)
        if "normalized_shape" in run.attrs:
            given = range(-len(run.attrs["normalized_shape"]), 0)
        if given is None:
            return False
        ranks = {len(type.shape) for type in types if isinstance(type, TensorType)}
        axes = given if isinstance(given, (tuple, list, range)) else (given,)
        return len(ranks) == 1 and all(axis % (min(ranks) + (run.op == "unsqueeze")) for axis in axes)

    def _einsum(self, run: Run) -> bool:
        """Whether one letter is axis 0 of operands of the sequences and of the result, and of no other axis."""
        operands, _, result = run.attrs["subscripts"].replace(" ", "").partition("->")
        letter, parts = result[:1], operands.split(",")
        if len(parts) != len(run.inputs) or not letter.isalpha() or letter in result[1:]:
            return False
        return all(
            part[:1] == letter and letter not in part[1:] if slot in self._theirs else letter not in part
            for part, slot in zip(parts, run.inputs, strict=True)
        )
