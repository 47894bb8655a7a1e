# SPDX-License-Identifier: Apache-2.0
"""The format of each weight, or why it stays as it is. A weight has one, whoever reads it, in all methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from nnfront import dtypes
from nnfront.ir import IRModule, TensorType
from nnfront.passes.quantizing.reads import Read, find_reads
from nnfront.passes.quantizing.scheme import QuantScheme, fitted, text_of
from nnfront.quant_format import QuantFormat

NO_MOMENTS: Mapping[str, TensorType] = {}
"""Of a model that is not calibrated."""


@dataclass(frozen=True)
class Choice:
    """What becomes of a weight.

    name, role              the weight, and what it is (`Read.role`, several with "and")
    elements, bytes_before  how many it has, and their bytes; 0 where the checkpoint says its sizes
    format, bytes_after     what it is stored in; None and its bytes if it stays as it is
    reason                  why it stays, or why it is in another format than was asked for
    is_calibrated           whether it is rounded by the inputs that it is multiplied with
    inputs                  how many it has, as each of its readers sees it
    """

    name: str
    role: str
    elements: int
    bytes_before: int
    bytes_after: int
    format: QuantFormat | None = None
    reason: str = ""
    is_calibrated: bool = False
    inputs: tuple[int, ...] = ()

    @property
    def stored(self) -> str:
        """The format as text, `keep` if it stays."""
        return "keep" if self.format is None else text_of(self.format)


@dataclass(frozen=True)
class Wanted:
    """The format of a weight, and the name of the moments of its inputs that it is rounded by, if there are any."""

    format: QuantFormat
    moments: str | None = None


@dataclass(frozen=True)
class Choices:
    """What becomes of each weight that is in memory after load, and what is wanted of each read in its method, in order."""

    weights: tuple[Choice, ...]
    in_order: dict[str, tuple[Wanted | None, ...]]


def choose(ir: IRModule, scheme: QuantScheme, moments: Mapping[str, TensorType] = NO_MOMENTS) -> Choices:
    """Decide for all weights. `moments` are those of weights' inputs, by the weights' names. Raises PassError for a rule that fits none."""
    found = find_reads(ir)
    by_key: dict[str, list[Read]] = {}
    for reads in found.in_order.values():
        for read in reads:
            if read.weight is not None:
                by_key.setdefault(read.key, []).append(read)
    scheme.check(dict.fromkeys(path for reads in by_key.values() for read in reads for path in read.paths))
    chosen = {}
    for key, type in found.types.items():
        reads, others = by_key.get(key, []), found.others.get(key, {})
        wanted, reason = _wanted(scheme, reads, type, others, key in found.stored)
        role = " and ".join(dict.fromkeys(read.role for read in reads))
        elements = prod(size if isinstance(size, int) else 0 for size in type.shape)
        before = after = found.stored.get(key, type.size_bytes or 0)
        if wanted is not None:
            # A weight that products read in both orders is stored in both.
            orders = {(read.shape, read.is_transposed) for read in reads}
            after = sum(stored_bytes(wanted, shape, type.dtype) for shape, _ in orders if shape)
            if after >= before:
                wanted, after, reason = None, before, "would take no fewer bytes"
        inputs = tuple(dict.fromkeys(read.shape[-1] for read in reads if read.shape))
        fits = wanted is not None and key in moments and inputs == (prod(moments[key].shape[:2]),)
        chosen[key] = Choice(key, role, elements, before, after, wanted, reason, fits, inputs)
    in_order = {
        name: tuple(None if read.weight is None else _wanted_of(chosen[read.key]) for read in reads)
        for name, reads in found.in_order.items()
    }
    return Choices(tuple(chosen.values()), in_order)


def _wanted_of(choice: Choice) -> Wanted | None:
    if choice.format is None:
        return None
    return Wanted(choice.format, choice.name if choice.is_calibrated else None)


def stored_bytes(format: QuantFormat, shape: Sequence[int], dtype: str) -> int:
    """Return the bytes of a weight in a format: elements, scales, zero points and factors."""
    count = prod(shape)
    if format.block is not None:
        return count // shape[-1] * format.block.row_bytes(shape[-1])
    groups = count // (format.group_size or shape[-1])
    each = dtypes.size_bytes(format.scale_dtype or dtype) + (0 if format.symmetric else 1)
    factors = count // shape[-1] * 4 if format.has_factor else 0
    return count * format.bits // 8 + groups * each + factors


def _wanted(
    scheme: QuantScheme, reads: Sequence[Read], type: TensorType, others: dict[str, None], is_stored: bool
) -> tuple[QuantFormat | None, str]:
    """The format of a weight and a remark on it; None and why it stays as it is."""
    if not reads:
        return None, "vectors" if type.ndim < 2 else f"read by {' and '.join(others)}"
    if others:
        return None, f"read by {' and '.join(others)} as well"
    if is_stored:
        return None, "quantised already"
    if type.dtype not in dtypes.COMPUTED:
        return None, f"{type.dtype}, no floats to round"
    shapes = {read.shape for read in reads}
    if None in shapes:
        return None, "the checkpoint says its sizes"
    depths = [shape[-1] for shape in shapes if shape]
    roles = {read.role for read in reads}
    rule = scheme.rule_for([path for read in reads for path in read.paths])
    if "router" in roles:
        return None, "chooses experts"
    if rule is not None:
        wanted, why = rule[1], f"kept by {rule[0]!r}"
    else:
        of_head = roles & {"head", "embedding"}
        wanted, why = scheme.head_format if of_head else scheme.body_format, "kept by the scheme"
    if wanted is None:
        return None, why
    fit = wanted
    for depth in depths:
        fit = fitted(fit, depth)
    return fit, "" if fit == wanted else f"{max(depths)} inputs do not divide into {text_of(wanted)}"
