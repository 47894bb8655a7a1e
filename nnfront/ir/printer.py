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
              | NAME "(" ((atom | "None") % ",", attr % ",") ")"         call of an op; None: operand left out
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
              | "(" item % "," ")"  |  "{" (NAME ":" item) % "," "}"

    type        dtype "[" SIZE % "," "]"                                 tensor
              | dtype ("(" SIZE ")")?                                    host scalar, and its value where one is known
              | "shape" "[" SIZE % "," "]"
              | "(" type % "," ")"  |  "{" (NAME ":" type) % "," "}"     tuple; tuple with names. One field: "(t,)"
              | layer | "cache" "(" layers % "," ")"
              | "object" "(" STRING ")" | "fn" "(" type % "," ")" "->" type
    layer       "layer" "(" "kv_heads" "=" INT "," "head_size" "=" INT "," "dtype" "=" dtype ","
                        "batch" "=" SIZE "," "max_seq" "=" SIZE ("," "window" "=" INT)? ")"
    layers      layer | INT "*" layer | INT "*" "(" layers % "," ")"

    NAME        WORD ("." WORD)* with digits allowed after a dot, or STRING   a STRING is never a keyword
    STRING      JSON's
    SIZE        an int or an expression over the dims, as in `nnfront.dims`

White space separates and means nothing else. `#` starts a comment; `# at model.layers.0.mlp (llama.py:41)` behind a binding
(behind the first brace of an `if`) is its provenance. The text depends on the meaning only: same module, same bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nnfront.dims import Dim, Size, Symbol
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
from nnfront.ir.literals import CALLS, KEYWORDS, constant_text, escape, name_text, number_text, quote
from nnfront.ir.scope import DimTexts, symbols_in
from nnfront.ir.types import (
    CacheLayerType,
    CacheType,
    FunctionType,
    ObjectType,
    ScalarType,
    ShapeType,
    TensorType,
    TupleType,
    Type,
)

if TYPE_CHECKING:
    from nnfront.ir.module import Function, IRModule

_INDENT = "    "
_WIDTH = 120  # longer lists are written one item a line
_PERIOD = 8  # longest pattern of cache layers that is looked for


def print_module(module: IRModule, *, provenance: bool = False) -> str:
    """Return the text form of a module, without a newline at its end; with `provenance`, each binding says where it comes from."""
    parts = [print_function(function, provenance=provenance) for function in module.functions]
    if module.attrs:
        # The attributes of a module belong to no function, so their dims keep their names.
        parts.insert(0, f"module{_Printer(()).attrs(module.attrs)}")
    return "\n\n".join(parts)


def print_function(function: Function, *, provenance: bool = False) -> str:
    """Return the text form of a function."""
    printer = _Printer(symbols_in(function), provenance)
    return "\n".join(printer.function(function))


def type_text(type: Type) -> str:
    """Return the text form of a type, for messages: dims by their own names."""
    return _Printer(()).type(type)


