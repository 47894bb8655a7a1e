# SPDX-License-Identifier: Apache-2.0
"""What there is to know of a function of `nnfront.op`, read off its declaration: `help` shows it, and docs/ops.md is made of it.

Which dtypes an op takes, and which it gives, its type rule is asked: for the operands of its example, in one dtype after the other.
"""

from __future__ import annotations

import contextlib
import inspect
import io
from collections.abc import Mapping, Sequence
from contextvars import Context
from dataclasses import dataclass, replace
from typing import Any

import torch

from nnfront.dtypes import DTYPES
from nnfront.errors import NnfrontError
from nnfront.ir import Op, TensorType, TupleType, Type
from nnfront.nn.eager import Eager, run_in
from nnfront.nn.elsewhere import signature_text
from nnfront.nn.op_examples import EXAMPLES
from nnfront.nn.tensor import operand_type

IMPORTS = "import torch\n\nimport nnfront as nn\nfrom nnfront import op, spec\n"
"""What every example begins with."""

FAMILIES: dict[str, tuple[str, ...]] = {
    "bool": ("bool",),
    "integers": ("uint8", "int8", "int16", "int32", "int64"),
    "floats": ("float16", "bfloat16", "float32", "float64"),
    "float8": ("float8_e4m3fn", "float8_e5m2"),
}
"""Words for dtypes that ops mostly take together."""


@dataclass(frozen=True)
class Argument:
    """One argument: what it may be, the dtypes that it may have ("" if it is no tensor), and its default as written ("" if there is none)."""

    name: str
    what: str
    dtypes: str
    default: str


@dataclass(frozen=True)
class Entry:
    """What a declaration says: arguments in order, and the dtypes of the result ("" if they are not known, as where a cache says them)."""

    signature: str
    arguments: tuple[Argument, ...]
    result: str


def entry(op: Op) -> Entry:
    """Describe an op by its declaration."""
    taken, result = _dtypes(op)
    operands = {operand.name: operand for operand in op.operands}
    arguments = []
    for name, parameter in op.signature.parameters.items():
        if name in operands:
            operand = operands[name]
            what = f"several, each {operand.expects}" if operand.is_sequence else operand.expects
            what += " or None" if operand.is_optional else ""
        else:
            what = op.attribute_words(name)
        has_default = parameter.default is not parameter.empty
        default = repr(parameter.default) if has_default else ""
        arguments.append(Argument(name, what, taken.get(name, ""), default))
    return Entry(f"op.{op.name}{signature_text(op.name)}", tuple(arguments), result)


def help_text(op: Op) -> str:
    """What `help` shows of an op: its documentation, arguments, dtypes and example."""
    described = entry(op)
    lines = [op.doc, "", "Arguments:"]
    for a in described.arguments:
        dtypes = f" ({a.dtypes})" if a.dtypes else ""
        lines.append(f"    {a.name}: {a.what}{dtypes}{f', by default {a.default}' if a.default else ''}")
    if described.result:
        lines += ["", f"Dtype of the result: {described.result}"]
    if op.name in EXAMPLES:
        lines += ["", "Example:", *(f"    {line}" for line in EXAMPLES[op.name].splitlines())]
    return "\n".join(lines)


def run_code(code: str) -> None:
    """Run an example, or lines like one, and leave torch's random numbers as they were."""
    with torch.random.fork_rng(devices=[]):
        exec(compile(f"{IMPORTS}{code}", "example", "exec"), {"__name__": "example"})


class _Recorder(Eager):
    """An eager run that keeps the operands' types and the attributes of the first call of an op."""

    def __init__(self, op: Op) -> None:
        super().__init__()
        self.op = op
        self.first_call: tuple[list[Type | None], dict[str, Any]] | None = None

    def apply(self, op: Op, args: tuple[Any, ...], attrs: Mapping[str, Any]) -> Any:
        if op is self.op and self.first_call is None:
            self.first_call = [operand_type(self._operand(a, op)) for a in args], dict(attrs)
        return super().apply(op, args, attrs)


def _dtypes(op: Op) -> tuple[dict[str, str], str]:
    """The dtypes that each operand may have, and those of the result; operands that have one dtype in the example change it together."""
    recorder = _Recorder(op)
    if op.name in EXAMPLES:
        with contextlib.redirect_stdout(io.StringIO()):
            Context().run(run_in, recorder, lambda: run_code(EXAMPLES[op.name]), (), {})
    if recorder.first_call is None:
        return {}, ""
    types, attrs = recorder.first_call
    names = [o.name for o in op.operands] * (len(types) if op.is_variadic else 1)
    groups: dict[str, list[int]] = {}
    for i, type in enumerate(types):
        if isinstance(type, TensorType):
            groups.setdefault(type.dtype, []).append(i)
    taken: dict[str, str] = {}
    given = [", ".join(_of(op, types, attrs))]
    for group in groups.values():
        results = _results(op, types, attrs, group)
        taken |= {names[i]: dtypes_text(results) for i in group}
        if len({*results.values()}) > 1:
            given.insert(-1, _result_text(results, names[group[0]]))
    return taken, _or_as_asked(op, given[0])


def _or_as_asked(op: Op, dtype: str) -> str:
    """Words for the dtype of a result which an attribute may change, or says."""
    asked = next((name for name in ("dtype", "out_dtype") if name in op.attributes), None)
    if asked is None:
        return dtype
    is_given = op.attributes[asked] is inspect.Parameter.empty
    return f"what {asked} says" if is_given else f"{dtype}, or what {asked} says"


def _results(
    op: Op, types: Sequence[Type | None], attrs: Mapping[str, Any], group: Sequence[int]
) -> dict[str, tuple[str, ...]]:
    """The dtypes that the operands of a group may have together, with the dtypes of what the op then gives."""
    found = {}
    for dtype in DTYPES:
        changed = [
            replace(type, dtype=dtype) if i in group and isinstance(type, TensorType) else type
            for i, type in enumerate(types)
        ]
        with contextlib.suppress(NnfrontError):
            found[dtype] = _of(op, changed, attrs)
    return found


def _of(op: Op, types: Sequence[Type | None], attrs: Mapping[str, Any]) -> tuple[str, ...]:
    result = op.result_type(types, op.canonical_attrs(types, attrs))
    fields = result.fields if isinstance(result, TupleType) else (result,)
    return tuple(field.dtype for field in fields if isinstance(field, TensorType))


def dtypes_text(dtypes: Mapping[str, object]) -> str:
    """Words for a set of dtypes: families where all of one is in it."""
    if set(dtypes) == set(DTYPES):
        return "any dtype"
    whole = [word for word, members in FAMILIES.items() if dtypes.keys() >= set(members)]
    named = {dtype for word in whole for dtype in FAMILIES[word]}
    return ", ".join([*whole, *(dtype for dtype in dtypes if dtype not in named)])


def _result_text(results: Mapping[str, tuple[str, ...]], name: str) -> str:
    """Words for the dtypes of results: as many texts as there are results, each by what the operand called `name` has."""
    fields = list(zip(*results.values(), strict=True))
    return "; ".join(dict.fromkeys(_field_text(dict(zip(results, f, strict=True)), name) for f in fields))


def _field_text(given: Mapping[str, str], name: str) -> str:
    if len({*given.values()}) == 1:
        return next(iter(given.values()))
    other: dict[str, dict[str, str]] = {}
    for dtype, result in given.items():
        if dtype != result:
            other.setdefault(result, {})[dtype] = result
    return ", ".join(
        [f"that of {name}", *(f"{result} for {dtypes_text(of)}" for result, of in other.items())]
    )
