# SPDX-License-Identifier: Apache-2.0
"""Compute no rows that are only cut away: a slice moves from the result of an op to its operands.

before:
    private def layer[n](x: input float32[n, 4], w: weight float32[4, 4], v: weight float32[4, 4]) -> float32[n, 4] {
        h: float32[n, 4] = linear(x, w)
        a: float32[n, 4] = cumsum(h, axis=0)
        y: float32[n, 4] = linear(a, v)
        z: float32[n, 4] = add(x, y)
        return z
    }
    def main[n: 1..](x: input float32[n, 4], w: weight float32[4, 4], v: weight float32[4, 4]) -> float32[1, 4] {
        a: float32[n, 4] = @layer(x, w, v)
        b: float32[n, 4] = @layer(a, w, v)
        y: float32[1, 4] = getitem(b, index=((n - 1, n, 1),))
        return y
    }
after:
    private def layer[n](x: input float32[n, 4], w: weight float32[4, 4], v: weight float32[4, 4]) -> float32[n, 4] {
        h: float32[n, 4] = linear(x, w)
        a: float32[n, 4] = cumsum(h, axis=0)
        y: float32[n, 4] = linear(a, v)
        z: float32[n, 4] = add(x, y)
        return z
    }
    def main[n: 1..](x: input float32[n, 4], w: weight float32[4, 4], v: weight float32[4, 4]) -> float32[1, 4] {
        a: float32[n, 4] = @layer(x, w, v)
        h: float32[n, 4] = linear(a, w)
        a_1: float32[n, 4] = cumsum(h, axis=0)
        getitem: float32[1, 4] = getitem(a_1, index=((n - 1, n, 1),))
        y_1: float32[1, 4] = linear(getitem, v)
        getitem_1: float32[1, 4] = getitem(a, index=((n - 1, n, 1),))
        b: float32[1, 4] = add(getitem_1, y_1)
        return b
    }

A prompt gives the logits of its last token alone: of the last layer that is left what its attention reads, and one row of all behind it.

A value is computed in part where all that reads it reads the same part, along one axis, if its op can (`nnfront.ops.sliced_axes`) and that makes a product
smaller. A call is inlined where a product in what it calls becomes smaller.

leaves:  what branches read or give, and the order of effects.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from nnfront import ops
from nnfront.dims import Size, less, less_equal, product, same, same_shape
from nnfront.ir import (
    Atom,
    Binding,
    Call,
    Expr,
    Function,
    FunctionBuilder,
    FunctionCall,
    IRModule,
    Mutator,
    Names,
    Projection,
    TensorType,
    Tuple,
    Var,
    canonical_call,
    infer,
    tensor_type,
    used_vars,
)
from nnfront.ops.slice import slice_length
from nnfront.ops.sliced_axes import sliced_axes
from nnfront.passes.base import module_pass
from nnfront.passes.canonicalize import canonical
from nnfront.passes.effects import impure_functions, is_alive
from nnfront.passes.eliminate_dead_code import without_dead_bindings
from nnfront.passes.inline import inlined


class Cut(NamedTuple):
    """A part of a tensor, or of each of a tuple: these positions along an axis; `of` (count, size) of each of so many runs that lie along it."""

    axis: int
    start: Size
    stop: Size
    step: int
    of: tuple[Size, Size] | None = None

    def is_same(self, other: Cut) -> bool:
        """Whether both are the same part."""
        positions, others = ((*cut[1:4], *(cut.of or ())) for cut in (self, other))
        return self.axis == other.axis and same_shape(positions, others)

    @property
    def length(self) -> Size:
        """How long the axis is in the part."""
        return slice_length(self.start, self.stop, self.step) * (self.of or (1,))[0]

    def take(self, builder: FunctionBuilder, value: Var) -> Var:
        """The part of a tensor."""
        before, behind = tensor_type(value).shape[: self.axis], tensor_type(value).shape[self.axis + 1 :]
        index = (*":" * (self.axis + bool(self.of)), self[1:4])
        if self.of is None:
            return builder.call(ops.getitem, value, index=index)
        runs = builder.call(ops.reshape, value, shape=(*before, *self.of, *behind))
        part = builder.call(ops.getitem, runs, index=index)
        return builder.call(ops.reshape, part, shape=(*before, self.length, *behind))


@module_pass()
def bubble_up_slices(ir: IRModule) -> IRModule:
    """Compute what slices leave over, in functions that are called from outside and in private ones."""
    impure = impure_functions(ir)
    return ir.with_functions(
        _cut(f, ir, impure) if f.kind in ("public", "private") else f for f in ir.functions
    )


def _cut(function: Function, ir: IRModule, impure: set[str]) -> Function:
    if not any(_cut_by(binding.value) for binding in function.bindings):
        return function
    whole = function
    parts = _Parts(whole, ir, impure)
    while parts.calls:
        whole = canonical(inlined(whole, ir, parts.calls))
        parts = _Parts(whole, ir, impure)
    return (
        without_dead_bindings(_Cutting(whole, parts.cut).function(whole), impure) if parts.cut else function
    )


class _Parts:
    """Which values of a function's own block are read in part alone: `cut` those that are computed so, `calls` what would have to be inlined first."""

    def __init__(self, function: Function, ir: IRModule, impure: set[str]) -> None:
        self.cut: dict[Var, Cut] = {}
        self.calls: set[Var] = set()
        self._read: dict[Var, Cut | None] = {}  # None: whole, or in several ways
        self._whole([function.result])
        needs: set[Var] = {function.result} if isinstance(function.result, Var) else set()
        fields: dict[Var, dict[int, Var]] = {}
        for binding in function.bindings:
            if isinstance(binding.value, Projection) and isinstance(binding.value.tuple, Var):
                fields.setdefault(binding.value.tuple, {})[binding.value.index] = binding.var
        for binding in reversed(function.bindings):
            if is_alive(binding, needs, impure):
                needs.update(used_vars(binding.value))
                self._look(binding.var, binding.value, fields.get(binding.var, {}), ir)
        self._keep_what_saves(function.bindings)

    def _keep_what_saves(self, bindings: Iterable[Binding]) -> None:
        """Cut no value on the way to whose slice no product becomes smaller: it may be one that a kernel makes with what is before it."""
        for var, value in ((b.var, b.value) for b in bindings if b.var in self.cut):
            if not _is_product(value) and self.cut.keys().isdisjoint(used_vars(value)):
                del self.cut[var]

    def _look(self, var: Var, value: Expr, fields: Mapping[int, Var], ir: IRModule) -> None:
        if (made := _cut_by(value)) is not None:
            self._reads(*made)
            return
        if isinstance(value, FunctionCall):
            self._whole(value.args)
            cuts: Mapping[int | None, Cut | None] = {i: self._read.get(field) for i, field in fields.items()}
            cuts = cuts or {None: self._read.get(var)}
            if any(cut and _saves(ir, value.function, i, cut) for i, cut in cuts.items()):
                self.calls.add(var)
            return
        cut = self._read.get(var)
        parts = None if cut is None else _parts_read(value, cut)
        if cut is None or parts is None:
            self._whole(used_vars(value))
            return
        self.cut[var] = cut
        for operand, part in parts:
            self._reads(operand, part)

    def _whole(self, atoms: Iterable[Atom]) -> None:
        for atom in atoms:
            self._reads(atom, None)

    def _reads(self, atom: Atom | None, cut: Cut | None) -> None:
        if isinstance(atom, Var):
            known = self._read.setdefault(atom, cut)
            if known is not None and (cut is None or not known.is_same(cut)):
                self._read[atom] = None


