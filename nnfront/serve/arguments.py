# SPDX-License-Identifier: Apache-2.0
"""Arguments of tools' calls and their JSON schemas: which parameters a tool has, of which types they may be, and what a text says of one."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nnfront.files import parse_json

KINDS: dict[type, str] = {
    str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object", type(None): "null",
}  # fmt: skip
TYPES = frozenset(KINDS.values())
_WORDS = {"true": True, "false": False, "null": None}


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a tool: its schema, whole in itself, the types of JSON that it allows, and whether a call must have it."""

    schema: Any
    types: frozenset[str]
    is_required: bool

    @property
    def texts(self) -> list[str] | None:
        """The only texts that it may be; None where it may be others."""
        if not isinstance(self.schema, Mapping):
            return None
        listed = self.schema.get("enum", [self.schema["const"]] if "const" in self.schema else None)
        is_texts = isinstance(listed, list) and all(isinstance(value, str) for value in listed)
        return listed if is_texts and listed else None


def parameters_of(schema: Any) -> dict[str, Parameter]:
    """The parameters that a tool's schema declares, by their names."""
    found = _followed(schema, schema)
    declared = found.get("properties")
    required = found.get("required")
    names = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
    properties = dict(declared) if isinstance(declared, Mapping) else {}
    properties |= {name: True for name in names if name not in properties}
    whole = schema if isinstance(schema, Mapping) else {}
    shared = {name: whole[name] for name in ("$defs", "definitions") if name in whole}
    return {
        name: Parameter(
            {**shared, **each} if isinstance(each, Mapping) else each, _types(each, schema), name in names
        )
        for name, each in properties.items()
    }


def value_of(text: str, parameter: Parameter | None) -> Any:
    """What a text says of a parameter, as the types of its schema have it; of one that no schema declares, JSON if it is some.

    A text is one where only that is allowed, and where it says nothing of the other types.
    """
    types = TYPES if parameter is None else parameter.types
    if types == {"string"}:
        return text
    for read in (_json,) if types == TYPES else (_json, literal_of):
        try:
            found = read(text.strip())
            json.dumps(found, allow_nan=False)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            continue
        kind = KINDS.get(type(found), "string")
        if kind != "string" and (kind in types or (kind == "integer" and "number" in types)):
            return found
    return text


def literal_of(text: str | ast.expr) -> Any:
    """What a literal of Python's says, in which JSON's words are literals, too. Raises ValueError, or SyntaxError, for what is none."""
    tree = ast.parse(text, mode="eval").body if isinstance(text, str) else text
    return ast.literal_eval(_Words().visit(tree))


class _Words(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_WORDS[node.id]) if node.id in _WORDS else node


def _json(text: str) -> Any:
    return parse_json(text.encode("utf-8", "replace"))


def _types(schema: Any, root: Any, depth: int = 8) -> frozenset[str]:
    """The types that a schema allows, as far as it says."""
    if not isinstance(schema, Mapping) or not depth:
        return TYPES
    found = _followed(schema, root)
    allowed = TYPES
    if isinstance(said := found.get("type"), str | list):
        allowed &= frozenset(
            [said] if isinstance(said, str) else [each for each in said if isinstance(each, str)]
        )
    listed = found.get("enum", [found["const"]] if "const" in found else None)
    if isinstance(listed, list):
        allowed &= frozenset(KINDS.get(type(value), "string") for value in listed)
    for name in ("anyOf", "oneOf"):
        if isinstance(several := found.get(name), list):
            allowed &= frozenset[str]().union(*(_types(each, root, depth - 1) for each in several))
    return allowed or TYPES


def _followed(schema: Any, root: Any) -> Mapping[str, Any]:
    """A schema, or what it refers to within another."""
    for _ in range(8):
        where = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(where, str) or not where.startswith("#/"):
            break
        schema = root
        for step in where[2:].split("/"):
            schema = (
                schema.get(step.replace("~1", "/").replace("~0", "~"))
                if isinstance(schema, Mapping)
                else None
            )
    return schema if isinstance(schema, Mapping) else {}
