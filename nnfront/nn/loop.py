# SPDX-License-Identifier: Apache-2.0
"""`op.scan`: a loop along an axis whose body is traced once, into a private function that an op is given."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

from nnfront import ops
from nnfront.dims import Size, equal, of_symbol
from nnfront.errors import TraceError
from nnfront.ir import (
    Call,
    Function,
    FunctionBuilder,
    FunctionName,
    Scalar,
    ScalarType,
    TensorType,
    Tuple,
    TupleType,
    Type,
    first_difference,
    type_text,
    undefined_symbols,
)
from nnfront.nn.mode import active_mode, outside_place
from nnfront.nn.pytree import flatten, unflatten
from nnfront.nn.source_location import user_place
from nnfront.nn.tensor import Tensor, apply, as_operand
from nnfront.nn.trace import Trace
from nnfront.nn.trace_state import Frame
from nnfront.ops.rules import axis_of

Step = Callable[[Any, Any], Any]


def scan(
    body: Step, carry: Any, xs: Any, axis: int = 0, chunk: tuple[int, Step] | None = None
) -> tuple[Any, Any]:
    """Call `carry, y = body(carry, x)` for each slice x of `xs` along an axis, in order; return the last carry and the ys.

    carry, xs, y: a tensor, or tuples, lists and dicts of them; a carry keeps its structure and types, and y may be None. A slice lacks the
    axis; ys are put together along it. What else the body uses (weights, tensors around it) is the same in every step; it is traced once,
    so that it reads no Python value that changes. chunk: (size, function), where `carry, ys = function(carry, xs)` does for
    `size` slices at once, with the axis, what the body does one by one: it takes all whole chunks, the body what is left.
    Raises TraceError for a carry that changes its type, and for slices along axes that are not known to be as long as each other.
    """
    mode = active_mode.get()
    if mode is None:
        raise TraceError(
            "op.scan is used outside a method", where=user_place(), help="a derived tensor has no loop"
        )
    structure, leaves = flatten(xs, is_tensor)
    tensors = [as_operand(x, ops.scan) for x in leaves]
    axis, length = _along(tensors, axis)
    if chunk is None:
        return mode.scan(body, carry, unflatten(structure, tensors), axis)
    size, whole = chunk
    if type(size) is not int or size < 1:
        raise TraceError(
            f"op.scan: the size of a chunk must be an int of at least 1, got {size!r}",
            where=outside_place(),
            help="give (size, function)",
        )
    count = length // size
    parts = []
    if not (isinstance(count, int) and count == 0):
        chunks = [_chunked(x, axis, count, size) for x in tensors]
        carry, made = mode.scan(whole, carry, unflatten(structure, chunks), axis)
        parts.append(_mapped(made, lambda y: _joined(y, axis, count * size)))
    if not parts or equal(count * size, length) is not True:
        rest = [_part(x, axis, slice(count * size, None)) for x in tensors]
        carry, made = mode.scan(body, carry, unflatten(structure, rest), axis)
        parts.append(made)
    return carry, parts[0] if len(parts) == 1 else _concatenated(parts, axis)


def is_tensor(value: Any) -> bool:
    """Whether this is a leaf of what a loop carries, slices and makes."""
    return isinstance(value, (Tensor, torch.Tensor))


def _along(tensors: Sequence[Tensor], axis: Any) -> tuple[int, Size]:
    """Return the axis counted from the front, and the number of steps."""
    if not tensors:
        raise TraceError(
            "op.scan: there is nothing to take slices of",
            where=outside_place(),
            help="give a tensor; op.arange(n) where the body needs none",
        )
    found = axis_of(axis, tensors[0].ndim)
    length = tensors[0].shape[found]
    for x in tensors[1:]:
        size = x.shape[axis_of(axis, x.ndim)]
        if axis_of(axis, x.ndim) != found or equal(length, size) is not True:
            raise TraceError(
                f"op.scan: how many steps there are is not known: {length} or {size}",
                details=[f"axis {axis} of {type_text(t.type)}" for t in (tensors[0], x)],
                where=outside_place(),
                help="what is sliced has one dim, on one axis: use the same name in the spec, or cut with x[:n]",
            )
    return found, length


def _part(x: Tensor, axis: int, part: slice) -> Tensor:
    return x[(*[slice(None)] * axis, part)]


def _chunked(x: Tensor, axis: int, count: Size, size: int) -> Tensor:
    """The whole chunks of a tensor, one behind the other on the axis."""
    shape = x.shape
    return _part(x, axis, slice(None, count * size)).reshape(*shape[:axis], count, size, *shape[axis + 1 :])


def _joined(y: Tensor, axis: int, size: Size) -> Tensor:
    return y.reshape(*y.shape[:axis], size, *y.shape[axis + 2 :])


def _mapped(made: Any, function: Callable[[Tensor], Tensor]) -> Any:
    structure, leaves = flatten(made, is_tensor)
    return unflatten(structure, map(function, leaves))


def _concatenated(parts: Sequence[Any], axis: int) -> Any:
    """Put what chunks and steps made together."""
    structures, leaves = zip(*(flatten(part, is_tensor) for part in parts), strict=True)
    if structures[0] != structures[1]:
        raise TraceError(
            "op.scan: a chunk makes something of another structure than the body",
            details=[
                f"{name} {structure!r}" for name, structure in zip(("chunk", "body"), structures, strict=True)
            ],
            where=outside_place(),
            help="return the same number of tensors, in the same lists and dicts, from both",
        )
    pairs = zip(*leaves, strict=True)
    return unflatten(structures[0], (apply(ops.concat, pair, {"dim": axis}) for pair in pairs))


def split_result(result: Any) -> tuple[Any, Any]:
    """Take what a body returned apart."""
    if not isinstance(result, tuple) or len(result) != 2:
        raise TraceError(
            f"op.scan: the body returns {result!r}",
            help="return carry, y; y may be None, and so may the carry",
        )
    return result


def check_carry(before: tuple[Any, Sequence[Type]], after: tuple[Any, Sequence[Type]]) -> None:
    """Raise TraceError unless what a step carries on has the structure and the types of what it got."""
    if before[0] != after[0] or len(before[1]) != len(after[1]):
        details = [f"in {before[0]!r}", f"out {after[0]!r}"]
    else:
        details = [
            f"value {i}: in {type_text(a)}, out {type_text(b)}"
            for i, (a, b) in enumerate(zip(before[1], after[1], strict=True))
            if a != b
        ]
    if details:
        raise TraceError(
            "op.scan: a step changes the type of what it carries",
            details=details,
            help="cast with astype, or reshape, so that each step leaves what the next one takes",
        )


def run_scan(body: Step, carry: Any, xs: Any, axis: int) -> tuple[Any, Any]:
    """Run the loop as Python does. Without steps, one over zeros says what steps would make."""
    carry_structure, carried = flatten(carry, is_tensor)
    xs_structure, sliced = flatten(xs, is_tensor)
    before = carry_structure, [as_operand(x, ops.scan).type for x in carried]
    steps: list[list[Any]] = []
    structure: Any = None
    length = sliced[0].shape[axis]
    assert isinstance(length, int)
    if length == 0:
        sliced = [
            apply(ops.zeros, (), {"shape": (*x.shape[:axis], 1, *x.shape[axis + 1 :]), "dtype": x.dtype})
            for x in sliced
        ]
    start = carry
    for i in range(max(length, 1)):
        index = (*[slice(None)] * axis, i)
        carry, made = split_result(body(carry, unflatten(xs_structure, [x[index] for x in sliced])))
        after_structure, after = flatten(carry, is_tensor)
        check_carry(before, (after_structure, [as_operand(x, ops.scan).type for x in after]))
        structure, leaves = flatten(made, is_tensor)
        steps.append(leaves)
    ys = [apply(ops.stack, made, {"dim": axis}) for made in zip(*steps, strict=True)]
    if length == 0:
        carry, ys = start, [_part(y, axis, slice(0, 0)) for y in ys]
    return carry, unflatten(structure, ys)


def trace_scan(trace: Trace, body: Step, carry: Any, xs: Any, axis: int) -> tuple[Any, Any]:
    """Trace the body into a private function, and emit the loop."""
    # The body once more, on the same state of the trace: what differs then is a Python value that has changed.
    names = copy.deepcopy(trace.function_names)
    loop = _Loop(trace, body, carry, xs, axis)
    kept, functions = trace.function_names, dict(trace.functions)
    trace.function_names = names
    again = _Loop(trace, body, carry, xs, axis)
    trace.function_names = kept
    trace.functions.update(functions)
    difference = first_difference(loop.function, again.function)
    if difference is not None or loop.structure != again.structure:
        raise TraceError(
            "op.scan: the body is not the same when it is traced once more",
            details=[str(difference)] if difference is not None else [],
            help="a loop runs one body: carry what changes from step to step, or slice it; a Python value is read once",
        )
    return loop.emit()


class _Loop:
    """The body of one loop as a function, and what the loop gives it."""

    def __init__(self, trace: Trace, body: Step, carry: Any, xs: Any, axis: int) -> None:
        self.trace, self.axis = trace, axis
        self.carry_structure, carried = flatten(carry, is_tensor)
        xs_structure, sliced = flatten(xs, is_tensor)
        self.length = sliced[0].shape[axis]
        self.given = [trace.atom(x, ops.scan) for x in (*carried, *sliced)]
        self.carried, self.sliced = len(carried), len(sliced)
        outer, path, effects = trace.frame, trace.path, dict(trace.effects)
        name = trace.function_names.unique(getattr(body, "__name__", "step").strip("<>"))
        frame = Frame(
            FunctionBuilder(name, trace.functions),
            parent=outer,
            prefix=f"{outer.prefix}.{path}".strip("."),
            captured={},
        )
        trace.frame, trace.path = frame, ""
        try:
            before = [a.type for a in self.given[: self.carried] if a is not None]
            steps = [TensorType((*x.shape[:axis], *x.shape[axis + 1 :]), x.dtype) for x in sliced]
            inside = [trace.wrap(frame.builder.param("carry", t, "input"), t) for t in before]
            slices = [trace.wrap(frame.builder.param("x", t, "input"), t) for t in steps]
            result = body(unflatten(self.carry_structure, inside), unflatten(xs_structure, slices))
            self.function = self._finished(frame, result, before)
            if trace.changes_effects(effects):
                raise TraceError(
                    "op.scan: the body changes the state of an effect",
                    help="carry it, and set it after the loop",
                )
        finally:
            trace.frame, trace.path, trace.effects = outer, path, effects
        assert frame.captured is not None
        self.given += [*frame.captured, *(Scalar(of_symbol(symbol)) for symbol in self.dims)]

    def _finished(self, frame: Frame, result: Any, before: Sequence[Type]) -> Function:
        """The body as a function that returns what it carries on, then what it makes."""
        after, made = split_result(result)
        after_structure, carried = flatten(after, is_tensor)
        self.structure, leaves = flatten(made, is_tensor)
        count = len(carried)
        atoms = [self.trace.atom(leaf, ops.scan) for leaf in (*carried, *leaves)]
        types = [atom.type for atom in atoms if atom is not None]
        check_carry((self.carry_structure, before), (after_structure, types[:count]))
        self.made = types[count:]
        for type in self.made:
            if isinstance(type, TensorType) and type.ndim < self.axis:
                raise TraceError(
                    f"op.scan: a step makes {type_text(type)}, which has no place for axis {self.axis}",
                    help="slice along an earlier axis, or give it more axes",
                )
        fields = Tuple(tuple(atom for atom in atoms if atom is not None))
        value = frame.builder.emit(fields, "results")
        dims = undefined_symbols(frame.builder.finish(value, "private"))
        assert dims is not None, "what is of another function has become a parameter"
        self.dims = dims
        for symbol in dims:
            frame.builder.param(symbol.name, ScalarType("int64", of_symbol(symbol)), "input")
        function = frame.builder.finish(value, "private")
        self.trace.functions[function.name] = function
        return function

    def emit(self) -> tuple[Any, Any]:
        """Emit the loop and return what the author gets."""
        trace, axis = self.trace, self.axis
        before = [a.type for a in self.given[: self.carried] if a is not None]
        whole = [
            TensorType((*t.shape[:axis], self.length, *t.shape[axis:]), t.dtype)
            for t in self.made
            if isinstance(t, TensorType)
        ]
        out = TupleType((*before, *whole))
        attrs = {"body": FunctionName(self.function.name), "out": out, "carried": self.carried}
        attrs |= {"sliced": self.sliced, "axis": axis}
        call = Call(ops.scan, tuple(self.given), attrs)
        var = trace.frame.builder.emit(call, "scan", trace.provenance(), out)
        results = trace.results(var, out, []) or ()
        carry, made = results[: self.carried], results[self.carried :]
        return unflatten(self.carry_structure, carry), unflatten(self.structure, made)
