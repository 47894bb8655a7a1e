# SPDX-License-Identifier: Apache-2.0
"""Who needs which weight: as it is, or as part of a formula whose result a method reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nnfront.lower import Program, TensorType
from nnfront.runtime.formula import formulas


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
    """Return what a program wants of a checkpoint. Transforms that no method names are left out."""
    readers: dict[tuple[str, str], list[str]] = {}  # (transform, or "" for raw; name) -> methods
    for method in program.methods.values():
        for weight in method.weights:
            origin = method.transform or "" if weight.role == "transformed" else ""
            readers.setdefault((origin, weight.name), []).append(method.name)
    wanted: dict[str, TensorType] = {}
    uses = [
        Use(name, name, (name,), tuple(methods)) for (origin, name), methods in readers.items() if not origin
    ]
    used = {method.transform for method in program.methods.values()}
    for transform in (t for t in program.transforms.values() if t.name in used):
        wanted |= {w.name: w.type for w in transform.weights if isinstance(w.type, TensorType)}
        for name, _, text, sources in formulas(transform):
            uses.append(Use(name, text, sources, tuple(readers.get((transform.name, name), ()))))
    for method in program.methods.values():
        raw = (w for w in method.weights if w.role == "weight")
        wanted |= {w.name: w.type for w in raw if isinstance(w.type, TensorType)}
    return WeightUses(wanted, tuple(uses))
