# SPDX-License-Identifier: Apache-2.0
"""`verify_variants`: run each special case of a method against its general function, on inputs that meet the case."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from nnfront.cases.conditions import GENERAL
from nnfront.compiler import Executable, compile
from nnfront.errors import RunError
from nnfront.ir import IRModule, type_symbols, type_text
from nnfront.runtime import Method
from nnfront.runtime.cases import Explanation
from nnfront.runtime.random_arguments import RandomArguments, copied
from nnfront.session import Session
from nnfront.transform.source import stored_type
from nnfront.transform.weight_usage import weight_uses

TOLERANCES: Mapping[torch.dtype, float] = {
    torch.float64: 1e-10,
    torch.float32: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 4e-2,
}
"""Largest difference allowed by dtype, as a share of the largest number of the result; other dtypes must be equal."""

Weights: TypeAlias = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class VariantReport:
    """One case: the sizes that it was tried with, none if no input was found that meets it, and the largest difference to the general function as a share of its largest number."""

    case: str
    sizes: tuple[Mapping[str, int], ...]
    difference: float

    def __str__(self) -> str:
        if not self.sizes:
            return f"{self.case}: no sample, since no input was found that meets it"
        tried = "; ".join(_sizes_text(sizes) or "no dims" for sizes in self.sizes)
        return f"{self.case}: {len(self.sizes)} samples, largest difference {self.difference:.1e} ({tried})"


@dataclass(frozen=True)
class VariantsReport:
    """All cases of a method."""

    method: str
    variants: tuple[VariantReport, ...]

    def __str__(self) -> str:
        return "\n".join([f"{self.method}:", *(f"  {variant}" for variant in self.variants)])


def verify_variants(
    subject: Session | Executable | IRModule,
    method: str,
    weights: Weights | None = None,
    *,
    samples: int = 3,
    seed: int = 0,
    dims: Mapping[str, int] | None = None,
    ranges: Mapping[str, tuple[int, int]] | None = None,
    tolerance: float | None = None,
) -> VariantsReport:
    """Run each variant of a method and the general function on the same inputs, and check that the dispatch takes the right one.

    subject: a session, or what becomes one with `weights`, by default random ones. Inputs are random: dims within the facts of each
    case, its least and greatest first; values as the case says; caches with some tokens in them. dims: numbers for dims by name.
    ranges: (least, greatest) for the elements of integer arguments by name; without it, indices of a table stay inside it and
    others are 0 or 1. tolerance: the largest difference allowed, as a share of the result's largest number; by dtype without it.

    Raises RunError for a method without special cases, for a variant whose result differs (naming the case, the sizes and the
    largest difference), and for a dispatch that takes another case than the first that holds.
    """
    session = _session(subject, weights, seed, dims or {})
    checked = session[method]
    cases = [case for case in checked.hits if case in checked.program.cases]
    if not cases:
        raise RunError(
            f"{method} has no special cases",
            help='give it some: nn.passes.special_cases(ir, ...), or "$": {"special_cases": [...]} in the spec',
        )
    draw = RandomArguments(checked, dims or {}, ranges or {}, seed)
    counted, general = checked.only(None), checked.only(GENERAL)
    reports = []
    for case in cases:
        variant = checked.only(case)
        tried, largest = [], 0.0
        for number in range(samples):
            drawn = draw.arguments(case, number)
            if drawn is None:
                continue
            args, sizes = drawn
            tried.append(sizes)
            difference, wrong = _compare(_run(variant, args), _run(general, args), tolerance)
            if wrong:
                given = f", with {_sizes_text(sizes)}" if sizes else ""
                what = f"{method}: the variant for '{case}' is not what the general function is{given}"
                raise RunError(what, details=[wrong])
            largest = max(largest, difference)
            _check_dispatch(counted, args, sizes)
        reports.append(VariantReport(case, tuple(tried), largest))
    for number in range(samples):
        drawn = draw.arguments(None, number)
        assert drawn is not None  # nothing is asked of them
        _check_dispatch(counted, *drawn)
    return VariantsReport(method, tuple(reports))


def _session(
    subject: Session | Executable | IRModule, weights: Weights | None, seed: int, dims: Mapping[str, int]
) -> Session:
    if isinstance(subject, Session):
        if weights is not None:
            raise RunError(
                "a session has its weights", help="give its executable instead, or leave weights out"
            )
        return subject
    executable = compile(subject) if isinstance(subject, IRModule) else subject
    return executable.load(_random_weights(executable, seed, dims) if weights is None else weights)


def _random_weights(executable: Executable, seed: int, dims: Mapping[str, int]) -> dict[str, torch.Tensor]:
    """Weights of the sizes that are declared; a dim of a weight is its least number, or 2 where that is less."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for name, type in weight_uses(executable.program).wanted.items():
        numbers = {}
        for symbol in type_symbols(type):
            step = symbol.multiple_of
            numbers[symbol.name] = dims.get(symbol.name, max(int(symbol.low), -(-2 // step) * step))
        tensor = RandomArguments.tensor(type, numbers, generator, (0, 2))
        # Rows of a product keep the size of numbers as they are, whatever their length.
        is_matrix = tensor.dim() > 1 and tensor.is_floating_point()
        made[name] = tensor / max(tensor.shape[-1], 1) ** 0.5 if is_matrix else tensor
    return made


def _run(method: Method, args: list[Any]) -> list[tuple[str, Any]]:
    """The results of a call by their places, caches that it writes included; the arguments stay as they are."""
    own = [copied(arg) for arg in args]
    results = dict(_leaves("the result", method(*own)))
    for argument, arg in zip(method.program.arguments, own, strict=True):
        if argument.role == "state":
            for i, layer in enumerate(arg):
                where = f"of layer {i} of '{argument.name}'"
                tokens, fixed = layer.type.per_token, layer.type.per_sequence
                results |= {f"{b.name} {where}": layer.stored(n) for n, b in enumerate(tokens)}
                results |= {f"{b.name} {where}": layer.read(b.name) for b in fixed}
    return list(results.items())


def _leaves(place: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name, part in value.items():
            yield from _leaves(f"{place}[{name!r}]", part)
    elif isinstance(value, (tuple, list)):
        for i, part in enumerate(value):
            yield from _leaves(f"{place}[{i}]", part)
    else:
        yield place, value


def _compare(
    actual: list[tuple[str, Any]], expected: list[tuple[str, Any]], tolerance: float | None
) -> tuple[float, str]:
    """The largest difference as a share of the largest number, and what is wrong; "" if nothing is."""
    worst = 0.0
    for (place, mine), (_, its) in zip(actual, expected, strict=True):
        if not isinstance(its, torch.Tensor):
            if mine != its:
                return worst, f"{place} is {mine!r}, the general function gives {its!r}"
            continue
        kinds = stored_type(mine), stored_type(its)
        if kinds[0] != kinds[1]:
            return (
                worst,
                f"{place} is {type_text(kinds[0])}, the general function gives {type_text(kinds[1])}",
            )
        difference = _difference(mine, its)
        allowed = TOLERANCES.get(its.dtype, 0.0) if tolerance is None else tolerance
        if not difference <= allowed:
            said = f"{difference:.3g} of its largest number, {allowed:.3g} allowed"
            return worst, f"largest difference in {place}: {said}"
        worst = max(worst, difference)
    return worst, ""


def _difference(mine: torch.Tensor, its: torch.Tensor) -> float:
    """The largest difference as a share of the largest finite number; what is not finite must be the same."""
    if not its.is_floating_point():
        return float((mine != its).any())
    a, b = mine.double(), its.double()
    finite = b.isfinite()
    if not torch.equal(finite, a.isfinite()) or not torch.equal(
        a[~finite].nan_to_num(), b[~finite].nan_to_num()
    ):
        return float("inf")
    if not finite.any():
        return 0.0
    return float(
        (a[finite] - b[finite]).abs().max() / b[finite].abs().max().clamp_min(torch.finfo(its.dtype).tiny)
    )


def _check_dispatch(method: Method, args: list[Any], sizes: Mapping[str, int]) -> None:
    """Check that a call takes the first case that holds."""
    explained = method.explain(*args)
    assert isinstance(explained, Explanation)
    expected = explained.taken
    before = method.hits
    method(*map(copied, args))
    taken = [case for case, count in method.hits.items() if count > before[case]]
    if taken != [expected]:
        raise RunError(
            f"{method.name} takes the wrong case with {_sizes_text(sizes)}",
            details=[f"got {', '.join(map(repr, taken)) or 'none'}, expected {expected!r}"],
        )


def _sizes_text(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} = {number}" for name, number in sizes.items())