class _Printer:
    """Writes what belongs to one function."""

    def __init__(self, symbols: Sequence[Symbol], provenance: bool = False) -> None:
        self.dims = DimTexts(symbols)
        self.provenance = provenance
        self.names: dict[str, str] = {}
        self.types: dict[int, str] = {}  # by id: the function keeps its types alive

    def function(self, function: Function) -> Iterator[str]:
        """Yield the lines of a function."""
        kind = "" if function.kind == "public" else f"{function.kind} "
        dims = ", ".join(_dim_text(symbol, name) for symbol, name in self.dims.names.items())
        params = [f"{name_text(p.name)}: {p.role} {self.type(p.type)}" for p in function.params]
        result = self._broken_type(function.result_type, "", len(") ->  {"))
        attrs = f" attrs{self.attrs(function.attrs)}" if function.attrs else ""
        yield (
            f"{kind}def {name_text(function.name)}{f'[{dims}]' if dims else ''}"
            f"{_lines('(', params, ')', '') if params else '()'} -> {result}{attrs} {{"
        )
        yield from self.block(function.bindings, f"return {self.atom(function.result)}", _INDENT)
        yield "}"

    def block(self, bindings: Sequence[Binding], last: str, indent: str) -> Iterator[str]:
        """Yield the lines of a block; `last` gives its result."""
        for binding in bindings:
            var, value = binding.var, binding.value
            head = f"{indent}{self.name(var.name)}: "
            where = self._where(binding.provenance)
            if isinstance(value, If):
                type = self._broken_type(var.type, indent, len(head) + 20)
                yield f"{head}{type} = if {self.atom(value.condition)} {{{where}"
                yield from self._branch(value.then, indent)
                yield f"{indent}}} else {{"
                yield from self._branch(value.otherwise, indent)
                yield f"{indent}}}"
                continue
            type, text = self.type(var.type), self.value(value)
            if len(head) + len(type) + len(text) > _WIDTH:
                type = self._broken_type(var.type, indent, len(head))
                text = self._broken_value(value, text, indent)
            yield f"{head}{type} = {text}{where}"
        yield f"{indent}{last}"

    def _branch(self, block: Block, indent: str) -> Iterator[str]:
        return self.block(block.bindings, f"yield {self.atom(block.result)}", indent + _INDENT)

    def _where(self, provenance: Provenance | None) -> str:
        return (
            f"  # at {escape(str(provenance))}" if self.provenance and provenance and str(provenance) else ""
        )

    # Values.

    def value(self, value: Expr) -> str:
        """Return a value on one line."""
        match value:
            case Call():
                args = [*map(self.operand, value.args), *self._attr_list(value.attrs)]
                return f"{name_text(value.op.name, CALLS)}({', '.join(args)})"
            case FunctionCall():
                return f"@{name_text(value.function)}({', '.join(map(self.atom, value.args))})"
            case Tuple():
                return _bracketed(*self._fields(value))
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
        if len(text) <= _WIDTH - 2 * len(indent):
            return text
        match value:
            case Tuple():
                return _lines(*self._fields(value), indent)
            case Call(args=args) | FunctionCall(args=args) if len(args) > 1:
                attrs = self._attr_list(value.attrs) if isinstance(value, Call) else []
                return _lines(text[: text.index("(") + 1], [*map(self.operand, args), *attrs], ")", indent)
            case _:
                return text

    def _fields(self, value: Tuple) -> tuple[str, list[str], str]:
        atoms = [self.atom(field) for field in value.fields]
        return _tuple_parts(atoms, value.names)

    def operand(self, atom: Atom | None) -> str:
        """Return an operand of an op."""
        return "None" if atom is None else self.atom(atom)

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

    # Attributes.

    def attrs(self, attrs: Mapping[str, Any]) -> str:
        """Return attributes in parentheses, one a line if they are long."""
        items = self._attr_list(attrs)
        text = f"({', '.join(items)})"
        return text if len(text) <= _WIDTH else _lines("(", items, ")", "")

    def _attr_list(self, attrs: Mapping[str, Any]) -> list[str]:
        return [f"{name_text(name)}={self.item(value)}" for name, value in attrs.items()]

    def item(self, value: Any) -> str:
        """Return the value of an attribute."""
        match value:
            case None:
                return "None"
            case bool() | int() | float():
                return number_text(value)
            case str():
                return quote(value)
            case Dim():
                text = self.dims.size(value)
                return f"dim({text})" if text in KEYWORDS else text
            case tuple() | list():
                return _bracketed(*_tuple_parts([self.item(item) for item in value], None))
            case Mapping():
                return _bracketed(*_tuple_parts([self.item(item) for item in value.values()], tuple(value)))
            case _:
                assert isinstance(value, Type), f"an attribute cannot be a {type(value).__name__}"
                return f"type({self.type(value)})"

    # Types.

    def type(self, type: Type) -> str:
        """Return a type on one line."""
        text = self.types.get(id(type))
        if text is None:
            text = self.types[id(type)] = self._type(type)
        return text

    def _type(self, type: Type) -> str:
        match type:
            case TensorType():
                return f"{name_text(type.dtype)}[{self._sizes(type.shape)}]"
            case ShapeType():
                return f"shape[{self._sizes(type.sizes)}]"
            case ScalarType():
                return name_text(type.dtype) + (
                    "" if type.value is None else f"({self.dims.size(type.value)})"
                )
            case TupleType():
                return _bracketed(*_tuple_parts([self.type(field) for field in type.fields], type.names))
            case CacheLayerType():
                window = "" if type.window is None else f", window={type.window}"
                return (
                    f"layer(kv_heads={type.kv_heads}, head_size={type.head_size}, dtype={name_text(type.dtype)}, "
                    f"batch={self.dims.size(type.batch)}, max_seq={self.dims.size(type.max_seq)}{window})"
                )
            case CacheType():
                return f"cache({', '.join(repeats([self.type(layer) for layer in type.layers]))})"
            case ObjectType():
                return f"object({quote(type.name)})"
            case FunctionType():
                return f"fn({', '.join(map(self.type, type.params))}) -> {self.type(type.result)}"

    def _sizes(self, sizes: Sequence[Size]) -> str:
        return ", ".join(map(self.dims.size, sizes))

    def _broken_type(self, type: Type, indent: str, used: int) -> str:
        """Return a type with one field a line if it is a long tuple."""
        text = self.type(type)
        if not isinstance(type, TupleType) or len(text) + used <= _WIDTH:
            return text
        return _lines(*_tuple_parts([self.type(field) for field in type.fields], type.names), indent)


def repeats(texts: Sequence[str]) -> Iterator[str]:
    """Yield the texts with runs and periods counted: `2 * a`, `3 * (a, b)`."""
    start = 0
    while start < len(texts):
        covered, period = 1, 1
        for length in range(1, min(_PERIOD, (len(texts) - start) // 2) + 1):
            count = 1
            unit = texts[start : start + length]
            while texts[start + count * length : start + (count + 1) * length] == unit:
                count += 1
            if count > 1 and count * length > covered:
                covered, period = count * length, length
        unit = texts[start : start + period]
        text = unit[0] if period == 1 else f"({', '.join(repeats(unit))})"
        yield text if covered == period else f"{covered // period} * {text}"
        start += covered


def _dim_text(symbol: Symbol, name: str) -> str:
    low, high, step = symbol.facts
    span = "" if (low, high) == (0, None) else f"{low}..{'' if high is None else high}"
    facts = " ".join([*([span] if span else []), *([f"% {step}"] if step > 1 else [])])
    return f"{'fresh ' if symbol.uid else ''}{name}{f': {facts}' if facts else ''}"


def _tuple_parts(texts: list[str], names: Sequence[str] | None) -> tuple[str, list[str], str]:
    """Return the opening bracket, the fields and the closing bracket of a tuple."""
    if names is not None:
        return "{", [f"{name_text(name)}: {text}" for name, text in zip(names, texts, strict=True)], "}"
    return "(", texts, ",)" if len(texts) == 1 else ")"


def _bracketed(opening: str, texts: Sequence[str], closing: str) -> str:
    return f"{opening}{', '.join(texts)}{closing}"


def _lines(opening: str, texts: Iterable[str], closing: str, indent: str) -> str:
    """Return a list with one item a line, each with a comma behind it."""
    items = "".join(f"{indent}{_INDENT}{text},\n" for text in texts)
    return f"{opening}\n{items}{indent}{closing.removeprefix(',')}"
