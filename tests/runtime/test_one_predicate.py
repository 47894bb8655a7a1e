# SPDX-License-Identifier: Apache-2.0
"""What a kernel in C takes is said once: what `explain` says of types when kernels have been chosen is what a tape finds by sizes, and what the function of the kernel does alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import nnfront as nn
from nnfront import op, spec
from nnfront.backends.cpu import tape
from nnfront.backends.cpu.backend import CPU, WRITERS
from nnfront.backends.cpu.extension import NATIVE
from nnfront.backends.cpu.in_c import in_c, refusal
from nnfront.lower import Run, Structure
from nnfront.lower.reference import reference
from nnfront.session import Session

pytestmark = pytest.mark.skipif(NATIVE is None, reason="no kernels in C")
CHECKPOINT = Path(__file__).parents[2] / "examples" / "checkpoints" / "pylib-3m"


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> list[Run]:
    """Instructions with a kernel in C that a tape has asked by sizes, and that refused them."""
    found: list[Run] = []
    rows_of = tape._Planner._rows_of

    def noted(planner: tape._Planner, run: Run, kind: int) -> int | None:
        rows = rows_of(planner, run, kind)
        if rows is None and run.kernel in WRITERS:
            found.append(run)
        return rows

    monkeypatch.setattr(tape._Planner, "_rows_of", noted)
    return found


@pytest.mark.parametrize("quant", [None, "int8"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_what_is_said_of_types_is_what_tapes_find_for_one_token(
    dtype: str, quant: str | None, refused: list[Run]
) -> None:
    session = nn.LLM.load(CHECKPOINT, dtype=dtype, quant=quant).session
    cache = session.make_cache(batch=1, max_seq=32)
    session["prefill"](torch.tensor([[5, 6, 7]]), cache)
    refused.clear()
    session["decode"](torch.tensor([[8]]), cache)
    method = session.program.methods["decode"]
    runs = [run for run in method.body.walk() if isinstance(run, Run) and run.kernel in WRITERS]
    said = {run.outputs for run in runs if refusal(WRITERS[run.kernel], run, method.slots)}
    assert {run.outputs for run in refused} == said & {run.outputs for run in on_tapes(session)}
    assert (len(said) > 4) == (dtype == "float32")


def on_tapes(session: Session) -> Iterator[Run]:
    """Instructions that tapes were asked for."""
    for step in session["decode"]._route.code.steps:
        yield from step.runs if isinstance(step, tape.TapeStep) else ()


class Rows(nn.Module):
    """A product, and a number for each row."""

    def __init__(self) -> None:
        self.proj = nn.Linear(64, 32, bias=False, dtype="bfloat16")

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        return op.add(self.proj(x), 1)


@pytest.mark.parametrize("rows", ["n", 64, 65])
def test_a_product_of_any_number_of_rows_is_no_product_by_itself(rows: int | str) -> None:
    exe = nn.compile(Rows().export({"forward": {"x": spec.Tensor([rows, 64], "bfloat16")}}))
    assert not any("run by themselves" in line for line in CPU.notes(exe.program))


def test_explain_says_which_operand_keeps_a_kernel_off_the_tape() -> None:
    ir = nn.RMSNorm(8, -1, bias=False).export({"forward": {"x": spec.Tensor(["n", 8], "float16")}})
    text = nn.compile(ir).explain()
    assert "(rows, weight and bias are of other dtypes than bfloat16 and float32)" in text


def test_what_is_known_of_one_tensor_given_twice_is_not_said_of_two() -> None:
    """Calls are written down once for operands of the same sizes."""
    add = in_c(WRITERS["add"], reference)(Run("add", "add", (), Structure(0)))
    x, y = torch.randn(2, 8, 4)
    assert torch.equal(add(x, x), x + x)
    assert torch.equal(add(x, y), x + y)
