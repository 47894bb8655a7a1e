# SPDX-License-Identifier: Apache-2.0
"""Who needs which weight: as it is, or as part of a formula whose result a method reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nnfront.errors import LoadError
from nnfront.lower import MethodProgram, Program, TensorType, type_text
from nnfront.transform.formula import formulas


@dataclass(frozen=True, slots=True)
class Use:
    """One way in which weights are used: the value's name, its formula over `sources`, and the methods that read it.

    A weight that is read as it is has its own name as name and formula.
    """

    name: str
    formula: str
    sources: tuple[str, ...]
    methods: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class WeightUses:
    """The raw weights that a program wants, with their types, and all uses of them."""

    wanted: Mapping[str, TensorType]
    uses: tuple[Use, ...]

    @property
    def needed_by(self) -> dict[str, list[str]]:
        """The methods that need each weight, through formulas too."""
        found: dict[str, dict[str, None]] = {}
        for use in self.uses:
            for source in use.sources:
                found.setdefault(source, {}).update(dict.fromkeys(use.methods))
        return {name: list(methods) for name, methods in found.items()}


def weight_uses(program: Program) -> WeightUses:
    """Return what a program wants of a checkpoint. Transforms that no method names are left out.

    Raises LoadError if two of its functions want one weight in different dtypes or shapes.
    """
    readers: dict[tuple[str, str], list[str]] = {}  # (transform, or "" for raw; name) -> methods
    for method in program.methods.values():
        for weight in method.weights:
            origin = method.transform or "" if weight.role == "transformed" else ""
            readers.setdefault((origin, weight.name), []).append(method.name)
    wanted: dict[str, TensorType] = {}
    wanted_by: dict[str, str] = {}
    uses = [
        Use(name, name, (name,), tuple(methods)) for (origin, name), methods in readers.items() if not origin
    ]
    for transform in program.used_transforms.values():
        _want(wanted, wanted_by, transform)
        for name, _, text, sources in formulas(transform):
            uses.append(Use(name, text, sources, tuple(readers.get((transform.name, name), ()))))
    for method in program.methods.values():
        _want(wanted, wanted_by, method)
    return WeightUses(wanted, tuple(uses))


def _want(wanted: dict[str, TensorType], wanted_by: dict[str, str], program: MethodProgram) -> None:
    """Add the raw weights that a method or transform reads."""
    for weight in program.weights:
        type = weight.type
        if weight.role != "weight" or not isinstance(type, TensorType):
            continue
        other = wanted.setdefault(weight.name, type)
        by = wanted_by.setdefault(weight.name, program.name)
        if not _may_be_one(type, other):
            raise LoadError(
                f"{by} and {program.name} want different things of weight {weight.name!r}",
                details=[f"{by}: {type_text(other)}", f"{program.name}: {type_text(type)}"],
            )


def _may_be_one(one: TensorType, two: TensorType) -> bool:
    """Whether a tensor can be of both types; of dims the checkpoint decides."""
    if one.dtype != two.dtype or one.ndim != two.ndim:
        return False
    pairs = zip(one.shape, two.shape, strict=True)
    return not any(isinstance(a, int) and isinstance(b, int) and a != b for a, b in pairs)
