# SPDX-License-Identifier: Apache-2.0
"""Whether a method computes for each sequence what it would compute for it alone, so that a call may be given rows that are nobody's.

Of each value that depends on the sequences, axis 0 has to be theirs, in their order; each instruction that reads one has to be known to keep
to the rows of axis 0. What is not known is refused: such a method is captured for each number of sequences.

Tokens of a prompt are rows in the same way, if it is a single one: attention gives none of them anything of later ones. Theirs is the first axis
that is longer than 1, and what a method returns must be made of its last one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nnfront.backends.cuda import last_token, latent_attention
from nnfront.backends.cuda.graph_safety import FINDING
from nnfront.dims import Dim, Size, Symbol, equal, evaluate, of_symbol, substitute
from nnfront.ir import OPS, StateLayerType, StateType, TensorType, Type
from nnfront.lower import MethodProgram, Run

# What a batch is padded to: a graph serves all up to its own.
BATCHES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
# What the tokens of a prompt are padded to.
TOKENS = (16, 32, 64, 128, 256)

# Ops of one element, and others that keep to a row whatever their attributes are.
WHOLE_ROWS = {name for name, op in OPS.items() if op.pointwise} | {
    *("prelu", "gated_activation", "tuple", "zeros_like", "ones_like", "full_like", "broadcast_to")
}
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
# Of one token a row of results is of the same rows of tokens and states. The sizes of weights are others of results, so `_add` refuses weights that have rows.
RECURRENCES = ("causal_conv1d", "ssm_scan", "selective_scan", "gated_delta_rule")
# What may be said how many rows there are.
TOLD = ("reshape", "zeros", "ones", "full", "broadcast_to", "cache_positions")
# Kernels of a prompt's attention that are said which tokens are somebody's.
COUNTING = FINDING - {kernel.name for kernel in latent_attention.KERNELS}


@dataclass(frozen=True)
class Rows:
    """Of a method that keeps to rows: the slot of how many there are, the arguments and results that have them, and along which axis."""

    dim: int
    tensors: frozenset[int]
    axis: int = 0


def independent_rows(program: MethodProgram) -> Rows | str:
    """Where the rows of sequences are, or which instruction, the first one, may not keep to them."""
    symbol = _symbol_of(_sequences(program))
    if symbol is None:
        return "it has no caches of one number of sequences"
    return _Rows(program, symbol).found()


def independent_tokens(program: MethodProgram) -> Rows | str:
    """Where the tokens of a call for a single sequence are, or which instruction, the first one, may not keep to them."""
    sequences = _sequences(program)
    shapes = [a.type.shape for a in program.arguments if isinstance(a.type, TensorType)]
    symbol = _symbol_of({size for shape in shapes for size in shape[1:2]})
    batch = _symbol_of(sequences)
    if symbol is None or batch is None:
        return "it has no tokens of one number"
    return _Rows(program, symbol, batch).found()


def _sequences(program: MethodProgram) -> set[Size]:
    """How many sequences caches have."""
    states = [a.type for a in program.arguments if isinstance(a.type, StateType)]
    return {layer.batch for state in states for layer in state.layers}


def _symbol_of(sizes: set[Size]) -> Symbol | None:
    """The symbol that all of these sizes are."""
    symbols = {size.symbols[0] if isinstance(size, Dim) else None for size in sizes}
    symbol = symbols.pop() if len(symbols) == 1 else None
    return symbol if symbol is not None and sizes == {of_symbol(symbol)} else None


class _Refused(Exception):
    pass


class _Rows:
    """One walk over a method's instructions; `theirs` are the slots whose values depend on the sequences, or on the tokens of the only one: `alone`."""

    def __init__(self, program: MethodProgram, symbol: Symbol, alone: Symbol | None = None) -> None:
        self._program = program
        self._symbol = symbol
        self._known = {} if alone is None else {alone: 1}
        self._what = "sequences" if alone is None else "tokens"
        self._theirs: set[int] = set()

    def found(self) -> Rows | str:
        axis = len(self._known)
        try:
            for argument in self._program.arguments:
                for slot in argument.structure.leaves():
                    if self._is_of(argument.type if argument.structure.is_leaf else self._type(slot)):
                        self._add(slot, f"the argument {argument.name!r}", axis)
            for instruction in self._program.body.walk():
                if not isinstance(instruction, Run):
                    raise _Refused("it has branches, or shapes that values say")
                self._look(instruction)
            for slot in self._program.result.leaves():
                # Of tokens nothing that a caller would have to take apart.
                is_right = slot in self._theirs and isinstance(self._type(slot), TensorType)
                if is_right != (not self._known):
                    raise _Refused(f"it returns something that is no tensor of its {self._what}")
            dim = next((b.slot for b in self._program.dims if b.symbol == self._symbol), None)
            if dim is None:
                raise _Refused(f"its arguments do not say how many {self._what} there are")
        except _Refused as refused:
            return str(refused)
        return Rows(dim, frozenset(s for s in self._theirs if isinstance(self._type(s), TensorType)), axis)

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

    def _rows(self, type: Type | None) -> tuple[int, int] | None:
        """The axis of the rows, and how many there are for each sequence or token; None if it is another than the first, or they have two."""
        if not isinstance(type, TensorType):
            return None
        shape = [substitute(size, self._known) for size in type.shape]
        axis = next((i for i, size in enumerate(shape) if not self._known or size != 1), len(shape))
        size = shape[axis] if axis < len(shape) else 1
        if not isinstance(size, Dim) or size.symbols != (self._symbol,) or self._is_of(shape[axis + 1 :]):
            return None
        count = evaluate(size, {self._symbol: 1})
        return (axis, count) if equal(size, of_symbol(self._symbol) * count) else None

    def _add(self, slot: int, what: str, axis: int | None = None) -> None:
        """Note that a value is of the sequences, along an axis if one is said."""
        type = self._type(slot)
        if type is not None and not isinstance(type, (StateType, StateLayerType)):
            found = self._rows(type)
            if found is None or axis not in (None, found[0]):
                raise _Refused(f"{what} does not have its {self._what} along axis {axis or 0} alone")
        self._theirs.add(slot)

    def _look(self, run: Run) -> None:
        theirs = [slot for slot in run.inputs if slot in self._theirs]
        where = f"{run.kernel}{f' at {run.module}' if run.module else ''}"
        told = [slot for slot in run.operands if self._tells(slot)]
        if not (theirs or told) or (self._known and run.kernel == last_token.NAME):
            return
        if told and run.op not in TOLD:
            raise _Refused(f"{where} computes with the number of {self._what}")
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
            if self._known:
                return run.kernel in COUNTING
            return run.op in ("cache_read", "cache_write") or (run.kernel in FINDING and self._is_step(run))
        if run.op in RECURRENCES:
            return not self._known and self._is_step(run)
        if run.op in ("reshape", "zeros", "ones", "full"):
            return True  # rows stay in their order, and `_add` looks at how many there are
        if run.op in WHOLE_ROWS:
            return self._are_as_wide(run, theirs)
        if run.op == "rope":  # axis 0 of tables is that of x, whatever lies between it and the last
            return len({self._rows(type) for type in types}) == 1
        if run.op in ALONG or (run.op in OPS and OPS[run.op].rowwise):
            return self._is_inside(run, types)
        if run.op == "permute_dims":
            return all(axis == to for to, axis in zip(self._leading(types), run.attrs["axes"], strict=False))
        if run.op == "take":
            data, indices = run.inputs
            return data not in self._theirs and indices in self._theirs and not run.attrs["axis"]
        if run.op == "einsum":
            return self._einsum(run)
        if run.op == "add_low_rank":
            y, x, a, b, adapter = run.inputs
            own = {y, x} if self._known else {y, x, adapter}
            return own <= self._theirs and self._theirs.isdisjoint((a, b))
        if run.op.endswith(PRODUCTS):
            return run.inputs[0] in self._theirs and not set(run.inputs[1:3]) & self._theirs
        return False

    def _is_step(self, run: Run) -> bool:
        """Whether attention, or a recurrence, is that of one token for each sequence: what several of a row that is nobody's would see is not there."""
        tensors = (self._type(slot) for slot in (*run.inputs[:1], *run.outputs[:1]))
        shapes = [type.shape for type in tensors if isinstance(type, TensorType)]
        return all(shape[1] == 1 for shape in shapes)

    def _are_as_wide(self, run: Run, theirs: list[int]) -> bool:
        """Whether operands have as many axes as results, so that axis 0 meets axis 0, and as many rows."""
        types = [self._type(slot) for slot in (*theirs, *run.outputs)]
        axes = {len(type.shape) for type in types if isinstance(type, TensorType)}
        return len(axes) <= 1 and len({self._rows(type) for type in types if type is not None}) <= 1

    def _is_inside(self, run: Run, types: list[Type | None]) -> bool:
        """Whether the axes that an op works along are others than that of the rows."""
        given = next((run.attrs[name] for name in ("axis", "axes", "dim") if name in run.attrs), None)
        if "normalized_shape" in run.attrs:
            given = range(-len(run.attrs["normalized_shape"]), 0)
        if given is None:
            return False
        ranks = {len(type.shape) for type in types if isinstance(type, TensorType)}
        axes = given if isinstance(given, (tuple, list, range)) else (given,)
        rank = min(ranks) + (run.op == "unsqueeze")
        return len(ranks) == 1 and all(axis % rank not in self._leading(types) for axis in axes)

    def _leading(self, types: list[Type | None]) -> range:
        """The axes up to that of the rows."""
        return range(1 + max(rows[0] for type in types if (rows := self._rows(type)) is not None))

    def _einsum(self, run: Run) -> bool:
        """Whether one letter is axis 0 of operands of the sequences and of the result, and of no other axis."""
        if self._known:
            return False
        operands, _, result = run.attrs["subscripts"].replace(" ", "").partition("->")
        letter, parts = result[:1], operands.split(",")
        if len(parts) != len(run.inputs) or not letter.isalpha() or letter in result[1:]:
            return False
        return all(
            part[:1] == letter and letter not in part[1:] if slot in self._theirs else letter not in part
            for part, slot in zip(parts, run.inputs, strict=True)
        )
