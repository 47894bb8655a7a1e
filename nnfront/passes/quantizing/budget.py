# SPDX-License-Identifier: Apache-2.0
"""A format for each weight by its measured error, so that all together take no more than so many bits for an element (`auto:4.5`).

What a rounded matrix adds to its result is in proportion to its error over its size, the mean square of what is lost over that of what was there, whatever matrix it is.
What a head adds is in the logits as it is, what another matrix adds is one of many parts of the stream that the head reads: a head counts as much as half of all others.
How much each matters besides is not measured: of a trained model with one table a head adds three quarters of the divergence, of random weights a seventh. So none is made worse for
another: all begin in the one format that loses the least within the budget, and what is left of it goes to the steps that save the most for their bits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import torch

from nnfront import ops
from nnfront.errors import PassError
from nnfront.ir import IRModule, TensorType
from nnfront.passes.quantizing.choose import choose, stored_bytes
from nnfront.passes.quantizing.scheme import QuantScheme, fitted, named
from nnfront.quant_format import QuantFormat

CANDIDATES = ("int4:128", "int4:64", "q4_k", "int4", "uint4", "q5_k", "q6_k", "int8", "int8:32")
"""Formats to choose from, by the bits that they take."""
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


def candidates(reads: Callable[[QuantFormat], bool]) -> tuple[str, ...]:
    """Return the candidates that a target's kernels read."""
    return tuple(name for name in CANDIDATES if reads(named(name)))


def measure(weight: torch.Tensor, names: Sequence[str] = CANDIDATES) -> Measured:
    """Measure what each candidate takes and loses of a weight [..., inputs]."""
    rows = weight.reshape(-1, weight.shape[-1])
    sample = rows[:: max(rows.numel() // SAMPLE, 1)].contiguous()
    type = TensorType(sample.shape, str(sample.dtype).removeprefix("torch."))
    size = float(sample.double().square().sum()) or 1.0
    found = {}
    for name in names:
        format = fitted(named(name), weight.shape[-1])
        lost = rounded(sample, format).double() - sample.double()
        bits = 8 * stored_bytes(format, weight.shape, type.dtype)
        found[name] = bits, float(lost.square().sum()) / size
    return found


def rounded(weight: torch.Tensor, format: QuantFormat) -> torch.Tensor:
    """Return a matrix after it has been stored in a format and read back, in float32."""
    if format.block is not None:
        blocks = ops.quantize_blocks.run((weight,), {"format": format.name})
        dense: torch.Tensor = ops.dequantize_blocks.run(
            (blocks,), {"format": format.name, "dtype": "float32"}
        )
        return dense
    type = TensorType(weight.shape, str(weight.dtype).removeprefix("torch."))
    group = format.group_size or weight.shape[-1]
    attrs = {"group_size": group, "axis": 1, "format": format.name, "fit": format.fit}
    given = ops.quantize.full_attrs(ops.quantize.canonical_attrs([type], attrs))
    q, scales, *more = ops.quantize.run((weight,), given)
    if format.has_factor:
        scales = scales.float() * more.pop()
    back = {
        "group_size": group,
        "axis": 1,
        "dtype": "float32",
        "format": format.name if format.values else None,
    }
    found: torch.Tensor = ops.dequantize.run((q, scales, *(more or [None])), back)
    return found


def within(
    scheme: QuantScheme, measured: Mapping[str, Measured], elements: int, heads: Collection[str] = ()
) -> QuantScheme:
    """Return the scheme with a rule for each of the weights that were measured, ahead of its own rules; `elements` is how many they have, `heads` which are heads.

    Raises PassError if the budget is less than they take in the smallest format.
    """
    assert scheme.budget is not None
    names = tuple(next(iter(measured.values()), {}))
    counts = {name: max(len(measured) / 2, 1) if name in heads else 1 for name in measured}
    bits_of = {to: sum(each[to][0] for each in measured.values()) for to in names}
    lost_by = {to: sum(each[to][1] * counts[name] for name, each in measured.items()) for to in names}
    fitting = [to for to in names if bits_of[to] <= scheme.budget * elements]
    if names and not fitting:
        least = min(names, key=bits_of.__getitem__)
        raise PassError(
            f"{scheme.format} is less than the weights take in {least}",
            details=[f"they take {bits_of[least] / elements:.2f} bits for an element"],
            help="allow more, or keep fewer weights",
        )
    first = min(fitting, key=lost_by.__getitem__, default="")
    chosen, left = dict.fromkeys(measured, first), scheme.budget * elements - bits_of.get(first, 0)
    while steps := [
        ((lost - after) * counts[name] / max(then - bits, 1), name, to, then - bits)
        for name, to in ((name, to) for name in measured for to in names)
        for (bits, lost), (then, after) in [(measured[name][chosen[name]], measured[name][to])]
        if after < lost and then - bits <= left
    ]:
        _, name, to, more = max(steps, key=lambda step: step[0])
        chosen[name], left = to, left - more
    return replace(scheme, format="int8", rules=(*chosen.items(), *scheme.rules))
