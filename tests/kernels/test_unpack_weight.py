# SPDX-License-Identifier: Apache-2.0
"""Weights in 4 and 8 bits unpacked to 16: against what the elements stand for in float64, on sizes around a block's, and mistakes that must show."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import ModuleType

import nnfront_kernels
import pytest
import torch
from few_of import few_of
from kernel_checks import EPS32, Guarded, assert_close, surrounded
from kernel_launches import launched_twice
from kernel_mutants import Mutant, package
from nnfront_kernels import KernelError, unpack_weight
from nnfront_kernels.quantized import pack_int4


@dataclass(frozen=True)
class Weight:
    """`n` rows of `groups` groups; `bits` 8 with group 0 is one scale for a row, of 16 * `groups` elements."""

    n: int
    groups: int
    group: int
    bits: int = 4
    zero_points: bool = False
    scales: str = "float16"
    gap: int = 0

    def __str__(self) -> str:
        zeros = "-zeros" * self.zero_points
        return f"{self.n}x{self.groups}-group{self.group}-bits{self.bits}-{self.scales}-gap{self.gap}{zeros}"


def unpacked(package: ModuleType, weight: Weight) -> None:
    """Launch twice on poisoned outputs; AssertionError unless the results are right."""
    generator = torch.Generator().manual_seed(weight.n * 1000 + weight.groups)
    group = weight.group or 16 * weight.groups
    groups = weight.groups if weight.group else 1
    k, low, high = groups * group, *((0, 16) if weight.bits == 4 else (-128, 128))
    elements = torch.randint(low, high, (weight.n, k), generator=generator)
    scales = torch.randn(groups, weight.n, generator=generator, dtype=torch.float64)
    scales = surrounded(scales.to(getattr(torch, weight.scales)), 3 * weight.gap, weight.gap)
    zeros = torch.randint(0, 16, (groups, weight.n), generator=generator)
    stored = pack_int4(elements, group) if weight.bits == 4 else elements.to(torch.int8)
    given = [surrounded(stored, 16 * weight.gap, 0), scales]
    if weight.zero_points:
        given.append(surrounded(zeros.to(torch.uint8), 5 * weight.gap, weight.gap))
    elif weight.bits == 4:
        zeros.fill_(8)
    else:
        zeros.zero_()

    def planned(views: list[torch.Tensor]) -> object:
        return package.unpack_weight.plan(*given, dtype=torch.float16, out=views[0], arch="sm_80")

    (got,) = launched_twice(
        lambda pattern: [Guarded(weight.n, k, torch.float16, 3 * weight.gap, weight.gap, pattern)], planned
    )
    spread = [each.double().T.repeat_interleave(group, 1) for each in (zeros, scales)]
    expected = (elements.double() - spread[0]) * spread[1]
    drift = EPS32 * expected.abs()
    assert_close(actual=got, expected=expected, drift=drift)
    stated = package.unpack_weight.reference(*given, dtype=torch.float16, compute=torch.float64)
    assert_close(actual=stated, expected=expected, drift=drift)


CASES = [
    Weight(17, 3, 128, zero_points=True, gap=1),
    Weight(33, 17, 32, scales="float32", gap=1),
    Weight(15, 9, 64, bits=8, gap=1),
    *(Weight(n, 8 * 32 // group + 1, group, zero_points=n % 2 == 1) for n in (1, 16) for group in (32, 64, 128)),
    *(Weight(n, groups, 0, bits=8, gap=n % 2) for n, groups in ((1, 1), (16, 16), (17, 17), (31, 15))),
    *(Weight(16, 256 // group, group, bits=8, scales="float32") for group in (32, 64, 128)),
]  # fmt: skip


def unpacked_here(weight: Weight) -> None:
    unpacked(nnfront_kernels, weight)


@pytest.mark.parametrize("weight", few_of(CASES, 2), ids=str)
def test_an_unpacked_weight_matches_float64(interpreted, weight):
    interpreted(unpacked_here, weight)


NIBBLES, BYTES = CASES[0], replace(CASES[2], n=17)
MUTANTS = [
    (Mutant("neighbours_not_exchanged", "unpack_weight.py", "tl.join(w & 15, (w >> 8) & 15)", "tl.join(w & 15, (w >> 16) & 15)"), NIBBLES),
    (Mutant("halves_exchanged", "unpack_weight.py", "w >> 4 * high", "w >> 4 * (1 - high)"), NIBBLES),
    (Mutant("zero_dropped", "unpack_weight.py", "(quads - zero[:, :, None])", "(quads - 8)"), NIBBLES),
    (Mutant("zero_of_the_first_group", "unpack_weight.py", "zeros_ptr + at * stride_zg", "zeros_ptr + at * 0"), NIBBLES),
    (Mutant("scale_of_the_first_group", "unpack_weight.py", "scales_ptr + at * stride_sg", "scales_ptr + at * 0"), BYTES),
    (Mutant("one_row_too_many", "unpack_weight.py", "(row < N)", "(row <= N)"), NIBBLES),
    (Mutant("one_group_too_many", "unpack_weight.py", "(group * GROUP < K)", "(group * GROUP <= K)"), NIBBLES),
    (Mutant("beyond_the_row", "unpack_weight.py", "(k < K)", "(k <= K)"), Weight(17, 17, 0, bits=8, gap=1)),
    (Mutant("blocks_of_groups_overlap", "unpack_weight.py", "tl.program_id(1) * BLOCK_G", "tl.program_id(1)"), CASES[1]),
]  # fmt: skip


def run_mutant(mutant: Mutant, weight: Weight) -> None:
    unpacked(package(mutant), weight)


@pytest.mark.parametrize(("mutant", "weight"), MUTANTS, ids=[str(mutant) for mutant, _ in MUTANTS])
@pytest.mark.matrix
def test_mutant_of_the_unpacking_is_caught(interpreted, mutant, weight):
    with pytest.raises(AssertionError):
        interpreted(run_mutant, mutant, weight)


@pytest.mark.parametrize("weight", list(dict.fromkeys(weight for _, weight in MUTANTS)), ids=str)
@pytest.mark.matrix
def test_the_unpacking_without_the_mistake_passes(interpreted, weight):
    interpreted(run_mutant, Mutant("none", "", "", ""), weight)


def tensor(*size: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.empty(*size, dtype=dtype, device="meta")


PACKED = {"w": tensor(16, 64, dtype=torch.uint8), "scales": tensor(1, 16)}
WRONG = [
    ({"w": tensor(16, 64)}, "w must be torch.int8, got torch.float16"),
    ({"scales": tensor(3, 16)}, r"scales must have shape \[K / group, N\] for K = 128, got \[3, 16\]"),
    ({"scales": tensor(1, 15)}, r"scales must have shape \[1, 16\], got \[1, 15\]"),
    ({"scales": tensor(8, 16)}, "unpack_weight: the group must be one of 32, 64, 128, got 16"),
    ({"zeros": tensor(1, 16)}, "zeros must be torch.uint8, got torch.float16"),
    ({"w": tensor(16, 128, dtype=torch.int8), "zeros": tensor(1, 16)}, "zeros are for packed weights, and w is int8"),
    ({"w": tensor(16, 66, dtype=torch.uint8)[:, :64]}, "w must have rows that start at multiples of 4 bytes, got 66 bytes apart"),
    ({"w": tensor(16, 24, dtype=torch.int8)}, "unpack_weight: K must be a multiple of 16, got 24"),
    ({"dtype": torch.float32}, "unpack_weight: dtype must be one of float16, bfloat16, got 'float32'"),
    ({"out": tensor(16, 128)}, "out must be torch.bfloat16, got torch.float16"),
    ({"arch": "sm_70"}, "unpack_weight: arch must be one of"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), WRONG)
def test_wrong_arguments_of_the_unpacking_are_named(changes, message):
    with pytest.raises(KernelError, match=message):
        unpack_weight.plan(**{**PACKED, "arch": "sm_90", **changes})
