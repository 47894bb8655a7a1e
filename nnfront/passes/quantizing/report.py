# SPDX-License-Identifier: Apache-2.0
"""What becomes of a model's weights, as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from nnfront.ir.summary import columns
from nnfront.passes.quantize_activations import ActivationsReport
from nnfront.passes.quantizing.choose import Choice
from nnfront.passes.quantizing.scheme import QuantScheme

UNITS = {0: "bytes", 3: "kB", 6: "MB", 9: "GB"}


@dataclass(frozen=True)
class QuantizeReport:
    """What `quantize_weights` makes of the weights that are in memory after load. `str` is one line, `text()` has one for each weight."""

    scheme: QuantScheme
    weights: tuple[Choice, ...]
    activations: ActivationsReport | None = None

    @property
    def quantized(self) -> tuple[Choice, ...]:
        """The weights that are quantised."""
        return tuple(w for w in self.weights if w.format is not None)

    @property
    def bits(self) -> float:
        """Bits that are stored for an element of the quantised weights, scales included."""
        elements = sum(w.elements for w in self.quantized)
        return 8 * sum(w.bytes_after for w in self.quantized) / elements if elements else 0.0

    def __str__(self) -> str:
        formats: dict[str, list[Choice]] = {}
        left: dict[str, list[Choice]] = {}
        for weight in self.weights:
            if weight.format is None:
                left.setdefault(
                    f"{weight.role} ({weight.reason})" if weight.role else weight.reason, []
                ).append(weight)
            else:
                formats.setdefault(weight.stored, []).append(weight)
        done = [f"{len(found)} weights to {stored}, {change(found)}" for stored, found in formats.items()]
        others = [f"{size(w.bytes_before for w in found)} of {reason}" for reason, found in left.items()]
        count = sum(w.is_calibrated for w in self.weights)
        calibrated = (
            "" if self.scheme.calibration is None else f" {count} of {len(self.quantized)} calibrated;"
        )
        return (
            f"quantised: {'; '.join(done) or 'nothing'};{calibrated} as they are: {', '.join(others) or 'nothing'};"
            f" all weights: {change(self.weights)}" + (f"; {self.activations}" if self.activations else "")
        )

    def text(self) -> str:
        """Return the line and one for each weight: its name, what it is, what it is stored in, its bytes before and after, and why."""
        rows = [
            (
                w.name,
                w.role,
                "as it is" if w.format is None else w.stored,
                str(w.bytes_before),
                str(w.bytes_after),
                w.reason,
            )
            for w in self.weights
        ]
        rows = [("weight", "read as", "stored in", "bytes", "then", "why"), *rows]
        return "\n".join([str(self), *columns(rows)])


def change(weights: Sequence[Choice]) -> str:
    """Return the bytes of weights before and after."""
    return f"{size(w.bytes_before for w in weights)} to {size(w.bytes_after for w in weights)}"


def size(sizes: Iterable[int]) -> str:
    """Return a sum of bytes in a unit in which it has few digits."""
    total = sum(sizes)
    power = next((power for power in (9, 6, 3) if total >= 10**power), 0)
    return f"{total / 10**power:.3g} {UNITS[power]}"
