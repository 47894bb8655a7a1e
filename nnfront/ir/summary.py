# SPDX-License-Identifier: Apache-2.0
"""What a module holds: methods, dims, weights and private functions in tables that fit on two screens for any model.

At most 100 lines of 120 columns; a table that is cut ends with the number of rows that are left out.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import TypeAlias

from nnfront.dims import determined
from nnfront.files import shown_text
from nnfront.ir.expr import Call, Param
from nnfront.ir.function_dims import DimTexts, symbols_in
from nnfront.ir.interfaces import FunctionData, ModuleLike
from nnfront.ir.print_types import dim_text, repeats, type_text
from nnfront.ir.types import StateType, TensorType, TupleType, Type, sizes_of, type_symbols
from nnfront.ir.walk import functions_of, walk_exprs

_COLUMNS = 120
# Rows of each table, which with headings and blank lines make 100 lines.
_METHODS, _INPUTS, _DIMS, _WEIGHTS, _FUNCTIONS = 5, 4, 14, 22, 8
_CELL = 64  # widest column but the last
_NUMBER = re.compile(r"(?<![^.])[0-9]+(?![^.])")  # a component of a path that is a number
_BINDERS = {"weight": "weights", "transformed": "weights", "input": "inputs", "state": "cache"}

Row: TypeAlias = tuple[str, ...]


def summarize(module: ModuleLike) -> str:
    """Return the tables: at most 100 lines of at most 120 columns."""
    ops = _ops(module)
    sections = [
        ("methods", _methods(module, ops)),
        ("dims", _table(("name", "facts", "bound by", "used in"), _dims(module), _DIMS)),
        ("weights", _weights(module)),
        ("functions", _functions(module, ops)),
    ]
    lines: list[str] = []
    for title, body in sections:
        found = [f"  {line}" for line in body]
        if found:
            lines += [*([""] if lines else []), title, *found]
    return "\n".join(shown_text(line, _COLUMNS) for line in lines)


def _table(heading: Row, rows: Sequence[Row], limit: int, totals: Sequence[Row] = ()) -> Iterator[str]:
    """Yield aligned lines: the heading, at most `limit` rows, how many are left out, the totals. Nothing if there are no rows."""
    if not rows:
        return
    shown = [*([heading] if heading else []), *rows[:limit], *totals]
    lines = columns([[*(shown_text(cell, _CELL) for cell in row[:-1]), row[-1]] for row in shown])
    if len(rows) > limit:
        lines.insert(len(lines) - len(totals), f"... and {len(rows) - limit} more")
    yield from lines


# Methods.


def _methods(module: ModuleLike, ops: dict[str, Counter[str]]) -> Iterator[str]:
    methods = module.methods
    for function in methods[:_METHODS]:
        yield f"{function.name}: {len(function.bindings)} bindings"
        rows = [(param.name, param.role, _short(param.type)) for param in function.inputs]
        yield from (f"  {line}" for line in _table((), rows, _INPUTS))
        yield f"  -> {_short(function.result_type)}"
        if ops[function.name]:
            yield f"  runs {_counts(ops[function.name])}"
    if len(methods) > _METHODS:
        yield f"... and {len(methods) - _METHODS} more: {', '.join(f.name for f in methods[_METHODS:])}"


def _counts(ops: Counter[str]) -> str:
    return ", ".join(
        f"{count} {name}" for name, count in sorted(ops.items(), key=lambda item: (-item[1], item[0]))
    )


def _ops(module: ModuleLike) -> dict[str, Counter[str]]:
    """How often each op runs in one call of each function: through calls, and in both branches of an `if`."""
    known: dict[str, Counter[str]] = {}

    def count(name: str) -> Counter[str]:
        if name not in known:
            known[name] = Counter()  # a function that calls itself, which the verifier refuses, ends here
            for expr in walk_exprs(module[name]):
                if isinstance(expr, Call):
                    known[name][expr.op.name] += 1
                for callee in functions_of(expr):
                    if callee in module:
                        known[name].update(count(callee))
        return known[name]

    return {name: count(name) for name in module}


def _short(type: Type) -> str:
    """A type, with a cache by the number of its layers."""
    match type:
        case StateType() if type.layers:
            windows = ["full" if layer.window is None else f"window {layer.window}" for layer in type.layers]
            kinds = f" ({', '.join(repeats(windows))})" if set(windows) != {"full"} else ""
            layer = type.layers[0]
            texts = [str(layer) for layer in type.layers]
            kept = texts[:1] if len(set(texts)) == 1 else repeats(texts)
            return f"cache of {len(type.layers)} layers{kinds}: {', '.join(kept)}[{layer.batch}, {layer.max_seq}]"
        case TupleType():
            names = type.names or ("",) * len(type.fields)
            texts = [f"{n}: {_short(f)}" if n else _short(f) for n, f in zip(names, type.fields, strict=True)]
            return f"({', '.join(repeats(texts))})"
        case _:
            return type_text(type)


# Dims.


def _dims(module: ModuleLike) -> list[Row]:
    """One row for each name of a dim in the methods and transforms: facts, who binds it, where it is used."""
    facts: dict[str, list[str]] = {}
    binders: dict[str, set[str]] = {}
    used: dict[str, list[str]] = {}
    owners = _owners(module)
    told = determined([size for f in owners for p in f.weights for size in sizes_of(p.type)])
    for function in owners:
        symbols = symbols_in(function)
        for symbol, name in DimTexts(symbols).names.items():
            said = dim_text(symbol, name).partition(": ")[2] or "any"
            facts.setdefault(name, [])
            if said not in facts[name]:
                facts[name].append(said)
            used.setdefault(name, []).append(function.name)
            # What weights say only as part of an expression such as m*n is left to the calls.
            roles = {
                _BINDERS["input" if p in function.weights and symbol not in told else p.role]
                for p in function.params
                if symbol in type_symbols(p.type)
            }
            binders.setdefault(name, set()).update(roles)
    rows: list[Row] = []
    for name, said_all in facts.items():
        by = next((who for who in ("weights", "inputs", "cache") if who in binders[name]), "match_shape")
        rows.append((name, " or ".join(said_all), by, ", ".join(used[name])))
    return rows


def _owners(module: ModuleLike) -> list[FunctionData]:
    """The functions whose weights have the names of the checkpoint."""
    return [function for function in module.functions if function.kind in ("public", "transform")]


# Weights.


def _weights(module: ModuleLike) -> Iterator[str]:
    """Weights of all methods and transforms, those whose paths differ in numbers only in one row."""
    params: dict[tuple[str, str], Param] = {}
    for function in _owners(module):
        for param in function.weights:
            params.setdefault((param.role, param.name), param)
    groups: dict[tuple[str, str, str], list[Param]] = {}
    for (role, name), param in params.items():
        groups.setdefault((role, _NUMBER.sub("{}", name), type_text(param.type)), []).append(param)
    rows = [
        (_collapsed([p.name for p in group]), str(len(group)), text, _bytes(p.type for p in group), role)
        for (role, _, text), group in groups.items()
    ]
    totals: list[Row] = []
    for role in dict.fromkeys(role for role, _ in params):
        types = [param.type for (other, _), param in params.items() if other == role]
        totals.append(("total", str(len(types)), "", _bytes(types), role))
    return _table(("name", "count", "type", "bytes", "role"), rows, _WEIGHTS, totals)


def _collapsed(names: Sequence[str]) -> str:
    """One name for all: `model.layers.{0..79}.mlp.up_proj.weight`."""
    if len(names) == 1:
        return names[0]
    columns = zip(*(_NUMBER.findall(name) for name in names), strict=True)
    spans = [_span(sorted({int(number) for number in column})) for column in columns]
    parts = _NUMBER.split(names[0])
    return "".join(map("".join, zip(parts, [*spans, ""], strict=True)))


def _span(numbers: Sequence[int]) -> str:
    """Ascending numbers as ranges: `{0..3,7}`; a single one as it is."""
    if len(numbers) == 1:
        return str(numbers[0])
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return f"{{{','.join('..'.join(map(str, run)) for run in runs)}}}"


def _bytes(types: Iterable[Type]) -> str:
    """Bytes of tensors of these types; of those whose size is symbolic only that there are some."""
    known, is_complete = 0, True
    for type in types:
        size = type.size_bytes if isinstance(type, TensorType) else None
        known += size or 0
        is_complete &= size is not None
    if is_complete:
        return bytes_text(known)
    return f"{bytes_text(known)} + symbolic" if known else "symbolic"


def bytes_text(count: int) -> str:
    """Return a number of bytes in words."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if count >= 1024**power:
            return f"{count / 1024**power:.2f} {unit}"
    return f"{count} B"


# Private functions.


def _functions(module: ModuleLike, ops: dict[str, Counter[str]]) -> Iterator[str]:
    """Functions that are no methods: how large they are, and how often they are called."""
    calls = Counter(
        (callee, function.name)
        for function in module.functions
        for expr in walk_exprs(function)
        for callee in functions_of(expr)
    )
    rows: list[Row] = []
    for function in module.functions:
        if function.kind != "public":
            callers = [
                f"{caller} {count}x" for (name, caller), count in calls.items() if name == function.name
            ]
            size = str(len(function.bindings))
            rows.append(
                (function.name, function.kind, size, ", ".join(callers) or "-", _counts(ops[function.name]))
            )
    return _table(("name", "kind", "bindings", "called by", "runs"), rows, _FUNCTIONS)


def columns(rows: Sequence[Sequence[str]], right: Container[int] = ()) -> list[str]:
    """Return rows as lines, each column as wide as its widest cell; the cells of some columns stand at their right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    pads = [str.rjust if i in right else str.ljust for i in range(len(widths))]
    return [
        "  ".join(pad(cell, width) for pad, cell, width in zip(pads, row, widths, strict=True)).rstrip()
        for row in rows
    ]
