# SPDX-License-Identifier: Apache-2.0
"""What becomes of the weights of a checkpoint that others have stored in their own way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from nnfront.ir import TensorType
from nnfront.quantized.formula import Formula


@dataclass(frozen=True)
class StoredWeight:
    """A weight: the scheme by which it is stored, the dtype that products compute in, and what it is in memory.

    format   as which it stays; empty if it is dequantised
    reason   why it is dequantised
    """

    name: str
    scheme: str
    dtype: str
    format: str = ""
    reason: str = ""


@dataclass(frozen=True)
class StoredReport:
    """What was found and what is made of it. `str` is one line."""

    weights: tuple[StoredWeight, ...]

    def __str__(self) -> str:
        found: dict[str, Counter[str]] = {}
        for weight in self.weights:
            found.setdefault(weight.scheme, Counter())[_way(weight)] += 1
        texts = [
            f"{scheme}: " + ", ".join(f"{n} weight{'s' * (n > 1)} {way}" for way, n in ways.items())
            for scheme, ways in found.items()
        ]
        return "stored as " + "; ".join(texts) if texts else "stored as they are"


def _way(weight: StoredWeight) -> str:
    if weight.format:
        return f"kept as {weight.format}"
    return f"made {weight.dtype}" + (f" ({weight.reason})" if weight.reason else "")


def report_of(
    formulas: Mapping[str, Formula], types: Mapping[str, TensorType], reasons: Mapping[str, str]
) -> StoredReport:
    """Return the report on weights that have a formula, with the reason for each that is dequantised."""
    return StoredReport(
        tuple(
            StoredWeight(
                name,
                formulas[name].scheme,
                type.dtype,
                "" if reasons[name] or formulas[name].is_plain else str(formulas[name].format),
                reasons[name],
            )
            for name, type in types.items()
        )
    )
