# SPDX-License-Identifier: Apache-2.0
"""act(gate) * up against float64: two tensors or halves of one, strided rows, every activation, and mistakes that must show."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import ModuleType

import nnfront_kernels
import pytest
import torch
from few_of import few_of
from kernel_checks import EPS32, Guarded, assert_close, surrounded
from kernel_launches import launched_twice
from kernel_mutants import Mutant, package
from nnfront_kernels import KernelError, gated_activation
from nnfront_kernels.gated_activation import ACTIVATIONS, CONFIGS


@dataclass(frozen=True)
class Rows:
    """gate and up of their own, or `halves` of one tensor."""

    rows: int
    size: int
    dtype: str = "float16"
    activation: str = "silu"
    halves: bool = False
    gap: int = 0
    offset: int = 0
    config: int | None = None

    def __str__(self) -> str:
        return f"{self.rows}x{self.size}-{self.dtype}-{self.activation}-gap{self.gap}-config{self.config}{'-halves' * self.halves}"


def gated(package: ModuleType, rows: Rows) -> None:
    """Launch twice on poisoned outputs; AssertionError unless the results are right."""
    generator = torch.Generator().manual_seed(rows.rows * 1000 + rows.size)
    dtype = getattr(torch, rows.dtype)

    def place(size: int, gap: int) -> torch.Tensor:
        values = 3 * torch.randn(rows.rows, size, generator=generator, dtype=torch.float64)
        return surrounded(values.to(dtype), gap, rows.offset)

    if rows.halves:
        both = place(2 * rows.size, rows.gap)
        operands = (both[:, : rows.size], both[:, rows.size :])
    else:
        operands = (place(rows.size, rows.gap), place(rows.size, 2 * rows.gap))
    gate, up = (operand.double() for operand in operands)
    config = None if rows.config is None else CONFIGS[rows.config]
    (got,) = launched_twice(
        lambda pattern: [Guarded(rows.rows, rows.size, dtype, rows.gap, rows.offset, pattern)],
        lambda views: package.gated_activation.plan(
            *operands, activation=rows.activation, out=views[0], arch="sm_80", config=config
        ),
    )
    expected = curve(gate, rows.activation) * up
    # 16 roundings in the function; 1 + erf and 1 + tanh cancel on the left, where only the magnitude of gate bounds the error.
    drift = 16 * EPS32 * (expected.abs() + gate.abs() * up.abs())
    assert_close(actual=got, expected=expected, drift=drift)
    stated = package.gated_activation.reference(*operands, activation=rows.activation, compute=torch.float64)
    assert_close(actual=stated, expected=expected, drift=drift)


def curve(z: torch.Tensor, activation: str) -> torch.Tensor:
    """The activations by their textbook formulas."""
    if activation == "silu":
        return z / (1 + torch.exp(-z))
    if activation == "gelu":
        return z * (1 + torch.erf(z / math.sqrt(2))) / 2
    return z * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))) / 2


SIZES = (1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 257)
CASES = [
    *(
        Rows(
            SIZES[(5 * i + 3) % 12], size, dtype=("float16", "float32")[i // 2 % 2], activation=ACTIVATIONS[i % 3],
            halves=i % 2 == 1, gap=(0, 16, 3, 5)[i % 4], offset=i % 2, config=(0, 1, None)[i % 3],
        )
        for i, size in enumerate(SIZES)
    ),
    *(Rows(3, size, halves=True, gap=7, activation=a) for size, a in ((2047, "silu"), (2049, "gelu"), (4500, "gelu_tanh"))),
    *(Rows(size, 8, dtype="float32", activation="gelu") for size in (0, 8, 9)),
    Rows(3, 0),
]  # fmt: skip


def gated_here(rows: Rows) -> None:
    gated(nnfront_kernels, rows)


@pytest.mark.parametrize("rows", few_of(CASES, 3), ids=str)
def test_gated_activation_matches_float64(interpreted, rows):
    interpreted(gated_here, rows)


def in_place() -> None:
    gate, up = torch.randn(3, 300), torch.randn(3, 300)
    expected = gated_activation.launch(gate, up)
    assert gated_activation.launch(gate.clone(), up, out=up) is up
    assert torch.equal(up, expected)


def test_the_result_may_replace_an_operand(interpreted):
    interpreted(in_place)


HERE = Rows(17, 65, halves=True, gap=3)
APART = Rows(9, 300, gap=5, activation="gelu")
MUTANTS = [
    (Mutant("exchanged", "gated_activation.py", '"gate_ptr": gate,\n            "up_ptr": up,', '"gate_ptr": up,\n            "up_ptr": gate,'), HERE),
    (Mutant("up_dropped", "gated_activation.py", "activate(gate, ACTIVATION) * up", "activate(gate, ACTIVATION)"), HERE),
    (Mutant("one_row_too_many", "gated_activation.py", "(row < ROWS)", "(row <= ROWS)"), HERE),
    (Mutant("one_column_too_many", "gated_activation.py", "(at < SIZE)", "(at <= SIZE)"), HERE),
    (Mutant("rows_of_up_as_far_apart_as_gates", "gated_activation.py", "up_ptr + row * stride_um", "up_ptr + row * stride_gm"), APART),
    (Mutant("blocks_of_columns_overlap", "gated_activation.py", "tl.program_id(1) * BLOCK_N", "tl.program_id(1)"), APART),
    (Mutant("erf_of_the_unscaled", "epilogue.py", "tl.erf(z * 0.7071067811865476)", "tl.erf(z)"), APART),
    (Mutant("always_silu", "gated_activation.py", "y = activate(gate, ACTIVATION)", "y = activate(gate, \"silu\")"), APART),
]  # fmt: skip


def run_mutant(mutant: Mutant, rows: Rows) -> None:
    gated(package(mutant), rows)


@pytest.mark.parametrize(("mutant", "rows"), MUTANTS, ids=[str(mutant) for mutant, _ in MUTANTS])
@pytest.mark.matrix
def test_mutant_of_the_gated_activation_is_caught(interpreted, mutant, rows):
    with pytest.raises(AssertionError):
        interpreted(run_mutant, mutant, rows)


@pytest.mark.parametrize("rows", [HERE, APART], ids=str)
@pytest.mark.matrix
def test_the_gated_activation_without_the_mistake_passes(interpreted, rows):
    interpreted(run_mutant, Mutant("none", "", "", ""), rows)


def tensor(*size: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.empty(*size, dtype=dtype, device="meta")


WRONG = [
    ({"up": tensor(4, 7)}, r"up must have shape \[4, 8\], got \[4, 7\]"),
    ({"up": tensor(4, 8, dtype=torch.float32)}, "up must be torch.float16, got torch.float32"),
    ({"gate": tensor(8, 4).T}, r"gate must have adjacent elements along its last axis, got strides \[1, 4\]"),
    ({"out": tensor(4, 9)}, r"out must have shape \[4, 8\], got \[4, 9\]"),
    ({"activation": "relu"}, "activation must be one of silu, gelu, gelu_tanh, got 'relu'"),
    ({"gate": tensor(4, 8, dtype=torch.int8), "up": tensor(4, 8, dtype=torch.int8)}, "gated_activation: dtype must be one of float16, bfloat16, float32, got 'int8'"),
    ({"gate": tensor(2**31, 8), "up": tensor(2**31, 8)}, r"gated_activation: there must be less than 2\^31 rows, got 2147483648"),
    ({"arch": "sm_70"}, "gated_activation: arch must be one of"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), WRONG, ids=[message[-30:] for _, message in WRONG])
def test_gated_activation_says_what_does_not_fit(changes, message):
    arguments = {"gate": tensor(4, 8), "up": tensor(4, 8), "arch": "sm_90", **changes}
    with pytest.raises(KernelError, match=message):
        gated_activation.plan(arguments.pop("gate"), arguments.pop("up"), **arguments)
