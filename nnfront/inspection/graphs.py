# SPDX-License-Identifier: Apache-2.0
"""Functions as graphs: nodes are calls, edges values; what belongs to one module of the model is grouped, so that it can be folded.

A graph is plain data:

    nodes    {"op", "kind", "name", "type", "in", "attrs", "weights", "call", "module", "at"}, keys without a value left out; "in" are
             numbers of nodes, "weights" names of weights that it reads (of a call of a function in the order of that function's), "at"
             the number of a source line
    tree     numbers of nodes in order, and groups of them: {"label", "module", "of": tree}
    params   {"name", "role", "type"};  dims  {"name", "facts"}

Fields of tuples are no nodes of their own. Bindings of one module that follow one another are a group: so a graph in which groups are
folded has no circles.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from nnfront.ir import (
    Atom,
    Binding,
    Call,
    Constant,
    Function,
    FunctionCall,
    If,
    MatchShape,
    Op,
    Projection,
    Provenance,
    Scalar,
    StateLayerType,
    StateType,
    Tuple,
    TupleType,
    Type,
    Var,
    symbols_in,
)
from nnfront.ir.print_types import TypePrinter, dim_text, repeats

Node: TypeAlias = dict[str, Any]
Tree: TypeAlias = list[Any]

ATTENDING, NORMING = ("attention",), ("norm",)
"""Parts of the names of ops that a reader looks for."""


class Lines:
    """The source lines that graphs name, each once: `numbers` maps a file and line to its number."""

    def __init__(self) -> None:
        self.numbers: dict[tuple[str, int], int] = {}

    def number(self, provenance: Provenance | None) -> int | None:
        """Return the number of a binding's line; None if there is none."""
        if provenance is None or not provenance.file:
            return None
        return self.numbers.setdefault((provenance.file, provenance.line), len(self.numbers))


def graph_of(function: Function, lines: Lines) -> dict[str, Any]:
    """Return a function as a graph; source lines are counted in `lines`."""
    return _Graph(function, lines).data()


