# SPDX-License-Identifier: Apache-2.0
"""Text to IR, the inverse of `printer`, whose docstring has the grammar. One method for each of its rules.

The parser resolves names and keeps declared types as they are written; whether the result makes sense is for `verify`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nnfront.dims import bounded_work
from nnfront.ir.budget import MAX_DIM_TERMS, MAX_FUNCTIONS
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
    Scalar,
    Tuple,
    Var,
)
from nnfront.ir.interfaces import KINDS, Kind
from nnfront.ir.literals import CALLS, KEYWORDS, constant_bytes, decode_base64
from nnfront.ir.module import Function, IRModule
from nnfront.ir.op import OPS
from nnfront.ir.parse_types import TypeParser
from nnfront.ir.print_types import type_text
from nnfront.ir.tokens import Tokens
from nnfront.ir.types import TensorType


def parse(text: str) -> IRModule:
    """Return the module that `print_module` wrote as `text`.

    Raises ParseError with line, column, what was expected, and the nearest known name for one that is not known.
    """
    with bounded_work(MAX_DIM_TERMS):
        return _module(Tokens(text))


def _module(tokens: Tokens) -> IRModule:
    attrs = _Parser(tokens).module_attrs()
    functions: dict[str, Function] = {}
    while tokens.kind != "end":
        start = tokens.index
        function = _Parser(tokens).function()
        if function.name in functions:
            tokens.error(f"there is a function {function.name!r} already", at=start)
        if len(functions) == MAX_FUNCTIONS:
            tokens.error(f"a module has at most {MAX_FUNCTIONS} functions", at=start)
        functions[function.name] = function
    return IRModule(functions.values(), attrs)


def parse_function(text: str) -> Function:
    """Return the function that `print_function` wrote as `text`. Raises ParseError."""
    with bounded_work(MAX_DIM_TERMS):
        tokens = Tokens(text)
        function = _Parser(tokens).function()
        if tokens.kind != "end":
            tokens.fail("the end, after one function")
        return function


class _Parser(TypeParser):
    """Reads one function, or the attributes of a module."""

    def __init__(self, tokens: Tokens) -> None:
        super().__init__(tokens)
        self.vars: dict[str, Var] = {}
        self.lines: dict[str, int] = {}  # name -> index of the token that binds it

    def module_attrs(self) -> Mapping[str, Any]:
        """Read the attributes of a module, if the text has them."""
        tokens = self.tokens
        if tokens.next != "module":
            return NO_ATTRS
        tokens.index += 1
        tokens.expect("(")
        return self.attrs(")")

    def function(self) -> Function:
        """Read a function."""
        tokens = self.tokens
        kind: Kind = "public"
        if tokens.next in KINDS and tokens.next != "public":
            kind = KINDS[KINDS.index(tokens.next)]
            tokens.index += 1
        if tokens.next != "def":
            tokens.fail("a function: 'def' or its kind")
        tokens.index += 1
        name = tokens.name("the name of a function")
        self.declare_dims()
        tokens.expect("(")
        params = tuple(self.items(")", self.param))
        tokens.expect("->")
        declared = self.type()
        attrs: Mapping[str, Any] = NO_ATTRS
        if tokens.take("attrs"):
            tokens.expect("(")
            attrs = self.attrs(")")
        tokens.expect("{")
        block = self.block("return")
        result = block.result.type
        if result is not declared and result != declared:
            tokens.error(
                f"the header of {name!r} says that it returns {type_text(declared)}, but this is {type_text(result)}",
                at=tokens.index - 2,
            )
        return Function(name, params, block.bindings, block.result, kind, attrs)

    def param(self) -> Param:
        """Read a parameter."""
        tokens = self.tokens
        start = tokens.index
        name = tokens.name("a parameter")
        tokens.expect(":")
        if tokens.next not in ROLES:
            tokens.fail(f"the role of {name!r}: {', '.join(ROLES[:-1])} or {ROLES[-1]}")
        role = ROLES[ROLES.index(tokens.next)]
        tokens.index += 1
        param = Param(name, self.type(), role)
        self.bind(param, start)
        return param

    def bind(self, var: Var, at: int) -> None:
        """Make a name known from here on."""
        if var.name in self.lines:
            line = self.tokens.line_of(self.lines[var.name])
            self.tokens.error(f"{var.name!r} is bound already, in line {line}", at=at)
        self.vars[var.name] = var
        self.lines[var.name] = at

    def block(self, last: str) -> Block:
        """Read bindings and the result behind the word `last`, up to the closing brace; the opening one has been read."""
        tokens = self.tokens
        tokens.enter()
        bindings = []
        while not tokens.take(last):
            bindings.append(self.binding(last))
        result = self.atom()
        tokens.expect("}")
        tokens.leave()
        return Block(tuple(bindings), result)

    def binding(self, last: str) -> Binding:
        """Read a binding."""
        tokens = self.tokens
        start = tokens.index
        if tokens.kind == "name" and tokens.next in KEYWORDS:
            tokens.fail(f"a binding or {last!r}")
        name = tokens.name(f"a binding or {last!r}")
        tokens.expect(":")
        type = self.type()
        tokens.expect("=")
        if tokens.kind == "name" and tokens.next == "if":
            tokens.index += 1
            condition = self.atom()
            tokens.expect("{")
            provenance = tokens.comments.get(tokens.index - 1)
            value: Expr = self.branches(condition)
        else:
            value = self.value()
            provenance = tokens.comments.get(tokens.index - 1)
        var = Var(name, type)
        self.bind(var, start)
        return Binding(var, value, provenance)

    def branches(self, condition: Atom) -> If:
        """Read the two blocks of an `if`; what they bind is not known behind them."""
        outer = self.vars
        self.vars = dict(outer)
        then = self.block("yield")
        self.tokens.expect("else")
        self.tokens.expect("{")
        self.vars = dict(outer)
        otherwise = self.block("yield")
        self.vars = outer
        return If(condition, then, otherwise)

    def value(self) -> Expr:
        """Read the value of a binding, except for an `if`."""
        tokens = self.tokens
        kind, token = tokens.kind, tokens.next
        if token == "@" and kind == "sign":
            tokens.index += 1
            name = tokens.name("the name of a function")
            tokens.expect("(")
            return FunctionCall(name, tuple(self.items(")", self.atom)))
        if kind == "sign" and token in ("(", "{"):
            fields, names = self.fields(self.atom)
            return Tuple(fields, names)
        if tokens.after() == "(" and (kind == "string" or (kind == "name" and token not in CALLS)):
            return self.call()
        if kind == "name" and token == "match_shape" and tokens.after() == "(":
            tokens.index += 2
            atom = self.atom()
            tokens.expect(",")
            type = self.type()
            tokens.expect(")")
            return MatchShape(atom, type)
        atom = self.atom()
        if tokens.take("["):
            index = tokens.integer("the number of a field")
            tokens.expect("]")
            return Projection(atom, index)
        return atom

    def call(self) -> Call:
        """Read the call of an op."""
        tokens = self.tokens
        start = tokens.index
        name = tokens.name("an op")
        op = OPS.get(name)
        if op is None:
            tokens.unknown(
                f"there is no op {name!r}", name, OPS, at=start, help="import the module that declares it"
            )
        tokens.expect("(")
        args: list[Atom | None] = []
        attrs: dict[str, Any] = {}
        for _ in tokens.each(")"):
            if tokens.after() == "=" and tokens.kind in ("name", "string"):
                self.attr(attrs)
            elif attrs:
                tokens.fail("an attribute: operands come first")
            elif tokens.kind == "name" and tokens.next == "None":
                tokens.index += 1
                args.append(None)
            else:
                args.append(self.atom())
        if not op.is_variadic:
            # Absent operands are not written at the end.
            args += [None for operand in op.operands[len(args) :] if operand.is_optional]
        return Call(op, tuple(args), attrs or NO_ATTRS)

    def atom(self) -> Atom:
        """Read a variable, a literal or a constant."""
        tokens = self.tokens
        kind, token, start = tokens.kind, tokens.next, tokens.index
        if kind == "name":
            var = self.vars.get(token)
            if var is not None and token not in KEYWORDS and tokens.after() != "(":
                tokens.index += 1
                return var
            if token == "dim" and tokens.after() == "(":
                tokens.index += 2
                size = self.size()
                tokens.expect(")")
                return Scalar(size)
            if token == "const" and tokens.after() == "(":
                tokens.index += 2
                return self.constant()
        number = self.number()
        if number is not None:
            return Scalar(number)
        if kind == "name" and token in KEYWORDS:
            tokens.fail("a variable, a number or a constant")
        name = tokens.name("a variable, a number or a constant")
        if name not in self.vars:
            where = " here: it is bound in another branch" if name in self.lines else ""
            tokens.unknown(f"there is no variable {name!r}{where}", name, self.vars, at=start)
        return self.vars[name]

    def constant(self) -> Constant:
        """Read a constant behind `const(`."""
        tokens = self.tokens
        start = tokens.index
        type = self.type()
        if not isinstance(type, TensorType):
            tokens.error("a constant is a tensor", at=start)
        tokens.expect(",")
        start = tokens.index
        if tokens.kind == "string":
            data = decode_base64(tokens.string())
            problem = "this is not base64"
        else:
            tokens.expect("[")
            data = constant_bytes(self.items("]", self.element), type.dtype)
            problem = f"not every element is a {type.dtype} that can be written in a list"
        if data is None:
            tokens.error(problem, at=start)
        tokens.expect(")")
        return Constant(type, data)

    def element(self) -> bool | int | float:
        """Read an element of a constant."""
        number = self.number()
        return self.tokens.fail("a number") if number is None else number