def _is_product(value: Expr) -> bool:
    return isinstance(value, Call) and value.op.flops is not None


def _cut_by(value: Expr) -> tuple[Var, Cut] | None:
    """Of what a slice along one axis takes a part, or a position that is surely there, and which."""
    if not isinstance(value, Call) or value.op is not ops.getitem:
        return None
    x = value.args[0]
    index = value.attrs["index"]
    chosen = [axis for axis, entry in enumerate(index) if not isinstance(entry, str)]
    if not isinstance(x, Var) or not isinstance(x.type, TensorType) or len(chosen) != 1:
        return None
    (axis,) = chosen
    entry = index[axis]
    if isinstance(entry, tuple):
        return x, Cut(axis, *entry)
    size = x.type.shape[axis]
    is_there = entry is not None and less_equal(0, entry) is True and less(entry, size) is True
    return (x, Cut(axis, entry, entry + 1, 1)) if is_there and not same(size, 1) else None


def _parts_read(value: Expr, cut: Cut) -> list[tuple[Atom | None, Cut | None]] | None:
    """Each operand, and which part of it a part of the value is computed of, None for all of it; None if nothing says so."""
    if isinstance(value, Projection):
        return [(value.tuple, cut)]
    if not isinstance(value, Call):
        return None
    if value.op is ops.reshape:
        source = _before_reshape(tensor_type(value.args[0]).shape, value.attrs["shape"], cut)
        return None if source is None else [(value.args[0], source)]
    axes = sliced_axes(value.op, cut.axis, [None if a is None else a.type for a in value.args], value.attrs)
    if axes is None:
        return None
    return [
        (a, None if axis is None else cut._replace(axis=axis))
        for a, axis in zip(value.args, axes, strict=True)
    ]