class _Graph:
    def __init__(self, function: Function, lines: Lines) -> None:
        self.function = function
        self.lines = lines
        self.printer = TypePrinter(symbols_in(function))
        self.nodes: list[Node] = []
        self.makers: dict[int, int] = {}  # a variable's id to the node that it is made by
        self.weights = {id(param): param.name for param in function.weights}

    def data(self) -> dict[str, Any]:
        function = self.function
        tree: Tree = []
        for param in function.inputs:
            tree.append(self._add(param.role, "state" if param.role == "state" else "input", param, ()))
        tree += _grouped(list(self._bindings(function.bindings)), ())
        results = [function.result]
        last = function.bindings[-1] if function.bindings else None
        if last is not None and last.var is function.result and isinstance(last.value, Tuple):
            results = list(last.value.fields)
        tree.append(self._add("result", "result", Var("result", function.result_type), results))
        return {
            "kind": function.kind,
            "dims": [
                {"name": name, "facts": dim_text(symbol, name).partition(": ")[2]}
                for symbol, name in self.printer.dims.names.items()
            ],
            "params": [{"name": p.name, "role": p.role, "type": self._type(p.type)} for p in function.params],
            "result": self._type(function.result_type),
            "nodes": self.nodes,
            "tree": tree,
        }

    def _bindings(self, bindings: Sequence[Binding]) -> Iterator[tuple[Any, tuple[str, ...]]]:
        """Yield what stands in the tree for each binding, and the module that it is of as its path."""
        for binding in bindings:
            value, var = binding.value, binding.var
            path = tuple(filter(None, _module(binding).split(".")))
            if isinstance(value, Projection):
                self._same(var, value.tuple)
            elif isinstance(value, Var):
                self._same(var, value)
            elif isinstance(value, Tuple) and var is self.function.result:
                continue
            elif isinstance(value, If):
                yield self._branches(binding, value), path
            else:
                yield self._call(binding), path

    def _same(self, var: Var, of: Atom) -> None:
        if id(of) in self.makers:
            self.makers[id(var)] = self.makers[id(of)]
        if id(of) in self.weights:
            self.weights[id(var)] = self.weights[id(of)]

    def _branches(self, binding: Binding, value: If) -> Node:
        of: Tree = []
        for label, block in (("then", value.then), ("else", value.otherwise)):
            of.append({"label": label, "module": _module(binding), "of": _grouped(list(self._bindings(block.bindings)), ())})  # fmt: skip
        atoms = [value.condition, value.then.result, value.otherwise.result]
        of.append(self._add("if", "if", binding.var, atoms, binding=binding))
        condition = value.condition.name if isinstance(value.condition, Var) else "a constant"
        return {"label": f"if {condition}", "module": _module(binding), "of": of}

    def _type(self, type: Type) -> str:
        """A type, alike fields of a tuple once."""
        if not isinstance(type, TupleType) or type.names:
            return self.printer.type(type)
        return f"({', '.join(repeats([self.printer.type(field) for field in type.fields]))})"

    def _call(self, binding: Binding) -> int:
        value, attrs = binding.value, list[str]()
        match value:
            case Call():
                atoms = [atom for atom in value.args if atom is not None]
                op, kind, attrs = value.op.name, _kind(value.op, atoms), self.printer.attr_list(value.attrs)
            case FunctionCall():
                op, kind, atoms = value.function, "call", list(value.args)
            case Tuple():
                op, kind, atoms = "tuple", "view", list(value.fields)
            case MatchShape():
                op, kind, atoms = "match_shape", "view", [value.value]
            case _:
                op, kind, atoms = "constant", "view", []
        return self._add(op, kind, binding.var, atoms, attrs, binding)

    def _add(
        self,
        op: str,
        kind: str,
        var: Var,
        atoms: Sequence[Atom],
        attrs: Sequence[str] = (),
        binding: Binding | None = None,
    ) -> int:
        """Add the node that makes a variable; return its number."""
        node: Node = {
            "op": op,
            "kind": kind,
            "name": var.name,
            "type": self._type(var.type),
            "in": list(dict.fromkeys(self.makers[id(atom)] for atom in atoms if id(atom) in self.makers)),
            "attrs": [*(text for atom in atoms if (text := self._literal(atom))), *attrs],
            "weights": [self.weights[id(atom)] for atom in atoms if id(atom) in self.weights],
            "call": op if kind == "call" else "",
            "module": _module(binding),
            "at": None if binding is None else self.lines.number(binding.provenance),
        }
        self.nodes.append({key: value for key, value in node.items() if value not in ("", [], None)})
        self.makers[id(var)] = len(self.nodes) - 1
        return len(self.nodes) - 1

    def _literal(self, atom: Atom) -> str:
        """A literal as text, a constant by its type."""
        if isinstance(atom, Constant):
            return f"constant {self._type(atom.type)}"
        return str(atom.value) if isinstance(atom, Scalar) else ""


def _module(binding: Binding | None) -> str:
    return binding.provenance.module if binding is not None and binding.provenance is not None else ""


def _kind(op: Op, atoms: Sequence[Atom]) -> str:
    """What sort of node an op is, which the page tells by its colour."""
    if any(isinstance(atom, Var) and isinstance(atom.type, StateType | StateLayerType) for atom in atoms):
        return "attention" if any(part in op.name for part in ATTENDING) else "state"
    if any(part in op.name for part in NORMING):
        return "norm"
    if any(part in op.name for part in ATTENDING):
        return "attention"
    if op.is_view or op.moves:
        return "view"
    return "product" if op.flops is not None else "math"


def _grouped(items: Sequence[tuple[Any, tuple[str, ...]]], prefix: tuple[str, ...]) -> Tree:
    """The items as a tree by module, those that follow one another; a group of one item is that item."""
    depth, tree, i = len(prefix), [], 0
    while i < len(items):
        path = items[i][1]
        end = i + 1
        if len(path) > depth:
            head = path[: depth + 1]
            while end < len(items) and items[end][1][: depth + 1] == head:
                end += 1
            inside = _grouped(items[i:end], head)
            if len(inside) > 1:
                tree.append({"label": head[-1], "module": ".".join(head), "of": inside})
            elif isinstance(inside[0], dict) and inside[0]["module"].startswith(".".join(head)):
                tree.append({**inside[0], "label": f"{head[-1]}.{inside[0]['label']}"})
            else:
                tree += inside
        else:
            tree.append(items[i][0])
        i = end
    return tree
