# SPDX-License-Identifier: Apache-2.0
"""The report of a check: every tensor of the checkpoint, what is made of it, which methods read that, and what does not fit."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from nnfront.ir.summary import columns
from nnfront.transform.weight_usage import Use, WeightUses
from nnfront.weights.check import check_weights
from nnfront.weights.check_result import CheckResult
from nnfront.weights.checkpoint import Checkpoint
from nnfront.weights.name_hints import pattern


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What `check_report` found. `text()` is for people: tensors of all layers share a line. `json()` has every tensor."""

    checkpoint: Checkpoint
    result: CheckResult
    uses: tuple[Use, ...]

    @property
    def fits(self) -> bool:
        """Whether the checkpoint fits the model."""
        return self.result.fits

    def text(self) -> str:
        """Return a table with a line for each pattern of tensors and use, then the problems."""
        infos = self.checkpoint.infos
        rows: dict[tuple[str, str, str], int] = {}
        for name, use in self._pairs():
            row = (pattern(name), str(infos[name]), _use_text(use))
            rows[row] = rows.get(row, 0) + 1
        table = [(*row[:2], f"×{count}" if count > 1 else "", row[2]) for row, count in rows.items()]
        table += [(name, str(infos[name]), "", "ignored") for name in self.result.ignored]
        lines = [repr(self.checkpoint).strip("<>"), *columns(table)]
        dims = [f"{symbol} = {value}" for symbol, value in self.result.dims.items()]
        lines += [f"dims: {', '.join(dims)}"] if dims else []
        lines += [f"tied: {one} and {two} must hold equal bytes" for one, two in self.result.ties]
        casts = sorted(
            {(infos[self.result.sources[name]].dtype, dtype) for name, dtype in self.result.casts.items()}
        )
        lines += [f"converted on load: {stored} to {wanted}" for stored, wanted in casts]
        lines += [f"cannot be loaded: {line}" for line in self.checkpoint.truncated]
        if self.fits:
            return "\n".join([*lines, "fits: every weight has its tensor, every tensor its use"])
        help = [f"help: {self.result.help}"] if self.result.help else []
        return "\n".join([*lines, "does not fit:", *(f"  {line}" for line in self.result.lines()), *help])

    def json(self) -> dict[str, Any]:
        """Return the report as plain data."""
        tensors: dict[str, dict[str, Any]] = {}
        for name, info in self.checkpoint.infos.items():
            tensors[name] = {"dtype": info.dtype, "shape": list(info.shape), "file": info.file.name, "bytes": info.size_bytes, "uses": []}  # fmt: skip
        for name, use in self._pairs():
            tensors[name]["uses"].append(
                {"name": use.name, "formula": use.formula, "methods": list(use.methods)}
            )
        problems = [{"kind": p.kind, "name": p.name, "text": p.text} for p in self.result.problems]
        return {
            "fits": self.fits,
            "tensors": tensors,
            "problems": problems,
            "ignored": list(self.result.ignored),
            "ties": [list(pair) for pair in self.result.ties],
            "casts": dict(self.result.casts),
            "truncated": list(self.checkpoint.truncated),
            "dims": {str(symbol): value for symbol, value in self.result.dims.items()},
        }

    def _pairs(self) -> Iterable[tuple[str, Use]]:
        """Each stored tensor with each of its uses, in the order of the files."""
        by_source: dict[str, list[Use]] = {}
        for use in self.uses:
            for source in use.sources:
                if source in self.result.sources:
                    by_source.setdefault(self.result.sources[source], []).append(use)
        return ((name, use) for name in self.checkpoint for use in by_source.get(name, ()))


def check_report(
    uses: WeightUses,
    checkpoint: Checkpoint,
    *,
    aliases: Mapping[str, str] | None = None,
    ignored: Sequence[str] = (),
    cast: bool = False,
) -> CheckReport:
    """Check a checkpoint, opened with or without its data, against what a program wants, from headers alone. Raises nothing."""
    result = check_weights(
        uses.wanted,
        checkpoint.infos,
        aliases=aliases or {},
        ignored=ignored,
        cast=cast,
        needed_by=uses.needed_by,
    )
    return CheckReport(checkpoint, result, uses.uses)


def _use_text(use: Use) -> str:
    """The use, names relative to the module that all are in, and `*` for numbers in names, so that all layers read alike."""
    methods = f"  [{', '.join(use.methods)}]" if use.methods else "  [no method]"
    if use.formula == use.name:
        return "as it is" + methods
    paths = [name.split(".")[:-1] for name in (use.name, *use.sources)]
    shared = sum(1 for _ in takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False)))

    def short(name: str) -> str:
        return pattern(".".join(name.split(".")[shared:]))

    names = "|".join(map(re.escape, sorted(use.sources, key=len, reverse=True)))
    formula = re.sub(names, lambda found: short(found[0]), use.formula) if names else use.formula
    return f"{short(use.name)} = {formula}{methods}"