def _before_reshape(old: Sequence[Size], new: Sequence[Size], cut: Cut) -> Cut | None:
    """The part that is `cut` under a new shape; None if it is none along one axis."""
    axis = cut.axis
    if same_shape(old[: axis + 1], new[: axis + 1]):
        return cut
    if cut.of is not None:  # runs that were an axis of their own
        is_joined = same_shape(old[: axis + 2], (*new[:axis], *cut.of))
        return cut._replace(axis=axis + 1, of=None) if is_joined else None
    runs = new[axis - 1 : axis + 1]
    if axis and same_shape(old[:axis], (*new[: axis - 1], product(runs))):
        return cut._replace(axis=axis - 1, of=(runs[0], runs[1]))
    return None


def _saves(ir: IRModule, function: str, field: int | None, cut: Cut) -> bool:
    """Whether a product that a function computes for a part of its result, or of a field of it, is one of a part of its operands."""
    called = ir[function]
    if called.kind != "private":
        return False
    made = {binding.var: binding.value for binding in called.bindings}
    result: Atom = called.result
    value = made.get(result) if isinstance(result, Var) else None
    if field is not None and isinstance(value, Tuple):
        result, field = value.fields[field], None
    pending: list[tuple[Atom | None, Cut | None]] = [(result, cut)]
    while pending:
        atom, part = pending.pop()
        value = made.get(atom) if isinstance(atom, Var) and part is not None else None
        if value is None or part is None:
            continue
        if isinstance(value, FunctionCall) and _saves(ir, value.function, field, part):
            return True
        parts = _parts_read(value, part)
        if parts is not None and _is_product(value):
            return True
        pending += parts or ()
    return False


class _Cutting(Mutator):
    """Rewrites a function's own block: `cut` values are computed in part."""

    def __init__(self, function: Function, cut: Mapping[Var, Cut]) -> None:
        super().__init__()
        self.cut = cut
        self.names = Names.of(function)
        self.parts: dict[Var, list[tuple[Cut, Var]]] = {}

    def binding(self, binding: Binding) -> Sequence[Binding]:
        """Compute the part of a value; what took it is that part."""
        var, value = binding.var, binding.value
        made = _cut_by(value)
        if made is not None and made[0] in self.cut:
            part, axis = self.parts[made[0]][0][1], made[1].axis
            if part.type != var.type:
                return (
                    binding.with_value(canonical_call(ops.getitem, (part,), {"index": (*":" * axis, 0)})),
                )
            self.replaced[var] = part
            return ()
        if var not in self.cut:
            return super().binding(binding)
        cut, builder = self.cut[var], FunctionBuilder.of_bindings(self.names, binding.provenance)
        parts = _parts_read(value, cut)
        assert parts is not None  # or it would not be cut
        operands = [
            atom and (self.atom(atom) if of is None else self._part(builder, atom, of)) for atom, of in parts
        ]
        part = Var(var.name, infer(new := _of(value, operands, cut), {}))
        self.parts[var] = [(cut, part)]
        return (*builder.finish(part).bindings, Binding(part, new, binding.provenance))

    def _part(self, builder: FunctionBuilder, atom: Atom, cut: Cut) -> Var:
        """The part of a value that is there, or is taken now."""
        assert isinstance(atom, Var)  # it has axes
        known = self.parts.setdefault(atom, [])
        for each, part in known:
            if each.is_same(cut):
                return part
        whole = self.atom(atom)
        assert isinstance(whole, Var)
        known.append((cut, cut.take(builder, whole)))
        return known[-1][1]


def _of(value: Expr, operands: Sequence[Atom | None], cut: Cut) -> Expr:
    """A part of a value, of parts of its operands."""
    if isinstance(value, Projection):
        assert operands[0] is not None
        return Projection(operands[0], value.index)
    assert isinstance(value, Call)
    attrs = dict(value.attrs)
    if value.op is ops.reshape:
        attrs["shape"] = (*attrs["shape"][: cut.axis], cut.length, *attrs["shape"][cut.axis + 1 :])
    return canonical_call(value.op, operands, attrs)
