# SPDX-License-Identifier: Apache-2.0
"""Low-rank changes on a CPU, by every kernel: the sums of float64, and rows that do not depend on their neighbours."""

from __future__ import annotations

import pytest
import torch

from nnfront.backends.table import resolver
from nnfront.lower import Run, Structure

COUNT, SIZE, OUT = 3, 96, 72
ADAPTERS = [-1, 2, 0, 2, COUNT, 1, 2]
pytestmark = pytest.mark.usefixtures("instructions")


def operands(tokens: int, rank: int, dtype: torch.dtype) -> list[torch.Tensor]:
    rows = len(ADAPTERS)
    shapes = (rows, tokens, OUT), (rows, tokens, SIZE), (COUNT, rank, SIZE), (COUNT, OUT, rank)
    generator = torch.Generator().manual_seed(rank)
    made = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    return [*made, torch.tensor(ADAPTERS, dtype=torch.int32)]


def run(*given: torch.Tensor) -> torch.Tensor:
    kernel = resolver("cpu")(Run("low_rank_by_adapter", "add_low_rank", (), Structure(), {}))
    result: torch.Tensor = kernel(*given)
    return result


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("tokens", "rank"), [(1, 1), (1, 16), (3, 8), (20, 5)])
def test_adapters_agree_with_a_loop_in_float64(tokens: int, rank: int, dtype: torch.dtype) -> None:
    y, x, a, b, adapter = operands(tokens, rank, dtype)
    before = y.clone()
    found = run(y, x, a, b, adapter)
    assert torch.equal(y, before)
    for i, number in enumerate(ADAPTERS):
        if not 0 <= number < COUNT:
            assert torch.equal(found[i], y[i])
            continue
        hidden = x[i].double() @ a[number].double().T
        expected = y[i].double() + hidden @ b[number].double().T
        size = hidden.abs() @ b[number].double().abs().T + y[i].double().abs()
        assert ((found[i].double() - expected).abs() <= 4 * torch.finfo(dtype).eps * size + 1e-5).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tokens", [1, 3, 20])
def test_a_row_does_not_depend_on_its_neighbours(tokens: int, dtype: torch.dtype) -> None:
    y, x, a, b, adapter = operands(tokens, 8, dtype)
    together = run(y, x, a, b, adapter)
    for i in range(len(ADAPTERS)):
        one = slice(i, i + 1)
        assert torch.equal(run(y[one], x[one], a, b, adapter[one])[0], together[i])


def test_a_sequence_without_an_adapter_stays_as_it_is() -> None:
    y, x, a, b, adapter = operands(1, 8, torch.bfloat16)
    nothing = y[:0], x[:0], a, b, adapter[:0]
    assert run(*nothing).shape == (0, 1, OUT)
    assert torch.equal(run(y, x, a, b, torch.full_like(adapter, -1)), y)
