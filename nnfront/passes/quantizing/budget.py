# SPDX-License-Identifier: Apache-2.0
"""A format for each weight by its measured error, so that all together take no more than so many bits for an element (`auto:4.5`).

What a rounded matrix adds to its result is in proportion to its error over its size, the mean square of what is lost over that of what was there, whatever matrix it is.
What a head adds is in the logits as it is, what another matrix adds is one of many parts of the stream that the head reads: a head counts as much as half of all others.
The sum of these is made small: all begin in the smallest format, and the step that saves the most of it for its bits is taken until no other fits.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import torch

from nnfront import ops
from nnfront.errors import PassError
from nnfront.ir import IRModule, TensorType
from nnfront.passes.quantizing.choose import choose, stored_bytes
from nnfront.passes.quantizing.scheme import QuantScheme, fitted, named

CANDIDATES = ("int4:128", "int4:64", "int4", "uint4", "int8")
"""Formats that kernels read, by the bits that they take."""
SAMPLE = 1 << 18
"""Elements of a weight of which errors are measured: whole rows, evenly spread."""


Measured = Mapping[str, tuple[int, float]]
"""Of each candidate the bits that it takes, and what it loses: the mean square of the error over that of the weight."""


def open_weights(ir: IRModule, scheme: QuantScheme) -> dict[str, bool]:
    """Return the names of the weights whose formats no rule says, and no format of the head, and whether they are heads."""
    first, second = (
        choose(ir, QuantScheme(format, scheme.head or format, scheme.rules)).weights
        for format in ("int8", "int4")
    )
    pairs = zip(first, second, strict=True)
    return {a.name: "head" in a.role for a, b in pairs if a.format != b.format}


def measure(weight: torch.Tensor) -> Measured:
    """Measure what each candidate takes and loses of a weight [..., inputs]."""
    rows = weight.reshape(-1, weight.shape[-1])
    sample = rows[:: max(rows.numel() // SAMPLE, 1)].contiguous()
    type = TensorType(sample.shape, str(sample.dtype).removeprefix("torch."))
    size = float(sample.double().square().sum()) or 1.0
    found = {}
    for name in CANDIDATES:
        format = fitted(named(name), weight.shape[-1])
        group = format.group_size or weight.shape[-1]
        attrs = {"group_size": group, "axis": 1, "format": format.name, "fit": format.fit}
        given = ops.quantize.full_attrs(ops.quantize.canonical_attrs([type], attrs))
        q, scales, *zeros = ops.quantize.run((sample,), given)
        back = {"group_size": group, "axis": 1, "dtype": "float32", "format": None}
        lost = ops.dequantize.run((q, scales, *(zeros or [None])), back).double() - sample.double()
        bits = 8 * stored_bytes(format, weight.shape, type.dtype)
        found[name] = bits, float(lost.square().sum()) / size
    return found


def within(
    scheme: QuantScheme, measured: Mapping[str, Measured], elements: int, heads: Collection[str] = ()
) -> QuantScheme:
    """Return the scheme with a rule for each of the weights that were measured, ahead of its own rules; `elements` is how many they have, `heads` which are heads.

    Raises PassError if the budget is less than they take in the smallest format.
    """
    assert scheme.budget is not None
    chosen = dict.fromkeys(measured, CANDIDATES[0])
    least = sum(each[CANDIDATES[0]][0] for each in measured.values())
    left = scheme.budget * elements - least
    counts = {name: max(len(measured) / 2, 1) if name in heads else 1 for name in measured}
    if left < 0:
        raise PassError(
            f"{scheme.format} is less than the weights take in {CANDIDATES[0]}",
            details=[f"they take {least / elements:.2f} bits for an element"],
            help="allow more, or keep fewer weights",
        )
    while steps := [
        ((lost - after) * counts[name] / (then - bits), name, to, then - bits)
        for name, to in ((name, to) for name in measured for to in CANDIDATES)
        for (bits, lost), (then, after) in [(measured[name][chosen[name]], measured[name][to])]
        if after < lost and 0 < then - bits <= left
    ]:
        _, name, to, more = max(steps, key=lambda step: step[0])
        chosen[name], left = to, left - more
    return replace(scheme, format="int8", rules=(*chosen.items(), *scheme.rules))
