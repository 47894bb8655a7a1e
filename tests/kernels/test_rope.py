# SPDX-License-Identifier: Apache-2.0
"""Rotation of queries and keys without a cache against complex numbers in float64, and its refusals."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import ModuleType

import nnfront_kernels
import pytest
import torch
from few_of import few_of
from kernel_checks import TOLERANCES, Guarded
from kernel_launches import launched_twice
from kernel_mutants import Mutant, package
from kernel_rope import angles, close, projected, turned
from nnfront_kernels import KernelError, rope
from nnfront_kernels.rope import RopeShape


@dataclass(frozen=True)
class Rotate:
    """`shared` angles are the same for all sequences."""

    batch: int
    seq: int
    heads: int
    kv_heads: int
    size: int
    pairs: int
    interleaved: bool = False
    dtype: str = "float16"
    gap: int = 0
    shared: bool = False
    fused: bool = True

    def __str__(self) -> str:
        flags = "".join(f"-{name}" for name in ("interleaved", "shared", "fused") if getattr(self, name))
        sizes = f"{self.batch}x{self.seq}-{self.heads}of{self.kv_heads}x{self.size}-{self.pairs}pairs"
        return f"{sizes}-{self.dtype}-gap{self.gap}{flags}"


def rotate(package: ModuleType, case: Rotate) -> None:
    """Launch twice on poisoned outputs; AssertionError unless both results are as the definition says."""
    generator = torch.Generator().manual_seed(case.size + case.seq)
    dtype = getattr(torch, case.dtype)
    counts = (case.heads, case.kv_heads)
    q, k, _ = projected(
        generator,
        case.batch,
        case.seq,
        ((case.heads, case.size), (case.kv_heads, case.size), (case.kv_heads, 8)),
        dtype,
        case.gap,
        case.fused,
    )
    cos, sin = angles(generator, 1 if case.shared else case.batch, case.seq, case.pairs, case.gap)
    tokens = (case.batch, case.seq)
    got = launched_twice(
        lambda pattern: [
            Guarded(case.batch * case.seq * count, case.size, dtype, case.gap, 0, pattern) for count in counts
        ],
        lambda views: package.rope.plan(
            q,
            k,
            *((cos[0], sin[0]) if case.shared and case.gap else (cos, sin)),
            interleaved=case.interleaved,
            out=views[0].unflatten(0, (*tokens, case.heads)),
            out_k=views[1].unflatten(0, (*tokens, case.kv_heads)),
            arch="sm_80",
        ),
    )
    stated = package.rope.reference(q, k, cos, sin, interleaved=case.interleaved, compute=torch.float64)
    unit = TOLERANCES[dtype].unit
    for mine, his, x in zip(got, stated, (q, k), strict=True):
        close(mine, *turned(x, cos, sin, case.interleaved))
        torch.testing.assert_close(mine, his.reshape(mine.shape), rtol=4 * unit, atol=8 * unit)


CASES = [
    Rotate(1, 1, 4, 1, 64, 32),
    Rotate(3, 2, 8, 2, 128, 64, gap=16, shared=True),
    Rotate(2, 7, 3, 1, 80, 40, dtype="float32", interleaved=True),
    Rotate(2, 3, 17, 2, 40, 5, gap=3, fused=False),
    Rotate(1, 5, 2, 2, 17, 7, interleaved=True, gap=3, shared=True),
    Rotate(1, 3, 4, 4, 192, 32, fused=False),
]


def rotate_here(case: Rotate) -> None:
    rotate(nnfront_kernels, case)


@pytest.mark.parametrize("case", few_of(CASES, 3), ids=str)
def test_queries_and_keys_turn(interpreted, case):
    interpreted(rotate_here, case)


def in_place() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, _ = projected(generator, 2, 3, ((5, 40), (2, 40), (2, 40)), torch.float16, 0, True)
    cos, sin = angles(generator, 2, 3, 12, 0)
    expected = [turned(x, cos, sin, False) for x in (q, k)]
    results = rope.launch(q, k, cos, sin, out=q, out_k=k)
    for result, own, answer in zip(results, (q, k), expected, strict=True):
        assert result is own
        close(result, *answer)


def test_the_result_may_be_written_over_the_operands(interpreted):
    interpreted(in_place)


PLAIN = Rotate(2, 3, 17, 2, 40, 12, gap=3)
MIXED = replace(PLAIN, interleaved=True)
MUTANTS = [
    (Mutant("turned_backwards", "rope.py", "= a * cos - b * sin, b", "= a * cos + b * sin, b"), PLAIN),
    (Mutant("sin_of_the_first_token", "rope.py", "row_of(sin_ptr, sequence, t,", "row_of(sin_ptr, sequence, 0 * t,"), PLAIN),
    (Mutant("cos_of_the_first_sequence", "rope.py", "row_of(cos_ptr, sequence, t,", "row_of(cos_ptr, 0 * sequence, t,"), PLAIN),
    (Mutant("rest_not_written", "rope.py", "    if BLOCK_R:\n        put(", "    if BLOCK_R < 0:\n        put("), PLAIN),
    (Mutant("one_query_head_too_many", "rope.py", "inside = head < HEADS", "inside = head <= HEADS"), PLAIN),
    (Mutant("keys_of_the_second_block", "rope.py", "head = (block - Q_BLOCKS) * BLOCK_H", "head = block * BLOCK_H"), PLAIN),
    (Mutant("pairs_beyond_the_last", "rope.py", "real = pair < PAIRS", "real = pair <= PAIRS"), PLAIN),
    (Mutant("interleaved_pairs_beyond_the_last", "rope.py", "real = pair < PAIRS", "real = pair <= PAIRS"), MIXED),
    (Mutant("halves_for_neighbours", "rope.py", "tl.reshape(tl.join(new_a, new_b), (BLOCK_H, 2 * BLOCK_P))", "tl.reshape(tl.permute(tl.join(new_a, new_b), (0, 2, 1)), (BLOCK_H, 2 * BLOCK_P))"), MIXED),
]  # fmt: skip


def run_mutant(mutant: Mutant, case: Rotate) -> None:
    rotate(package(mutant), case)


@pytest.mark.parametrize(("mutant", "case"), MUTANTS, ids=[str(mutant) for mutant, _ in MUTANTS])
@pytest.mark.matrix
def test_mutant_of_rotation_is_caught(interpreted, mutant, case):
    with pytest.raises(AssertionError):
        interpreted(run_mutant, mutant, case)


@pytest.mark.parametrize("case", [PLAIN, MIXED], ids=str)
@pytest.mark.matrix
def test_rotation_without_the_mistake_passes(interpreted, case):
    interpreted(run_mutant, Mutant("none", "", "", ""), case)


def tensor(*size: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.empty(*size, dtype=dtype, device="meta")


WRONG = [
    ({"q": tensor(2, 3, 256)}, r"q must be torch.float16 \[batch, seq, heads, size\] with adjacent elements, got torch.float16 \[2, 3, 256\]"),
    ({"k": tensor(2, 4, 1, 64)}, r"k must be torch.float16 \[2, 3, kv_heads, 64\] with adjacent elements, got torch.float16 \[2, 4, 1, 64\]"),
    ({"k": tensor(2, 3, 1, 64, dtype=torch.bfloat16)}, r"k must be torch.float16 .* got torch.bfloat16"),
    ({"k": tensor(2, 3, 64, 2).transpose(2, 3)}, r"got torch.float16 \[2, 3, 2, 64\] with strides \[384, 128, 1, 2\]"),
    ({"sin": tensor(2, 3, 31)}, r"sin must be \[2 or 1, 3, 32\] with adjacent elements, got \[2, 3, 31\]"),
    ({"cos": tensor(3, 3, 32)}, r"cos must be \[2 or 1, 3, 32\] with adjacent elements, got \[3, 3, 32\]"),
    ({"cos": tensor(4, 32)}, r"cos must be \[2 or 1, 3, 32\] with adjacent elements, got \[4, 32\]"),
    ({"cos": tensor(3, 33), "sin": tensor(3, 33)}, "rope: at most 32 pairs fit in a head of 64, got 33"),
    ({"out": tensor(2, 3, 2, 64)}, r"out must be torch.float16 \[2, 3, 4, 64\] with adjacent elements, got torch.float16 \[2, 3, 2, 64\]"),
    ({"out_k": tensor(2, 3, 2, 64)}, r"out_k must be torch.float16 \[2, 3, 1, 64\] with adjacent elements, got torch.float16 \[2, 3, 2, 64\]"),
    ({"arch": "sm_70"}, "rope: arch must be one of"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), WRONG, ids=[message[-30:] for _, message in WRONG])
def test_rope_says_what_does_not_fit(changes, message):
    arguments = {
        "q": tensor(2, 3, 4, 64),
        "k": tensor(2, 3, 1, 64),
        "cos": tensor(2, 3, 32),
        "sin": tensor(2, 3, 32),
        "arch": "sm_90",
        **changes,
    }
    with pytest.raises(KernelError, match=message):
        rope.plan(**arguments)


@pytest.mark.parametrize(("changes", "message"), [
    ({"dtype": "int8"}, "dtype must be one of float16, bfloat16, float32, got 'int8'"),
    ({"batch": 2**20, "tokens": 2**11}, "there must be less than 2^31 tokens, got 2147483648"),
])  # fmt: skip
def test_rope_refuses(changes, message):
    dtype = changes.pop("dtype", "float16")
    shape = replace(RopeShape(1, 1, 1, 1, 64, 32), **changes)
    assert rope.accepts(shape, dtype, "sm_90") == message
