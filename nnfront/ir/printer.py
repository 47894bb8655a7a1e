# SPDX-License-Identifier: Apache-2.0
"""IR as text. The grammar (`x*` any number, `x?` at most one, `x % ","` a list, whose last comma is optional):

    module      ("module" attrs)? function*
    function    kind? "def" NAME dims? "(" param % "," ")" "->" type ("attrs" attrs)? block("return")
    kind        "private" | "transform" | "fused" | "external"                       none: public
    dims        "[" ("fresh"? WORD (":" facts)?) % "," "]"                every dim of the function
    facts       (INT? ".." INT?)? ("%" INT)?                   least and greatest value; a divisor
    param       NAME ":" ("input" | "weight" | "transformed" | "state") type

    block(end)  "{" binding* end atom "}"
    binding     NAME ":" type "=" value
    value       atom
              | NAME "(" ((atom | "None") % ",", attr % ",") ")"         call of an op; None: an absent operand
              | "@" NAME "(" atom % "," ")"                              call of a function of the module
              | "(" atom % "," ")"  |  "{" (NAME ":" atom) % "," "}"     tuple; tuple with names. One field: "(x,)"
              | atom "[" INT "]"                                         one field of a tuple
              | "if" atom block("yield") "else" block("yield")
              | "match_shape" "(" atom "," type ")"
    atom        NAME | number | "dim" "(" SIZE ")"
              | "const" "(" type "," ("[" number % "," "]" | STRING) ")"  elements in row-major order; base64 of their bytes
    number      "True" | "False" | "-"? (INT | FLOAT | "inf" | "nan")

    attrs       "(" attr % "," ")"
    attr        NAME "=" item
    item        "None" | number | STRING | SIZE | "dim" "(" SIZE ")" | "type" "(" type ")"
              | "@" NAME                                                 a function of the module, which the op calls
              | "(" item % "," ")"  |  "{" (NAME ":" item) % "," "}"

    type        dtype "[" SIZE % "," "]"                                 tensor
              | dtype ("(" SIZE ")")?                                    host scalar, and its value where one is known
              | "shape" "[" SIZE % "," "]"
              | "(" type % "," ")"  |  "{" (NAME ":" type) % "," "}"     tuple; tuple with names. One field: "(t,)"
              | layer | "cache" "(" layers % "," ")"
              | "object" "(" STRING ")" | "fn" "(" type % "," ")" "->" type
    layer       "layer" "(" "batch" "=" SIZE "," "max_seq" "=" SIZE ("," "per_token" "=" buffers)? ("," "per_sequence" "=" buffers)?
                            ("," "window" "=" INT)? ")"
              | "layer" "(" "kv_heads" "=" INT "," "head_size" "=" INT "," "dtype" "=" dtype ","
                            "batch" "=" SIZE "," "max_seq" "=" SIZE ("," "window" "=" INT)? ")"      keys and values, in older text
    buffers     "{" (NAME ":" dtype "[" INT % "," "]") % "," "}"
    layers      layer | INT "*" layer | INT "*" "(" layers % "," ")"

    NAME        WORD ("." WORD)* with digits allowed after a dot, or STRING   a STRING is never a keyword
    STRING      JSON's
    SIZE        an int or an expression over the dims, as in `nnfront.dims`

White space separates and means nothing else. `#` starts a comment; `# at model.layers.0.mlp (llama.py:41)` behind a binding
(behind the first brace of an `if`) is its provenance. The text of a module is the same bytes in
every process.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nnfront.dims import Dim, Symbol
from nnfront.ir.expr import (
    Atom,
    Binding,
    Block,
    Call,
    Constant,
    Expr,
    FunctionCall,
    If,
    MatchShape,
    Projection,
    Provenance,
    Scalar,
    Tuple,
    Var,
)
from nnfront.ir.function_dims import symbols_in
from nnfront.ir.interfaces import FunctionData, ModuleLike
from nnfront.ir.literals import CALLS, constant_text, escape, name_text, number_text
from nnfront.ir.print_types import INDENT, WIDTH, TypePrinter, bracketed, dim_text, lines, tuple_parts


def print_module(module: ModuleLike, *, provenance: bool = False) -> str:
    """Return the text form of a module, without a newline at its end; with `provenance`, each binding says where it comes from."""
    parts = [print_function(function, provenance=provenance) for function in module.functions]
    if module.attrs:
        # The attributes of a module belong to no function, so their dims keep their names.
        parts.insert(0, f"module{TypePrinter(()).attrs(module.attrs)}")
    return "\n\n".join(parts)


def print_function(function: FunctionData, *, provenance: bool = False) -> str:
    """Return the text form of a function."""
    printer = _Printer(symbols_in(function), provenance)
    return "\n".join(printer.function(function))


class _Printer(TypePrinter):
    """Writes what belongs to one function."""

    def __init__(self, symbols: Sequence[Symbol], provenance: bool = False) -> None:
        super().__init__(symbols)
        self.provenance = provenance
        self.names: dict[str, str] = {}

    def function(self, function: FunctionData) -> Iterator[str]:
        """Yield the lines of a function."""
        kind = "" if function.kind == "public" else f"{function.kind} "
        dims = ", ".join(dim_text(symbol, name) for symbol, name in self.dims.names.items())
        params = [f"{name_text(p.name)}: {p.role} {self.type(p.type)}" for p in function.params]
        result = self.broken_type(function.result_type, "", len(") ->  {"))
        attrs = f" attrs{self.attrs(function.attrs)}" if function.attrs else ""
        yield (
            f"{kind}def {name_text(function.name)}{f'[{dims}]' if dims else ''}"
            f"{lines('(', params, ')', '') if params else '()'} -> {result}{attrs} {{"
        )
        yield from self.block(function.bindings, f"return {self.atom(function.result)}", INDENT)
        yield "}"

    def block(self, bindings: Sequence[Binding], last: str, indent: str) -> Iterator[str]:
        """Yield the lines of a block; `last` gives its result."""
        for binding in bindings:
            var, value = binding.var, binding.value
            head = f"{indent}{self.name(var.name)}: "
            where = self._where(binding.provenance)
            if isinstance(value, If):
                type = self.broken_type(var.type, indent, len(head) + 20)
                yield f"{head}{type} = if {self.atom(value.condition)} {{{where}"
                yield from self._branch(value.then, indent)
                yield f"{indent}}} else {{"
                yield from self._branch(value.otherwise, indent)
                yield f"{indent}}}"
                continue
            type, text = self.type(var.type), self.value(value)
            if len(head) + len(type) + len(text) > WIDTH:
                type = self.broken_type(var.type, indent, len(head))
                text = self._broken_value(value, text, indent)
            yield f"{head}{type} = {text}{where}"
        yield f"{indent}{last}"

    def _branch(self, block: Block, indent: str) -> Iterator[str]:
        return self.block(block.bindings, f"yield {self.atom(block.result)}", indent + INDENT)

    def _where(self, provenance: Provenance | None) -> str:
        return (
            f"  # at {escape(str(provenance))}" if self.provenance and provenance and str(provenance) else ""
        )

    # Values.

    def value(self, value: Expr) -> str:
        """Return a value on one line."""
        match value:
            case Call():
                return f"{name_text(value.op.name, CALLS)}({', '.join(self._operands(value))})"
            case FunctionCall():
                return f"@{name_text(value.function)}({', '.join(map(self.atom, value.args))})"
            case Tuple():
                return bracketed(*self._fields(value))
            case Projection():
                return f"{self.atom(value.tuple)}[{value.index}]"
            case MatchShape():
                return f"match_shape({self.atom(value.value)}, {self.type(value.type)})"
            case If():
                raise AssertionError("an if takes several lines")
            case _:
                return self.atom(value)

    def _broken_value(self, value: Expr, text: str, indent: str) -> str:
        """Return a value with one operand a line if it is long."""
        if len(text) <= WIDTH - 2 * len(indent):
            return text
        match value:
            case Tuple():
                return lines(*self._fields(value), indent)
            case Call() | FunctionCall() if len(value.args) > 1:
                return lines(text[: text.index("(") + 1], self._operands(value), ")", indent)
            case _:
                return text

    def _fields(self, value: Tuple) -> tuple[str, list[str], str]:
        atoms = [self.atom(field) for field in value.fields]
        return tuple_parts(atoms, value.names)

    def _operands(self, call: Call | FunctionCall) -> list[str]:
        """Return operands and attributes; absent operands are left out at the end."""
        texts = ["None" if atom is None else self.atom(atom) for atom in call.args]
        while texts and texts[-1] == "None":
            texts.pop()
        return [*texts, *self.attr_list(call.attrs)] if isinstance(call, Call) else texts

    def atom(self, atom: Atom) -> str:
        """Return a variable, a constant or a literal."""
        match atom:
            case Var():
                return self.name(atom.name)
            case Constant():
                return f"const({self.type(atom.type)}, {constant_text(atom.data, atom.type.dtype)})"
            case Scalar(value=value):
                return f"dim({self.dims.size(value)})" if isinstance(value, Dim) else number_text(value)

    def name(self, name: str) -> str:
        """Return the name of a variable."""
        text = self.names.get(name)
        if text is None:
            text = self.names[name] = name_text(name)
        return text
