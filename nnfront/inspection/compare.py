# SPDX-License-Identifier: Apache-2.0
"""`diff`: what changed between two models, folders or artefacts: what they say, what they compute, what they are made of."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from nnfront.dims import describe_facts
from nnfront.inspection.model import Inspected, inspect_model
from nnfront.inspection.weights import weights_of
from nnfront.ir import first_difference, type_text
from nnfront.llm.methods import Methods
from nnfront.lower.explain import explained
from nnfront.transform.run import stream_transform
from nnfront.weights.checkpoint import is_artefact
from nnfront.weights.content_hashes import Contents
from nnfront.weights.name_hints import shortened

WIDTH = 40
"""What is longer is written on a line of its own."""
SHOWN_DIGITS = 12
"""Digits of a hash in the text."""


@dataclass(frozen=True, slots=True)
class Change:
    """One thing that differs: what it was and what it is; None where there was or is nothing."""

    name: str
    before: str | None
    after: str | None

    def __str__(self) -> str:
        if self.before is None:
            return f"+ {self.name}: {self.after}"
        if self.after is None:
            return f"- {self.name}: {self.before}"
        if max(len(self.before), len(self.after)) > WIDTH:
            return f"~ {self.name}\n      - {self.before}\n      + {self.after}"
        return f"~ {self.name}: {self.before} -> {self.after}"


@dataclass(frozen=True)
class Differences:
    """What differs between the models at two paths, by section; sections without a change are left out. Prints as text."""

    before: Path
    after: Path
    changes: Mapping[str, tuple[Change, ...]]

    @property
    def is_same(self) -> bool:
        """Whether nothing differs."""
        return not self.changes

    def json(self) -> dict[str, Any]:
        """Return them as plain data."""
        changes = {section: [asdict(change) for change in found] for section, found in self.changes.items()}
        return {
            "before": str(self.before),
            "after": str(self.after),
            "same": self.is_same,
            "changes": changes,
        }

    def __str__(self) -> str:
        if self.is_same:
            return f"{self.before} and {self.after} are the same"
        lines = [f"- {self.before}", f"+ {self.after}"]
        for section, changes in self.changes.items():
            of_name = [(change.name, str(change)) for change in changes]
            lines += [f"\n{section}", *(f"  {line}" for line in shortened(of_name))]
        return "\n".join(lines)


def diff(
    before: str | Path, after: str | Path, *, model_file: str | Path | None = None, target: str | None = None
) -> Differences:
    """Compare two models: config.json, dims, methods, formulas and kernels, and weights by the hashes of their bytes.

    Of two folders the tensors of their files are compared; of artefacts, and of a folder with an artefact, the weights that methods read,
    which the folder's formulas make of its tensors. model_file: the model file of folders. target: whose kernels; cpu, or an artefact's own.
    Reads all weights. Raises LoadError if one of them is no model, or cannot be read.
    """
    methods = Methods.of(extends=any(map(is_artefact, (before, after))))  # as artefacts do
    one, two = (
        inspect_model(path, target, model_file, headers_only=False, methods=methods)
        for path in (before, after)
    )
    pairs: dict[str, Iterable[Mapping[str, str]]] = {
        "target": [{"target": model.executable.target} for model in (one, two)],
        "config": [{key: repr(value) for key, value in model.config.items()} for model in (one, two)],
        "dims": map(_dims, (one, two)),
        "methods": map(_signatures, (one, two)),
        "functions": _bodies(one, two),
        "formulas": map(_formulas, (one, two)),
        "weights": _contents(one, two),
        "kernels": map(_kernels, (one, two)),
    }
    found = {section: tuple(_changes(*pair)) for section, pair in pairs.items()}
    return Differences(
        one.path, two.path, {section: changes for section, changes in found.items() if changes}
    )


def _changes(before: Mapping[str, str], after: Mapping[str, str]) -> Iterator[Change]:
    for name in dict.fromkeys([*before, *after]):
        if before.get(name) != after.get(name):
            yield Change(name, before.get(name), after.get(name))


def _dims(model: Inspected) -> dict[str, str]:
    """What each method knows of a dim, and who binds it."""
    return {
        f"{binding.symbol} of {method.name}": f"{describe_facts(*binding.symbol.facts)}, bound by {binding.place}"
        for method in model.executable.program.methods.values()
        for binding in method.dims
    }


def _signatures(model: Inspected) -> dict[str, str]:
    return {f.name: f"({', '.join(type_text(p.type) for p in f.inputs)}) -> {type_text(f.result_type)}" for f in model.source.methods}  # fmt: skip


def _bodies(one: Inspected, two: Inspected) -> tuple[dict[str, str], dict[str, str]]:
    """The functions that only one has, and where bodies first differ. What differs in weights alone is said of formulas."""
    kept = [{f.name: f for f in m.source.functions if f.kind != "transform"} for m in (one, two)]
    before, after = ({n: f"{len(f.bindings)} bindings" for n, f in functions.items()} for functions in kept)
    for name in [name for name in before if name in after]:
        del before[name], after[name]
        if (found := first_difference(kept[0][name], kept[1][name])) is not None:
            where, _, values = found.partition(": ")
            before[where], _, after[where] = values.partition(" != ")
    return before, after


def _formulas(model: Inspected) -> dict[str, str]:
    return {
        weight["name"]: f"{weight['formula'] or 'as it is'}: {weight['type']}" for weight in weights_of(model)
    }


def _kernels(model: Inspected) -> dict[str, str]:
    """How often each kernel runs an op of a method."""
    counts: dict[str, Counter[str]] = {}
    for line in explained(model.executable.program, {}):
        counts.setdefault(f"{line.method}: {line.op}", Counter())[line.kernel] += len(line.modules)
    return {
        name: ", ".join(f"{kernel} x{n}" for kernel, n in found.items()) for name, found in counts.items()
    }


def _contents(one: Inspected, two: Inspected) -> tuple[dict[str, str], dict[str, str]]:
    """Type and hash of each tensor in the files of folders, or of each weight that methods read if one of them is an artefact."""
    if one.stored is None or two.stored is None:
        found = [{} if m.stored is None else {"files": f"{len(m.stored)} tensors"} for m in (one, two)]
        return found[0], found[1]
    if one.is_artefact or two.is_artefact:
        return _made(one), _made(two)
    return _stored(one), _stored(two)


def _stored(model: Inspected) -> dict[str, str]:
    assert model.stored is not None
    hashes = Contents(model.stored, Path()).hashes(model.stored)
    infos = model.stored.infos
    return {name: _text(infos[name].encoding or str(infos[name]), hashes[name]) for name in infos}


def _made(model: Inspected) -> dict[str, str]:
    return {name: _text(*_of(value)) for name, value in _values(model)}


def _values(model: Inspected) -> Iterable[tuple[str, Any]]:
    """Yield each weight that methods read, by name; one after the other, so that only one is in memory."""
    assert model.stored is not None
    if model.places is not None:
        for names in model.places.values():
            for name, stored in names.items():
                order = model.orders.get(stored)
                tensor = model.stored[stored]
                yield name, tensor if order is None else tensor.permute(sorted(order, key=order.index))
        return
    sources = model.executable.named(model.stored, ["*"])
    program = model.executable.program
    raw = {w.name: None for m in program.methods.values() for w in m.weights if w.role == "weight"}
    yield from ((name, sources[name]) for name in raw)
    for transform in {m.transform: None for m in program.methods.values() if m.transform}:
        yield from stream_transform(program.transforms[transform], sources)


def _of(value: Any) -> tuple[str, str]:
    """The type of a weight and the hash of its bytes, row by row."""
    if not isinstance(value, torch.Tensor):
        return type(value).__name__, hashlib.sha256(repr(value).encode()).hexdigest()
    data = value.contiguous().reshape(-1).view(torch.uint8).numpy().data
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}", hashlib.sha256(data).hexdigest()


def _text(type: str, digest: str) -> str:
    return f"{type} {digest[:SHOWN_DIGITS]}"
