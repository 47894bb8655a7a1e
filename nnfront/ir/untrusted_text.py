# SPDX-License-Identifier: Apache-2.0
"""IR between machines: `release` writes it, `admit` turns text from outside into IR that may be compiled.

What is admitted is parsed, verified, and of a size that compiling can handle (`budget`). `nnfront.compile` admits what it is given in the
same way (`admissible`): text that a user parses is no other.

Text of a kilobyte can stand for more work than a machine has: a function that calls another twice, which calls a third
twice, and so on for forty functions. What a model needs is far from the limits here.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import PurePath
from typing import Any

from nnfront.errors import NnfrontError, VerifyError
from nnfront.ir.attributes import RULE_ERRORS
from nnfront.ir.budget import MAX_BINDINGS, MAX_DEPTH
from nnfront.ir.callgraph import callees_first
from nnfront.ir.expr import Binding, Block, Call, If, canonical_call
from nnfront.ir.module import IRModule
from nnfront.ir.parser import parse
from nnfront.ir.types import TupleType
from nnfront.ir.verify import verify
from nnfront.ir.visit import Mutator
from nnfront.ir.walk import functions_of


def admit(text: str) -> IRModule:
    """Return the module that a text stands for. Raises ParseError for text that is no IR, and VerifyError as `check_admissible` does."""
    module = parse(text)
    check_admissible(module)
    return module


def check_admissible(module: IRModule) -> None:
    """Raise VerifyError for IR that breaks a rule, is too large or has attributes of functions that are not what passes read there."""
    verify(module)
    _check_attributes(module)
    _check_size(module)


def admissible(module: IRModule) -> IRModule:
    """Return the module if `check_admissible` lets it pass as it is, or with its attributes as ops store them: by hand one writes `axis=-1`, and out what has a default.

    Raises VerifyError as `check_admissible` does.
    """
    try:
        check_admissible(module)
    except VerifyError:
        module = module.with_functions(_Canonical().function(function) for function in module.functions)
        check_admissible(module)
    return module


class _Canonical(Mutator):
    """Gives attributes the form in which their ops store them; those that an op cannot take stay as they are."""

    def binding(self, binding: Binding) -> Sequence[Binding]:
        call = binding.value
        if isinstance(call, Call):
            with suppress(NnfrontError, *RULE_ERRORS):
                binding = binding.with_value(canonical_call(call.op, call.args, call.attrs))
        return super().binding(binding)


def release(module: IRModule) -> str:
    """Return the text form with provenance, in which files of the author's have their names and no folders."""
    functions = (_WithoutFolders().function(f) for f in module.functions)
    return module.with_functions(functions).text(provenance=True) + "\n"


class _WithoutFolders(Mutator):
    def binding(self, binding: Binding) -> Sequence[Binding]:
        (new,) = super().binding(binding)
        where = new.provenance
        if where is None or not where.file:
            return (new,)
        return (replace(new, provenance=replace(where, file=PurePath(where.file).name)),)


def _check_attributes(module: IRModule) -> None:
    aliases = module.attrs.get("aliases", {})
    if not (isinstance(aliases, dict) and _are_texts(tuple(aliases.values()))):
        raise VerifyError("the attribute 'aliases' of a module maps names to names")
    for attr in ("unread", "ignored"):
        if not _are_texts(module.attrs.get(attr, ())):
            raise VerifyError(f"the attribute {attr!r} of a module is a tuple of names")
    for function in module.values():
        if not _are_texts(function.attrs.get("derived", ())):
            raise VerifyError(f"{function.name}: the attribute 'derived' is a tuple of names")
        declared, cases = function.attrs.get("special_cases", ()), function.attrs.get("cases", {})
        if not isinstance(declared, tuple) or not all(isinstance(case, dict) for case in declared):
            raise VerifyError(f"{function.name}: the attribute 'special_cases' is a tuple of cases")
        if not isinstance(cases, dict) or not all(isinstance(case, dict) for case in cases.values()):
            raise VerifyError(f"{function.name}: the attribute 'cases' maps texts to cases")
        transform = function.attrs.get("transform")
        found = module.get(transform) if isinstance(transform, str) else None
        if transform is not None and (found is None or found.kind != "transform"):
            raise VerifyError(f"{function.name}: the attribute 'transform' names a transform of the module")
        made = found.result_type if found is not None else None
        names = made.names or () if isinstance(made, TupleType) else ()
        for param in function.params:
            if param.role == "transformed" and function.kind == "public" and param.name not in names:
                raise VerifyError(f"{function.name}: no transform makes the parameter {param.name!r}")


def _are_texts(values: Any) -> bool:
    return isinstance(values, tuple) and all(isinstance(value, str) for value in values)


def _check_size(module: IRModule) -> None:
    sizes: dict[str, tuple[int, int]] = {}  # bindings and depth, those of called functions included
    for function in callees_first(module):
        count, depth = _measure(function.body, sizes)
        sizes[function.name] = count, depth
        if count > MAX_BINDINGS:
            raise VerifyError(
                f"{function.name}: it has {count} bindings, with those of the functions that it calls; {MAX_BINDINGS} are the most"
            )
        if depth > MAX_DEPTH:
            raise VerifyError(
                f"{function.name}: calls and branches are {depth} levels deep; {MAX_DEPTH} are the most"
            )


def _measure(block: Block, sizes: dict[str, tuple[int, int]]) -> tuple[int, int]:
    """Number of bindings, and depth. The text bounds how deep branches are inside each other."""
    count, depth = len(block.bindings), 1
    for binding in block.bindings:
        match binding.value:
            case If():
                inner = [_measure(branch, sizes) for branch in (binding.value.then, binding.value.otherwise)]
            case value:
                inner = [sizes[name] for name in functions_of(value)]
        if not inner:
            continue
        count += sum(size for size, _ in inner)
        depth = max(depth, 1 + max(levels for _, levels in inner))
    return count, depth
